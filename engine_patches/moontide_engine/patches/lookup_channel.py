"""The scheduler's end of the Mooncake connector's lookup channel, in one shape on all releases: that of 0.24.

Until 0.23 the client is one blocking call. Since 0.24 it asks in a thread of its own, keeps what is in flight by
request, and can forget it. ``lookup-economy`` and ``reset-truth`` are written for that, and both call :func:`shape`
first. On a release without a reset at all ``store-reset`` comes before them.
"""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moontide_engine.patches import replace
from moontide_engine.patches.probe import STORE

LOOKUP_MSG = b"lookup"
RESET_MSG = b"reset"
RESP_OK = b"\x01"
RESP_ERR = b"\x00"

CLIENT = f"{STORE}.worker:LookupKeyClient"
HALF = f"{STORE}.scheduler:MooncakeStoreScheduler"


def protocol() -> Any:
    """Module with the channel's constants: vLLM's, or this one where it has none."""
    try:
        return importlib.import_module(f"{STORE}.protocol")
    except ModuleNotFoundError:
        return sys.modules[__name__]


def hits(result: Any) -> int:
    """Tokens that a lookup found; old releases answer the number itself."""
    return int(getattr(result, "hit_length", result))


def nothing() -> Any:
    """What a lookup answers that found nothing."""
    data: Any = importlib.import_module(f"{STORE}.data")
    return getattr(data, "MooncakeLookupResult", int)(0)


def shape() -> None:
    """Give the client its thread, where vLLM does not. A second call does nothing."""
    client: Any = importlib.import_module(f"{STORE}.worker").LookupKeyClient
    if hasattr(client, "_lookup"):
        return
    client._lookup, client._reset = client.lookup, client.reset
    client.lookup, client.reset, client.discard = _lookup, _reset, _discard
    replace(f"{CLIENT}.__init__", _init)
    replace(f"{CLIENT}.close", _close)
    replace(f"{HALF}.get_num_new_matched_tokens", _match)
    replace(f"{HALF}.build_connector_meta", _build)


def _init(original: Any) -> Any:
    def init(self: Any, vllm_config: Any) -> None:
        original(self, vllm_config)
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moontide-lookup")
        self.futures = {}
        self.moontide_asking = _Asking(self)

    return init


def _close(original: Any) -> Any:
    def close(self: Any) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        original(self)

    return close


def _lookup(self: Any, req_id: str, num_tokens: int, block_hashes: Any, non_block: bool = False) -> Any:
    future: Future[Any] | None = self.futures.get(req_id)
    if future is None:
        future = self.futures[req_id] = self.executor.submit(self._lookup, num_tokens, list(block_hashes))
    if non_block and not future.done():
        return None
    self.futures.pop(req_id)
    return future.result()


def _reset(self: Any) -> bool:
    return bool(self.executor.submit(self._reset).result())


def _discard(self: Any, req_id: str) -> None:
    future = self.futures.pop(req_id, None)
    if future is not None:
        future.cancel()


class _Asking:
    """The client as the scheduler half's own method sees it: it asks in the name of one request."""

    __slots__ = ("_client", "request")

    def __init__(self, client: Any) -> None:
        self._client = client
        self.request = ""

    def lookup(self, num_tokens: int, block_hashes: Any) -> int:
        """Tokens found. The number itself: these releases know nothing else."""
        found: int = self._client.lookup(self.request, num_tokens, block_hashes)
        return found


def _match(original: Any) -> Any:
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        client = self.client
        self.client = client.moontide_asking
        self.client.request = request.request_id
        try:
            return original(self, request, num_computed_tokens)
        finally:
            self.client = client

    return get_num_new_matched_tokens


def _build(original: Any) -> Any:
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        futures = self.client.futures
        for request in scheduler_output.finished_req_ids if futures else ():
            if request in futures:
                self.client.discard(request)
        return original(self, scheduler_output)

    return build_connector_meta
