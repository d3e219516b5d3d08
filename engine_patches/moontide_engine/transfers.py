"""Loads and saves that end: what the Mooncake client does to a peer that is frozen or out of reach.

Measured on Mooncake 0.3.13 (TCP): a transfer from or to such a peer takes 60 s. Then the client gives up *waiting*: the
transfer itself stays under way, and when the peer is back the data arrive, in blocks that belong to another request by
then. So loads go through memory of our own, and reach the blocks once they are known to have ended; memory that a lost
transfer may still write to is set aside. A load's end is bounded by us, a save's by the client's own time limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moontide_engine.jsonlog import log

TRANSFER_FAIL = -800
"""The store's code of a transfer that failed; also ours for one that was given up or not tried."""
CHUNK_KEYS = 32
"""Keys of one call. With :data:`CLIENT_ENV` it ends within twice the client's time limit, or three times it."""
CHUNK_BYTES = 16 << 20
MAX_SLOTS = 8
SET_ASIDE_SECONDS = 600.0
"""A lost transfer's memory after the client has given up: longer than the kernel tries to connect, which is 127 s."""
CLIENT_ENV = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "3", "MC_TCP_STATUS_TIMEOUT_SEC": "3", "MC_TCP_LANES_PER_PEER": "16"}

Codes = list[int]
Buffers = Sequence[Sequence[int]]
Get = Callable[[Sequence[str], Buffers, Buffers], Codes]

_memcpy: Any = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


def default_environment(env: MutableMapping[str, str]) -> None:
    """Shorten the client's own time limits, where nobody has set them. Before its first transfer."""
    for name, value in CLIENT_ENV.items():
        env.setdefault(name, value)


@dataclass(eq=False)
class _Job:
    """One call on the client, in a thread that is not the caller's: nobody can interrupt it."""

    get: Get
    keys: Sequence[str]
    staged: Buffers
    sizes: Buffers
    answer: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    """Gets one item as the call ends, if somebody still waits for it."""
    ended: bool = False
    codes: Codes | None = None
    error: BaseException | None = None
    lost: bool = False


@dataclass(eq=False)
class Slot:
    """Memory that loads land in, and what is to be loaded there: a thread of its own takes that, one after another."""

    memory: mmap.mmap
    address: int
    busy: bool = False
    free_at: float = 0.0
    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)


def _serve(slot: Slot, lock: threading.Lock) -> None:
    """Do what is put into a slot's queue until None is. Between jobs it keeps no client alive."""
    while (job := slot.jobs.get()) is not None:
        try:
            job.codes = list(job.get(job.keys, job.staged, job.sizes))
        except BaseException as error:
            job.error = error
        with lock:
            job.ended = True
            if job.lost:
                slot.free_at = time.monotonic() + SET_ASIDE_SECONDS
                slot.busy = False
            else:
                job.answer.put(None)
        del job


def _end(slots: list[Slot]) -> None:
    for slot in slots:
        slot.jobs.put(None)


class StagedLoads:
    """Loads of several threads within ``seconds`` each, through at most ``MAX_SLOTS`` slots."""

    def __init__(self, get: Get, seconds: float) -> None:
        self._get = get
        self._seconds = seconds
        self._slots: list[Slot] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._slots)

    @property
    def lost(self) -> int:
        """Slots that a lost transfer may still write to."""
        now = time.monotonic()
        with self._lock:
            return sum(not slot.busy and slot.free_at > now for slot in self._slots)

    def load(self, keys: Sequence[str], addresses: Buffers, sizes: Buffers) -> Codes:
        """The store's code of each key. Once one transfer has failed, the rest is not tried."""
        deadline = time.monotonic() + self._seconds
        codes: Codes = []
        for part in chunks(sizes):
            if TRANSFER_FAIL in codes or time.monotonic() >= deadline:
                break
            codes += self._chunk(keys[part], addresses[part], sizes[part], deadline)
        return codes + [TRANSFER_FAIL] * (len(keys) - len(codes))

    def _chunk(self, keys: Sequence[str], addresses: Buffers, sizes: Buffers, deadline: float) -> Codes:
        failed = [TRANSFER_FAIL] * len(keys)
        slot = self._take(sum(map(sum, sizes)))
        if slot is None:
            log("load-refused", keys=len(keys), message="too much memory is set aside for lost transfers")
            return failed
        staged, offset = [], slot.address
        for row in sizes:
            here = []
            for size in row:
                here.append(offset)
                offset += size
            staged.append(here)
        job = _Job(self._get, keys, staged, sizes)
        slot.jobs.put(job)
        with contextlib.suppress(queue.Empty):
            job.answer.get(timeout=max(deadline - time.monotonic(), 0.0))
        with self._lock:
            job.lost = not job.ended
        if job.lost:
            log("load-lost", keys=len(keys), first=keys[0], seconds=self._seconds)
            return failed
        try:
            if job.error is not None:
                raise job.error
            assert job.codes is not None
            for code, targets, sources, row in zip(job.codes, addresses, staged, sizes, strict=True):
                if code >= 0:
                    for target, source, size in zip(targets, sources, row, strict=True):
                        _memcpy(target, source, size)
            return job.codes
        finally:
            slot.busy = False

    def _take(self, size: int) -> Slot | None:
        now = time.monotonic()
        with self._lock:
            for slot in self._slots:
                if not slot.busy and slot.free_at <= now and len(slot.memory) >= size:
                    slot.busy = True
                    return slot
            if len(self._slots) >= MAX_SLOTS:
                return None
            memory = mmap.mmap(-1, max(size, CHUNK_BYTES))
            # Not registered with the client: TCP needs that only where others read and write.
            slot = Slot(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), busy=True)
            # Kept for the loads that follow: to start one for each cost more than the rest of a small load.
            threading.Thread(target=_serve, args=(slot, self._lock), daemon=True, name="moontide-load").start()
            self._slots.append(slot)
        return slot


def chunks(sizes: Buffers) -> Iterator[slice]:
    """Parts of at most :data:`CHUNK_KEYS` keys and :data:`CHUNK_BYTES`, of one key at least."""
    start, total = 0, 0
    for index, row in enumerate(sizes):
        size = sum(row)
        if index > start and (index - start >= CHUNK_KEYS or total + size > CHUNK_BYTES):
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def bounded(base: Any, seconds: float, *, staged: bool) -> Any:
    """Subclass of the store client whose loads and saves end.

    ``seconds`` bounds a load. Without ``staged`` (memory of a device) loads go straight to the blocks, as the client
    does them, and only what follows a transfer that failed is not tried any more.
    """

    class BoundedStore(base):  # type: ignore[misc]
        __moontide_bounded__ = True

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.moontide_loads = StagedLoads(super().batch_get_into_multi_buffers, seconds) if staged else None

        def batch_get_into_multi_buffers(self, keys: Sequence[str], addresses: Buffers, sizes: Buffers) -> Codes:
            """Codes of the keys, ``-800`` for what did not arrive in time."""
            if self.moontide_loads is not None:
                return self.moontide_loads.load(keys, addresses, sizes)
            return _until_failure(super().batch_get_into_multi_buffers, keys, addresses, sizes)

        def batch_put_from_multi_buffers(
            self, keys: Sequence[str], addresses: Buffers, sizes: Buffers, *more: Any, **named: Any
        ) -> Codes:
            """Codes of the keys. Never given up by us: the client would read blocks that are someone else's by then."""

            def put(*what: Any) -> Codes:
                return list(super(BoundedStore, self).batch_put_from_multi_buffers(*what, *more, **named))

            if any(getattr(config, "group_ids", None) for config in (*more, *named.values())):
                # They are listed by key, for all keys of the call.
                return put(keys, addresses, sizes)
            return _until_failure(put, keys, addresses, sizes)

    BoundedStore.__name__ = BoundedStore.__qualname__ = base.__name__
    return BoundedStore


def _until_failure(call: Get, keys: Sequence[str], addresses: Buffers, sizes: Buffers) -> Codes:
    codes: Codes = []
    for part in chunks(sizes):
        if TRANSFER_FAIL in codes:
            break
        codes += call(keys[part], addresses[part], sizes[part])
    return codes + [TRANSFER_FAIL] * (len(keys) - len(codes))


def prepare() -> None:
    """Set the client's time limits of this process."""
    default_environment(os.environ)
