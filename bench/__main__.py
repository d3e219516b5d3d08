"""The measurements of docs/performance.md: ``make bench``, or ``make bench ARGS="fanout real"`` for some of them.

Each is one command, prints its tables and writes a JSON under bench/results/. Nothing passes or fails by the clock.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Bench:
    """One of them. ``short`` is what is left out by ``--short``; ``minutes`` are those of two cores."""

    name: str
    about: str
    minutes: int
    arguments: tuple[str, ...] = ()
    short: tuple[str, ...] = ()

    def command(self, short: bool) -> list[str]:
        """As people would type it."""
        return [sys.executable, "-m", f"bench.{self.name}", *self.arguments, *(self.short if short else ())]


BENCHES = (
    Bench(
        "fanout", "the pause of 2 to 2,000 replicas (fake engines)", 25, short=("--sizes", "2", "64", "--bumps", "1")
    ),
    Bench("pause_calls", "a pause by its calls alone (fake engines)", 3, short=("--sizes", "2", "64", "--bumps", "3")),
    Bench(
        "real",
        "pause, hit rate, time to first token by strategy (real engines)",
        25,
        short=("--rounds", "1", "--after", "10"),
    ),
    Bench("scale", "reconciling 500 fleets and 50 pools, and at rest", 25, short=("--quick",)),
    Bench(
        "plugin_cost",
        "the scheduler with and without the plugin, by vLLM release",
        12,
        short=("--processes", "1", "--rounds", "4"),
    ),
    Bench("engine_start", "a start of an engine, its processes spawned and forked", 5, short=("--rounds", "1")),
    Bench("master_loss", "requests while the store's master is away (real engines)", 4),
)


def main() -> int:
    """0 when every bench ended well."""
    names = [bench.name for bench in BENCHES]
    listed = "\n".join(f"  {bench.name:12} {bench.minutes:3} min  {bench.about}" for bench in BENCHES)
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=f"{listed}\n\nmore options: python -m bench.NAME --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benches", nargs="*", metavar="NAME", help="all of them if none is named")
    parser.add_argument("--short", action="store_true", help="a small run of each, to see that it works")
    options = parser.parse_args()
    unknown = sorted(set(options.benches) - set(names))
    if unknown:
        parser.error(f"no such bench: {', '.join(unknown)}; there are {', '.join(names)}")
    failed = []
    for bench in BENCHES:
        if options.benches and bench.name not in options.benches:
            continue
        command = bench.command(options.short)
        print(f"\n== {bench.name}: {bench.about}\n$ python {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            failed.append(bench.name)
        print(f"== {bench.name}: {(time.monotonic() - began) / 60:.1f} min", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
