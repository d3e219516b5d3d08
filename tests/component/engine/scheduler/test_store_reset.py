"""Patch store-reset: what upstream's Mooncake store connector does at a reset since 0.23. Off must fail before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corekit as kit
import httpx
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as store_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import scheduler as store_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as store_worker
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackEncoder

from moontide_engine.patches import lookup_channel, reset_truth_front, store_reset

Scheduler = kit.quietly("vllm.v1.core.sched.scheduler").Scheduler
HASHES = [bytes([i]) * 32 for i in range(4)]
HELLO = (bytes(4), *MsgpackEncoder().encode([]))
"""A message that every server answers: a lookup of no tokens where there is nothing else, else one of no known kind."""


def both(reason: str, raises: Any = AssertionError) -> Any:
    """Run with and without the patch; before 0.23 it fails without, for that reason."""
    return pytest.mark.parametrize("patched", [kit.off(reason, raises, store_reset.PATCH), kit.ON], indirect=True)


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(store_reset.PATCH, on=request.param):
        yield request.param


class Client:
    """The lookup client: the worker says ``says``, or cannot be asked."""

    def __init__(self, says: bool | Exception) -> None:
        self.says = says
        self.resets = 0

    def reset(self) -> bool:
        self.resets += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def connector(client: Any, role: Any = KVConnectorRole.SCHEDULER) -> Any:
    """vLLM's connector and its scheduler half, with what a reset touches."""
    made = store_connector.MooncakeStoreConnector.__new__(store_connector.MooncakeStoreConnector)
    made._role, made._kv_cache_events, made.connector_worker = role, "events", None
    made.connector_scheduler = None
    if role == KVConnectorRole.SCHEDULER:
        made.connector_scheduler = store_scheduler.MooncakeStoreScheduler.__new__(
            store_scheduler.MooncakeStoreScheduler
        )
        made.connector_scheduler.client = client
        made.connector_scheduler.load_specs = {"r": "promised"}
    return made


def core(attached: Any) -> Any:
    """vLLM's engine core around its scheduler, with what a reset touches."""
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.connector, scheduler.aux_output_connector = attached, None
    scheduler.kv_cache_manager = SimpleNamespace(reset_prefix_cache=lambda: True)
    scheduler.running, scheduler.requests, scheduler.prev_step_scheduled_req_ids = [], {}, set()
    scheduler.log_stats, scheduler.connector_prefix_cache_stats = True, SimpleNamespace(reset=False)
    scheduler.finish_requests = lambda *_: []
    scheduler.set_pause_state = lambda state: None
    made = EngineCore.__new__(EngineCore)
    made.scheduler = scheduler
    made.calls = []
    made.reset_mm_cache = lambda: made.calls.append("mm")
    made.reset_encoder_cache = lambda: made.calls.append("encoder")
    made.model_executor = SimpleNamespace(
        collective_rpc=lambda *_: [], sleep=lambda level: made.calls.append("asleep"), is_sleeping=False
    )
    return made


# -- the connector -----------------------------------------------------------------------------------------------------


@both("it resets nothing, and says neither yes nor no")
@pytest.mark.parametrize(("says", "result"), [(True, True), (False, False), (ConnectionError("gone"), False)])
def test_the_scheduler_role_asks_its_channel_and_passes_on_what_it_says(
    patched: bool, says: bool | Exception, result: bool
) -> None:
    client = Client(says)
    made = connector(client)
    assert made.reset_cache() is result
    assert client.resets == 1
    assert made.connector_scheduler.load_specs == {}
    assert made._kv_cache_events is None


@pytest.mark.parametrize("patched", [False, True], ids=["off", "on"], indirect=True)
def test_the_worker_role_has_no_part_in_it(patched: bool) -> None:
    made = connector(None, KVConnectorRole.WORKER)
    assert made.reset_cache() is None
    assert made._kv_cache_events == "events"


# -- the engine --------------------------------------------------------------------------------------------------------


@both("success, and nobody asked the store")
@pytest.mark.parametrize("says", [True, False])
def test_a_reset_of_the_external_cache_reaches_the_store(patched: bool, says: bool) -> None:
    client = Client(says)
    engine = core(connector(client))
    assert engine.reset_prefix_cache(False, True) is says
    assert client.resets == 1
    assert engine.scheduler.connector_prefix_cache_stats.reset is says


@both("without a connector it is a failure")
def test_without_a_connector_it_is_a_success_with_a_debug_line(patched: bool) -> None:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    loggers = [logging.getLogger("moontide"), kit.quietly("vllm.v1.core.sched.scheduler").logger]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        assert core(None).reset_prefix_cache(False, True) is True
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
    assert [line.levelname for line in lines if "connector" in line.getMessage()] == ["DEBUG"]


def test_a_reset_of_the_local_cache_alone_leaves_the_store_alone() -> None:
    client = Client(True)
    with kit.installed(store_reset.PATCH):
        assert core(connector(client)).reset_prefix_cache(False, False) is True
    assert client.resets == 0


@both("a pause or a sleep leaves the store as it was")
@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_the_end_of_a_pause_or_sleep_resets_the_store(patched: bool, how: str) -> None:
    client = Client(True)
    engine = core(connector(client))
    if how == "sleep":
        engine.sleep(1)
    else:
        engine.pause_scheduler("abort")
    assert client.resets == 1
    assert engine.calls == ["mm", "encoder", *(["asleep"] if how == "sleep" else [])]


@pytest.mark.parametrize("patched", [False, True], ids=["off", "on"], indirect=True)
def test_a_pause_without_a_connector_and_one_that_keeps_the_caches(patched: bool) -> None:
    engine = core(None)
    engine.pause_scheduler("abort")
    assert engine.calls == ["mm", "encoder"]
    client = Client(True)
    core(connector(client)).pause_scheduler("abort", False)
    assert client.resets == 0


def test_the_route_takes_the_external_cache() -> None:
    fastapi = kit.quietly("fastapi")
    asked: list[tuple[bool, bool]] = []

    async def reset(running: bool = False, external: bool = False) -> bool:
        asked.append((running, external))
        return True

    async def post() -> int:
        app = fastapi.FastAPI()
        app.include_router(reset_truth_front.router().router)
        app.state.engine_client = SimpleNamespace(reset_prefix_cache=reset)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            return (await http.post("/reset_prefix_cache?reset_external=true")).status_code

    with kit.installed(store_reset.PATCH):
        assert asyncio.run(post()) == 200
    assert asked == [(False, True)]


@both("the blocks of before still hit")
def test_after_a_reset_the_blocks_of_before_hit_no_more(tiny: Path, patched: bool) -> None:
    store = kit.SimStore()
    text = kit.prompt(1)
    engine = kit.Core(tiny, store=store)
    engine.ask("before", text)
    engine.settle()
    client = engine.scheduler.connector.connector_scheduler.client
    client.reset = lambda: store.blocks.clear() is None
    assert store.blocks
    assert engine.core.reset_prefix_cache(False, True) is True
    engine.ask("after", text)
    assert store.loaded == 0
    assert engine.tokens["after"] == engine.tokens["before"]


# -- the channel -------------------------------------------------------------------------------------------------------


class Worker:
    """What the lookup server needs of the worker. ``saves`` is the queue of its thread."""

    def __init__(self, code: int | Exception = 3) -> None:
        self.code = code
        self.saves: queue.Queue[str] = queue.Queue()
        self.kv_send_thread = SimpleNamespace(request_queue=self.saves)
        self.store = SimpleNamespace(remove_all=self._remove_all)
        self.removed: list[int] = []
        self.asked: list[tuple[int, list[bytes]]] = []

    def _remove_all(self, force: bool = False) -> int:
        self.removed.append(self.saves.unfinished_tasks)
        if isinstance(self.code, Exception):
            raise self.code
        return self.code

    def lookup(self, num_tokens: int, block_hashes: Any) -> Any:
        self.asked.append((num_tokens, [bytes(value) for value in block_hashes]))
        return lookup_channel.nothing() if num_tokens < 48 else _result(48)


def _result(tokens: int) -> Any:
    return type(lookup_channel.nothing())(tokens)


@contextlib.contextmanager
def channel(worker: Worker) -> Iterator[Any]:
    """vLLM's client of a channel to ``worker``."""
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, data_parallel_rank=0, local_engines_only=False),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"lookup_rpc_port": str(random.randrange(10**9))}),
    )
    server = store_worker.LookupKeyServer(worker, config)
    client = store_worker.LookupKeyClient(config)
    try:
        yield client
    finally:
        # Its loop looks only after a message whether it is to end. It may just have looked: nobody waits for an answer.
        server.running = False
        client.socket.send_multipart(HELLO)
        server.thread.join(20)
        client.close()
        server.close()
        for owner in (client, server):
            owner.ctx.destroy(linger=0)
    assert not server.thread.is_alive()


def ask(client: Any, tokens: int, hashes: list[bytes]) -> int:
    """Tokens that a lookup finds."""
    name = ("r",) if hasattr(client, "discard") else ()
    return lookup_channel.hits(client.lookup(*name, tokens, hashes))


@both("there is no reset on the channel", AttributeError)
def test_a_reset_is_told_from_a_lookup_whatever_comes_before_it(patched: bool) -> None:
    worker = Worker()
    with channel(worker) as client:
        assert ask(client, 64, HASHES) == 48
        assert client.reset() is True
        assert ask(client, 16, HASHES[:1]) == 0
        assert client.reset() is True
        assert ask(client, 48, HASHES[:3]) == 48
        assert worker.asked == [(64, HASHES), (16, HASHES[:1]), (48, HASHES[:3])]
    assert worker.removed == [0, 0]


@both("there is no reset on the channel", AttributeError)
def test_a_store_that_fails_is_a_failure_and_lookups_go_on(patched: bool) -> None:
    with channel(Worker(ValueError("no"))) as client:
        assert client.reset() is False
        assert ask(client, 64, HASHES) == 48


@both("there is no reset on the channel", AttributeError)
def test_saves_of_rank_0_end_before_the_store_is_emptied(patched: bool) -> None:
    worker = Worker()
    worker.saves.put("save")

    def save() -> None:
        time.sleep(0.3)
        worker.saves.task_done()

    thread = threading.Thread(target=save)
    with channel(worker) as client:
        thread.start()
        assert client.reset() is True
        thread.join()
    assert worker.removed == [0]


def test_saves_that_do_not_end_are_a_failure_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours alone: upstream waits for ever, up to the bound of reset-truth."""
    monkeypatch.setenv("MOONTIDE_STORE_TIMEOUT_SECONDS", "0.2")
    worker = Worker()
    worker.saves.put("save")
    with pytest.raises(store_reset.StoreNotReset, match=r"0\.2 s"):
        store_reset._wipe(worker)
    worker.saves.task_done()
    store_reset._wipe(worker)
    worker.code = -900
    with pytest.raises(store_reset.StoreNotReset, match="-900"):
        store_reset._wipe(worker)
    assert worker.removed == [0, 0]


def test_messages_of_no_known_kind_and_lookups_that_fail_get_an_answer() -> None:
    worker = Worker()
    assert store_reset._answer(worker, [b"what"]) == lookup_channel.RESP_ERR
    assert store_reset._answer(worker, [lookup_channel.LOOKUP_MSG, b"1"]) == lookup_channel.RESP_ERR
    assert int.from_bytes(lookup_channel.RESP_ERR, "big") == 0
    assert worker.removed == []
