"""What the whole plugin costs a scheduler, by vLLM release: with it over without it, in turn in one run.

    python3 -m bench.plugin_cost                      # every release that is here: about 6 minutes
    python3 -m bench.plugin_cost --release 0.32.0 --processes 1 --rounds 6      # one, in half a minute
    python3 -m bench.plugin_cost --count              # Python bytecodes instead of CPU time: five minutes

Real EngineCore, scheduler and scheduler half of the Mooncake connector on the CPU; the worker and the store are
simulated (tests/component/engine/scheduler), so a step is the scheduler's work without a model. Of a release both arms
are processes that live at the same time and take turns, a round each; whose turn is first changes. A round is a seeded
load: conversations that share prefixes arrive while others run, then all once more after the local cache was emptied,
so that they load from the store. It is timed in CPU time of the thread: schedule() with update_from_output(), and
apart from these what a request costs before it waits (its hashes).

The ratio is the median over the rounds' ratios: the two arms' turns of a round follow each other, and machines whose
speed changes change it for both. ``--count`` counts the bytecodes that both arms execute: the same on every machine and
in every run, and blind to what is spent in C.

Exit status 1 if a ratio of the scheduler is above ``--limit``, or if the arms did not do the same work.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCENES = ("no store", "store")
STOCK, ALL = "stock", "all"
REQUESTS = 64
HEADS = 8
BLOCKS = 4096
Row = dict[str, Any]


# -- one arm, in the engine's interpreter ------------------------------------------------------------------------------


class Load:
    """One core, and the time that its scheduler takes."""

    def __init__(self, kit: Any, model: Path, scene: str, patched: bool, counts: bool) -> None:
        """``counts``: bytecodes, not nanoseconds."""
        self._kit = kit
        self._paused = False
        measured, left_out = (self._counted, self._uncounted) if counts else (self._timed, self._untimed)
        self.spent = {"scheduler": 0, "request": 0}
        self._store = kit.SimStore() if scene == "store" else None
        if self._store is not None:
            # Its answer is simulated, so it counts in neither arm, whichever thread asks.
            self._store.hits = left_out("scheduler", self._store.hits)
        options = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 2048}
        self.core = kit.Core(model, store=self._store, **options)
        # What it samples needs no more than to be the same in both arms.
        self.core.worker._visible = lambda seen: [len(seen.tokens)]
        if patched and hasattr(self.core.core, "moontide_switch"):
            self.core.core.moontide_switch("policy/1")
        self.steps = 0
        for owner, name in ((self.core.scheduler, "schedule"), (self.core.scheduler, "update_from_output")):
            setattr(owner, name, measured("scheduler", getattr(owner, name)))
        for name in ("preprocess_add_request", "add_request"):
            setattr(self.core.core, name, measured("request", getattr(self.core.core, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, spent = time.thread_time_ns, self.spent

        def timed(*arguments: Any, **more: Any) -> Any:
            began = clock()
            try:
                return function(*arguments, **more)
            finally:
                spent[part] += clock() - began

        return timed

    def _untimed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, spent, mine = time.thread_time_ns, self.spent, threading.get_ident()

        def untimed(*arguments: Any) -> Any:
            if threading.get_ident() != mine:
                return function(*arguments)
            began = clock()
            try:
                return function(*arguments)
            finally:
                spent[part] -= clock() - began

        return untimed

    def _counted(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spent = self.spent

        def executed(_: FrameType, event: str, __: object) -> Any:
            if event == "opcode":
                # Like nanoseconds: a round says thousandths of them.
                spent[part] += 1000
            return executed

        def called(frame: FrameType, _: str, __: object) -> Any:
            if self._paused:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return executed

        def counted(*arguments: Any, **more: Any) -> Any:
            sys.settrace(called)
            try:
                return function(*arguments, **more)
            finally:
                sys.settrace(None)

        return counted

    def _uncounted(self, _: str, function: Callable[..., Any]) -> Callable[..., Any]:
        mine = threading.get_ident()

        def uncounted(*arguments: Any) -> Any:
            if threading.get_ident() != mine:
                return function(*arguments)
            self._paused = True
            try:
                return function(*arguments)
            finally:
                self._paused = False

        return uncounted

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
        """Microseconds, or bytecodes, of one round, and what was done in it."""
        for part in self.spent:
            self.spent[part] = 0
        self.steps = 0
        if self._store is not None:
            self._store.blocks.clear()
            self._store.loaded = 0
        self.core.tokens.clear()
        self.core.finished.clear()
        gc.collect()
        gc.disable()
        try:
            for name in ("first", "again"):
                self._all(seed, f"{seed}-{name}")
                self.core.scheduler.reset_prefix_cache()
        finally:
            gc.enable()
        loaded = 0 if self._store is None else self._store.loaded
        work = {"steps": self.steps, "tokens": sum(map(len, self.core.tokens.values())), "loaded": loaded}
        return {**{part: nanoseconds / 1000 for part, nanoseconds in self.spent.items()}, **work}


def be_arm(model: Path, mode: str, counts: bool) -> None:
    """Answer rounds until the input ends. ``mode``: STOCK, ALL, or the name of the one patch that is left out."""
    patched = mode != STOCK
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
    loads = {scene: Load(kit, model, scene, patched, counts) for scene in SCENES}
    print(json.dumps({"vllm": vllm.__version__, "patches": dict(table)}), file=out, flush=True)
    for line in sys.stdin:
        scene, seed = json.loads(line)
        print(json.dumps(loads[scene].round(seed)), file=out, flush=True)


# -- all of them -------------------------------------------------------------------------------------------------------


class Arm:
    """A process with one arm of one release."""

    def __init__(self, python: Path, home: Path | None, model: Path, mode: str, counts: bool, log: Path) -> None:
        kit = ROOT / "tests" / "component" / "engine" / "scheduler"
        path = [str(each) for each in (home, ROOT / "engine_patches", kit) if each is not None]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONTIDE_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONHASHSEED": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_TARGET_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        command = [str(python), "-W", "ignore", str(Path(__file__).resolve()), "--arm", str(model)]
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, mode, *(["--count"] if counts else [])],
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
        assert self._process.stdin is not None
        print(json.dumps([scene, seed]), file=self._process.stdin, flush=True)
        return self.read()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def measure(
    python: Path, home: Path | None, model: Path, folder: Path, options: argparse.Namespace, scenes: Sequence[str]
) -> list[Row]:
    """A row a scene of one release, and one more for each patch that is left out."""
    processes, rounds = options.processes, options.rounds
    modes = (STOCK, ALL, *options.without)
    found: dict[tuple[str, str], list[tuple[Row, Row]]] = {(scene, mode): [] for scene in scenes for mode in modes[1:]}
    said: dict[str, Row] = {}
    for pair in range(processes):
        arms = {mode: Arm(python, home, model, mode, options.count, folder / f"{mode}.log") for mode in modes}
        try:
            said = {mode: arm.read() for mode, arm in arms.items()}
            for scene in scenes:
                for number in range(-1, rounds):
                    seed = 1 + pair * (rounds + 1) + number
                    turn = number % len(modes)
                    order = modes[turn:] + modes[:turn]
                    rows = {mode: arms[mode].round(scene, seed) for mode in order}
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
        made["without"] = mode
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
    works = ("steps", "tokens", "loaded")
    made["work"] = {name: [sum(each[name] for each in arm) for arm in zip(*pairs, strict=True)] for name in works}
    made["same_work"] = all(off == on for off, on in made["work"].values())
    return made


def line(row: Row) -> str:
    """For people."""
    one, other = row["scheduler"], row["request"]
    return (
        f"{row['vllm']:8} {row['scene']:9} {one['off_us']:9.1f} {one['on_us']:9.1f} {one['ratio']:7.3f} "
        f"({one['quartiles'][0]:.3f} to {one['quartiles'][1]:.3f}) {other['off_us']:9.1f} {other['on_us']:9.1f} "
        f"{other['ratio']:7.3f}"
        + (f"   without {row['without']}" if "without" in row else "")
        + ("" if row["same_work"] else f"   NOT THE SAME WORK: {row['work']}")
    )


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["--arm"]:
        be_arm(Path(sys.argv[2]), sys.argv[3], "--count" in sys.argv)
        return 0
    from hack.engines.__main__ import homes
    from hack.setup.steps import engine_python

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", help="only this one; may be repeated")
    parser.add_argument("--scene", action="append", choices=SCENES, help="only this one; may be repeated")
    parser.add_argument("--processes", type=int, default=3, help="pairs of processes, one after another (default 3)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each pair and scene (default 12)")
    parser.add_argument("--without", action="append", default=[], help="an arm without this patch, too; repeatable")
    parser.add_argument("--limit", type=float, default=1.02, help="of a ratio of the scheduler (default 1.02)")
    parser.add_argument("--count", action="store_true", help="bytecodes instead of CPU time; one pair, two rounds")
    parser.add_argument("--json", type=Path, help="default: bench/results/plugin-cost.json, or plugin-count.json")
    options = parser.parse_args()
    if options.count:
        options.processes, options.rounds = 1, 2
    options.json = options.json or ROOT / "bench" / "results" / f"plugin-{'count' if options.count else 'cost'}.json"
    known = homes()
    if unknown := set(options.release or ()) - known.keys():
        parser.error(f"no {', '.join(sorted(unknown))} here; there are {', '.join(known)}: python3 -m hack.setup")
    unit = "codes" if options.count else "us"
    print(f"{'':18} {'schedule() + update_from_output(), a step':45} {'a request before it waits':>27}")
    print(f"{'vLLM':8} {'scene':9} {f'off {unit}':>9} {f'on {unit}':>9} {'ratio':>7} {'(quartiles)':16} ", end="")
    print(f"{f'off {unit}':>9} {f'on {unit}':>9} {'ratio':>7}", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tiny"
        maker = ROOT / "hack" / "tinymodels" / "make.py"
        subprocess.run([str(engine_python()), str(maker), str(model), "1"], check=True, capture_output=True)
        for release in options.release or known:
            arguments = (engine_python(), known[release], model, Path(scratch), options)
            for each in measure(*arguments, options.scene or SCENES):
                rows.append(each)
                print(line(each), flush=True)
    whole = [each for each in rows if "without" not in each]
    right = all(each["same_work"] and each["scheduler"]["ratio"] <= options.limit for each in whole)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"limit": options.limit, "within": right, "rows": rows}, indent=1) + "\n")
    print(f"{'all' if right else 'NOT all'} within {options.limit}; {options.json.name} has it all")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
