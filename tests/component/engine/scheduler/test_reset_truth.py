"""Patch reset-truth on vLLM's own classes, without servers. Off must fail, on must pass."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corekit as kit
import httpx
import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as store_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data as store_data
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import scheduler as store_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as store_worker
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient, InprocClient
from vllm.v1.request import RequestStatus

from moontide_engine import fingerprint
from moontide_engine.patches import lookup_channel, lookup_economy, reset_truth, reset_truth_front, store_reset
from moontide_engine.patches import reset_truth_store as truth

TIMEOUT = 1.0
SLOW = 2.5
LATE = 5.0
HASHES = [b"h" * 32]
Scheduler = kit.quietly("vllm.v1.core.sched.scheduler").Scheduler
PATCHES = (store_reset.PATCH, reset_truth.PATCH)
protocol = lookup_channel.protocol()
router = reset_truth_front.router()
TRACKED = hasattr(store_scheduler.MooncakeStoreScheduler, "has_pending_push_work")
"""Whether the scheduler knows which saves have not ended."""
VERSION = ("v2",) if hasattr(AsyncLLM, "update_weight_version") else ()
"""What an update of the weights ends with, where they have versions."""


def offline() -> Any:
    """vLLM's class whose method ends an update of the weights without a server."""
    for name in reset_truth.OFFLINE:
        with contextlib.suppress(fingerprint.Missing):
            return fingerprint.resolve(f"{name}.finish_weight_update")[0]
    raise AssertionError("there is none")


@contextlib.contextmanager
def patching(on: bool = True) -> Iterator[None]:
    """The patch for a while; the router's list of routes is the one thing that no class or module holds."""
    routes = list(router.router.routes)
    try:
        with kit.installed(*PATCHES, on=on):
            yield
    finally:
        router.router.routes[:] = routes


def modes(reason: str, faulty: bool = True) -> Any:
    """Both ways to run a test: without the patch it shows the fault, where the release under test has it."""
    errors: tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception)
    if kit.needed(store_reset.PATCH):
        # There is no reset to be called.
        errors += (AttributeError,)
    off = kit.off(reason, errors) if faulty else pytest.param(False, id="off")
    return pytest.mark.parametrize("patched", [off, kit.ON], indirect=True)


@pytest.fixture
def patched(request: pytest.FixtureRequest, channel: str) -> Iterator[bool]:
    with patching(request.param):
        yield request.param


@pytest.fixture
def on(channel: str) -> Iterator[None]:
    with patching():
        yield


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Path of the lookup channel, short enough for a socket."""
    folder = tempfile.mkdtemp(prefix="rt")
    path = f"ipc://{folder}/s"
    monkeypatch.setattr(store_worker, "get_zmq_rpc_path_lookup", lambda config: path)
    monkeypatch.setenv("MOONTIDE_STORE_TIMEOUT_SECONDS", str(TIMEOUT))
    yield path
    shutil.rmtree(folder, ignore_errors=True)


def lookup_result(tokens: int) -> Any:
    """What a worker finds."""
    return getattr(store_data, "MooncakeLookupResult", int)(tokens)


def found(tokens: int) -> bytes:
    """The same on the channel."""
    encode = getattr(protocol, "encode_lookup_response", lambda number: number.to_bytes(4, "big"))
    return bytes(encode(lookup_result(tokens)))


def ask(client: Any, name: str = "r") -> int:
    """Tokens that a lookup finds."""
    if hasattr(client, "_lookup"):
        return lookup_channel.hits(client.lookup(name, 16, HASHES))
    return int(client.lookup(16, HASHES))


class Peer:
    """The worker's end of the channel. ``on_reset`` makes the answer to a reset; None: there is none, ever."""

    def __init__(self, path: str, on_reset: Callable[[], bytes | None] = lambda: protocol.RESP_OK) -> None:
        self.resets = 0
        self.on_reset = on_reset
        self._path = path
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Peer:
        self._thread.start()
        assert self._bound.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(self._path)
            self._bound.set()
            while not self._stop.is_set():
                if not socket.poll(20):
                    continue
                frames = socket.recv_multipart()
                start = frames.index(b"") + 1
                head, kind = frames[:start], frames[start]
                if kind == protocol.LOOKUP_MSG:
                    socket.send_multipart([*head, found(16)])
                    continue
                self.resets += 1
                answer = self.on_reset()
                if answer is not None:
                    socket.send_multipart([*head, answer])


def once(go_on: threading.Event) -> bytes:
    """An answer that comes once it may; by itself, far too late."""
    go_on.wait(LATE)
    return bytes(protocol.RESP_OK)


def slowly(seconds: float = SLOW) -> bytes:
    """An answer that comes late."""
    time.sleep(seconds)
    return bytes(protocol.RESP_OK)


@pytest.fixture
def client(channel: str) -> Iterator[Callable[[], Any]]:
    """Makes vLLM's own lookup client."""
    made: list[Any] = []

    def make() -> Any:
        made.append(store_worker.LookupKeyClient(None))
        return made[-1]

    yield make
    for each in made:
        executor = getattr(each, "executor", None)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        # Stock's thread may wait for an answer for ever: the end of its context ends that.
        end = threading.Thread(target=each.ctx.term, daemon=True)
        end.start()
        if executor is not None:
            executor.shutdown()
        each.socket.close(linger=0)
        end.join(5)


class Cache:
    """Local prefix cache: emptied, unless blocks are held."""

    def __init__(self) -> None:
        self.held = False
        self.resets = 0

    def reset_prefix_cache(self) -> bool:
        self.resets += not self.held
        return not self.held


def mooncake(lookup: Any) -> Any:
    """vLLM's connector and its scheduler half, with what a reset touches."""
    half = store_scheduler.MooncakeStoreScheduler.__new__(store_scheduler.MooncakeStoreScheduler)
    half.client, half.load_specs, half._pinned_saves = lookup, {}, {}
    half.enable_lookup, half.enable_partial_hash_hits, half._block_size = True, False, 16
    half.load_async = half.lookup_async = True
    made = store_connector.MooncakeStoreConnector.__new__(store_connector.MooncakeStoreConnector)
    made._role, made.connector_scheduler, made._kv_cache_events = KVConnectorRole.SCHEDULER, half, None
    return made


def scheduler(connector: Any) -> Any:
    """vLLM's scheduler, with what a reset touches."""
    made = Scheduler.__new__(Scheduler)
    made.connector, made.kv_cache_manager, made.aux_output_connector = connector, Cache(), None
    made.running, made.requests, made.prev_step_scheduled_req_ids, made.log_stats = [], {}, set(), False
    return made


def ranks(left: list[int]) -> list[dict[str, int]]:
    """What the ranks say about their saves."""
    return [{"left": count} for count in left]


def core(connector: Any, kind: Any = EngineCoreProc) -> Any:
    """vLLM's engine core, with what a reset touches."""
    made = kind.__new__(kind)
    made.scheduler = scheduler(connector)
    made.calls = []
    made.left = [0, 0]
    made.model_executor = SimpleNamespace(collective_rpc=lambda method, *_: ranks(made.left))
    made.reset_mm_cache = lambda: made.calls.append("mm")
    made.reset_encoder_cache = lambda: made.calls.append("encoder")
    return made


def utility(engine: Any, method: str, *args: object) -> queue.Queue[Any]:
    """Call it the way vLLM's loop does. The queue gets what the client would get."""
    answers: queue.Queue[Any] = queue.Queue()
    EngineCoreProc._invoke_utility_method(method, lambda: getattr(engine, method)(*args), UtilityOutput(1), answers.put)
    return answers


def answer(answers: queue.Queue[Any]) -> Any:
    """What a client gets, once it is there."""
    output = answers.get(timeout=60)
    assert output.failure_message is None
    return output.result.result


def report(engine: Any, running: bool = False, external: bool = True) -> dict[str, Any]:
    """The full truth of one reset."""
    told: dict[str, Any] = answer(utility(engine, "moontide_reset", running, external))
    return told


class Sub:
    """A connector inside a MultiConnector."""

    def __init__(self, says: Any) -> None:
        self.says = says
        self.asked = 0

    def reset_cache(self) -> Any:
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def has_pending_push_work(self) -> bool:
        return False


def multi(*subs: Any) -> Any:
    """vLLM's MultiConnector around these."""
    made = MultiConnector.__new__(MultiConnector)
    made._connectors = list(subs)
    return made


# -- MultiConnector ----------------------------------------------------------------------------------------------------


@modes("a connector without a cache counts as reset")
def test_multi_of_connectors_without_a_cache_is_neither_true_nor_false(patched: bool) -> None:
    assert multi(Sub(None), Sub(None)).reset_cache() is None


@modes("an exception skips the connectors behind it")
@pytest.mark.parametrize("rest", [True, False, None])
def test_multi_asks_every_connector_behind_one_that_raises(patched: bool, rest: bool | None) -> None:
    subs = [Sub(True), Sub(ValueError("no")), Sub(rest)]
    with contextlib.suppress(ValueError):
        assert multi(*subs).reset_cache() is False
    assert [sub.asked for sub in subs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("says", "result"),
    [((True, None), True), ((None, True, True), True), ((False, True), False), ((None, False), False)],
)
def test_multi_is_all_that_have_a_cache(on: None, says: tuple[Any, ...], result: bool) -> None:
    subs = [Sub(each) for each in says]
    assert multi(*subs).reset_cache() is result
    assert all(sub.asked == 1 for sub in subs)


def test_multi_waits_for_its_store_and_fails_with_it(on: None, channel: str, client: Any) -> None:
    with Peer(channel) as peer:
        assert report(core(multi(mooncake(client()), Sub(None))))["cleared"] == ["local", "external"]
        peer.on_reset = lambda: protocol.RESP_ERR + b"code -900"
        told = report(core(multi(Sub(True), mooncake(client()))))
        assert (told["success"], told["reason"], told["message"]) == (False, "StoreFailed", "code -900")
        told = report(core(multi(Sub(False), mooncake(client()))))
        assert told["success"] is False
        assert peer.resets == 3


# -- the channel -------------------------------------------------------------------------------------------------------


def in_time(work: Callable[[], Any], seconds: float) -> Any:
    """Result of a call that must not take longer."""
    box: list[Any] = []

    def run() -> None:
        # Stock's wait ends with the test, by an error of no interest.
        with contextlib.suppress(zmq.ZMQError):
            box.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert box, f"no answer within {seconds} s"
    return box[0]


@modes("a worker that does not answer blocks the engine for ever")
def test_a_dead_worker_is_a_failure_in_time_and_lookups_work_after_it(patched: bool, channel: str, client: Any) -> None:
    made = client()
    with Peer(channel, lambda: None) as peer:
        assert in_time(made.reset, TIMEOUT + 3) is False
        assert ask(made) == 16
        peer.on_reset = lambda: protocol.RESP_OK
        assert made.reset() is True


@modes("the reset takes as long as the store does")
def test_a_slow_store_is_a_failure_in_time_and_lookups_work_after_it(patched: bool, channel: str, client: Any) -> None:
    made = client()
    with Peer(channel, slowly):
        began = time.monotonic()
        done = made.reset()
        assert time.monotonic() - began < SLOW - 0.5
        assert done is False
        assert ask(made) == 16


class FakeStore:
    """Stand-in for the store's client: removals give ``code``."""

    code = 7

    def __init__(self) -> None:
        self.removed: list[object] = []

    def remove_all(self, force: bool = False) -> int:
        self.removed.append("everything")
        return self.code

    def remove_by_regex(self, regex: str, force: bool = False) -> int:
        self.removed.append(regex)
        return self.code


SERVERS: list[Any] = []
"""vLLM has no way to end one: its thread waits until the process ends."""


def serve(store: Any) -> None:
    """vLLM's own lookup server around a store."""
    half = SimpleNamespace(kv_send_thread=None, store=store, lookup=lambda tokens, hashes: lookup_result(tokens))
    SERVERS.append(store_worker.LookupKeyServer(half, None))


@modes("the store's negative code is dropped")
def test_a_negative_code_is_a_failure(patched: bool, client: Any) -> None:
    store = (truth.truthful(FakeStore, "ns") if patched else FakeStore)()
    store.code = -900
    serve(store)
    made = client()
    assert made.reset() is False
    assert ask(made) == 16


@modes("the whole master is wiped")
def test_only_the_namespace_is_removed(patched: bool, client: Any) -> None:
    store = (truth.truthful(FakeStore, "ns") if patched else FakeStore)()
    serve(store)
    assert client().reset() is True
    assert store.removed == ["^ns@"]


def test_the_number_of_keys_and_the_code_reach_the_caller(on: None, client: Any) -> None:
    store = truth.truthful(FakeStore, "ns")()
    serve(store)
    engine = core(mooncake(client()))
    expected = {"success": True, "cleared": ["local", "external"], "removed": 7, "reason": "", "message": ""}
    assert report(engine) == expected
    store.code = -900
    told = report(engine)
    assert (told["success"], told["cleared"], told["removed"]) == (False, ["local"], None)
    assert (told["reason"], told["message"]) == ("StoreFailed", "the store answered -900 to the removal of ns")
    store.code = 0
    assert report(engine)["removed"] == 0


def test_a_lookup_that_was_asked_before_the_wipe_promises_nothing(
    on: None, channel: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONTIDE_STORE_TIMEOUT_SECONDS", str(2 * LATE))
    made = client()
    connector = mooncake(made)
    half = connector.connector_scheduler
    engine = core(connector)
    request = SimpleNamespace(request_id="r", num_tokens=32, block_hashes=HASHES * 2)
    go_on = threading.Event()
    with Peer(channel, lambda: once(go_on)) as peer:
        assert made.lookup("r", 32, HASHES * 2, non_block=True) is None
        made.futures["r"].result(60)
        answers = utility(engine, "reset_prefix_cache", False, True)
        assert made.futures == {}
        began = time.monotonic()
        for asynchronous in (False, True):
            half.lookup_async = asynchronous
            assert half.get_num_new_matched_tokens(request, 0) == (0, False)
        assert time.monotonic() - began < LATE - 0.5
        go_on.set()
        assert answer(answers) is True
        half.lookup_async = False
        assert half.get_num_new_matched_tokens(request, 0) == (16, True)
        assert peer.resets == 1


def test_a_channel_that_hangs_in_a_lookup_ends_the_reset_all_the_same(on: None, channel: str, client: Any) -> None:
    made, release = client(), threading.Event()
    made.executor.submit(release.wait)
    with Peer(channel) as peer:
        began = time.monotonic()
        try:
            told = report(core(mooncake(made)))
            assert time.monotonic() - began < TIMEOUT + 3
            assert (told["success"], told["reason"]) == (False, "StoreTimeout")
        finally:
            release.set()
        assert ask(made) == 16
        # The wipe was taken back: nobody was told that it would come.
        assert peer.resets == 0
        assert report(core(mooncake(made)))["success"] is True


def test_a_closed_channel_is_a_failure(on: None, client: Any) -> None:
    made = client()
    made.executor.shutdown()
    assert made.reset() is False
    assert report(core(mooncake(made)))["reason"] == "StoreFailed"


@pytest.mark.parametrize("first", ["economy", "truth"])
def test_it_goes_with_the_patch_of_the_lookups_in_any_order(channel: str, client: Any, first: str) -> None:
    patches = [lookup_economy.PATCH, reset_truth.PATCH]
    routes = list(router.router.routes)
    ordered = patches if first == "economy" else reversed(patches)
    with kit.installed(store_reset.PATCH, *ordered), Peer(channel) as peer:
        connector = mooncake(client())
        half, engine = connector.connector_scheduler, core(connector)
        half.lookup_async = False
        request = SimpleNamespace(request_id="r", num_tokens=32, block_hashes=HASHES * 2)
        assert half.get_num_new_matched_tokens(request, 0) == (16, True)
        go_on = threading.Event()
        peer.on_reset = lambda: once(go_on)
        answers = utility(engine, "reset_prefix_cache", False, True)
        assert half.get_num_new_matched_tokens(request, 0) == (0, False)
        go_on.set()
        assert answer(answers) is True
        assert half.get_num_new_matched_tokens(request, 0) == (16, True)
        peer.on_reset = lambda: None
        assert report(engine)["reason"] == "StoreTimeout"
        assert half.get_num_new_matched_tokens(request, 0) == (16, True)
    router.router.routes[:] = routes


# -- EngineCore --------------------------------------------------------------------------------------------------------


@modes("the engine stands still until the store has answered")
def test_the_core_goes_on_while_the_store_is_wiped(
    patched: bool, channel: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONTIDE_STORE_TIMEOUT_SECONDS", str(2 * LATE))
    engine, go_on = core(mooncake(client())), threading.Event()
    with Peer(channel, lambda: once(go_on)):
        began = time.monotonic()
        answers = utility(engine, "reset_prefix_cache", False, True)
        assert time.monotonic() - began < LATE - 0.5
        assert answers.empty()
        go_on.set()
        assert answer(answers) is True


@modes("the store is wiped although the local reset was refused", faulty=not kit.needed(store_reset.PATCH))
def test_a_refused_local_reset_leaves_the_store_alone(patched: bool, channel: str, client: Any) -> None:
    engine = core(mooncake(client()))
    engine.scheduler.kv_cache_manager.held = True
    with Peer(channel) as peer:
        assert answer(utility(engine, "reset_prefix_cache", False, True)) is False
        assert peer.resets == 0


@modes("the store is wiped, and filled again by saves that were pending")
def test_pending_saves_of_any_rank_leave_everything_alone(patched: bool, channel: str, client: Any) -> None:
    connector = mooncake(client())
    engine = core(connector)
    if TRACKED:
        # One of two ranks has reported its end.
        connector.connector_scheduler._pinned_saves[1] = ([3], 1)
    else:
        engine.left[1] = 1
    with Peer(channel) as peer:
        assert answer(utility(engine, "reset_prefix_cache", False, True)) is False
        assert (peer.resets, engine.scheduler.kv_cache_manager.resets) == (0, 0)
        assert report(engine)["reason"] == "StoreBusy"


def test_a_reset_of_running_requests_takes_no_save_for_done_that_is_not(on: None, tiny: Path) -> None:
    store = kit.SimStore(save_steps=4)
    engine = kit.Core(tiny, store=store)
    engine.scheduler.connector.connector_scheduler.client._reset = lambda: store.blocks.clear() is None
    engine.add("r", kit.prompt(1), 20)
    engine.step(2)
    assert engine.worker.saves
    assert engine.core.moontide_reset(True, True)["reason"] == "StoreBusy"
    assert len(engine.scheduler.running) == 1
    engine.run()
    engine.settle()
    assert store.blocks
    assert engine.core.moontide_reset(False, True)["cleared"] == ["local", "external"]
    assert not store.blocks


@modes("a pending load is a 500")
def test_a_pending_load_answers_false(patched: bool, channel: str, client: Any) -> None:
    engine = core(mooncake(client()))
    engine.scheduler.kv_cache_manager.held = True
    engine.scheduler.requests["r"] = SimpleNamespace(status=RequestStatus.WAITING_FOR_REMOTE_KVS)
    with Peer(channel) as peer:
        assert answer(utility(engine, "reset_prefix_cache", True, True)) is False
        assert report(engine, True)["reason"] == "LoadPending"
        assert peer.resets == 0


@modes("blocks that are still held are a 500")
def test_blocks_that_preemption_does_not_free_answer_false(patched: bool, channel: str, client: Any) -> None:
    engine = core(mooncake(client()))
    engine.scheduler.kv_cache_manager.held = True
    assert answer(utility(engine, "reset_prefix_cache", True, True)) is False
    assert report(engine, True)["reason"] == "BlocksHeld"


def test_without_a_connector_it_is_a_success(on: None) -> None:
    engine = core(None)
    told = report(engine)
    assert (told["success"], told["cleared"], told["removed"]) == (True, ["local"], None)
    assert answer(utility(engine, "reset_prefix_cache", False, True)) is True
    assert answer(utility(engine, "reset_prefix_cache")) is True


def test_a_connector_without_a_cache_is_a_success_that_cleared_nothing(on: None) -> None:
    told = report(core(multi(Sub(None))))
    assert (told["success"], told["cleared"]) == (True, ["local"])


@modes("an exception of a connector is a 500")
def test_an_exception_of_a_connector_answers_false(patched: bool) -> None:
    engine = core(Sub(ValueError("no")))
    assert answer(utility(engine, "reset_prefix_cache", False, True)) is False
    assert report(engine)["message"] == "ValueError: no"


def test_statistics_start_again_only_where_something_was_reset(on: None) -> None:
    for says, reset in ((True, True), (False, False)):
        engine = core(Sub(says))
        engine.scheduler.log_stats = True
        engine.scheduler.connector_prefix_cache_stats = SimpleNamespace(reset=False)
        assert report(engine)["success"] is says
        assert engine.scheduler.connector_prefix_cache_stats.reset is reset


def test_both_front_ends_are_told_the_same(on: None, channel: str, client: Any) -> None:
    def inproc(engine: Any) -> Any:
        made = InprocClient.__new__(InprocClient)
        made.engine_core = engine
        return made.reset_prefix_cache(False, True)

    def asynchronous(target: Any) -> Any:
        made = AsyncMPClient.__new__(AsyncMPClient)

        async def call(method: str, *args: object, engine: bytes) -> Any:
            return await asyncio.to_thread(answer, utility(target, method, *args))

        made.core_engines, made._call_utility_async = [b"0"], call
        return asyncio.run(made.reset_prefix_cache_async(False, True))

    with Peer(channel) as peer:
        for on_reset, truth_ in ((peer.on_reset, True), (lambda: protocol.RESP_ERR, False), (lambda: None, False)):
            peer.on_reset = on_reset
            assert inproc(core(mooncake(client()), EngineCore)) is truth_
            assert asynchronous(core(mooncake(client()))) is truth_


# -- pause, sleep, weights ---------------------------------------------------------------------------------------------


def sleeper(connector: Any, kind: Any) -> Any:
    """An engine core that can be put to sleep."""
    engine = core(connector, kind)
    engine.scheduler.finish_requests = lambda *_: []
    engine.scheduler.set_pause_state = lambda state: engine.calls.append(state.name)
    engine.scheduler.has_requests = lambda: False
    engine.engines_running, engine.batch_queue, engine._idle_state_callbacks = False, None, []
    engine.model_executor = SimpleNamespace(
        is_sleeping=False,
        collective_rpc=lambda *_: [],
        sleep=lambda level: engine.calls.append("asleep"),
        wake_up=lambda tags: engine.calls.append("awake"),
        # Asked for from 0.33 on.
        get_kv_connector_handshake_metadata=lambda: None,
    )
    return engine


@pytest.mark.parametrize("kind", [EngineCore, EngineCoreProc])
def test_sleep_empties_both_caches_or_fails(on: None, channel: str, client: Any, kind: Any) -> None:
    engine = sleeper(mooncake(client()), kind)
    with Peer(channel) as peer:
        engine.sleep(1)
        engine.wake_up()
        assert engine.calls == ["PAUSED_NEW", "mm", "encoder", "asleep", "awake", "UNPAUSED"]
        assert (peer.resets, engine.scheduler.kv_cache_manager.resets) == (1, 1)
        peer.on_reset = lambda: protocol.RESP_ERR
        with pytest.raises(RuntimeError, match="not reset: StoreFailed"):
            engine.sleep(1)
        assert "asleep" not in engine.calls[6:]


def test_a_pause_that_ends_with_a_failed_reset_fails_and_the_engine_lives(on: None, channel: str, client: Any) -> None:
    engine = sleeper(mooncake(client()), EngineCoreProc)
    engine._send_abort_outputs = lambda requests: None
    engine.scheduler.has_requests = lambda: True
    future = engine.pause_scheduler("wait")
    engine.scheduler.has_requests = lambda: False
    with Peer(channel, lambda: protocol.RESP_ERR):
        engine._notify_idle_state_callbacks()
    with pytest.raises(RuntimeError, match="not reset: StoreFailed"):
        future.result(0)
    with Peer(channel):
        engine.scheduler.has_requests = lambda: True
        future = engine.pause_scheduler("wait")
        engine._notify_idle_state_callbacks()
        assert future.result(0) is None


@pytest.mark.parametrize("left", [3, 1000])
def test_a_pause_waits_for_the_saves_of_every_rank_within_its_bound(
    on: None, channel: str, client: Any, left: int
) -> None:
    """Where the scheduler does not know of them; where it does the engine goes on until they have ended."""
    connector = mooncake(client())
    engine = sleeper(connector, EngineCoreProc)
    asked = []

    def saves(method: str, *_: object) -> list[dict[str, int]]:
        if method == "moontide_store_queue":
            asked.append(method)
        return ranks([0, max(left - len(asked), 0)])

    engine.model_executor.collective_rpc = saves
    if TRACKED and left > 3:
        connector.connector_scheduler._pinned_saves[1] = ([3], 1)
    with Peer(channel) as peer:
        if left == 3:
            engine.sleep(1)
            assert peer.resets == 1
        else:
            with pytest.raises(RuntimeError, match="not reset: StoreBusy"):
                engine.sleep(1)
            assert peer.resets == 0
    assert bool(asked) is not TRACKED


def online(target: Any) -> Any:
    """vLLM's AsyncLLM before one engine core. ``calls`` of the core has the order of things."""

    async def collective_rpc_async(method: str, *_: object) -> list[Any]:
        target.calls.append(method)
        return []

    async def call_utility(method: str, *args: object, engine: bytes) -> Any:
        target.calls.append(method)
        return await asyncio.to_thread(answer, utility(target, method, *args))

    async def set_weight_version_async(version: str) -> None:
        target.calls.append(version)

    made = AsyncLLM.__new__(AsyncLLM)
    made.engine_core = SimpleNamespace(
        collective_rpc_async=collective_rpc_async,
        core_engines=[b"0"],
        _call_utility_async=call_utility,
        set_weight_version_async=set_weight_version_async,
        shutdown=lambda *a, **k: None,
    )
    # Its end looks at these.
    made.output_handler = made.logger_manager = made.renderer = None
    made.shutdown = lambda *a, **k: None
    return made


@modes("an update of the weights leaves both caches as they were")
def test_an_update_of_the_weights_empties_both_caches(patched: bool, channel: str, client: Any) -> None:
    engine = core(mooncake(client()))
    with Peer(channel) as peer:
        asyncio.run(online(engine).finish_weight_update(*VERSION))
        assert engine.calls[0] == "finish_weight_update"
        assert engine.calls[-1] == (*VERSION, "moontide_reset")[0]
        assert (peer.resets, engine.scheduler.kv_cache_manager.resets) == (1, 1)


def test_no_version_is_set_before_the_caches_are_empty(on: None, channel: str, client: Any) -> None:
    engine = core(mooncake(client()))
    engine.scheduler.kv_cache_manager.held = True
    with pytest.raises(RuntimeError, match=r"were not reset \(BlocksHeld"):
        asyncio.run(online(engine).finish_weight_update(*VERSION))
    assert engine.calls == ["finish_weight_update", "moontide_reset"]


@modes("an update of the weights leaves both caches as they were")
@pytest.mark.parametrize("success", [True, False])
def test_an_offline_update_of_the_weights_empties_both_caches(patched: bool, success: bool) -> None:
    calls: list[Any] = []

    def reset(*args: object) -> bool:
        calls.append(args)
        return success

    kind = offline()
    llm = kind.__new__(kind)
    llm.llm_engine = SimpleNamespace(
        collective_rpc=calls.append, reset_prefix_cache=reset, set_weight_version=calls.append
    )
    with contextlib.nullcontext() if success else pytest.raises(RuntimeError, match="not reset"):
        llm.finish_weight_update(*VERSION)
    assert calls == ["finish_weight_update", (False, True), *(VERSION if success else [])]


# -- the route ---------------------------------------------------------------------------------------------------------


def post(engine: Any, query: str, body: Any = None, status: int = 200) -> Any:
    """Body of vLLM's reset route; None: there is none."""
    from fastapi import FastAPI

    async def send() -> Any:
        app = FastAPI()
        app.include_router(router.router)
        app.state.engine_client = online(engine)

        async def plain(running: bool = False, external: bool = False) -> bool:
            return bool(await asyncio.to_thread(answer, utility(engine, "reset_prefix_cache", running, external)))

        app.state.engine_client.reset_prefix_cache = plain
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            content = {"content": body} if isinstance(body, str) else {"json": body} if body is not None else {}
            got = await http.post(f"/reset_prefix_cache{query}", **content)
            assert got.status_code == status
            assert (await http.post("/reset_prefix_cache?reset_external=what")).status_code == 422
            return got.json() if got.content else None

    return asyncio.run(send())


@modes("the body says success and no more")
def test_the_body_says_what_was_cleared(patched: bool, client: Any) -> None:
    store = (truth.truthful(FakeStore, "ns") if patched else FakeStore)()
    serve(store)
    engine = core(mooncake(client()))
    assert post(engine, "?reset_external=true") == {"success": True, "cleared": ["local", "external"], "removed": 7}
    assert post(engine, "") == {"success": True, "cleared": ["local"], "removed": None}
    store.code = -900
    body = post(engine, "?reset_external=true&reset_running_requests=false")
    assert (body["success"], body["cleared"], body["removed"]) == (False, ["local"], None)
    assert (body["reason"], "-900" in body["message"]) == ("StoreFailed", True)


@modes("what the body asks for is not done")
def test_the_parameters_may_come_in_the_body(patched: bool, client: Any) -> None:
    store = (truth.truthful(FakeStore, "ns") if patched else FakeStore)()
    serve(store)
    engine = core(mooncake(client()))
    asked = [
        ("", {"reset_external": True}),
        ("", {"reset_external": False}),
        ("?reset_external=true", {"reset_running_requests": True}),
        ("?reset_external=false", {"reset_external": True}),
    ]
    for query, body in asked:
        post(engine, query, body)
    assert len(store.removed) == 2


@pytest.mark.parametrize(
    "body", ["reset_external=true", "[]", '{"reset_externals": true}', '{"reset_external": "yes"}', "{"]
)
def test_a_body_that_says_nothing_known_is_refused(on: None, client: Any, body: str) -> None:
    store = truth.truthful(FakeStore, "ns")()
    serve(store)
    engine = core(mooncake(client()))
    told = post(engine, "?reset_external=true", body, status=422)
    assert (told["success"], told["reason"]) == (False, "BadRequest")
    assert (store.removed, engine.scheduler.kv_cache_manager.resets) == ([], 0)


@modes("one engine core speaks for all", faulty=not hasattr(AsyncMPClient, "call_utility_all_async"))
def test_every_engine_core_is_listened_to(patched: bool) -> None:
    made = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)

    async def call(method: str, *args: object, engine: bytes) -> bool:
        return engine == b"0"

    made.core_engines, made._call_utility_async = [b"0", b"1"], call
    assert asyncio.run(made.reset_prefix_cache_async(False, True)) is False


def test_the_body_of_several_cores_says_what_all_of_them_did(on: None) -> None:
    from moontide_engine.patches.reset_truth_front import merged

    good = {"success": True, "cleared": ["local", "external"], "removed": 3, "reason": "", "message": ""}
    bad = {"success": False, "cleared": [], "removed": None, "reason": "BlocksHeld", "message": "held"}
    assert merged([good, good]) == {"success": True, "cleared": ["local", "external"], "removed": 6}
    assert merged([good, bad]) == {
        "success": False,
        "cleared": [],
        "removed": 3,
        "reason": "BlocksHeld",
        "message": "held",
    }
    assert merged([])["success"] is False


def test_the_routes_of_the_patched_router_are_the_stock_ones(on: None) -> None:
    paths = sorted(route.path for route in router.router.routes)
    assert paths == ["/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache"]
