"""Times at which a thread of this machine got no processor, so that a timeout in a test can be told from a fault.

The host of a virtual machine can take a processor away for seconds, and a kernel whose processors are all busy can let
a thread wait as long. To a test that looks like a process that hangs. A thread that is pinned to each processor sleeps
for a moment, again and again, and notes when it woke far too late.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_SLEEP_SECONDS = 0.2
# Behind some busy processes a thread waits for tenths of a second.
_LATE_SECONDS = 3.0
_NAMED = 5


@dataclass(frozen=True)
class Standstill:
    """One processor's. ``at`` is Unix time of its end."""

    processor: int
    at: float
    seconds: float


class Watch:
    """Threads that look. ``late`` is the seconds from which a late wake-up counts; the other two are for tests."""

    def __init__(
        self,
        late: float = _LATE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._late = late
        self._clock = clock
        self._over = threading.Event()
        self._sleep = sleep or self._over.wait
        self._lock = threading.Lock()
        self._found: list[Standstill] = []

    @contextlib.contextmanager
    def on(self, processors: Sequence[int]) -> Iterator[None]:
        """Look at them until the block ends."""
        threads = [threading.Thread(target=self._pinned, args=(each,), daemon=True) for each in processors]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(_LATE_SECONDS)

    def _pinned(self, processor: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), {processor})
        while not self._over.is_set():
            self.look(processor)

    def look(self, processor: int) -> None:
        """Sleep once, and note it if that took too long."""
        began = self._clock()
        self._sleep(_SLEEP_SECONDS)
        late = self._clock() - began - _SLEEP_SECONDS
        if late >= self._late:
            with self._lock:
                self._found.append(Standstill(processor, time.time(), late))

    @property
    def found(self) -> list[Standstill]:
        """Those so far, oldest first."""
        with self._lock:
            return list(self._found)


def in_words(found: Sequence[Standstill]) -> str:
    """For people: the longest ones, at the time of day (UTC) at which they ended. Empty when there was none."""
    if not found:
        return ""
    longest = sorted(sorted(found, key=lambda each: -each.seconds)[:_NAMED], key=lambda each: each.at)
    times = [
        f"processor {each.processor} for {each.seconds:.1f} s until {time.strftime('%H:%M:%S', time.gmtime(each.at))}"
        for each in longest
    ]
    more = f", and {len(found) - len(times)} shorter ones" if len(found) > len(times) else ""
    return (
        f"a thread of this machine got no time: {', '.join(times)}{more}; a timeout meanwhile is no fault of the code"
    )
