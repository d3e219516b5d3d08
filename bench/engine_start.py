"""What a start of an engine on the CPU costs, spawned and forked: `.venv/bin/python -m bench.engine_start`.

One engine at a time with a real Mooncake master, from the command to the first answer of ``/health``, the ways in turn.
CPU is that of all its processes until then, memory their proportional set size (shared pages count once). Five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "component" / "engine"), str(ROOT)]

import enginekit as kit  # noqa: E402

from hack.setup.steps import engine_python, models_dir  # noqa: E402

NUMBER = 61
WAYS = ("spawn", "fork")
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(folder: Path) -> float:
    """User and system time of a process and of its children that have ended."""
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def mebibytes(folder: Path) -> float:
    """Its proportional set size."""
    return int(re.findall(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)[0]) / 1024


def start(way: str, folder: Path) -> dict[str, float]:
    """Start an engine, measure, end it."""
    environment = kit.engine_environment(folder, NUMBER) | {"MOONTIDE_CPU_START_METHOD": way}
    began = time.monotonic()
    command = kit.engine_command(models_dir() / "policy-a", NUMBER)
    engine = kit.spawn(command, environment, folder / f"{way}.log")
    try:
        url = f"http://127.0.0.1:{18100 + NUMBER}/health"
        kit.wait_for("health", lambda: (r := kit.get(url)) is not None and r.status_code == 200, 300, engine)
        took, group = time.monotonic() - began, [Path(f"/proc/{pid}") for pid in engine.members()]
        return {
            "seconds": took,
            "cpu": sum(map(cpu_seconds, group)),
            "mebibytes": sum(map(mebibytes, group)),
            "processes": len(group),
        }
    finally:
        engine.end()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each way, after one of each (default 3)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "engine-start.json")
    options = parser.parse_args()
    if Path(sys.prefix) != engine_python().parents[1]:
        os.execv(engine_python(), [str(engine_python()), "-m", "bench.engine_start", *sys.argv[1:]])
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kit.store_config(folder)
        master = kit.Master(folder)
        master.start()
        try:
            for turn in range(options.rounds + 1):
                for way in WAYS:
                    row = start(way, folder)
                    print(
                        f"{turn} {way}: {', '.join(f'{name} {value:.1f}' for name, value in row.items())}", flush=True
                    )
                    # The first reads the files from the disk.
                    rows[way] += [row] if turn else []
        finally:
            master.kill()
    medians = {way: {k: statistics.median(r[k] for r in found) for k in found[0]} for way, found in rows.items()}
    ratio = {k: medians["fork"][k] / medians["spawn"][k] for k in ("seconds", "cpu", "mebibytes")}
    print("fork over spawn: " + ", ".join(f"{name} {value:.2f}" for name, value in ratio.items()))
    options.json.write_text(json.dumps({"starts": rows, "medians": medians, "ratio": ratio}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
