"""A vLLM plugin that only tests load: it holds back what one tensor-parallel rank saves to, or loads from, the store.

A file (``FILE`` in the environment) says what: a JSON object with ``rank`` and ``hold``, which is ``save`` or ``load``.
A transfer that has begun to wait goes on when the file is gone. Late is what a test says, so no test has to guess how
long a busy machine takes.

As long as a save is pending and nothing is computed, vLLM takes an empty step a millisecond, on every rank. Of two
cores that leaves nothing to those who look on, so while the file is there such a step lasts twenty.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

FILE = "TEST_LATE_SAVES_FILE"


class LateStore:
    """The store's client as one rank's transfer thread has it."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_put_from_multi_buffers(self, *args: Any, **kwargs: Any) -> Any:
        self._wait("save")
        return self._store.batch_put_from_multi_buffers(*args, **kwargs)

    def batch_get_into_multi_buffers(self, *args: Any, **kwargs: Any) -> Any:
        self._wait("load")
        return self._store.batch_get_into_multi_buffers(*args, **kwargs)

    def _wait(self, what: str) -> None:
        while self._held(what):
            time.sleep(0.02)

    def _held(self, what: str) -> bool:
        try:
            told = json.loads(Path(os.environ[FILE]).read_text())
        except FileNotFoundError:
            return False
        return bool(told == {"rank": self._rank, "hold": what})


def register() -> None:
    """Entry point; vLLM may call it several times."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker

    original = worker.KVTransferThread.__init__
    if getattr(original, "__late__", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.store = LateStore(self.store, self.tp_rank)

    init.__late__ = True  # type: ignore[attr-defined]
    worker.KVTransferThread.__init__ = init

    from vllm.v1.engine.core import EngineCoreProc

    take_step = EngineCoreProc._process_engine_step

    @functools.wraps(take_step)
    def step(self: Any) -> bool:
        executed: bool = take_step(self)
        if not executed and Path(os.environ[FILE]).exists():
            time.sleep(0.02)
        return executed

    EngineCoreProc._process_engine_step = step
