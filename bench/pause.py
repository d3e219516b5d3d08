"""How long changes of policy pause the demo's fleet, idle and under load.

Run `make demo ARGS=--keep`, then `python3 bench/pause.py`.

Prints every pause, medians, and the ratio of loaded to idle. Absolute times are this machine's; compare ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """0 when every change finished."""
    from hack.demo import prompts
    from hack.demo.fleet import push_weights
    from hack.demo.install import kept_fleet
    from hack.demo.load import Load
    from hack.demo.story import MODELS, side_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--bumps", type=int, default=10, help="changes idle, and as many under load (default: %(default)s)"
    )
    parser.add_argument("--clients", type=int, default=6)
    options = parser.parse_args()
    fleet = kept_fleet()
    if fleet is None:
        print("error: there is no local cluster; run `make demo ARGS=--keep` first", file=sys.stderr)
        return 1
    replicas = fleet.replicas()
    texts = dict(enumerate(prompts.make().all))

    def change() -> tuple[float, int]:
        """Milliseconds for which replicas held requests, and keys removed."""
        version = int(fleet.get_policy()["spec"]["version"]) + 1
        push_weights(replicas, MODELS[side_of(version)], str(version))
        fleet.bump(version)
        fleet.until_current(str(version), 150)
        update = fleet.until_collected(60)["status"]["lastUpdate"]
        return float(update["pauseSeconds"]) * 1000, int(update["keysRemoved"])

    pauses: dict[str, list[float]] = {"idle": [], "load": []}
    for number in range(options.bumps):
        pause, keys = change()
        pauses["idle"].append(pause)
        print(f"idle {number + 1}: {pause:.0f} ms, {keys} keys removed", flush=True)
    with Load(replicas, fleet.model, texts, clients=options.clients) as load:
        for number in range(options.bumps):
            load.until(40, 30)
            pause, keys = change()
            pauses["load"].append(pause)
            print(f"load {number + 1}: {pause:.0f} ms, {keys} keys removed", flush=True)
    medians = {name: statistics.median(values) for name, values in pauses.items()}
    for name, values in pauses.items():
        span = f"least {min(values):.0f}, most {max(values):.0f}"
        print(f"{name}: median {medians[name]:.0f} ms, {span}, {len(values)} changes")
    print(f"load / idle = {medians['load'] / medians['idle']:.2f}")
    print(f"worst / median under load = {max(pauses['load']) / medians['load']:.2f}")
    fleet.close()
    return 0


if __name__ == "__main__":
    python = ROOT / ".venv" / "bin" / "python"
    if sys.prefix == sys.base_prefix and python.exists():
        os.execve(python, [str(python), __file__, *sys.argv[1:]], {**os.environ, "PYTHONPATH": str(ROOT)})
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
