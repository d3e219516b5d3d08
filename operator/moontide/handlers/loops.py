"""One loop a resource: level-triggered, woken by what is observed, never started twice.

kopf's daemons would do the same, but they write a finalizer on every resource, and a resource with a finalizer cannot
be deleted while no operator runs. Children are garbage-collected, so no finalizer is needed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from moontide.errors import InvalidSpec, Retry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Key:
    """A custom resource."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"


@dataclass
class _Loop:
    task: asyncio.Task[None]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    retiring: bool = False
    failures: int = 0
    running_since: float | None = None
    woken_since: float | None = None
    """When it was first woken, since its last run began."""
    due: float = field(kw_only=True)


Reconcile = Callable[[Key], Awaitable[float]]


class Loops:
    """Runs ``reconcile`` for each key: when woken, and again at the latest after the seconds that it returned.

    A run of a key never overlaps another of the same key; keys run side by side. A failure is retried after an
    exponential, jittered delay that a wake-up does not cut short below ``base`` seconds: something outside that changes
    all the time must not make a failing reconcile spin.
    """

    def __init__(
        self,
        reconcile: Reconcile,
        *,
        resync: float = 60.0,
        gap: float = 0.05,
        base: float = 0.5,
        limit: float = 60.0,
        stuck: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``gap``: seconds in which wake-ups are taken together; ``base`` and ``limit``: the shortest and longest
        delay after a failure; ``stuck``: seconds after which a run counts as hung."""
        self._reconcile = reconcile
        self._resync = resync
        self._gap = gap
        self._base = base
        self._limit = limit
        self._stuck = stuck
        self._clock = clock
        self._loops: dict[Key, _Loop] = {}
        self._stopping = False

    def __len__(self) -> int:
        return len(self._loops)

    def keys(self) -> list[Key]:
        """The keys that have a loop."""
        return sorted(self._loops)

    def start(self, key: Key) -> None:
        """The resource exists and something about it may have changed: start its loop, or wake it.

        Does nothing once :meth:`stop` was called.
        """
        if self._stopping:
            return
        loop = self._loops.get(key)
        if loop is None:
            wake = asyncio.Event()
            wake.set()
            now = self._clock()
            self._loops[key] = _Loop(task=self._spawn(key), wake=wake, woken_since=now, due=now)
        else:
            loop.retiring = False
            self._wake(loop)

    def wake(self, key: Key) -> None:
        """Something that the resource depends on changed. Does nothing for a key without a loop."""
        loop = self._loops.get(key)
        if loop is not None:
            self._wake(loop)

    def retire(self, key: Key) -> None:
        """The resource is gone: the loop runs once more and ends, unless :meth:`start` comes before that."""
        loop = self._loops.get(key)
        if loop is not None:
            loop.retiring = True
            self._wake(loop)

    def queue_age(self) -> float:
        """Seconds for which the key that waits longest has been woken and not looked at since."""
        now = self._clock()
        return max(
            (now - loop.woken_since for loop in self._loops.values() if loop.woken_since is not None), default=0.0
        )

    def running_age(self) -> float:
        """Seconds that the longest run at work has taken so far."""
        now = self._clock()
        return max(
            (now - loop.running_since for loop in self._loops.values() if loop.running_since is not None), default=0.0
        )

    def stuck(self) -> list[tuple[Key, float]]:
        """Keys whose loop has ended by itself or hangs, with the seconds since it should have moved on."""
        now = self._clock()
        found = []
        for key, loop in sorted(self._loops.items()):
            if loop.running_since is not None:
                if now - loop.running_since > self._stuck:
                    found.append((key, now - loop.running_since))
            elif loop.task.done() or now - loop.due > self._stuck:
                found.append((key, now - loop.due))
        return found

    async def stop(self) -> None:
        """Cancel every loop and wait for its end."""
        self._stopping = True
        tasks = [loop.task for loop in self._loops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loops.clear()

    def _wake(self, loop: _Loop) -> None:
        if loop.woken_since is None:
            loop.woken_since = self._clock()
        loop.wake.set()

    def _spawn(self, key: Key) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(key), name=f"reconcile {key}")
        task.add_done_callback(lambda ended: self._ended(key, ended))
        return task

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        """Begin a loop again that ended by itself: a cancellation may leak out of a reconcile.

        Later, not at once: kopf, too, cancels every task when it stops, and waits until they have ended.
        """
        loop = self._loops.get(key)
        if self._stopping or loop is None or loop.task is not task:
            return
        logger.error("the loop ended by itself, again in %.1f s", self._base, extra={"resource": str(key)})
        task.get_loop().call_later(self._base, self._revive, key, loop)

    def _revive(self, key: Key, loop: _Loop) -> None:
        if not self._stopping and self._loops.get(key) is loop and loop.task.done():
            loop.task = self._spawn(key)

    async def _run(self, key: Key) -> None:
        loop = self._loops[key]
        while True:
            loop.wake.clear()
            loop.woken_since = None
            retiring = loop.retiring
            delay, floor = await self._once(key, loop)
            if retiring and loop.retiring and loop.failures == 0 and not loop.wake.is_set():
                del self._loops[key]
                return
            loop.due = self._clock() + delay
            await self._wait(loop, delay, floor)

    async def _once(self, key: Key, loop: _Loop) -> tuple[float, float]:
        """One run. Returns the longest and the shortest time to wait before the next, in seconds."""
        loop.running_since = self._clock()
        try:
            wanted = await self._reconcile(key)
        except Retry as error:
            loop.failures += 1
            delay = error.after * random.uniform(1.0, 1.2)
            logger.info("retry in %.1f s: %s", delay, error.reason, extra={"resource": str(key)})
            return delay, min(delay, self._base)
        except InvalidSpec as error:
            # A reconcile turns this into a condition itself; where it cannot, only a new spec helps.
            loop.failures = 0
            logger.warning("%s: %s", error.reason, error.message, extra={"resource": str(key)})
            return self._resync, self._base
        except Exception:
            loop.failures += 1
            delay = self._backoff(loop.failures)
            logger.exception("reconcile failed, again in %.1f s", delay, extra={"resource": str(key)})
            return delay, min(delay, self._backoff(1))
        finally:
            loop.running_since = None
        loop.failures = 0
        return max(0.0, min(wanted, self._resync)), 0.0

    def _backoff(self, failures: int) -> float:
        ceiling = min(self._limit, self._base * 2.0 ** min(failures, 16))
        return random.uniform(ceiling / 2, ceiling)

    async def _wait(self, loop: _Loop, delay: float, floor: float) -> None:
        started = self._clock()
        try:
            async with asyncio.timeout(delay):
                await loop.wake.wait()
        except TimeoutError:
            return
        # Changes come in bursts: one look serves them all.
        await asyncio.sleep(max(self._gap, floor - (self._clock() - started)))
