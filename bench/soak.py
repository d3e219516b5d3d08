"""Changes of policy under faults, with an oracle: `make soak` (about an hour), `make soak ARGS="--bumps 12"` for less.

Real API server, etcd, operators (two), Mooncake master, wiper and vLLM engines (three, adopted by URL) on this machine.
At seeded random each of them is killed (and starts again, as a container does) or frozen while the policy changes and
clients ask; every answer is held against a cold engine with the weights that its header claims. Then changes without
faults, to see the operator's memory, and one without clients, to see what is left in the store. Exit status 1 unless
stale answers, stuck resources and leaked keys are 0, the operator's memory stays, and every fault was survived.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.rig import LEASE_SECONDS, MODEL, Child, Rig, cold, resident, rigged, wait

from hack.demo import prompts
from hack.demo.judge import Window, explain, judge
from hack.demo.load import Load
from hack.demo.story import side_of

ROOT = Path(__file__).resolve().parents[1]
CURRENT_SECONDS = 180.0
LEAK_MIB = 16.0


class Faults:
    """What can go wrong, and how it is done. Each returns when it is over; what was killed is started by the rig."""

    def __init__(self, rig: Rig, source: random.Random, only: list[str] | None = None) -> None:
        self._rig = rig
        self._source = source
        self.survived: collections.Counter[str] = collections.Counter()
        freezes = {"operator": LEASE_SECONDS + 8.0, "master": 5.0, "wiper": 5.0, "engine": 9.0}
        self.kinds: dict[str, Callable[[], None]] = {}
        for name, seconds in freezes.items():
            self.kinds[f"{name} killed"] = lambda n=name: self._one(n).kill()  # type: ignore[misc]
            self.kinds[f"{name} frozen"] = lambda n=name, s=seconds: self._freeze(self._one(n), s)  # type: ignore[misc]
        for name in ("kube-apiserver", "etcd"):
            self.kinds[f"{name} killed"] = lambda n=name: self._restart(n, "KILL")  # type: ignore[misc]
            self.kinds[f"{name} restarted"] = lambda n=name: self._restart(n, "TERM")  # type: ignore[misc]
            self.kinds[f"{name} frozen"] = lambda n=name: self._freeze_pid(rig.pid_of(n), 6.0)  # type: ignore[misc]
        if only:
            self.kinds = {name: self.kinds[name] for name in only}
        self._bag: list[str] = []

    def draw(self) -> str:
        """The next kind: each once, in a random order, before any comes again."""
        if not self._bag:
            self._bag = list(self.kinds)
            self._source.shuffle(self._bag)
        return self._bag.pop()

    def _one(self, name: str) -> Child:
        if name == "operator":
            # Most often the one that matters.
            with contextlib.suppress(TimeoutError):
                if self._source.random() < 0.75:
                    return self._rig.leader()
            return self._source.choice(self._rig.operators)
        if name == "engine":
            return self._source.choice(self._rig.engines)
        return self._rig.master if name == "master" else self._rig.wiper

    @staticmethod
    def _freeze(child: Child, seconds: float) -> None:
        child.signal(signal.SIGSTOP)
        time.sleep(seconds)
        child.signal(signal.SIGCONT)

    @staticmethod
    def _freeze_pid(pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def _restart(self, name: str, how: str) -> None:
        self._rig.component(name, "stop", "--signal", how)
        time.sleep(self._source.uniform(0.5, 4))
        self._rig.component(name, "start")


class Soak:
    """One run."""

    def __init__(self, rig: Rig, seed: int, note: Callable[[str], None], only: list[str] | None) -> None:
        self.rig = rig
        self.source = random.Random(seed)
        self.faults = Faults(rig, self.source, only)
        self.note = note
        self.windows: list[Window] = []
        self.stuck: list[str] = []
        self.bumps = 0

    def bump(self, kind: str = "") -> None:
        """One change of policy, with a fault at a random moment of it."""
        rig, began = self.rig, time.time()
        version = rig.target + 1
        trouble: list[str] = []

        def strike(after: float) -> None:
            time.sleep(after)
            try:
                self.faults.kinds[kind]()
            except (subprocess.SubprocessError, OSError, StopIteration) as error:
                trouble.append(f"{kind} could not be done: {type(error).__name__}: {error}")

        thread = threading.Thread(target=strike, args=(self.source.uniform(0, 2.5),)) if kind else None
        if thread is not None:
            thread.start()
        try:
            rig.patch(preparing=version)
            with contextlib.suppress(TimeoutError):
                wait("prepared", lambda: self._prepared(version), 45)
            rig.target = version
            for replica in rig.replicas:
                said = rig.says(replica)
                if said and said["weightsVersion"] != str(version):
                    with contextlib.suppress(Exception):
                        rig.push(replica)
            rig.patch(version=version, preparing=None)
            if thread is not None:
                thread.join()
            found = wait(f"version {version} to be current", lambda: rig.current(version), CURRENT_SECONDS)
            # Not before all are back, or the next fault would hit a fleet that is still down.
            rig.until_serving(CURRENT_SECONDS)
            epoch = int(found["status"]["epoch"])
            self.bumps += 1
            if kind and not trouble:
                self.faults.survived[kind] += 1
        except TimeoutError as error:
            epoch = 0
            trouble.append(f"version {version}, {kind or 'no fault'}: {error}")
            if thread is not None:
                thread.join()
        self.stuck += trouble
        self.windows.append(Window(began, time.time(), epoch or None))
        self.note(f"{version - 1:3} {kind or 'no fault':24} {time.time() - began:5.1f} s {'; '.join(trouble)}")

    def _prepared(self, version: int) -> bool:
        preparation = (self.rig.policy().get("status") or {}).get("preparation") or {}
        return preparation.get("version") == str(version) and bool(preparation.get("preparedAt"))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bumps", type=int, default=100, help="changes under faults (default 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=50, help="no more faults after so long (default 50)")
    parser.add_argument("--fault", action="append", help="only this kind, for example `etcd killed`; may be repeated")
    parser.add_argument("--engines", type=int, default=3, help="replicas (default 3)")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--logs", type=Path, help="keep all logs in this folder")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "soak.json")
    options = parser.parse_args()
    began = time.monotonic()

    def note(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    texts = prompts.make(kept=0).all
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        references = cold(folder, texts)
        note(f"a cold engine has answered {len(texts)} prompts with each of the weights")
        with rigged(folder, options.engines) as rig:
            note(f"{options.engines} engines serve")
            soak = Soak(rig, options.seed, note, options.fault)
            with Load(rig.replicas, MODEL, dict(enumerate(texts)), clients=options.clients) as load:
                for _ in range(options.bumps):
                    if time.monotonic() - began > options.minutes * 60:
                        break
                    soak.bump(soak.faults.draw())
                    load.until(12, 20)
                chaos = soak.bumps
                quiet = min(20, max(4, options.bumps // 5))
                leader = rig.leader()
                memory, pid = [], leader.pid
                for _ in range(quiet):
                    soak.bump()
                    load.until(6, 20)
                    memory.append(resident(pid))
            soak.bump()
            leaked = rig.keys()
            data = report(soak, load, references, leaked, memory)
            data["operator_restarted"] = leader.pid != pid
    data |= {"seed": options.seed, "engines": options.engines, "seconds": round(time.monotonic() - began)}
    data["bumps_under_faults"] = chaos
    checks = {
        "stale answers": data["stale"] == 0,
        "stuck resources": not data["stuck"],
        "leaked keys": leaked == 0,
        "operator's memory": data["operator_leak_mib"] <= LEAK_MIB and not data["operator_restarted"],
        "answers that began with a hit were checked": data["began_with_a_hit"] > 0,
        "changes": chaos > 0,
    }
    data["right"] = all(checks.values())
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(data, indent=1) + "\n")
    print(f"faults survived: {sum(data['survived'].values())}")
    for kind, count in sorted(data["survived"].items()):
        print(f"  {kind:26} {count}")
    print(f"changes of policy: {soak.bumps}, {chaos} of them under faults")
    print(f"answers checked: {data['checked']}; stale: {data['stale']}; {data['line']}")
    print(
        f"stuck: {len(data['stuck'])}; leaked keys: {leaked}; operator's memory: {data['operator_leak_mib']:+.1f} MiB"
    )
    for text in (*data["stuck"], *data["wrong"]):
        print(f"  {text}")
    print("all as it must be" if data["right"] else f"WRONG: {', '.join(n for n, ok in checks.items() if not ok)}")
    return 0 if data["right"] else 1


def report(soak: Soak, load: Load, references: Any, leaked: int, memory: list[float]) -> dict[str, Any]:
    """Everything for the file."""
    by_version = {str(version): references[side_of(version)] for version in range(1, soak.rig.target + 1)}
    verdict = judge(load.answers, by_version, soak.windows)
    return {
        "survived": dict(soak.faults.survived),
        "bumps": soak.bumps,
        "checked": verdict.checked,
        "stale": len(verdict.stale),
        "began_with_a_hit": verdict.cached,
        "wrong": [explain(answer, by_version) for answer in verdict.stale[:20]],
        "line": verdict.line(),
        "stuck": soak.stuck,
        "leaked_keys": leaked,
        # The first quarter fills caches.
        "operator_leak_mib": round(memory[-1] - memory[len(memory) // 4], 1),
        "operator_mib": [round(each, 1) for each in memory],
    }


if __name__ == "__main__":
    sys.exit(main())
