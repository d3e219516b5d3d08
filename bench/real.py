"""What a change costs clients of real engines, by strategy: `.venv/bin/python -m bench.real`, 25 minutes.

Three vLLM replicas on the CPU, a real Mooncake master with 20,000 old keys before each change (``--keys 1000000`` for
more), streaming clients. Of each way it prints the longest time for which one client got no token during the change and
over ``--after`` seconds from its end, in which old keys are removed (p50, p95 of the changes), the pause that the
operator saw, how long after the change began the old keys were gone, and over those seconds the share of prompt tokens
that hit and the time to the first token. *fan-out* is
what trainers do without Moontide and leaves stale KV behind: it is here for its cost only. *restart* ends one engine
after another. The last figure is how long, at worst, a thread that does nothing but wake up waited for its processor:
clients feel that, too. Asserts nothing; exit status 1 if a change did not end.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from bench.rig import MASTER, MODEL, Rig, kit, rigged, wait

from hack.demo import prompts
from hack.demo.fleet import Replica
from hack.setup.steps import engine_python
from hack.test.standstill import Watch
from moontide.status import parse_timestamp

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = 3
TOKENS = 16
# Keys of an epoch that nobody has: letters of a hash, as the engines' keys end in.
PUTTER = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 64 << 20, "tcp", "", sys.argv[2]) == 0
print("ready", flush=True)
for line in sys.stdin:
    head, count, turn = line.split()
    names = [f"{head}@tiny@{turn:0>16}{number:048x}" for number in range(int(count))]
    done = 0
    for start in range(0, len(names), 1000):
        part = names[start:start + 1000]
        code = store.put_batch(part, [b"x" * 64] * len(part))
        done += len(part) if code == 0 else 0
    print(done, flush=True)
os._exit(0)
"""


class Putter:
    """A client that lends memory and puts old keys."""

    def __init__(self, keys: int, folder: Path) -> None:
        size = max(256 << 20, keys * 1024)
        command = [str(engine_python()), "-c", PUTTER, str(size), f"127.0.0.1:{MASTER}"]
        env = kit.whole({"MC_TCP_BIND_ADDRESS": "127.0.0.1"})
        pipe = subprocess.PIPE
        with (folder / "putter.log").open("wb") as log:
            self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self._keys = keys
        self._turn = 0
        self._answer("ready")

    def _answer(self, wanted: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == wanted or (not wanted and line.strip().isdigit()):
                return line.strip()
        raise RuntimeError("the client of the store ended")

    def fill(self, head: str) -> int:
        """Put them all. How many are there."""
        assert self._process.stdin is not None
        self._turn += 1
        print(head, self._keys, self._turn, file=self._process.stdin, flush=True)
        return int(self._answer(""))

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class Clients:
    """Streaming clients: when each got a token, and the time to each first token."""

    def __init__(self, replicas: list[Replica], texts: tuple[str, ...]) -> None:
        self._replicas = replicas
        self._texts = texts
        self._stop = threading.Event()
        self._go = threading.Event()
        self._go.set()
        self.came: list[list[float]] = [[] for _ in range(CLIENTS)]
        self.first: list[tuple[float, float]] = []
        self.failed = 0
        self._threads = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """No new requests: what happens meanwhile has the processors for itself."""
        self._go.clear()
        try:
            yield
        finally:
            self._go.set()

    def _client(self, number: int) -> None:
        with httpx.Client(timeout=120, trust_env=False) as http:
            for turn in itertools.count(number):
                self._go.wait()
                if self._stop.is_set():
                    return
                text = self._texts[(7 * turn + number) % len(self._texts)]
                body = {"model": MODEL, "prompt": text, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
                url, began, fresh = self._replicas[turn % len(self._replicas)].inference, time.monotonic(), True
                try:
                    with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                        answer.raise_for_status()
                        for line in answer.iter_lines():
                            if not line.startswith("data: {"):
                                continue
                            now = time.monotonic()
                            self.came[number].append(now)
                            if fresh:
                                self.first.append((began, now - began))
                                fresh = False
                except httpx.HTTPError:
                    self.failed += 1
                    time.sleep(0.05)

    def gap(self, began: float, ended: float) -> float:
        """The longest time that one client got no token, of times that overlap the stretch."""
        pairs = [pair for times in self.came for pair in itertools.pairwise([*times, time.monotonic()])]
        return max((b - a for a, b in pairs if b > began and a < ended), default=0.0)


def hits(replicas: list[Replica]) -> tuple[float, float]:
    """Prompt tokens that hit, locally or in the store, and prompt tokens, of all engines since they started."""
    hit = total = 0.0
    for replica in replicas:
        text = httpx.get(f"{replica.inference}/metrics", timeout=10, trust_env=False).text
        for name, value in re.findall(r"^vllm:(\w+_total)\{[^}]*\} (\S+)$", text, re.MULTILINE):
            hit += float(value) if name in ("prefix_cache_hits_total", "external_prefix_cache_hits_total") else 0
            total += float(value) if name == "prompt_tokens_total" else 0
    return hit, total


def changes(rig: Rig) -> dict[str, Callable[[], None]]:
    """The ways, each from the decision to its end."""

    def push() -> None:
        threads = [threading.Thread(target=rig.push, args=(each,)) for each in rig.replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def managed() -> None:
        version = rig.target + 1
        rig.target = version
        push()
        rig.patch(version=version)
        rig.until_serving(180, wiped=False)

    def fan_out() -> None:
        for replica in rig.replicas:
            rig.push(replica)
            replica.command("/reset_prefix_cache", params={"reset_external": "true"})

    def restart() -> None:
        for engine, replica in zip(rig.engines, rig.replicas, strict=True):
            before = (rig.says(replica) or {}).get("bootId")
            engine.kill()
            wait("another", lambda r=replica, b=before: (rig.says(r) or {}).get("bootId", b) != b, 180)
            rig.until_serving(180)

    return {"Barrier": managed, "Fence": managed, "fan-out": fan_out, "restart": restart}


def until_wiped(rig: Rig, seconds: float = 300) -> float:
    """Seconds from the beginning of the last change until its old keys were gone; waits for that."""

    def times() -> tuple[str, str] | None:
        update = (rig.policy().get("status") or {}).get("lastUpdate") or {}
        return (update["startedAt"], update["wipedAt"]) if "wipedAt" in update else None

    began, ended = wait("the old keys to be gone", times, seconds)
    return (parse_timestamp(ended) - parse_timestamp(began)).total_seconds()


def until_swept(rig: Rig, seconds: float = 300) -> None:
    """Wait until late puts of older epochs were looked for, too: old keys that come later stay for the next change."""

    def swept() -> bool:
        status = rig.policy().get("status") or {}
        members = status.get("members") or ()
        return bool(members) and all(each.get("sweptEpoch", -1) >= status["epoch"] for each in members)

    wait("the second collection to end", swept, seconds)


def percentile(values: list[float], share: float) -> float:
    """Of a list that is not empty, the nearest value."""
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="changes of each way, one of restart (default 5)")
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--after", type=float, default=60, help="seconds that are looked at after each (default 60)")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--way", action="append", choices=("Barrier", "Fence", "fan-out", "restart"))
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "real.json")
    options = parser.parse_args()
    texts = prompts.make(kept=0).all
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, rigged(Path(scratch), options.engines) as rig:
        putter = Putter(options.keys, Path(scratch))
        try:
            watch = Watch(late=0.3)
            with Clients(rig.replicas, texts) as clients, watch.on(sorted(os.sched_getaffinity(0))):
                for way, change in changes(rig).items():
                    if options.way and way not in options.way:
                        continue
                    rig.patch(strategy="Fence" if way == "Fence" else "Barrier")
                    felt, later, pauses, wiped, rates, firsts = [], [], [], [], [], []
                    failed, stood = clients.failed, len(watch.found)
                    for _ in range(1 if way == "restart" else options.rounds):
                        with clients.resting():
                            filled = putter.fill(rig.uid)
                        time.sleep(3)
                        began = time.monotonic()
                        change()
                        ended = time.monotonic()
                        before = hits(rig.replicas)
                        time.sleep(options.after)
                        after = hits(rig.replicas)
                        felt.append(clients.gap(began, ended))
                        later.append(clients.gap(ended, time.monotonic()))
                        rates.append((after[0] - before[0]) / max(after[1] - before[1], 1))
                        firsts += [took for at, took in clients.first if ended <= at]
                        update = (rig.policy().get("status") or {}).get("lastUpdate") or {}
                        if way in ("Barrier", "Fence"):
                            pauses.append(float(update.get("pauseSeconds") or 0))
                            wiped.append(until_wiped(rig))
                            until_swept(rig)
                    row = {"way": way, "changes": len(felt), "keys": filled, "failed": clients.failed - failed}
                    measured = {"felt": felt, "later": later, "pause": pauses, "wiped": wiped, "first_token": firsts}
                    for name, values in measured.items():
                        row |= {f"{name}_p{p}": percentile(values, p / 100) if values else None for p in (50, 95)}
                    row["hit_rate"] = statistics.mean(rates)
                    row["stood_still"] = max((each.seconds for each in watch.found[stood:]), default=0.0)
                    rows.append(row)
                    print(line(row), flush=True)
        finally:
            putter.end()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"keys": options.keys, "engines": options.engines, "rows": rows}, indent=1) + "\n"
    )
    return 0


def line(row: dict[str, Any]) -> str:
    """For people."""

    def ms(name: str) -> str:
        return "/".join("-" if row[f"{name}_p{p}"] is None else f"{row[f'{name}_p{p}'] * 1000:.0f}" for p in (50, 95))

    return (
        f"{row['way']:8} {row['changes']} changes, {row['keys']} old keys: one client without a token {ms('felt')} ms "
        f"(p50/p95), later {ms('later')} ms, pause {ms('pause')} ms, old keys gone after {ms('wiped')} ms, then "
        f"{row['hit_rate']:.0%} of prompt tokens hit, first token {ms('first_token')} ms; {row['failed']} requests "
        f"failed; a thread waited {row['stood_still'] * 1000:.0f} ms for its processor"
    )


if __name__ == "__main__":
    sys.exit(main())
