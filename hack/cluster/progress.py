"""Lines for people: what is happening, and how long it has taken."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Prints one line a step to standard error, each with the seconds since this object was made."""

    def __init__(self, quiet: bool = False) -> None:
        self._start = time.monotonic()
        self._quiet = quiet

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def say(self, message: str) -> None:
        """Print one line, unless quiet."""
        if not self._quiet:
            print(f"[{self.seconds:7.1f}s] {message}", file=sys.stderr, flush=True)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announce the end of a step together with its own duration; a step that raises is announced as failed."""
        began = time.monotonic()
        try:
            yield
        except BaseException:
            self.say(f"{name}: failed after {time.monotonic() - began:.1f} s")
            raise
        self.say(f"{name}: {time.monotonic() - began:.1f} s")
