"""Patch ``exact-drain``: the queue of saves is empty when all of them have ended, and not before or never.

vLLM 0.22 ends the handling of a save early where there is nothing to put, and where the look at the store fails,
without telling the queue: from then on it counts a save that no one will ever end, and whoever waits for it waits in
vain. Here each save that was handled counts as done once, however that ended.
"""

from __future__ import annotations

import queue
from typing import Any

from moontide_engine.patches import Patch, replace
from moontide_engine.patches.probe import STORE

_HANDLE = f"{STORE}.worker:KVCacheStoreSendingThread._handle_request"


class _Handled(queue.Queue[Any]):
    """A queue that is told by :meth:`handled` alone."""

    def task_done(self) -> None:
        """What some of the paths say, and others forget."""

    def handled(self) -> None:
        """One is done."""
        super().task_done()


def _handle(original: Any) -> Any:
    def handle_request(self: Any, request: Any) -> None:
        waiting = self.request_queue
        if type(waiting) is queue.Queue:
            # Locks and contents stay: whoever waits on it now waits on the same.
            waiting.__class__ = _Handled
        try:
            original(self, request)
        finally:
            waiting.handled()

    return handle_request


def _install() -> None:
    replace(_HANDLE, _handle)


PATCH = Patch(
    name="exact-drain",
    summary="a save that ends early counts as done",
    references=(_HANDLE, f"{STORE}.worker:KVTransferThread.run"),
    install=_install,
    upstream=("0.23.0", "0.24.0", "0.27.1", "0.32.0", "0.33.0"),
)
