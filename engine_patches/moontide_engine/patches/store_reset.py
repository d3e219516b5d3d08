"""Patch ``store-reset``: the Mooncake store connector can be reset at all, as upstream's can since 0.23.

Until 0.22 ``reset_prefix_cache(reset_connector=True)`` asks a connector that has nothing to do: success, and the blocks
of before still hit. A pause or a sleep leaves the external cache alone, and without a connector the reset fails.

What a reset promises beyond that (its scope, its bounds, what it says) is up to ``reset-truth``.
"""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any

from moontide_engine import settings as settings_module
from moontide_engine.patches import Patch, replace
from moontide_engine.patches import lookup_channel as channel
from moontide_engine.patches.probe import CORE, SCHEDULER, STORE

CONNECTOR = f"{STORE}.connector:MooncakeStoreConnector"

_LOG = logging.getLogger("moontide")
_TOKEN_BYTES = 4
_SIZE_BYTES = 2


class StoreNotReset(RuntimeError):
    """The store may still hold blocks; the message says why."""


# -- the worker's end ----------------------------------------------------------------------------------------------


def _server_init(original: Any) -> Any:
    def init(self: Any, store_worker: Any, vllm_config: Any) -> None:
        module: Any = importlib.import_module(f"{STORE}.worker")
        path = module.get_zmq_rpc_path_lookup(vllm_config)
        self._ipc_path = path.removeprefix("ipc://")
        if module.os.path.exists(self._ipc_path):
            module.os.unlink(self._ipc_path)
        self.ctx = module.zmq.Context()
        self.socket = module.make_zmq_socket(self.ctx, path, module.zmq.REP, bind=True)
        self.store_worker = store_worker
        self.running = True
        self.thread = threading.Thread(target=_serve, args=(self, module.zmq.ZMQError), daemon=True)
        self.thread.start()

    return init


def _serve(server: Any, gone: type[Exception]) -> None:
    """Answer every message, whatever it is: a client that gets no answer waits for ever."""
    while server.running:
        try:
            frames = server.socket.recv_multipart()
            answer = _answer(server.store_worker, frames)
            # Looked up only now: ``reset-truth`` puts a socket of its own in the place of the first one.
            server.socket.send(answer)
        except gone:
            return


def _answer(worker: Any, frames: list[bytes]) -> bytes:
    try:
        if frames[0] == channel.RESET_MSG:
            _wipe(worker)
            return channel.RESP_OK
        if frames[0] == channel.LOOKUP_MSG:
            tokens, size, text = frames[1:]
            step = int.from_bytes(size, "big")
            hashes = [text[start : start + step] for start in range(0, len(text), step)] if step else []
            found: int = worker.lookup(int.from_bytes(tokens, "big"), hashes)
            return found.to_bytes(_TOKEN_BYTES, "big")
        _LOG.warning("the lookup channel got a message of an unknown kind: %r", frames[0][:32])
    except Exception as error:
        _LOG.error("the lookup channel could not carry out %r: %s: %s", frames[0], type(error).__name__, error)
    # Of a lookup that is no token.
    return channel.RESP_ERR


def _wipe(worker: Any) -> None:
    """Empty the store once all saves of this rank are done. Raises StoreNotReset."""
    sender = worker.kv_send_thread
    if sender is not None:
        saves, seconds = sender.request_queue, settings_module.load().store_timeout
        with saves.all_tasks_done:
            if not saves.all_tasks_done.wait_for(lambda: not saves.unfinished_tasks, seconds):
                raise StoreNotReset(f"saves had not ended after {seconds:g} s")
    code = worker.store.remove_all(force=True)
    if code < 0:
        raise StoreNotReset(f"the store answered {code}")


# -- the scheduler's end -------------------------------------------------------------------------------------------


def _client_lookup(original: Any) -> Any:
    def lookup(self: Any, token_len: int, block_hashes: Any) -> int:
        size = len(block_hashes[0]) if block_hashes else 0
        numbers = token_len.to_bytes(_TOKEN_BYTES, "big"), size.to_bytes(_SIZE_BYTES, "big")
        self.socket.send_multipart((channel.LOOKUP_MSG, *numbers, b"".join(block_hashes)))
        return int.from_bytes(self.socket.recv(), "big")

    return lookup


def reset(self: Any) -> bool:
    """``LookupKeyClient.reset``: whether rank 0 has emptied the store."""
    self.socket.send(channel.RESET_MSG)
    return bool(self.socket.recv() == channel.RESP_OK)


def reset_store(self: Any) -> bool:
    """``MooncakeStoreScheduler.reset_store``: whether the store was emptied. Never raises."""
    try:
        return bool(self.client.reset())
    except Exception as error:
        _LOG.error("the store was not reset: %s: %s", type(error).__name__, error)
        return False


def reset_cache(self: Any) -> bool | None:
    """``MooncakeStoreConnector.reset_cache``: whether the store was emptied; None in a worker, which has no part."""
    half = self.connector_scheduler
    if half is None:
        return None
    # They promise what goes away.
    half.load_specs.clear()
    self._kv_cache_events = None
    return bool(half.reset_store())


def _reset_connector(original: Any) -> Any:
    def reset_connector_cache(self: Any) -> bool:
        if self.connector is None:
            _LOG.debug("a reset of the external cache was asked for, and there is no connector: nothing to do")
            return True
        return bool(original(self))

    return reset_connector_cache


def _reset_caches(original: Any) -> Any:
    def reset_caches(self: Any, reset_running_requests: bool = True, reset_connector: bool = True) -> None:
        self.reset_prefix_cache(reset_running_requests, reset_connector)
        self.reset_mm_cache()
        self.reset_encoder_cache()

    return reset_caches


def _install() -> None:
    worker, half, connector = (
        importlib.import_module(f"{STORE}.{name}") for name in ("worker", "scheduler", "connector")
    )
    replace(f"{STORE}.worker:LookupKeyServer.__init__", _server_init)
    replace(f"{channel.CLIENT}.lookup", _client_lookup)
    for owner, function in (
        (worker.LookupKeyClient, reset),
        (half.MooncakeStoreScheduler, reset_store),
        (connector.MooncakeStoreConnector, reset_cache),
    ):
        setattr(owner, function.__name__, function)
    replace(f"{SCHEDULER}.reset_connector_cache", _reset_connector)
    replace(f"{CORE}._reset_caches", _reset_caches)


PATCH = Patch(
    name="store-reset",
    summary="the Mooncake store connector resets its store, on request and when the engine pauses or sleeps",
    references=(
        f"{STORE}.worker:LookupKeyServer.__init__",
        f"{STORE}.worker:LookupKeyServer.close",
        f"{channel.CLIENT}.__init__",
        f"{channel.CLIENT}.lookup",
        f"{channel.CLIENT}.reset",
        f"{STORE}.worker:get_zmq_rpc_path_lookup",
        f"{STORE}.worker:MooncakeStoreWorker.lookup",
        f"{STORE}.worker:KVTransferThread.run",
        f"{channel.HALF}.reset_store",
        f"{channel.HALF}.get_num_new_matched_tokens",
        f"{CONNECTOR}.reset_cache",
        f"{CONNECTOR}.__init__",
        f"{SCHEDULER}.reset_prefix_cache",
        f"{SCHEDULER}.reset_connector_cache",
        f"{CORE}.reset_prefix_cache",
        f"{CORE}._reset_caches",
        "vllm.utils.network_utils:make_zmq_socket",
    ),
    install=_install,
    upstream=("0.23.0", "0.24.0", "0.27.1", "0.32.0", "0.33.0"),
)
