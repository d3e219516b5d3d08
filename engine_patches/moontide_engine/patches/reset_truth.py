"""Patch ``reset-truth``: a reset of the store through vLLM's own route says what happened, and ends.

Stock vLLM drops the store's return code (success with a dead master), waits for the worker without bound, wipes the
store although the local reset was refused, and wipes all that is on the master.
"""

from __future__ import annotations

import concurrent.futures
import importlib
from typing import Any

from moontide_engine import settings as settings_module
from moontide_engine.namespace import pattern
from moontide_engine.patches import Patch, replace
from moontide_engine.patches.probe import CORE, SCHEDULER, STORE


class StoreResetFailed(RuntimeError):
    """The store did not do what it was told; the message has its code."""


def truthful(base: Any, namespace: str) -> Any:
    """Subclass of the store client whose ``remove_all`` keeps to the namespace and raises on a negative code."""

    class TruthfulStore(base):  # type: ignore[misc]
        __moontide__ = True

        def remove_all(self, force: bool = False) -> int:
            """Remove the keys of this deployment. Raises StoreResetFailed."""
            scoped = bool(namespace)
            code: int = super().remove_by_regex(pattern(namespace), force) if scoped else super().remove_all(force)
            if code < 0:
                raise StoreResetFailed(f"the store answered {code} to the removal of {namespace or 'all keys'}")
            return code

    TruthfulStore.__name__ = TruthfulStore.__qualname__ = base.__name__
    return TruthfulStore


def _worker_init(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        store: Any = importlib.import_module("mooncake.store")
        if not getattr(store.MooncakeDistributedStore, "__moontide__", False):
            namespace = settings_module.load().key_namespace
            store.MooncakeDistributedStore = truthful(store.MooncakeDistributedStore, namespace)
        original(self, *args, **kwargs)

    return init


def _client_init(original: Any) -> Any:
    def init(self: Any, vllm_config: Any) -> None:
        original(self, vllm_config)
        module = importlib.import_module(f"{STORE}.worker")
        self.moontide_path = module.get_zmq_rpc_path_lookup(vllm_config)
        self.moontide_timeout = settings_module.load().store_timeout

    return init


def _client_reset_inner(original: Any) -> Any:
    def _reset(self: Any) -> bool:
        module = importlib.import_module(f"{STORE}.worker")
        protocol = importlib.import_module(f"{STORE}.protocol")
        self.socket.send(protocol.RESET_MSG)
        if not self.socket.poll(round(self.moontide_timeout * 1000)):
            # A request socket that missed its answer can never be used again.
            self.socket.close(linger=0)
            self.socket = module.make_zmq_socket(self.ctx, self.moontide_path, module.zmq.REQ, bind=False)
            raise StoreResetFailed(f"the worker did not answer within {self.moontide_timeout:g} s")
        ok: bytes = protocol.RESP_OK
        return bytes(self.socket.recv()) == ok

    return _reset


def _client_reset(original: Any) -> Any:
    def reset(self: Any) -> bool:
        # The one thread may be busy with a lookup that hangs, so this wait needs its own bound.
        future = self.executor.submit(self._reset)
        try:
            return bool(future.result(self.moontide_timeout + 1.0))
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise StoreResetFailed("the lookup channel is busy") from None

    return reset


def _core_reset(original: Any) -> Any:
    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        # The local part first and alone: blocks that are still held mean that something runs or that a rank still puts,
        # and then the store would be filled again behind the wipe.
        if not self.scheduler.reset_prefix_cache(reset_running_requests, False):
            return False
        if not reset_connector:
            return True
        reset: object = self.scheduler.reset_connector_cache()
        return reset is True

    return reset_prefix_cache


def _install() -> None:
    replace(f"{STORE}.worker:MooncakeStoreWorker.__init__", _worker_init)
    replace(f"{STORE}.worker:LookupKeyClient.__init__", _client_init)
    replace(f"{STORE}.worker:LookupKeyClient._reset", _client_reset_inner)
    replace(f"{STORE}.worker:LookupKeyClient.reset", _client_reset)
    replace(f"{CORE}.reset_prefix_cache", _core_reset)


PATCH = Patch(
    name="reset-truth",
    summary="store resets are scoped, bounded and honest",
    references=(
        f"{STORE}.worker:MooncakeStoreWorker.__init__",
        f"{STORE}.worker:LookupKeyServer.__init__",
        f"{STORE}.worker:LookupKeyClient.__init__",
        f"{STORE}.worker:LookupKeyClient._lookup",
        f"{STORE}.worker:LookupKeyClient._reset",
        f"{STORE}.worker:LookupKeyClient.reset",
        f"{STORE}.worker:get_zmq_rpc_path_lookup",
        f"{STORE}.scheduler:MooncakeStoreScheduler.reset_store",
        f"{STORE}.connector:MooncakeStoreConnector.reset_cache",
        f"{STORE}.data:PoolKey.to_string",
        f"{CORE}.reset_prefix_cache",
        f"{CORE}._reset_caches",
        f"{SCHEDULER}.reset_prefix_cache",
        f"{SCHEDULER}.reset_connector_cache",
    ),
    install=_install,
)
