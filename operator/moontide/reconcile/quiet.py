"""While engines are told something, what can wait does: a pause is as long as its calls take on the one core they have.

A look at a fleet of a thousand asks a thousand engines. The first write of a change wakes that look, and it would run
between the calls of the pause. So would Python's search for cycles among the hundred thousand objects of those calls.
"""

from __future__ import annotations

import asyncio
import gc

WAIT_SECONDS = 2.0
"""The longest that anything waits: a replica that hangs keeps nobody from looking."""


class Quiet:
    """Counts who tells engines something, and lets others wait for them."""

    def __init__(self, *, collects: bool = True) -> None:
        """``collects``: whether Python may look for cycles meanwhile. Where not, it is for one of the process."""
        self._collects = collects
        self._telling = 0
        self._bound: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()
        self._over.set()

    def begin(self) -> None:
        """Somebody tells engines something from now on."""
        if not (self._telling or self._collects):
            gc.disable()
            self._bound = asyncio.get_running_loop().call_later(WAIT_SECONDS, gc.enable)
        self._telling += 1
        self._over.clear()

    def end(self) -> None:
        """Whoever called :meth:`begin` is done."""
        self._telling -= 1
        if not self._telling:
            self._over.set()
            if self._bound is not None:
                self._bound.cancel()
                self._bound = None
                gc.enable()

    async def wait(self) -> None:
        """Until nobody tells engines anything, and no longer than :data:`WAIT_SECONDS`."""
        if self._over.is_set():
            return
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._over.wait()
        except TimeoutError:
            pass
