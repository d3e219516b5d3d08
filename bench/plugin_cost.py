"""What the whole plugin costs a scheduler, by vLLM release: with it over without it, in turn in one run.

    python3 -m bench.plugin_cost                      # every release that is here: about 6 minutes
    python3 -m bench.plugin_cost --release 0.32.0 --processes 1 --rounds 6      # one, in half a minute
    python3 -m bench.plugin_cost --count              # Python bytecodes instead of CPU time: five minutes
    python3 -m bench.plugin_cost --instructions       # machine instructions, under valgrind: an hour

Real EngineCore, scheduler and scheduler half of the Mooncake connector on the CPU; the worker and the store are
simulated (tests/component/engine/scheduler), so a step is the scheduler's work without a model. Of a release both arms
are processes that live at the same time and take turns, a round each; whose turn is first changes. A round is a seeded
load: conversations that share prefixes arrive while others run, then all once more after the local cache was emptied,
so that they load from the store. It is timed in CPU time of the thread: schedule() with update_from_output(), and
apart from these what a request costs before it waits (its hashes).

The ratio is the median over the rounds' ratios: the two arms' turns of a round follow each other, and machines whose
speed changes change it for both. ``--control`` adds an arm that is like the first: how far from 1 its ratio is, the
others may be for nothing. ``--count`` counts the bytecodes that both arms execute: the same on every machine and in
every run, and blind to what is spent in C. ``--instructions`` counts the machine instructions, C's among them; beside
them stand the misses of a simulated cache of 512 KiB, and the branches that a simulated processor guessed wrongly.

Exit status 1 if a ratio of the scheduler is above ``--limit``, or if the arms did not do the same work.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.plugin_meters import BRANCHES, C_SOURCE, CACHE, GRIND, Bytecodes, CpuTime, Instructions

ROOT = Path(__file__).resolve().parents[1]
SCENES = ("no store", "store")
STOCK, ALL, CONTROL = "stock", "all", "stock again"
REQUESTS = 64
HEADS = 8
BLOCKS = 4096
Row = dict[str, Any]


class Unit(NamedTuple):
    """What is counted."""

    meter: type[CpuTime]
    title: str
    results: str
    processes: int
    rounds: int
    """Of each pair of processes: as many as tell more."""


UNITS = {
    "time": Unit(CpuTime, "us", "plugin-cost.json", 3, 12),
    "bytecodes": Unit(Bytecodes, "codes", "plugin-count.json", 1, 2),
    "instructions": Unit(Instructions, "instr.", "plugin-instructions.json", 1, 2),
}
LIBRARY = "callgrind.so"


# -- one arm, in the engine's interpreter ------------------------------------------------------------------------------


class Load:
    """One core, and the time that its scheduler takes."""

    def __init__(self, kit: Any, model: Path, scene: str, patched: bool, meter: CpuTime) -> None:
        """``meter``: what counts."""
        self._kit = kit
        self._meter = meter
        self._store = kit.SimStore() if scene == "store" else None
        if self._store is not None:
            # Its answer is simulated, so it counts in neither arm, whichever thread asks.
            self._store.hits = meter.left_out("scheduler", self._store.hits)
        options = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 2048}
        self.core = kit.Core(model, store=self._store, **options)
        # What it samples needs no more than to be the same in both arms.
        self.core.worker._visible = lambda seen: [len(seen.tokens)]
        if patched and hasattr(self.core.core, "moontide_switch"):
            self.core.core.moontide_switch("policy/1")
        self.steps = 0
        for owner, name in ((self.core.scheduler, "schedule"), (self.core.scheduler, "update_from_output")):
            setattr(owner, name, meter.measured("scheduler", getattr(owner, name)))
        for name in ("preprocess_add_request", "add_request"):
            setattr(self.core.core, name, meter.measured("request", getattr(self.core.core, name)))

    def _all(self, seed: int, name: str) -> None:
        source = random.Random(seed)
        heads = [self._kit.prompt(seed * 1000 + number, source.randrange(64, 400)) for number in range(HEADS)]
        for number in range(REQUESTS):
            tail = self._kit.prompt(seed * 1000 + 100 + number, source.randrange(16, 160))
            self.core.add(f"{name}-{number}", source.choice(heads) + tail, source.randrange(8, 48))
            for _ in range(source.randrange(3)):
                self.core.step()
                self.steps += 1
        self.steps += self.core.run(5000)
        self.core.settle()

    def round(self, seed: int) -> Row:
        """Of one round: what its parts cost, in microseconds (or one of the other units), and what was done in it."""
        work: Row = {}
        for parts in self._meter.passes:
            work = self._pass(seed, parts)
        cost = {part: thousands / 1000 for part, thousands in self._meter.spent.items()}
        return {**cost, **work, "events": dict(self._meter.events.get("scheduler", {}))}

    def _pass(self, seed: int, parts: tuple[str, ...]) -> Row:
        self.steps = 0
        if self._store is not None:
            self._store.blocks.clear()
            self._store.loaded = 0
        self.core.tokens.clear()
        self.core.finished.clear()
        gc.collect()
        gc.disable()
        self._meter.begin(parts)
        try:
            for name in ("first", "again"):
                self._all(seed, f"{seed}-{name}")
                self.core.scheduler.reset_prefix_cache()
        finally:
            self._meter.end(parts)
            gc.enable()
        loaded = 0 if self._store is None else self._store.loaded
        return {"steps": self.steps, "tokens": sum(map(len, self.core.tokens.values())), "loaded": loaded}


def be_arm(model: Path, mode: str, unit: str, scenes: Sequence[str], *more: str) -> None:
    """Answer rounds until the input ends. ``mode``: STOCK, CONTROL, ALL, or the name of the patch that is left out;
    ``more``: what the meter of ``unit`` needs."""
    patched = mode not in (STOCK, CONTROL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import corekit as kit
    import vllm

    table: Mapping[str, str] = {}
    if patched:
        from moontide_engine.patches import Registry
        from moontide_engine.plugin import PATCHES

        registry = Registry(patch for patch in PATCHES.patches if patch.name != mode)
        registry.apply()
        table = registry.table
    meter: Any = UNITS[unit].meter(*map(Path, more))
    loads = {scene: Load(kit, model, scene, patched, meter) for scene in scenes}
    print(json.dumps({"vllm": vllm.__version__, "patches": dict(table)}), file=out, flush=True)
    for line in sys.stdin:
        scene, seed = json.loads(line)
        print(json.dumps(loads[scene].round(seed)), file=out, flush=True)


# -- all of them -------------------------------------------------------------------------------------------------------


class Arm:
    """A process with one arm of one release."""

    def __init__(
        self, python: Path, home: Path | None, model: Path, mode: str, unit: str, scenes: Sequence[str], folder: Path
    ) -> None:
        """``folder``: for its log, and with callgrind for the library that ``compile_library`` made."""
        kit = ROOT / "tests" / "component" / "engine" / "scheduler"
        path = [str(each) for each in (home, ROOT / "engine_patches", kit, ROOT) if each is not None]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONTIDE_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONHASHSEED": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_TARGET_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        out = folder / f"{mode}.callgrind"
        command = [str(python), "-W", "ignore", str(Path(__file__).resolve()), "--arm", str(model), mode, unit]
        command += [",".join(scenes)]
        if unit == "instructions":
            command = ["valgrind", *GRIND, f"--callgrind-out-file={out}", *command, str(folder / LIBRARY), str(out)]
        self._log = log = folder / f"{mode}.log"
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=python.parent,
            )

    def read(self) -> Row:
        """Its next answer. Raises RuntimeError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._log.read_text(errors="replace")[-3000:])
        found: Row = json.loads(line)
        return found

    def round(self, scene: str, seed: int) -> Row:
        """One round of a scene."""
        self.ask(scene, seed)
        return self.read()

    def ask(self, scene: str, seed: int) -> None:
        """For one round of a scene, whose row is to be read."""
        assert self._process.stdin is not None
        print(json.dumps([scene, seed]), file=self._process.stdin, flush=True)

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def rounds_of(arms: Mapping[str, Arm], order: Sequence[str], scene: str, seed: int, *, at_once: bool) -> dict[str, Row]:
    """One round of each arm: in this order, or all at once where that changes nothing."""
    if not at_once:
        return {mode: arms[mode].round(scene, seed) for mode in order}
    for mode in order:
        arms[mode].ask(scene, seed)
    return {mode: arms[mode].read() for mode in order}


def measure(
    python: Path, home: Path | None, model: Path, folder: Path, options: argparse.Namespace, scenes: Sequence[str]
) -> list[Row]:
    """A row a scene of one release, and one more for each patch that is left out."""
    processes, rounds = options.processes, options.rounds
    modes = (STOCK, ALL, *options.without, *([CONTROL] if options.control else []))
    found: dict[tuple[str, str], list[tuple[Row, Row]]] = {(scene, mode): [] for scene in scenes for mode in modes[1:]}
    said: dict[str, Row] = {}
    for pair in range(processes):
        arms = {mode: Arm(python, home, model, mode, options.unit, scenes, folder) for mode in modes}
        try:
            said = {mode: arm.read() for mode, arm in arms.items()}
            for scene in scenes:
                for number in range(-1, rounds):
                    seed = 1 + pair * (rounds + 1) + number
                    turn = number % len(modes)
                    order = modes[turn:] + modes[:turn]
                    rows = rounds_of(arms, order, scene, seed, at_once=options.unit != "time")
                    # The first round warms up.
                    for mode in modes[1:] if number >= 0 else ():
                        found[scene, mode].append((rows[STOCK], rows[mode]))
        finally:
            for arm in arms.values():
                arm.end()
    return [row(scene, mode, said[mode], pairs) for (scene, mode), pairs in found.items()]


def row(scene: str, mode: str, said: Row, pairs: list[tuple[Row, Row]]) -> Row:
    """Medians over the rounds, in microseconds (or bytecodes) a step and a request, and medians of the rounds'
    ratios."""
    made: Row = {"vllm": said["vllm"].partition("+")[0], "scene": scene, "rounds": len(pairs)}
    if mode != ALL:
        made["control" if mode == CONTROL else "without"] = mode
    made["applied"] = sorted(name for name, state in said["patches"].items() if state == "applied")
    for part in ("scheduler", "request"):
        unit = [(off["steps"] if part == "scheduler" else 2 * REQUESTS) for off, _ in pairs]
        ratios = sorted(on[part] / off[part] for off, on in pairs)
        made[part] = {
            "off_us": statistics.median(off[part] / each for (off, _), each in zip(pairs, unit, strict=True)),
            "on_us": statistics.median(on[part] / each for (_, on), each in zip(pairs, unit, strict=True)),
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        }
    if pairs[0][0]["events"]:
        for what, names in (("cache_misses", CACHE), ("wrong_branches", BRANCHES)):
            off, on = (sum(each["events"][name] for each in arm for name in names) for arm in zip(*pairs, strict=True))
            made["scheduler"][what] = {"off": off, "on": on, "ratio": on / off}
    works = ("steps", "tokens", "loaded")
    made["work"] = {name: [sum(each[name] for each in arm) for arm in zip(*pairs, strict=True)] for name in works}
    made["same_work"] = all(off == on for off, on in made["work"].values())
    return made


def compile_library(path: Path) -> None:
    """What lets an arm turn callgrind on and off, as ``path``. Ends the program where valgrind or a compiler lacks."""
    if shutil.which("valgrind") is None or shutil.which("cc") is None:
        raise SystemExit(
            "--instructions needs valgrind with its headers and a C compiler: apt-get install valgrind gcc"
        )
    source = path.with_suffix(".c")
    source.write_text(C_SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)


def line(row: Row) -> str:
    """For people."""
    one, other = row["scheduler"], row["request"]
    return (
        f"{row['vllm']:8} {row['scene']:9} {one['off_us']:11.1f} {one['on_us']:11.1f} {one['ratio']:7.3f} "
        f"({one['quartiles'][0]:.3f} to {one['quartiles'][1]:.3f}) {other['off_us']:11.1f} {other['on_us']:11.1f} "
        f"{other['ratio']:7.3f}"
        + "".join(f" {name}: {one[name]['ratio']:.3f}" for name in ("cache_misses", "wrong_branches") if name in one)
        + (f"   without {row['without']}" if "without" in row else "   stock again" if "control" in row else "")
        + ("" if row["same_work"] else f"   NOT THE SAME WORK: {row['work']}")
    )


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["--arm"]:
        _, _, model, mode, unit, scenes, *more = sys.argv
        be_arm(Path(model), mode, unit, scenes.split(","), *more)
        return 0
    from hack.engines.__main__ import homes
    from hack.setup.steps import engine_python

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", help="only this one; may be repeated")
    parser.add_argument("--scene", action="append", choices=SCENES, help="only this one; may be repeated")
    parser.add_argument("--processes", type=int, help="pairs of processes, one after another (default 3; counted, 1)")
    parser.add_argument("--rounds", type=int, help="rounds of each pair and scene (default 12; counted, 2)")
    parser.add_argument("--without", action="append", default=[], help="an arm without this patch, too; repeatable")
    parser.add_argument("--limit", type=float, default=1.02, help="of a ratio of the scheduler (default 1.02)")
    parser.add_argument("--control", action="store_true", help="an arm like the first, too")
    units = parser.add_mutually_exclusive_group()
    units.add_argument(
        "--count", dest="unit", action="store_const", const="bytecodes", help="bytecodes instead of CPU time"
    )
    units.add_argument(
        "--instructions", dest="unit", action="store_const", const="instructions", help="machine instructions instead"
    )
    parser.add_argument("--json", type=Path, help="default: bench/results/plugin-cost.json, or of the unit's name")
    parser.set_defaults(unit="time")
    options = parser.parse_args()
    unit = UNITS[options.unit]
    options.processes, options.rounds = options.processes or unit.processes, options.rounds or unit.rounds
    options.json = options.json or ROOT / "bench" / "results" / unit.results
    known = homes()
    if unknown := set(options.release or ()) - known.keys():
        parser.error(f"no {', '.join(sorted(unknown))} here; there are {', '.join(known)}: python3 -m hack.setup")
    print(f"{'':18} {'schedule() + update_from_output(), a step':45} {'a request before it waits':>27}")
    print(
        f"{'vLLM':8} {'scene':9} {f'off {unit.title}':>11} {f'on {unit.title}':>11} {'ratio':>7} {'(quartiles)':16} ",
        end="",
    )
    print(f"{f'off {unit.title}':>11} {f'on {unit.title}':>11} {'ratio':>7}", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tiny"
        if options.unit == "instructions":
            compile_library(Path(scratch) / LIBRARY)
        maker = ROOT / "hack" / "tinymodels" / "make.py"
        subprocess.run([str(engine_python()), str(maker), str(model), "1"], check=True, capture_output=True)
        right = True
        for release in options.release or known:
            arguments = (engine_python(), known[release], model, Path(scratch), options)
            for each in measure(*arguments, options.scene or SCENES):
                rows.append(each)
                print(line(each), flush=True)
            whole = [each for each in rows if not {"without", "control"} & each.keys()]
            right = all(each["same_work"] and each["scheduler"]["ratio"] <= options.limit for each in whole)
            # After each: all of them take long.
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(
                json.dumps({"limit": options.limit, "within": right, "rows": rows}, indent=1) + "\n"
            )
    print(f"{'all' if right else 'NOT all'} within {options.limit}; {options.json.name} has it all")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
