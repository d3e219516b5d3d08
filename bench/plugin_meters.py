"""What a call costs, in one of three units, for bench.plugin_cost: nanoseconds, bytecodes or machine instructions.

Runs in the engine's interpreter, so it needs nothing but the standard library. A meter wraps functions of the thread
that made it: what is ``measured`` counts, what is ``left_out`` within that does not.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

Function = Callable[..., Any]
GRIND = (
    *("--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"),
    # The second cache of many a server: it is each core's own, and what it misses costs most here.
    *("--cache-sim=yes", "--branch-sim=yes", "--LL=524288,8,64"),
)
CACHE, BRANCHES = ("ILmr", "DLmr", "DLmw"), ("Bcm", "Bim")
"""Events: misses of that cache; branches that were guessed wrongly."""
PARTS = ("scheduler", "request")

C_SOURCE = """
#include <valgrind/callgrind.h>
void instrument(void) { CALLGRIND_START_INSTRUMENTATION; }
void uninstrument(void) { CALLGRIND_STOP_INSTRUMENTATION; }
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(void) { CALLGRIND_DUMP_STATS; }
"""


class CpuTime:
    """Nanoseconds of the thread's CPU time."""

    passes: tuple[tuple[str, ...], ...] = (PARTS,)
    """A round is run once for each of these, and measures the parts named in it."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0)
        self.events: dict[str, dict[str, int]] = {}
        """What else was counted, by part: here nothing."""
        self._thread = threading.get_ident()

    def begin(self, parts: tuple[str, ...]) -> None:
        """A pass begins."""
        self.spent |= dict.fromkeys(parts, 0)

    def end(self, parts: tuple[str, ...]) -> None:
        """It has ended; ``spent`` has it."""

    def measured(self, part: str, function: Function) -> Function:
        """``function``, counted."""
        clock, spent = time.thread_time_ns, self.spent

        def timed(*arguments: Any, **more: Any) -> Any:
            began = clock()
            try:
                return function(*arguments, **more)
            finally:
                spent[part] += clock() - began

        return timed

    def left_out(self, part: str, function: Function) -> Function:
        """``function``, called within what counts as ``part``, not counted."""
        clock, spent, mine = time.thread_time_ns, self.spent, self._thread

        def untimed(*arguments: Any) -> Any:
            if threading.get_ident() != mine:
                return function(*arguments)
            began = clock()
            try:
                return function(*arguments)
            finally:
                spent[part] -= clock() - began

        return untimed


class Bytecodes(CpuTime):
    """Python bytecodes, as thousands of them: like nanoseconds, of which a round says thousandths."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False

    def measured(self, part: str, function: Function) -> Function:
        """``function``, counted."""
        spent = self.spent

        def executed(_: FrameType, event: str, __: object) -> Any:
            if event == "opcode":
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

    def left_out(self, part: str, function: Function) -> Function:
        """``function``, not counted."""

        def uncounted(*arguments: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*arguments)
            self._paused = True
            try:
                return function(*arguments)
            finally:
                self._paused = False

        return uncounted


class Instructions(CpuTime):
    """Machine instructions of the process (C and Python alike), which callgrind counts while one of ours is called.

    The process runs under ``valgrind`` with :data:`GRIND`. There is one counter, so each part is a pass of its own.
    ``events`` are callgrind's: what a simulated processor would have missed in its caches, and guessed wrongly.
    """

    passes = tuple((part,) for part in PARTS)

    def __init__(self, library: Path, out: Path) -> None:
        """``library``: C_SOURCE, compiled. ``out``: callgrind's ``--callgrind-out-file``; it adds numbers to it."""
        super().__init__()
        # Calls of a PyDLL keep the interpreter's lock: no other thread runs while it counts, unless ours waits.
        self._grind = ctypes.PyDLL(str(library))
        self._out = out
        self._dumps = 0
        self._live = ""

    def begin(self, parts: tuple[str, ...]) -> None:
        """A pass begins."""
        (self._live,) = parts
        self._grind.instrument()
        self._grind.zero()

    def end(self, parts: tuple[str, ...]) -> None:
        """It has ended; ``spent`` has it. Raises RuntimeError if callgrind has counted nothing."""
        self._live = ""
        self._grind.dump()
        self._grind.uninstrument()
        self._dumps += 1
        dumped = Path(f"{self._out}.{self._dumps}")
        lines = dumped.read_text().splitlines()
        dumped.unlink()
        said = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines) if rest}
        counted = dict(zip(said.get("events", ()), map(int, said.get("totals", ())), strict=False))
        if not counted.get("Ir"):
            raise RuntimeError("callgrind counted nothing: is this valgrind?")
        self.spent[parts[0]] = counted["Ir"] * 1000
        self.events[parts[0]] = counted

    def measured(self, part: str, function: Function) -> Function:
        """``function``, counted."""
        toggle = self._grind.toggle

        def counted(*arguments: Any, **more: Any) -> Any:
            if self._live != part:
                return function(*arguments, **more)
            toggle()
            try:
                return function(*arguments, **more)
            finally:
                toggle()

        return counted

    def left_out(self, part: str, function: Function) -> Function:
        """``function``, not counted."""
        toggle = self._grind.toggle

        def uncounted(*arguments: Any) -> Any:
            if self._live != part or threading.get_ident() != self._thread:
                return function(*arguments)
            toggle()
            try:
                return function(*arguments)
            finally:
                toggle()

        return uncounted
