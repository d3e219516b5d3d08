"""Patch ``lookup-economy``: the store is asked once for a waiting request, and never for longer than a bound.

Stock vLLM asks the store again in each scheduling step of a request that cannot be scheduled yet, waits for the answer
without bound inside the scheduler, and lets two replicas of one host take each other's lookup socket.
"""

from __future__ import annotations

import enum
import errno
import importlib
import os
import socket as sockets
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moontide_engine.jsonlog import log
from moontide_engine.patches import Patch, replace
from moontide_engine.patches import lookup_channel as channel
from moontide_engine.patches.probe import STORE
from moontide_engine.patches.reset_truth_store import rebuild
from moontide_engine.settings import number

_GRACE = 0.5
"""Seconds beyond the timeout that the scheduler leaves to the thread that asks."""

Clock = Callable[[], float]
Signature = tuple[int, int, bytes]


class LookupFailed(RuntimeError):
    """The store gave no answer that can be trusted; the message says why."""


class LookupRefused(RuntimeError):
    """The store was not asked: it did not answer lately."""


class SocketTaken(RuntimeError):
    """Another process listens on the path of this replica's lookup socket."""


@dataclass(frozen=True)
class LookupSettings:
    """Times in seconds."""

    timeout: float
    """Bound of one lookup. One that took more than half of it and found nothing counts as failed, too."""
    memo: float
    """How long an answer is used again; 0: never. No more than half the store's lease (``-default_kv_lease_ttl``)."""


def load(env: Mapping[str, str] | None = None) -> LookupSettings:
    """Settings from the environment. Raises SettingsError."""
    env = os.environ if env is None else env
    return LookupSettings(
        timeout=number(env, "MOONTIDE_LOOKUP_TIMEOUT_SECONDS", 1.0, 0.01, 60),
        memo=number(env, "MOONTIDE_LOOKUP_MEMO_SECONDS", 2.5, 0, 300),
    )


# -- decisions -----------------------------------------------------------------------------------------------------


class Admission(enum.Enum):
    """What a caller of the breaker may do."""

    ASK = "ask"
    TRIAL = "trial"
    """Ask, as the only one, and tell the breaker what came of it."""
    REFUSE = "refuse"


class Breaker:
    """Opens after failures in a row; open, it lets one trial through after each back-off. For any thread."""

    def __init__(self, clock: Clock, *, failures: int = 2, first: float = 1.0, longest: float = 30.0) -> None:
        """``first`` and ``longest`` are back-offs in seconds; each failed trial doubles the last one."""
        self._clock = clock
        self._limit = failures
        self._first = first
        self._longest = longest
        self._lock = threading.Lock()
        self._failures = 0
        self.backoff = 0.0
        """0 while closed; to look at, not to change."""
        self._until = 0.0
        self._trial = False

    def admit(self) -> Admission:
        """Whether to ask the store. TRIAL is given to one caller, until it reports."""
        with self._lock:
            if not self.backoff:
                return Admission.ASK
            if self._trial or self._clock() < self._until:
                return Admission.REFUSE
            self._trial = True
            return Admission.TRIAL

    def refuses(self) -> bool:
        """Whether it is open and no trial is due: true for what was admitted before it opened."""
        if not self.backoff:
            return False
        with self._lock:
            return bool(self.backoff) and not self._trial

    def success(self) -> bool:
        """The store answered. Whether that closed an open breaker."""
        if not self._failures and not self.backoff:
            return False
        with self._lock:
            opened = bool(self.backoff)
            self._failures = 0
            self.backoff = 0.0
            self._trial = False
            return opened

    def failure(self) -> float:
        """The store did not answer. Seconds of the back-off that begins with it; 0: none does."""
        with self._lock:
            if self.backoff:
                if not self._trial:
                    return 0.0
                self.backoff = min(self.backoff * 2, self._longest)
            else:
                self._failures += 1
                if self._failures < self._limit:
                    return 0.0
                self.backoff = self._first
            self._trial = False
            self._until = self._clock() + self.backoff
            return self.backoff


@dataclass(slots=True)
class _Entry:
    signature: Signature
    call: object
    asked: float
    given: bool = False


class Memo:
    """What each waiting request was asked for, by which call, and when. For one thread.

    It holds no answers: those stay in the calls, and a call that its owner dropped is not valid any more.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._entries: dict[str, _Entry] = {}

    def note(self, request: str, signature: Signature, call: object) -> None:
        """``call`` was started just now for ``request``."""
        self._entries[request] = _Entry(signature, call, self._clock())

    def given(self, request: str) -> None:
        """Its answer was used: from here on its age counts."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.given = True

    def valid(self, request: str, signature: Signature, call: object) -> bool:
        """Whether the answer of ``call`` is one to what is asked now. An answer nobody took is, however old it is."""
        entry = self._entries.get(request)
        if entry is None or entry.call is not call or entry.signature != signature:
            return False
        return not entry.given or self._clock() - entry.asked < self._seconds

    def drop(self, request: str) -> None:
        """Forget it."""
        self._entries.pop(request, None)

    def __len__(self) -> int:
        return len(self._entries)


def signature_of(num_tokens: int, hashes: Sequence[bytes]) -> Signature:
    """What an answer depends on. Each hash covers all before it, so the last one stands for all."""
    return num_tokens, len(hashes), hashes[-1] if hashes else b""


def listening(path: str) -> bool:
    """Whether a live process has the socket ``path``. What only a dead one left behind is not."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            # Anything else, a full queue or no permission, is somebody who lives.
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


# -- the client ----------------------------------------------------------------------------------------------------


class Line:
    """The client's own thread, an executor, which knows whether it has something to do. For one thread."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.calls: list[Any] = []
        """None of them: it has nothing to do; else ask :meth:`idle`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        """The future of a call in that thread, after all that were submitted before."""
        self.calls = [call for call in self.calls if not call.done()]
        self.calls.append(self._executor.submit(function, *args))
        return self.calls[-1]

    def idle(self) -> bool:
        """Whether no call is running or waits."""
        if self.calls and all(call.done() for call in self.calls):
            self.calls = []
        return not self.calls


class Answered:
    """In place of the future of a lookup: an answer that was given, to what, and when it was asked for."""

    __slots__ = ("answer", "asked", "signature")

    def __init__(self, answer: Any, signature: Signature, asked: float) -> None:
        self.answer = answer
        self.signature = signature
        self.asked = asked

    def done(self) -> bool:
        """It is."""
        return True

    def result(self, timeout: float | None = None) -> Any:
        """The answer."""
        return self.answer

    def cancel(self) -> bool:
        """Too late."""
        return False


class Economy:
    """State of one lookup client. ``path`` is the address of its socket."""

    def __init__(self, settings: LookupSettings, path: str, clock: Clock = time.monotonic) -> None:
        self.settings = settings
        self.path = path
        self.clock = clock
        self.breaker = Breaker(clock)
        self.memo = Memo(clock, settings.memo)

    def failed(self, reason: str) -> LookupFailed:
        """Count a failure; the error to raise."""
        backoff = self.breaker.failure()
        if backoff:
            log("lookups-suspended", reason=reason, seconds=backoff)
        return LookupFailed(reason)

    def answered(self) -> None:
        """Count a success."""
        if self.breaker.success():
            log("lookups-resumed")


def _client_init(original: Any) -> Any:
    def init(self: Any, vllm_config: Any) -> None:
        settings = load()
        original(self, vllm_config)
        module: Any = importlib.import_module(f"{STORE}.worker")
        self.moontide_economy = Economy(settings, module.get_zmq_rpc_path_lookup(vllm_config))
        self.executor = Line(self.executor)

    return init


def _client_lookup_inner(original: Any) -> Any:
    def _lookup(self: Any, num_tokens: int, block_hashes: Sequence[bytes]) -> Any:
        # Runs in the client's one thread, the only one that uses the socket.
        economy: Economy = self.moontide_economy
        if economy.breaker.refuses():
            raise LookupRefused
        started = economy.clock()
        try:
            result = _bounded(self, economy.settings.timeout, original, num_tokens, block_hashes)
        except Exception as error:
            rebuild(self, economy.path)
            took = economy.clock() - started
            raise economy.failed(f"{type(error).__name__} after {took:.2f} s: {error}") from error
        took = economy.clock() - started
        if not channel.hits(result) and took > economy.settings.timeout / 2:
            # A dead master looks like that: the worker's own timeout, and then an answer as if nothing were stored.
            raise economy.failed(f"no hit after {took:.2f} s")
        economy.answered()
        return result

    return _lookup


def _bounded(client: Any, seconds: float, original: Any, num_tokens: int, block_hashes: Sequence[bytes]) -> Any:
    zmq: Any = importlib.import_module(f"{STORE}.worker").zmq
    socket = client.socket
    # Who asks may be the scheduler itself, and both together are what it waits.
    for option, bound in ((zmq.SNDTIMEO, min(seconds, _GRACE)), (zmq.RCVTIMEO, seconds)):
        socket.setsockopt(option, max(round(bound * 1000), 1))
    result = original(client, num_tokens, block_hashes)
    # A reset that follows may take longer.
    for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
        socket.setsockopt(option, -1)
    return result


def _client_lookup(original: Any) -> Any:
    def lookup(self: Any, req_id: str, num_tokens: int, block_hashes: Sequence[bytes], non_block: bool = False) -> Any:
        economy: Economy = self.moontide_economy
        signature = signature_of(num_tokens, block_hashes)
        # Answers stay where vLLM keeps what is in flight: whoever drops that, drops them too.
        future = self.futures.get(req_id)
        if type(future) is Answered:
            if future.signature == signature and economy.clock() - future.asked < economy.settings.memo:
                return future.answer
            future = None
        elif future is not None and not economy.memo.valid(req_id, signature, future):
            self.discard(req_id)
            future = None
        try:
            if future is None:
                line = self.executor
                if not non_block and not economy.breaker.backoff and (not line.calls or line.idle()):
                    # Who waits can as well ask: handing it to the thread and back costs more than the rest.
                    asked = economy.clock()
                    answer = self._lookup(num_tokens, block_hashes)
                    self.futures[req_id] = Answered(answer, signature, asked)
                    return answer
                admission = economy.breaker.admit()
                if admission is Admission.REFUSE:
                    return channel.nothing()
                future = line.submit(self._lookup, num_tokens, list(block_hashes))
                if admission is Admission.TRIAL:
                    # Nobody waits for it; this request goes without.
                    return channel.nothing()
                self.futures[req_id] = future
                economy.memo.note(req_id, signature, future)
            if non_block and not future.done():
                return None
            result = future.result(economy.settings.timeout + _GRACE)
        except Exception as error:
            self.discard(req_id)
            if isinstance(error, TimeoutError):
                error = economy.failed("the lookup channel is busy")
            if not isinstance(error, LookupRefused):
                log("lookup-failed", request=req_id, reason=f"{error}" or type(error).__name__)
            return channel.nothing()
        economy.memo.given(req_id)
        return result

    return lookup


def _client_discard(original: Any) -> Any:
    def discard(self: Any, req_id: str) -> None:
        future = self.futures.get(req_id)
        if type(future) is Answered:
            del self.futures[req_id]
        elif future is not None:
            self.moontide_economy.memo.drop(req_id)
            original(self, req_id)

    return discard


# -- the scheduler's and the worker's side -------------------------------------------------------------------------


def _scheduler_update(original: Any) -> Any:
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        original(self, request, blocks, num_external_tokens)
        # The match is committed. Preempted, or after a load that failed, it must ask anew.
        self.client.discard(request.request_id)

    return update_state_after_alloc


def _scheduler_reset(original: Any) -> Any:
    def reset_store(self: Any) -> Any:
        for req_id in list(self.client.futures):
            self.client.discard(req_id)
        return original(self)

    return reset_store


def _server_init(original: Any) -> Any:
    def init(self: Any, store_worker: Any, vllm_config: Any) -> None:
        module: Any = importlib.import_module(f"{STORE}.worker")
        path = module.get_zmq_rpc_path_lookup(vllm_config).removeprefix("ipc://")
        if listening(path):
            raise SocketTaken(
                f"moontide-engine: another process listens on {path}, and this replica would take it away from it; set "
                "a different kv_connector_extra_config.lookup_rpc_port for each replica on this host"
            )
        original(self, store_worker, vllm_config)

    return init


def _install() -> None:
    # A bad value stops the engine at once, not when the scheduler is built.
    load()
    channel.shape()
    replace(f"{STORE}.worker:LookupKeyServer.__init__", _server_init)
    replace(f"{channel.CLIENT}.__init__", _client_init)
    replace(f"{channel.CLIENT}._lookup", _client_lookup_inner)
    replace(f"{channel.CLIENT}.lookup", _client_lookup)
    replace(f"{channel.CLIENT}.discard", _client_discard)
    replace(f"{channel.HALF}.update_state_after_alloc", _scheduler_update)
    replace(f"{channel.HALF}.reset_store", _scheduler_reset)


PATCH = Patch(
    name="lookup-economy",
    summary="one bounded store lookup for each waiting request; a breaker for a store that does not answer",
    references=(
        f"{STORE}.worker:LookupKeyServer.__init__",
        f"{STORE}.worker:LookupKeyServer.close",
        f"{channel.CLIENT}.__init__",
        f"{channel.CLIENT}._lookup",
        f"{channel.CLIENT}.lookup",
        f"{channel.CLIENT}.discard",
        f"{channel.CLIENT}._reset",
        f"{channel.CLIENT}.reset",
        f"{channel.CLIENT}.close",
        f"{STORE}.worker:get_zmq_rpc_path_lookup",
        f"{STORE}.worker:MooncakeStoreWorker.lookup",
        f"{STORE}.data:MooncakeLookupResult",
        f"{channel.HALF}.get_num_new_matched_tokens",
        f"{channel.HALF}.update_state_after_alloc",
        f"{channel.HALF}.build_connector_meta",
        f"{channel.HALF}.reset_store",
        "vllm.utils.network_utils:make_zmq_socket",
    ),
    install=_install,
    optional=True,
)
