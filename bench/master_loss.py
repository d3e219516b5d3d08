"""What clients of a fleet feel when the pool's only master is killed and comes back, and when it stands still.

    ~/.cache/moontide/engine-env-*/bin/python bench/master_loss.py

A real master and two engines on the CPU, with the pool's default timeouts and the plugin's patches. Four clients ask
without a pause: each prompt is new to one replica, which saves it, and then goes to the other one, which loads it.
Meanwhile the master is killed and started again after five seconds, and later frozen (SIGSTOP) for twenty. A line for
each phase: requests, failures, the longest time in which no client got an answer, the slowest answer, prompt tokens
that came from the store. Asserts nothing. Takes four minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "component" / "engine")]

import enginekit as kit  # noqa: E402

PORT, METRICS = 18192, 18193
NUMBERS = (71, 72)
"""Of the replicas, which name their ports: others than those of the tests."""
CLIENTS = 4
WORDS = 120
"""Of one prompt; a byte-level tokenizer makes about three tokens of each."""
DOWN_SECONDS, FROZEN_SECONDS, QUIET_SECONDS, AFTER_SECONDS = 5.0, 20.0, 20.0, 25.0


class Master(kit.Master):
    """With the pool's default of ``master.clientTtlSeconds``."""

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("mooncake_master")), f"-rpc_port={PORT}"]
        command += [f"-metrics_port={METRICS}", "-client_ttl=4", "-rpc_address=127.0.0.1"]
        self.process = kit.spawn(command, {}, self._folder / "master.log")
        url = f"http://127.0.0.1:{METRICS}/health"
        kit.wait_for("master", lambda: (r := kit.get(url)) is not None and r.status_code == 200, 20, self.process)


@dataclass(frozen=True)
class Asked:
    """One request; seconds of the monotonic clock."""

    began: float
    ended: float
    status: int


class Load:
    """Clients that ask without a pause, until it is closed."""

    def __init__(self, replicas: tuple[kit.Replica, ...]) -> None:
        self.answers: list[Asked] = []
        self._replicas = replicas
        self._numbers = itertools.count()
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._work = [self._pool.submit(self._client) for _ in range(CLIENTS)]

    def close(self) -> None:
        """Wait for the last answers. Raises what a client met with that is no answer."""
        self._ended.set()
        for each in self._work:
            each.result()

    def _client(self) -> None:
        while not self._ended.is_set():
            number = next(self._numbers)
            prompt = " ".join(f"p{number}w{word}" for word in range(WORDS))
            first = number % len(self._replicas)
            for replica in (self._replicas[first], self._replicas[first - 1]):
                began = time.monotonic()
                try:
                    status = replica.complete(prompt, tokens=8).status
                except httpx.HTTPError:
                    status = 0
                self.answers.append(Asked(began, time.monotonic(), status))


def environment(folder: Path, number: int) -> dict[str, str]:
    """The kit's, with the pool's defaults in place of the limits that suit the tests."""
    made = kit.engine_environment(folder, number)
    for name in ("MOONTIDE_STORE_TIMEOUT_SECONDS", "MOONTIDE_LOAD_TIMEOUT_SECONDS"):
        del made[name]
    return made | {"MC_HANDSHAKE_CONNECT_TIMEOUT": "1"}


def models() -> Path:
    """The tiny model of the component tests; made if they have never run here."""
    cache = Path(os.environ.get("MOONTIDE_CACHE") or Path.home() / ".cache" / "moontide")
    folder = cache / f"component-models-{hashlib.sha256(kit.MAKER.read_bytes()).hexdigest()[:12]}" / "a" / "tiny"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, str(kit.MAKER), str(folder), "1"], check=True, capture_output=True)
        (folder / "complete").touch()
    return folder


class Phases:
    """Prints a line for each phase when it ends."""

    def __init__(self, load: Load, fleet: tuple[kit.Replica, ...], master: Master) -> None:
        self._load = load
        self._fleet = fleet
        self._master = master
        self._began, self._hits = time.monotonic(), self._counted()
        print(
            f"{'phase':<28} {'seconds':>7} {'requests':>8} {'failures':>8} {'longest gap':>11} {'slowest':>8} "
            f"{'from the store':>14} {'keys after':>10}",
            flush=True,
        )

    def over(self, name: str, seconds: float) -> None:
        """Let ``seconds`` pass, and say what happened since the phase before; a gap may have begun in that one."""
        time.sleep(seconds)
        began, ended, answers = self._began, time.monotonic(), list(self._load.answers)
        within = [each for each in answers if began <= each.ended < ended]
        good = sorted(each.ended for each in answers if each.status == 200 and each.ended < ended)
        gap = max(after - before for before, after in itertools.pairwise([*good, ended]) if after >= began)
        slowest = max((each.ended - each.began for each in within), default=0.0)
        failures = sum(each.status != 200 for each in within)
        hits = self._counted()
        print(
            f"{name:<28} {ended - began:>7.0f} {len(within):>8} {failures:>8} {gap:>9.1f} s {slowest:>6.1f} s "
            f"{hits - self._hits:>14,.0f} {self._keys():>10}",
            flush=True,
        )
        self._began, self._hits = ended, hits

    def _counted(self) -> float:
        return sum(replica.counters()["external"] for replica in self._fleet)

    def _keys(self) -> str:
        try:
            return f"{len(self._master.keys()):,}"
        except httpx.HTTPError:
            return "no answer"


def run(folder: Path) -> None:
    """Start the fleet, and play everything through."""
    kit.store_config(folder, PORT)
    master, processes = Master(folder, PORT, METRICS), list[kit.Process]()
    try:
        master.start()
        for number in NUMBERS:
            command = kit.engine_command(models(), number)
            processes.append(kit.spawn(command, environment(folder, number), folder / f"engine{number}.log"))
        replicas = tuple(kit.Replica(number, process) for number, process in zip(NUMBERS, processes, strict=True))
        for replica in replicas:
            health = f"{replica.inference}/health"
            kit.wait_for("an engine", lambda url=health: kit.get(url), kit.START_SECONDS, replica.process)
            replica.boot_id = replica.status()["bootId"]
            replica.succeed("admit", 1, version="v1", salt="policy/1")
            replica.succeed("resume", 1)
        load = Load(replicas)
        time.sleep(5)
        phases = Phases(load, replicas, master)
        phases.over("quiet", QUIET_SECONDS)
        master.kill()
        phases.over("the master is killed", DOWN_SECONDS)
        master.start()
        phases.over("it is back", AFTER_SECONDS)
        phases.over("quiet", QUIET_SECONDS)
        master.signal(signal.SIGSTOP)
        phases.over("the master stands still", FROZEN_SECONDS)
        master.signal(signal.SIGCONT)
        phases.over("it goes on", AFTER_SECONDS)
        load.close()
    finally:
        for process in processes:
            process.end(20)
        if master.process is not None and master.process.popen.poll() is None:
            master.signal(signal.SIGCONT)
            master.process.end(10)


def main() -> int:
    """Always 0."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(temporary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
