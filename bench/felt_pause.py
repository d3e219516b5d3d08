"""How long clients get no token when the policy changes, by the way it is changed. All ways in one run.

Run `make demo ARGS=--keep`, then `python3 bench/felt_pause.py`. Streaming clients ask all along; of each way it prints
the longest time for which one client got no token, the longest for which nobody got any, requests that failed, and how
often the first is that of a quiet stretch. Absolute times are this machine's; compare ratios.

*bump*: weights were pushed just before, the change alone is measured. *prepared*: the push is inside. *fan-out* is what
trainers do without Moontide, and leaves stale KV behind: it is here for its pause only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 64
CLIENTS = 4
CURRENT_SECONDS = 300.0


class Streams:
    """Clients that ask one streaming request after another; when each of them got a token, and failures."""

    def __init__(self, targets: Callable[[], list[str]], model: str) -> None:
        self._targets = targets
        self._model = model
        self._stop = threading.Event()
        self.came: list[list[float]] = [[] for _ in range(CLIENTS)]
        self.failed = 0
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        import httpx

        asked = number
        with httpx.Client(timeout=120, trust_env=False) as http:
            while not self._stop.is_set():
                asked += 1
                urls = self._targets()
                body = {
                    "model": self._model,
                    "prompt": f"client {number} asks {asked % 7} " * 8,
                    "max_tokens": TOKENS,
                    "ignore_eos": True,
                    "stream": True,
                }
                try:
                    with http.stream("POST", f"{urls[asked % len(urls)]}/v1/completions", json=body) as answer:
                        answer.raise_for_status()
                        for line in answer.iter_lines():
                            if line.startswith("data: {"):
                                self.came[number].append(time.monotonic())
                            if self._stop.is_set():
                                return
                except (httpx.HTTPError, IndexError, ZeroDivisionError):
                    self.failed += 1
                    time.sleep(0.05)

    def gaps(self, began: float, ended: float) -> tuple[float, float]:
        """Seconds: the longest that one client, and that everybody, got nothing, as far as it overlaps the stretch."""
        each = [_longest(times, began, ended) for times in self.came]
        return max(each), _longest(sorted(t for times in self.came for t in times), began, ended)


def _longest(times: list[float], began: float, ended: float) -> float:
    inside = [time for time in times if began <= time <= ended]
    before = max((time for time in times if time < began), default=began)
    after = min((time for time in times if time > ended), default=ended)
    points = [before, *inside, after]
    return max(b - a for a, b in itertools.pairwise(points))


def main() -> int:
    """0 when every change finished."""
    import httpx

    from hack.demo.fleet import push_weights
    from hack.demo.install import kept_fleet
    from hack.demo.story import MODELS, side_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="changes of each way (default: %(default)s)")
    parser.add_argument("--no-restart", action="store_true", help="leave out the rolling restart, which takes minutes")
    options = parser.parse_args()
    fleet = kept_fleet()
    if fleet is None:
        print("error: there is no local cluster; run `make demo ARGS=--keep` first", file=sys.stderr)
        return 1
    targets = [each.inference for each in fleet.replicas()]

    def spec(**changes: object) -> None:
        fleet.kube.merge("polv", fleet.policy, fleet.namespace, {"spec": changes})

    def following() -> tuple[int, str]:
        version = int(fleet.get_policy()["spec"]["version"]) + 1
        return version, MODELS[side_of(version)]

    def bump() -> float:
        version, weights = following()
        push_weights(fleet.replicas(), weights, str(version))
        began = time.monotonic()
        fleet.bump(version)
        fleet.until_current(str(version), CURRENT_SECONDS)
        return began

    def prepared() -> float:
        version, weights = following()
        began = time.monotonic()
        fleet.prepare(version, CURRENT_SECONDS)
        push_weights(fleet.replicas(), weights, str(version))
        fleet.commit(version)
        fleet.until_current(str(version), CURRENT_SECONDS)
        return began

    def fan_out() -> float:
        began = time.monotonic()
        version = int(fleet.get_policy()["spec"]["version"])
        push_weights(fleet.replicas(), MODELS[side_of(version)], str(version))
        for replica in fleet.replicas():
            replica.command("/reset_prefix_cache", params={"reset_external": "true"})
        return began

    def restart() -> float:
        began = time.monotonic()
        name, deployment = f"deployment/{fleet.deployment}", ("--namespace", fleet.namespace)
        fleet.kube.run("rollout", "restart", name, *deployment)
        version = str(fleet.get_policy()["spec"]["version"])
        ends = time.monotonic() + CURRENT_SECONDS
        while time.monotonic() < ends:
            for replica in fleet.replicas():
                try:
                    if replica.look()["weightsVersion"] != version:
                        replica.push_weights(MODELS[side_of(int(version))], version)
                except (httpx.HTTPError, KeyError, OSError, RuntimeError):
                    continue
            targets[:] = [each.inference for each in fleet.replicas()]
            done = fleet.kube.run("get", name, *deployment, "-o", "json")
            status = json.loads(done)["status"]
            if status.get("updatedReplicas") == status.get("replicas") == status.get("readyReplicas"):
                return began
            time.sleep(1)
        raise TimeoutError("the rollout did not end")

    def quiet() -> float:
        began = time.monotonic()
        time.sleep(3)
        return began

    ways: list[tuple[str, dict[str, object], Callable[[], float], int]] = [
        ("quiet", {"strategy": "Barrier"}, quiet, options.rounds),
        ("Barrier, bump", {"strategy": "Barrier"}, bump, options.rounds),
        ("Fence, bump", {"strategy": "Fence"}, bump, options.rounds),
        ("Barrier, prepared", {"strategy": "Barrier"}, prepared, options.rounds),
        ("Fence, prepared", {"strategy": "Fence"}, prepared, options.rounds),
        ("fan-out", {"strategy": "Barrier"}, fan_out, options.rounds),
    ]
    if not options.no_restart:
        ways.append(("rolling restart", {"strategy": "Barrier"}, restart, 1))
    base = 0.0
    print(f"{'way':20} {'one client':>12} {'everybody':>12} {'failed':>7} {'/ quiet':>8}   (medians, ms)")
    try:
        with Streams(lambda: list(targets), fleet.model) as streams:
            time.sleep(5)
            for name, changes, change, rounds in ways:
                spec(**changes)
                time.sleep(2)
                failed, ones, alls = streams.failed, [], []
                for _ in range(rounds):
                    began = change()
                    ended = time.monotonic()
                    time.sleep(2)
                    one, everybody = streams.gaps(began, ended)
                    ones.append(one)
                    alls.append(everybody)
                one, everybody = statistics.median(ones), statistics.median(alls)
                base = base or one
                times = f"{one * 1000:12.0f} {everybody * 1000:12.0f}"
                print(f"{name:20} {times} {streams.failed - failed:7} {one / base:8.1f}", flush=True)
    finally:
        spec(strategy="Barrier", preparing=None)
        # The fan-out changed no weights of what is claimed, but what it left in the store is nobody's.
        spec(resetNonce=str(time.time()))
        fleet.close()
    return 0


if __name__ == "__main__":
    python = ROOT / ".venv" / "bin" / "python"
    if sys.prefix == sys.base_prefix and python.exists():
        os.execve(python, [str(python), __file__, *sys.argv[1:]], {**os.environ, "PYTHONPATH": str(ROOT)})
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
