"""The long oracle: `make oracle`. Changes under load and under faults, every answer held against a cold engine.

Three arms in one run, with the same faults: prepared changes with Barrier and with Fence, and the plain fan-out on
engines without the plugin. It fails when one answer of ours is stale, when the fan-out left none stale (an oracle that
sees nothing proves nothing), when fewer than half of the checked answers began with a hit, or when more than one in
twenty was left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from hack.cluster.settings import repository_root
from hack.demo import cold, prompts
from hack.demo.cold import References
from hack.demo.fleet import Fleet
from hack.demo.install import kept_fleet
from hack.demo.kube import wait
from tests.e2e.oracle.arms import FanOutArm, MoontideArm, Outcome, complaints, end_stock_fleet, stock_fleet
from tests.e2e.oracle.clients import Router
from tests.e2e.oracle.disturbances import SCHEDULE, Fault

ARMS = ("Barrier", "Fence", "fan-out")
START_SECONDS = 400.0


def main() -> int:
    """0 when every arm is as it should be."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.e2e.oracle", description=__doc__)
    parser.add_argument("--bumps", type=int, default=len(SCHEDULE), help="rounds of each arm (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=70, help="good answers after each (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--arm", action="append", choices=ARMS, help="this one only; may be given again")
    parser.add_argument("--faults", help="only rounds whose fault has this text in its name")
    options = parser.parse_args()
    chosen = [each for each in SCHEDULE if options.faults is None or options.faults in each.name]
    schedule: list[Fault] = [chosen[number % len(chosen)] for number in range(options.bumps)] if chosen else []
    if not schedule:
        parser.error(f"no fault has {options.faults!r} in its name; there are: {sorted({f.name for f in SCHEDULE})}")
    fleet, references = _demo()
    outcomes: list[Outcome] = []
    try:
        for arm in options.arm or ARMS:
            began = time.monotonic()
            _say(f"\n{arm}: {len(schedule)} changes, {options.replicas} replicas")
            outcomes.append(_run(arm, fleet, references, schedule, options.answers, options.replicas))
            _say(f"{outcomes[-1].line()}  ({time.monotonic() - began:.0f} s)")
            for line in outcomes[-1].wrong[:20]:
                _say(f"  {line}")
    finally:
        artifacts = repository_root() / "artifacts"
        artifacts.mkdir(exist_ok=True)
        (artifacts / "oracle.json").write_text(json.dumps([each.data() for each in outcomes], indent=1) + "\n")
        fleet.close()
    least = options.bumps * options.answers * 9 // 10
    bad = [text for outcome in outcomes for text in complaints(outcome, least)]
    _say("\n| arm | changes | answers checked | stale | began with a hit | left out |\n|---|---|---|---|---|---|")
    for outcome in outcomes:
        seen = outcome.verdict
        stale = f"{len(seen.stale)}" + (f" ({outcome.unfaulted_stale} without a fault)" if seen.stale else "")
        _say(
            f"| {outcome.arm} | {outcome.changes} | {seen.checked} | {stale} | {seen.cached} | "
            f"{seen.left_out.total()} ({seen.left_out_share:.1%}) |"
        )
    for text in bad:
        _say(f"WRONG: {text}")
    return 1 if bad else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _demo() -> tuple[Fleet, References]:
    """The demo's fleet and references; the demo runs first where there are none."""
    path = repository_root() / "artifacts" / "cold-references.json"
    fleet = kept_fleet()
    if fleet is None or not path.exists():
        path.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "hack.demo.command", "--keep", f"--references={path}"]
        subprocess.run(command, cwd=repository_root(), check=True)
        fleet = kept_fleet()
    assert fleet is not None
    return fleet, cold.load(path)


def _scale(fleet: Fleet, replicas: int) -> None:
    fleet.kube.merge("ifd", fleet.deployment, fleet.namespace, {"spec": {"replicas": replicas}})
    wait(lambda: len(fleet.pods()) == replicas or None, START_SECONDS, f"{replicas} replicas", every=1.0)


def _run(arm: str, fleet: Fleet, references: References, schedule: list[Fault], answers: int, replicas: int) -> Outcome:
    texts, say = prompts.make(), _say
    if arm != "fan-out":
        _scale(fleet, replicas)
        with Router(fleet.replicas) as router:
            return MoontideArm(fleet, references, router, arm).run(texts, schedule, answers, say)
    _scale(fleet, 0)
    pods = stock_fleet(fleet, replicas)
    try:
        with Router(pods, "/health") as router:
            wait(lambda: len(router.ready()) == replicas or None, START_SECONDS, "stock engines", every=1.0)
            return FanOutArm(fleet, references, router, "stock").run(texts, schedule, answers, say)
    finally:
        end_stock_fleet(fleet.kube, fleet.namespace)
        _scale(fleet, replicas)


if __name__ == "__main__":
    sys.exit(main())
