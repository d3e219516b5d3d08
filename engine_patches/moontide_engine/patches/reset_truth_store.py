"""The store's half of ``reset-truth``: a client that keeps to the namespace, and a channel to it that has an end."""

from __future__ import annotations

import contextlib
import importlib
import threading
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from moontide_engine import settings as settings_module
from moontide_engine.jsonlog import log
from moontide_engine.namespace import pattern
from moontide_engine.patches import lookup_channel as channel
from moontide_engine.patches.probe import STORE

_COUNT_BYTES = 8
_GRACE = 1.0
"""Seconds that a reset may take beyond the store timeout: it may have to wait for a lookup on the one channel."""


class StoreResetFailed(RuntimeError):
    """The store did not do what it was told; the message has its code."""


class StoreResetTimeout(StoreResetFailed):
    """Nobody answered in time: the store may or may not have been wiped."""


@dataclass(frozen=True)
class Outcome:
    """How one wipe of the store ended. ``removed`` is a number of keys; None: not known."""

    ok: bool
    removed: int | None = None
    reason: str = ""
    message: str = ""


JOBS: ContextVar[list[Future[Outcome]] | None] = ContextVar("moontide_reset_jobs", default=None)
"""Where a wipe that was only started is left for the caller. None: the caller waits for it."""


def truthful(base: Any, namespace: str) -> Any:
    """Subclass of the store client whose ``remove_all`` keeps to the namespace and raises on a negative code."""

    class TruthfulStore(base):  # type: ignore[misc]
        __moontide__ = True
        moontide_outcome: int | str | None = None

        def remove_all(self, force: bool = False) -> int:
            """Remove the keys of this deployment; their number. Raises StoreResetFailed."""
            scoped = bool(namespace)
            try:
                code: int = super().remove_by_regex(pattern(namespace), force) if scoped else super().remove_all(force)
                if code < 0:
                    raise StoreResetFailed(
                        f"the store answered {code} to the removal of {namespace if scoped else 'all keys'}"
                    )
            except Exception as error:
                self.moontide_outcome = f"{error}" or type(error).__name__
                raise
            self.moontide_outcome = code
            return code

    TruthfulStore.__name__ = TruthfulStore.__qualname__ = base.__name__
    return TruthfulStore


def worker_init(original: Any) -> Any:
    """``MooncakeStoreWorker.__init__`` with the truthful client; vLLM imports the client's class inside it."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        store: Any = importlib.import_module("mooncake.store")
        if not getattr(store.MooncakeDistributedStore, "__moontide__", False):
            namespace = settings_module.load().key_namespace
            store.MooncakeDistributedStore = truthful(store.MooncakeDistributedStore, namespace)
        original(self, *args, **kwargs)

    return init


class _Answers:
    """Socket of the lookup server whose answers to a reset also carry the number of keys, or what went wrong.

    The server's loop is a closure that sends one constant byte; it looks its socket up anew for each answer.
    """

    def __init__(self, socket: Any, worker: Any) -> None:
        self._socket = socket
        self._worker = worker
        protocol = channel.protocol()
        self._ok: bytes = protocol.RESP_OK
        self._err: bytes = protocol.RESP_ERR

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        if data in (self._ok, self._err):
            store = self._worker.store
            outcome = getattr(store, "moontide_outcome", None)
            if outcome is not None:
                store.moontide_outcome = None
            if data == self._ok and isinstance(outcome, int):
                data += outcome.to_bytes(_COUNT_BYTES, "big")
            elif data == self._err and isinstance(outcome, str):
                data += outcome.encode()
        return self._socket.send(data, *args, **kwargs)


def server_init(original: Any) -> Any:
    """``LookupKeyServer.__init__`` with answers that say more."""

    def init(self: Any, store_worker: Any, vllm_config: Any) -> None:
        original(self, store_worker, vllm_config)
        self.socket = _Answers(self.socket, store_worker)

    return init


def client_init(original: Any) -> Any:
    """``LookupKeyClient.__init__`` that remembers how to build its socket again."""

    def init(self: Any, vllm_config: Any) -> None:
        original(self, vllm_config)
        module = importlib.import_module(f"{STORE}.worker")
        self.moontide_path = module.get_zmq_rpc_path_lookup(vllm_config)
        self.moontide_timeout = settings_module.load().store_timeout
        self.moontide_removed = None
        self.moontide_pending = None

    return init


def client_reset_inner(original: Any) -> Any:
    """``LookupKeyClient._reset``: one exchange, within the store timeout. Raises StoreResetFailed."""

    def _reset(self: Any) -> bool:
        protocol = channel.protocol()
        self.moontide_removed = None
        try:
            answer = _exchange(self, protocol.RESET_MSG)
        except BaseException:
            # A request socket that missed its answer can never be used again.
            rebuild(self, self.moontide_path)
            raise
        if answer[:1] != protocol.RESP_OK:
            raise StoreResetFailed(answer[1:].decode(errors="replace") or "the worker could not wipe the store")
        if len(answer) == 1 + _COUNT_BYTES:
            self.moontide_removed = int.from_bytes(answer[1:], "big")
        return True

    return _reset


def _exchange(client: Any, message: bytes) -> bytes:
    zmq = importlib.import_module(f"{STORE}.worker").zmq
    client.socket.send(message, zmq.NOBLOCK)
    if not client.socket.poll(round(client.moontide_timeout * 1000)):
        raise StoreResetTimeout(f"the worker did not answer within {client.moontide_timeout:g} s")
    return bytes(client.socket.recv())


def rebuild(client: Any, path: str) -> None:
    """Put a new request socket in the place of one that missed its answer: a late answer ends with the old one.

    A client that was closed meanwhile stays closed.
    """
    if client.socket.closed:
        return
    module = importlib.import_module(f"{STORE}.worker")
    client.socket.close(linger=0)
    client.socket = module.make_zmq_socket(client.ctx, path, module.zmq.REQ, bind=False)


def client_reset(original: Any) -> Any:
    """``LookupKeyClient.reset``: whether the store was wiped, within the store timeout and a second. Never raises."""

    def reset(self: Any) -> bool:
        return begin(self).result().ok

    return reset


def _miss_meanwhile(half: Any, wipe: Future[bool]) -> None:
    """Let the scheduler half miss while a wipe is under way.

    The lookup would wait behind the wipe, and the engine with it, to be promised keys that go away.
    """

    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
        if not half.client.moontide_pending.done():
            return 0, False
        vars(half).pop("get_num_new_matched_tokens", None)
        return half.get_num_new_matched_tokens(request, num_computed_tokens)

    if not wipe.done():
        half.get_num_new_matched_tokens = get_num_new_matched_tokens


def begin(client: Any) -> Future[Outcome]:
    """Start the wipe on the channel's own thread. The future is done within the store timeout and a second.

    For the thread of EngineCore alone: lookups that were answered or asked before the wipe are forgotten here.
    """
    for request in list(client.futures):
        client.discard(request)
    answer: Future[Outcome] = Future()
    try:
        exchange: Future[bool] = client.executor.submit(client._reset)
    except RuntimeError as error:
        answer.set_result(Outcome(False, None, "StoreFailed", str(error)))
        return answer
    client.moontide_pending = exchange

    def settle(outcome: Outcome) -> None:
        with contextlib.suppress(InvalidStateError):
            answer.set_result(outcome)

    def expire() -> None:
        # Before the cancellation, which would settle it with a reason that says less.
        settle(Outcome(False, None, "StoreTimeout", "the lookup channel is busy"))
        exchange.cancel()

    timer = threading.Timer(client.moontide_timeout + _GRACE, expire)
    timer.daemon = True
    timer.start()

    def done(future: Future[bool]) -> None:
        timer.cancel()
        try:
            future.result()
        except CancelledError:
            settle(Outcome(False, None, "StoreFailed", "the lookup channel was closed"))
        except StoreResetTimeout as error:
            settle(Outcome(False, None, "StoreTimeout", str(error)))
        except Exception as error:
            settle(Outcome(False, None, "StoreFailed", f"{error}" or type(error).__name__))
        else:
            settle(Outcome(True, client.moontide_removed))

    exchange.add_done_callback(done)
    return answer


def scheduler_reset_store(original: Any) -> Any:
    """``MooncakeStoreScheduler.reset_store``: starts the wipe; waits for its end unless the caller collects it."""

    def reset_store(self: Any) -> bool:
        future = begin(self.client)
        if self.client.moontide_pending is not None:
            _miss_meanwhile(self, self.client.moontide_pending)
        future.add_done_callback(_tell)
        jobs = JOBS.get()
        if jobs is None:
            return future.result().ok
        # Not yet true: whoever collects it asks the future.
        jobs.append(future)
        return True

    return reset_store


def _tell(future: Future[Outcome]) -> None:
    outcome = future.result()
    log("store-reset", success=outcome.ok, removed=outcome.removed, reason=outcome.reason, message=outcome.message)
