"""Lookups with vLLM's own client and server over a real socket, and with its scheduler; only the store is a stub."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corekit as kit
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as module
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.serial_utils import MsgpackEncoder

from moontide_engine.patches import lookup_channel, reset_truth, store_reset
from moontide_engine.patches import lookup_economy as economy

kit.quietly("vllm.v1.core.sched.scheduler")
HASHES = [bytes([i]) * 32 for i in range(16)]
TOKENS = 16 * 16
HELLO = (bytes(4), *MsgpackEncoder().encode([]))
"""A message that every server answers: of a lookup of no tokens where there is nothing else, else of no known kind."""
BOUND = 20.0
"""Seconds after which a test gives up on something."""


PATCHES = (store_reset.PATCH, economy.PATCH)
THREADED = hasattr(module.LookupKeyClient, "_lookup")
"""Whether stock vLLM asks in a thread, and so can have an answer in flight."""


def both(reason: str, faulty: bool = True) -> Any:
    """Run with and without the patch; without it the test fails, for that reason, where the release has the fault."""
    return pytest.mark.parametrize("patched", [kit.off(reason) if faulty else pytest.param(False, id="off"), kit.ON])


class StubWorker:
    """What LookupKeyServer needs of the worker."""

    def __init__(self) -> None:
        self.kv_send_thread = None
        self.store = SimpleNamespace(remove_all=lambda force: 0)
        self.calls = 0
        self.hits = TOKENS
        self.seconds = 0.0
        self.go = threading.Event()
        self.go.set()

    def lookup(self, num_tokens: int, block_hashes: Sequence[bytes]) -> Any:
        if not num_tokens:
            return 0
        self.calls += 1
        hits = self.hits
        time.sleep(self.seconds)
        assert self.go.wait(BOUND * 3)
        return getattr(data, "MooncakeLookupResult", int)(hits)


class Channel:
    """Servers and clients of one test, and their orderly end."""

    def __init__(self) -> None:
        self.config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, data_parallel_rank=0, local_engines_only=False),
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config={"lookup_rpc_port": str(random.randrange(10**9))}
            ),
        )
        self.worker = StubWorker()
        self.servers: list[tuple[Any, Any]] = []
        self.clients: list[Any] = []

    def server(self, worker: StubWorker | None = None) -> Any:
        made = module.LookupKeyServer(worker or self.worker, self.config)
        # A connection of its own, by which it can be ended even after another server took the path.
        control = make_zmq_socket(made.ctx, module.get_zmq_rpc_path_lookup(self.config), module.zmq.REQ, bind=False)
        self.servers.append((made, control))
        control.send_multipart(HELLO)
        assert control.poll(BOUND * 1000)
        control.recv()
        return made

    def client(self) -> Any:
        made = module.LookupKeyClient(self.config)
        self.clients.append(made)
        return made

    def close(self) -> None:
        self.worker.go.set()
        for client in self.clients:
            if hasattr(client, "executor"):
                client.executor.shutdown(wait=True, cancel_futures=True)
            client.close()
        for server, control in self.servers:
            # Its loop looks only after a message whether it is to end.
            server.running = False
            control.send_multipart(HELLO)
            server.thread.join(BOUND)
            assert not server.thread.is_alive()
            control.close(linger=0)
            server.close()
        for owner in [*self.clients, *(server for server, _ in self.servers)]:
            owner.ctx.destroy(linger=0)


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., contextlib.AbstractContextManager[Channel]]:
    """Makes a channel, with the patch or without, and with the given settings."""

    @contextlib.contextmanager
    def make(patched: bool = True, timeout: float = 5.0, memo: float = 60.0) -> Iterator[Channel]:
        monkeypatch.setenv("MOONTIDE_LOOKUP_TIMEOUT_SECONDS", str(timeout))
        monkeypatch.setenv("MOONTIDE_LOOKUP_MEMO_SECONDS", str(memo))
        with kit.installed(*PATCHES, on=patched):
            made = Channel()
            try:
                yield made
            finally:
                made.close()

    return make


def lookup(client: Any, name: str, hashes: Sequence[bytes], tokens: int, non_block: bool) -> int | None:
    """One call; None: there is no answer yet."""
    if not hasattr(client, "_lookup"):
        return int(client.lookup(tokens, list(hashes)))
    result = client.lookup(name, tokens, list(hashes), non_block=non_block)
    return None if result is None else lookup_channel.hits(result)


def get(client: Any, name: str, hashes: Sequence[bytes] = HASHES, tokens: int = TOKENS, non_block: bool = False) -> int:
    """Tokens of the hit, after as many calls as the mode needs."""
    end = time.monotonic() + BOUND
    while time.monotonic() < end:
        result = lookup(client, name, hashes, tokens, non_block)
        if result is not None:
            return result
        time.sleep(0.001)
    raise AssertionError("no answer")


def eventually(check: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND
    while not check():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


# -- memo ----------------------------------------------------------------------------------------------------------


@both("one lookup a step")
@pytest.mark.parametrize("non_block", [False, True])
def test_a_waiting_request_is_looked_up_once(channel: Any, patched: bool, non_block: bool) -> None:
    with channel(patched) as made:
        made.server()
        client = made.client()
        start = time.monotonic()
        assert {get(client, "r", non_block=non_block) for _ in range(260)} == {TOKENS}
        took = time.monotonic() - start
        print(f"{made.worker.calls} lookups in 260 steps, {took / 260 * 1e6:.0f} us a step")
        assert made.worker.calls == 1


@both("one lookup a step of the blocked request")
def test_a_blocked_head_of_line_request_is_looked_up_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
    monkeypatch.setenv("MOONTIDE_LOOKUP_MEMO_SECONDS", "300")
    first, blocked = kit.prompt(1, 400), kit.prompt(2, 300)
    with kit.installed(*PATCHES, on=patched):
        store = kit.SimStore()
        seed = kit.Core(tiny, store=store)
        seed.ask("seed", blocked)
        seed.settle()
        core = kit.Core(tiny, store=store, num_gpu_blocks_override=41, max_model_len=608, max_num_batched_tokens=608)
        before = store.lookups
        core.add("first", first, 200)
        core.step()
        core.add("blocked", blocked)
        steps = core.run()
        lookups = store.lookups - before
        print(f"{lookups} lookups in {steps} steps for two requests")
        assert core.tokens["blocked"] == kit.cold("a", blocked, 4)
        assert store.loaded > 0
        assert steps > 190
        assert lookups <= 2
        client = core.scheduler.connector.connector_scheduler.client
        assert not client.futures
        assert len(client.moontide_economy.memo) == 0


def test_a_failed_load_is_looked_up_anew_and_abort_forgets(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONTIDE_LOOKUP_MEMO_SECONDS", "300")
    text = kit.prompt(3)
    with kit.installed(*PATCHES):
        store = kit.SimStore(promise=True)
        core = kit.Core(tiny, store=store, num_gpu_blocks_override=41, max_model_len=608)
        core.add("r", text)
        for _ in range(50):
            core.step()
            if store.failed:
                break
        assert store.failed
        store.promise = False
        core.run()
        assert core.tokens["r"] == kit.cold("a", text, 4)
        assert store.lookups == 2

        client = core.scheduler.connector.connector_scheduler.client
        core.add("holds the blocks", kit.prompt(4, 400), 100)
        core.step()
        core.add("gone", kit.prompt(5, 300))
        core.step(3)
        assert list(client.futures) == ["gone"]
        core.core.abort_requests(["gone"])
        core.tokens.pop("gone")
        core.step(2)
        assert not client.futures
        assert len(client.moontide_economy.memo) == 0


def test_memo_ends_with_the_question_discard_reset_and_time(channel: Any) -> None:
    with channel(memo=60.0) as made:
        made.server()
        client = made.client()
        worker = made.worker

        def asked(**changes: Any) -> int:
            before = worker.calls
            assert get(client, "r", **changes) == worker.hits
            return int(worker.calls - before)

        assert [asked(), asked()] == [1, 0]
        other = [*HASHES[:-1], b"x" * 32]
        worker.hits = 16
        assert [asked(hashes=other), asked(hashes=other)] == [1, 0]
        assert [asked(hashes=other, tokens=TOKENS + 1), asked(hashes=other, tokens=TOKENS + 1)] == [1, 0]
        assert [asked(), asked()] == [1, 0]
        client.discard("r")
        assert [asked(), asked()] == [1, 0]
        scheduler = MooncakeStoreScheduler.__new__(MooncakeStoreScheduler)
        scheduler.client = client
        assert scheduler.reset_store()
        worker.hits = 0
        assert [asked(), asked()] == [1, 0]
    with channel(memo=0.0) as made:
        made.server()
        client = made.client()
        assert [get(client, "r", non_block=mode) for mode in (False, True) * 3] == [TOKENS] * 6
        assert made.worker.calls == 6


@pytest.mark.parametrize("first", [True, False])
def test_a_reset_ends_the_memo_whichever_patch_comes_first(channel: Any, first: bool) -> None:
    patches = [economy.PATCH, reset_truth.PATCH]
    ordered = patches if first else reversed(patches)
    with kit.installed(store_reset.PATCH, *ordered), channel(patched=False) as made:
        made.server()
        client = made.client()
        assert [get(client, "r"), get(client, "r")] == [TOKENS, TOKENS]
        assert made.worker.calls == 1
        scheduler = MooncakeStoreScheduler.__new__(MooncakeStoreScheduler)
        scheduler.client = client
        assert scheduler.reset_store()
        made.worker.hits = 0
        assert get(client, "r") == 0


@both("the answer to the old hashes", faulty=THREADED)
def test_an_answer_in_flight_is_not_taken_for_changed_hashes(channel: Any, patched: bool) -> None:
    with channel(patched) as made:
        made.server()
        client = made.client()
        made.worker.seconds = 0.2
        lookup(client, "r", HASHES, TOKENS, True)
        made.worker.seconds = 0
        eventually(lambda: not hasattr(client, "futures") or client.futures["r"].done())
        made.worker.hits = 0
        assert get(client, "r", hashes=[b"new" * 8] * 16, non_block=True) == 0


# -- breaker -------------------------------------------------------------------------------------------------------


@both("each request waits for the dead master")
@pytest.mark.parametrize("seconds", [0.35, 0.9], ids=["slow-and-empty", "over-the-timeout"])
def test_a_dead_master_costs_the_scheduler_two_lookups(channel: Any, patched: bool, seconds: float) -> None:
    with channel(patched, timeout=0.6) as made:
        made.server()
        made.worker.seconds, made.worker.hits = seconds, 0
        client = made.client()
        start = time.monotonic()
        assert {get(client, f"r{i}") for i in range(6)} == {0}
        took = time.monotonic() - start
        print(f"6 requests, {seconds} s a lookup: {took:.2f} s in the scheduler, {made.worker.calls} lookups")
        assert made.worker.calls <= 2


@both("recv has no bound")
def test_a_hanging_worker_does_not_hold_the_scheduler(channel: Any, patched: bool) -> None:
    with channel(patched, timeout=0.3) as made:
        made.server()
        made.worker.go.clear()
        client = made.client()
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.extend(get(client, f"r{i}") for i in range(10)), daemon=True)
        start = time.monotonic()
        thread.start()
        thread.join(5.0)
        took = time.monotonic() - start
        print(f"{len(answers)} of 10 answers after {took:.2f} s")
        made.worker.go.set()
        ended = list(answers)
        thread.join(BOUND)
        assert ended == [0] * 10


def test_queued_lookups_do_not_wait_for_a_hanging_worker_one_after_the_other(channel: Any) -> None:
    with channel(timeout=0.3) as made:
        made.server()
        made.worker.go.clear()
        client = made.client()
        names = [f"r{i}" for i in range(50)]
        assert {client.lookup(name, TOKENS, list(HASHES), non_block=True) for name in names} == {None}
        start = time.monotonic()
        assert {get(client, name, non_block=True) for name in names} == {0}
        took = time.monotonic() - start
        print(f"50 queued lookups ended in {took:.2f} s")
        assert took < 0.3 * 50 / 2
        assert not client.futures


def test_it_comes_back_by_itself_and_says_so(channel: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with channel(timeout=0.3) as made:
        made.server()
        made.worker.go.clear()
        client = made.client()
        assert [get(client, f"r{i}") for i in range(3)] == [0] * 3
        made.worker.go.set()
        opened = time.monotonic()
        numbers = iter(range(100_000))
        longest = 0.0

        def back() -> bool:
            nonlocal longest
            start = time.monotonic()
            hits = get(client, f"again{next(numbers)}")
            longest = max(longest, time.monotonic() - start)
            return hits == TOKENS

        eventually(back)
        print(f"back {time.monotonic() - opened:.2f} s after it opened; longest call {longest * 1e3:.1f} ms")
        assert get(client, "r0") == TOKENS
    lines = capfd.readouterr().err
    assert "lookups-suspended" in lines
    assert '"seconds": 1.0' in lines
    assert "lookups-resumed" in lines


def test_who_waits_for_the_answer_asks_itself_unless_the_thread_is_busy(channel: Any) -> None:
    with channel(timeout=0.3) as made:
        made.server()
        client = made.client()
        asked: list[int] = []
        inner = client._lookup
        client._lookup = lambda *of: (asked.append(threading.get_ident()), inner(*of))[1]
        assert get(client, "r") == TOKENS
        assert asked == [threading.get_ident()]
        go = threading.Event()
        client.executor.submit(go.wait, BOUND)
        try:
            # The socket is another's: nothing is asked, and the wait for it is bounded.
            assert get(client, "behind") == 0
            assert len(asked) == 1
        finally:
            go.set()
        eventually(client.executor.idle)
        assert get(client, "after") == TOKENS
        assert asked[-1] == threading.get_ident()


def test_a_late_answer_is_not_taken_for_the_next_one(channel: Any) -> None:
    with channel(timeout=1.0) as made:
        made.server()
        client = made.client()
        made.worker.go.clear()
        assert get(client, "late") == 0
        eventually(lambda: made.worker.calls == 1)
        made.worker.hits = 7 * 16
        made.worker.go.set()
        assert get(client, "next") == 7 * 16
        assert made.worker.calls == 2
        # The channel serves a reset as before, with no bound of ours left on it.
        assert client.reset()
        assert client.socket.getsockopt(module.zmq.RCVTIMEO) == -1


def test_without_a_worker_lookups_miss_and_then_find_it(channel: Any) -> None:
    with channel(timeout=0.3) as made:
        client = made.client()
        assert get(client, "early") == 0
        made.server()
        eventually(lambda: get(client, "later") == TOKENS)


# -- guard ---------------------------------------------------------------------------------------------------------


@both("the second replica unlinks the socket of the first, whose requests it then answers")
def test_two_replicas_of_one_host_need_two_ports(channel: Any, patched: bool) -> None:
    with channel(patched) as made:
        made.server()
        second = StubWorker()
        second.hits = 16
        with (
            contextlib.nullcontext()
            if not patched
            else pytest.raises(RuntimeError, match=r"different .*lookup_rpc_port")
        ):
            made.server(second)
        assert get(made.client(), "r") == TOKENS
        assert second.calls == 0


def test_a_socket_that_a_dead_process_left_is_no_obstacle(channel: Any) -> None:
    with channel() as made:
        path = module.get_zmq_rpc_path_lookup(made.config).removeprefix("ipc://")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
            dead.listen()
        assert Path(path).exists()
        made.server()
        assert get(made.client(), "r") == TOKENS
