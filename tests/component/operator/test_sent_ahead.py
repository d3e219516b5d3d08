"""Commands that are sent ahead, to real gates and admin planes behind real HTTP servers: they act on none of it before
it is complete, and a change of policy goes by it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moontide.engines.client import EngineStatus, begin, engine_status, new_http_client, prepare, send
from moontide.engines.wire import Request, Session
from moontide.planning.model import Command, Replica, Step
from moontide.reconcile import policyversion
from tests.component.operator.served import serving, until
from tests.unit.operator.doubles import TOKENS, Cluster, Engine

UID = "uid-rl-chat"
TOKEN = TOKENS.derive(UID)
SERVERS = ["httptools", "h11"]
"""The two that uvicorn has for HTTP/1.1."""


async def opened(http: Session, engine: Engine, address: str) -> Replica:
    """The engine serves in epoch 1."""
    closed = await looked_at(http, address)
    admit = Command(Step.ADMIT, closed, 1, {"version": "7", "salt": "p/1", "resume": True})
    assert (await send(http, admit, TOKEN, 1)).success
    assert engine.state == ("open", 1)
    return await looked_at(http, address)


async def looked_at(http: Session, address: str) -> Replica:
    status = await engine_status(http, address, TOKEN)
    assert isinstance(status, EngineStatus)
    return Replica("r", "pod-uid", UID, address, "c1", True, status=status)


def barrier(replica: Replica, epoch: int) -> tuple[Command, Command]:
    pause = {"mode": "keep", "requestsDuringBarrier": "Queue", "ttlSeconds": 60.0}
    admit = {"version": "8", "salt": f"p/{epoch}", "resume": True}
    return Command(Step.QUIESCE, replica, epoch, pause), Command(Step.ADMIT, replica, epoch, admit)


@pytest.mark.parametrize("server", SERVERS)
async def test_an_engine_does_nothing_of_what_is_sent_ahead_until_it_is_complete(tmp_path: Path, server: str) -> None:
    engine = Engine(tmp_path, "a", TOKEN, key_namespace=UID)
    async with serving(engine, server) as port, new_http_client() as http:
        replica = await opened(http, engine, f"127.0.0.1:{port}")
        quiesce, admit = barrier(replica, 2)
        prepare(http, (quiesce, admit), TOKEN, 1)
        await asyncio.sleep(0.2)
        assert engine.state == ("open", 1)
        assert (await send(http, quiesce, TOKEN, 1)).success
        await asyncio.sleep(0.2)
        assert engine.state == ("paused", 1)
        begin(http, admit, TOKEN, 1)
        await until(lambda: engine.state == ("open", 2))
        result = await send(http, admit, TOKEN, 1)
        assert result.success
        assert result.status is not None
        assert (result.status.state, result.status.epoch) == ("open", 2)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("quiesced", [False, True])
async def test_an_operator_that_ends_in_between_has_told_no_more_than_it_completed(
    tmp_path: Path, server: str, quiesced: bool
) -> None:
    """Its connections close with a request begun and not ended. The engine obeys the next operator."""
    engine = Engine(tmp_path, "a", TOKEN, key_namespace=UID)
    async with serving(engine, server) as port:
        async with new_http_client() as http:
            replica = await opened(http, engine, f"127.0.0.1:{port}")
            quiesce, admit = barrier(replica, 2)
            prepare(http, (quiesce, admit), TOKEN, 1)
            if quiesced:
                assert (await send(http, quiesce, TOKEN, 1)).success
            assert len(http._prepared) == 1
        await asyncio.sleep(0.2)
        assert engine.state == ("paused" if quiesced else "open", 1)
        async with new_http_client() as http:
            for command in barrier(replica, 3):
                assert (await send(http, command, TOKEN, 2)).success
        assert engine.state == ("open", 3)


class World(Cluster):
    """A fleet of eight whose admin planes are behind HTTP."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client = new_http_client()
        self.ctx = replace(self.ctx, http=self.client)
        self.engines: list[Engine] = []

    async def start(self, stack: AsyncExitStack, server: str) -> None:
        """All serve in their first epoch."""
        urls = []
        for number in range(8):
            engine = Engine(self.folder, f"boot-{number}", TOKEN, key_namespace=UID)
            self.engines.append(engine)
            urls.append(f"http://127.0.0.1:{await stack.enter_async_context(serving(engine, server))}")
        self.kube.put("PolicyVersion", "rl", "policy", {"version": 7, "weights": "Unchecked"})
        spec = {"endpoints": {"urls": urls}, "policyRef": {"name": "policy"}}
        self.kube.put("InferenceDeployment", "rl", "chat", spec)
        for _ in range(3):
            await self.run()
        assert self.states == {("open", 1)}

    async def run(self) -> None:
        await policyversion.reconcile(self.ctx, "rl", "policy")

    def bump(self) -> None:
        spec = self.kube.objects["PolicyVersion", "rl", "policy"]["spec"]
        self.kube.put("PolicyVersion", "rl", "policy", {**spec, "version": spec["version"] + 1})

    @property
    def states(self) -> set[tuple[str, int]]:
        return {engine.state for engine in self.engines}


@pytest.mark.parametrize("server", SERVERS)
async def test_a_change_completes_what_it_sent_ahead(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    begun: list[bytes] = []
    begin_one = Session.begin

    def noted(session: Session, request: Request, server_name: str = "") -> None:
        before = len(session._begun)
        begin_one(session, request, server_name)
        begun.extend([request.body] * (len(session._begun) - before))

    monkeypatch.setattr(Session, "begin", noted)
    async with world.client, AsyncExitStack() as stack:
        await world.start(stack, server)
        for epoch in (2, 3, 4):
            begun.clear()
            world.bump()
            await world.run()
            assert world.states == {("open", epoch)}
            assert world.kube.condition("PolicyVersion", "rl", "policy", "Current")[:2] == ("True", "Current")
            # Each was admitted by a byte on the connection on which it was quiesced.
            assert len(begun) == 8
            assert (world.client._prepared, world.client._begun) == ({}, {})


async def test_nobody_serves_the_new_epoch_while_one_is_not_quiesced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although all know the admissions that resume them, but for a byte. They are admitted by other ones."""
    monkeypatch.setattr(policyversion, "PATIENCE_SECONDS", 0.2)
    world = World(tmp_path)
    seen: list[set[tuple[str, int]]] = []
    async with world.client, AsyncExitStack() as stack:
        await world.start(stack, "httptools")
        late, quiesce = asyncio.Event(), world.engines[3].commands._quiesce

        async def slowly(body: Any) -> Any:
            seen.append(world.states)
            await late.wait()
            seen.append(world.states)
            return await quiesce(body)

        monkeypatch.setattr(world.engines[3].commands, "_quiesce", slowly)
        world.bump()
        running = asyncio.ensure_future(world.run())
        try:
            await until(lambda: sum(engine.state == ("paused", 2) for engine in world.engines) == 7)
            await asyncio.sleep(0.5)
            assert world.states == {("open", 1), ("paused", 2)}
        finally:
            late.set()
        await running
        for _ in range(10):
            if world.states != {("open", 2)}:
                await world.run()
        assert world.states == {("open", 2)}
        assert seen
        assert not any(("open", 2) in states for states in seen)
