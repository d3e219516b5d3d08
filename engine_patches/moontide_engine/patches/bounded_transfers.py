"""Patch ``bounded-transfers``: a load or save whose other end is frozen or gone ends, and writes nothing afterwards.

Stock waits 60 s for it. Then the blocks are computed, or given to others, and written to when the other end is back.
"""

from __future__ import annotations

import importlib
from typing import Any

from moontide_engine import settings, transfers
from moontide_engine.patches import Patch, replace
from moontide_engine.patches.probe import STORE


def _worker_init(original: Any) -> Any:
    """``MooncakeStoreWorker.__init__`` with the bounded client; vLLM imports the client's class inside it."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        store: Any = importlib.import_module("mooncake.store")
        if not getattr(store.MooncakeDistributedStore, "__moontide_bounded__", False):
            platform: Any = importlib.import_module("vllm.platforms").current_platform
            seconds = settings.load().load_timeout
            store.MooncakeDistributedStore = transfers.bounded(
                store.MooncakeDistributedStore, seconds, staged=platform.is_cpu()
            )
        original(self, *args, **kwargs)

    return init


def _install() -> None:
    transfers.prepare()
    replace(f"{STORE}.worker:MooncakeStoreWorker.__init__", _worker_init)


PATCH = Patch(
    name="bounded-transfers",
    summary="a load or save whose other end is frozen or gone ends in seconds, and writes nothing afterwards",
    references=(
        f"{STORE}.worker:MooncakeStoreWorker.__init__",
        f"{STORE}.worker:KVCacheStoreRecvingThread._handle_request",
        f"{STORE}.worker:KVCacheStoreSendingThread._handle_request",
    ),
    install=_install,
    optional=True,
)
