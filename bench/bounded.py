"""Whether keys and memory stay bounded over many changes of policy: 50 live ones (`Fence`), with load on every replica.

Run `make demo ARGS=--keep`, then `python3 bench/bounded.py`. Every few changes it prints the deployment's keys in the
store, by the wiper's count, and the resident memory of the master, the wiper and the engines. Nothing waits for a
collection before the next change begins. At the end it waits for one, and says what is left.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CURRENT_SECONDS = 120.0


def main() -> int:
    """0 when every change finished and nothing of old epochs was left."""
    from hack.cluster.processes import resident_mib
    from hack.demo import prompts
    from hack.demo.fleet import push_weights
    from hack.demo.install import kept_fleet
    from hack.demo.load import Load
    from hack.demo.story import MODELS, side_of
    from tests.e2e.faults import pids

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bumps", type=int, default=50)
    parser.add_argument("--every", type=int, default=10, help="changes between two lines (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=20, help="answers after each change (default: %(default)s)")
    options = parser.parse_args()
    fleet = kept_fleet()
    if fleet is None:
        print("error: there is no local cluster; run `make demo ARGS=--keep` first", file=sys.stderr)
        return 1
    replicas, store, namespace = fleet.replicas(), fleet.store(), fleet.key_namespace

    def memory(pod: dict[str, object], needle: str) -> float:
        return sum(resident_mib(pid) for pid in pids(pod, needle))

    def line(number: int) -> None:
        engines = sum(memory(each.pod, "EngineCore") for each in replicas)
        master, wiper = memory(store.pod, "mooncake_master"), memory(store.pod, "moontide_engine.wiper")
        keys = store.counted(namespace)
        print(f"{number:8} {keys:8} {master:12.1f} {wiper:11.1f} {engines:14.0f}", flush=True)

    fleet.kube.merge("polv", fleet.policy, fleet.namespace, {"spec": {"strategy": "Fence"}})
    try:
        with Load(replicas, fleet.model, dict(enumerate(prompts.make().all)), clients=4) as load:
            load.until(3 * options.answers, CURRENT_SECONDS)
            print(f"{'changes':>8} {'keys':>8} {'master, MiB':>12} {'wiper, MiB':>11} {'engines, MiB':>14}")
            line(0)
            for number in range(1, options.bumps + 1):
                version = int(fleet.get_policy()["spec"]["version"]) + 1
                push_weights(replicas, MODELS[side_of(version)], str(version))
                fleet.bump(version)
                fleet.until_current(str(version), CURRENT_SECONDS)
                load.until(options.answers, CURRENT_SECONDS)
                if number % options.every == 0:
                    line(number)
        fleet.until_collected(CURRENT_SECONDS)
        line(options.bumps)
        print(
            f"{store.counted(namespace)} keys are left; those of one epoch, with all {len(prompts.make().all)} prompts"
        )
    finally:
        fleet.kube.merge("polv", fleet.policy, fleet.namespace, {"spec": {"strategy": "Barrier"}})
        fleet.close()
    return 0


if __name__ == "__main__":
    python = ROOT / ".venv" / "bin" / "python"
    if sys.prefix == sys.base_prefix and python.exists():
        os.execve(python, [str(python), __file__, *sys.argv[1:]], {**os.environ, "PYTHONPATH": str(ROOT)})
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
