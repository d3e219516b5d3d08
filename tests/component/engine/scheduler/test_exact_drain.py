"""Patch exact-drain: the real sending thread of the store, with a store that is not there.

What a save looks at first differs from 0.27 on; there real engines drain (test_engine.py, test_ranks.py).
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import corekit as kit
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as store_worker

from moontide_engine.patches import exact_drain

NEVER = kit.off("the queue counts saves that have ended", patch=exact_drain.PATCH)


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(exact_drain.PATCH, on=request.param):
        yield request.param


class Coordinator:
    """What a save asks first: there is nothing to save, and the second time it fails."""

    lcm_block_size = kit.BLOCK

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked = 0

    def store_mask(self, *_: Any, **__: Any) -> list[Any]:
        self.asked += 1
        self.go_on.wait(10)
        if self.asked == 2:
            raise OSError("the store is gone")
        return []


ALIKE = "request_queue" not in inspect.signature(store_worker.KVTransferThread.__init__).parameters


def sending(coordinator: Coordinator) -> Any:
    """A started thread of the release under test."""
    thread = store_worker.KVCacheStoreSendingThread(
        None, coordinator, [], kit.BLOCK, 0, 1, "kv_both", threading.Event()
    )
    thread.start()
    return thread


if ALIKE:

    @pytest.mark.parametrize("patched", [NEVER, kit.ON], indirect=True)
    def test_the_queue_is_empty_when_all_saves_have_ended(patched: bool) -> None:
        coordinator = Coordinator()
        thread = sending(coordinator)
        waiting: queue.Queue[Any] = thread.request_queue
        for name in ("nothing to save", "fails", "nothing again"):
            thread.add_stored_request(name)
            more = {"token_len_chunk": 16, "block_ids": (), "current_event": None, "block_hashes": []}
            thread.add_request(SimpleNamespace(req_id=name, num_prompt_tokens=16, **more))
        assert waiting.unfinished_tasks == 3
        coordinator.go_on.set()
        limit = time.monotonic() + 5
        while (waiting.unfinished_tasks or coordinator.asked < 3) and time.monotonic() < limit:
            time.sleep(0.001)
        assert waiting.unfinished_tasks == 0
        assert coordinator.asked == 3
        assert thread.is_alive()
