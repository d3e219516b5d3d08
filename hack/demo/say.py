"""Plain lines for people; colour only where a terminal shows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

_BOLD, _GREEN, _RED, _PLAIN = "\033[1m", "\033[32m", "\033[31m", "\033[0m"


class Voice:
    """Says what happens, and keeps every claim that was checked."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._colour = sys.stdout.isatty()
        self.failed: list[str] = []
        self.checked = 0

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        print(f"[{time.monotonic() - self._start:7.1f}s] {text}", flush=True)

    def head(self, text: str) -> None:
        """The title of a part."""
        print(f"\n{self._paint(_BOLD, text)}", flush=True)

    def plain(self, text: str = "") -> None:
        """A line, or a block of them, as it is."""
        print(text, flush=True)

    def claim(self, text: str, true: bool) -> bool:
        """State something that was checked; a false one makes the whole run fail. Returns ``true``."""
        self.checked += 1
        if not true:
            self.failed.append(text)
        mark = self._paint(_GREEN, "  ok    ") if true else self._paint(_RED, "  FALSE ")
        print(f"{mark}{text}", flush=True)
        return true

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as what is in them."""
        lines = [list(head), *(list(row) for row in rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        for number, line in enumerate(lines):
            text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            print(f"  {self._paint(_BOLD, text) if number == 0 else text}", flush=True)

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._colour else text
