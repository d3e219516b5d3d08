"""What a load through the plugin's own memory costs beyond the transfer: its threads, and the copy to the blocks.

    .venv/bin/python -m bench.staged_load                          # this plugin: seconds
    .venv/bin/python -m bench.staged_load --against fa8f03e        # and that of another commit, in turn

No store and no engine: the transfer does nothing (moontide_engine/transfers.py). A key is four pieces of 1 KiB, as a
small model's blocks are. Each source tree is a process of its own, and they take turns, a round each; medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from typing import Any

KEYS, PIECES, BYTES = (1, 8, 24), 4, 1024
LOADS, ROUNDS = 400, 5


def be_one() -> None:
    """Answer rounds until the input ends: microseconds of wall clock and of CPU of a load, by number of keys."""
    from moontide_engine.transfers import StagedLoads

    loads = StagedLoads(lambda keys, addresses, sizes: [1] * len(keys), 5)
    for line in sys.stdin:
        count = int(line)
        memory = ctypes.create_string_buffer(count * PIECES * BYTES)
        base = ctypes.addressof(memory)
        rows = [[base + (key * PIECES + piece) * BYTES for piece in range(PIECES)] for key in range(count)]
        what: tuple[Any, ...] = ([str(key) for key in range(count)], rows, [[BYTES] * PIECES] * count)
        began, used = time.perf_counter(), time.process_time()
        for _ in range(LOADS):
            loads.load(*what)
        spent = time.perf_counter() - began, time.process_time() - used
        print(json.dumps([seconds / LOADS * 1e6 for seconds in spent]), flush=True)


def main() -> int:
    """0."""
    if sys.argv[1:] == ["--one"]:
        be_one()
        return 0
    from bench.fanout import trees

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="the plugin of that commit, too")
    options = parser.parse_args()
    with trees(options.against) as sources:
        running = {
            name: subprocess.Popen(
                [sys.executable, __file__, "--one"],
                env={"PYTHONPATH": str(tree / "engine_patches")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, tree in sources.items()
        }
        print(f"{'keys':>5} {'plugin':>8} {'wall us':>9} {'CPU us':>9}")
        for count in KEYS:
            found: dict[str, list[list[float]]] = {name: [] for name in running}
            for number in range(1 + ROUNDS):
                for name, process in running.items():
                    assert process.stdin is not None
                    assert process.stdout is not None
                    print(count, file=process.stdin, flush=True)
                    spent = json.loads(process.stdout.readline())
                    # The first round warms up.
                    if number:
                        found[name].append(spent)
            for name, rounds in found.items():
                wall, cpu = (statistics.median(each) for each in zip(*rounds, strict=True))
                print(f"{count:5} {name:>8} {wall:9.1f} {cpu:9.1f}")
        for process in running.values():
            process.communicate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
