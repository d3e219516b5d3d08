"""What can wait while engines are told something does, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moontide import app
from moontide.errors import Retry
from moontide.handlers.loops import Key
from moontide.reconcile import quiet, rounds
from moontide.reconcile.quiet import Quiet
from tests.unit.operator.test_rounds import BARRIER, World


@pytest.fixture(name="world")
async def _world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    for _ in range(3):
        await made.run()
    async with made.http:
        yield made


async def test_waits_for_the_last_of_those_who_tell_engines_something() -> None:
    made = Quiet()
    await made.wait()
    made.begin()
    made.begin()
    waiting = asyncio.ensure_future(made.wait())
    for _ in range(2):
        await asyncio.sleep(0)
        assert not waiting.done()
        made.end()
    await waiting


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "WAIT_SECONDS", 0.01)
    made = Quiet()
    made.begin()
    await made.wait()


async def test_fleets_and_pools_wait_and_policies_do_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    async def counted(_: object, key: Key) -> float:
        ran.append(key.kind)
        return 0.0

    monkeypatch.setattr(app, "reconcile", counted)
    begun, kinds = asyncio.Event(), ("InferenceDeployment", "KVCachePool", "PolicyVersion")
    world.ctx.quiet.begin()
    running = [asyncio.ensure_future(app.run_one(world.ctx, world.ctx, begun, Key(kind, "rl", "x"))) for kind in kinds]
    begun.set()
    await running[-1]
    assert ran == ["PolicyVersion"]
    world.ctx.quiet.end()
    await asyncio.gather(*running)
    assert sorted(ran) == sorted(kinds)


class Watch:
    """Notes at each request to an engine whether others had to wait then."""

    def __init__(self, world: World) -> None:
        self.seen: list[tuple[str, bool]] = []
        self._handle, self._ctx = world.network.handle_async_request, world.ctx
        world.network.handle_async_request = self._noted  # type: ignore[method-assign]

    async def _noted(self, request: httpx.Request) -> httpx.Response:
        others = asyncio.ensure_future(self._ctx.quiet.wait())
        await asyncio.sleep(0)
        self.seen.append((request.url.path.rpartition("/")[2], not others.done()))
        others.cancel()
        return await self._handle(request)


async def test_others_wait_from_the_first_command_to_the_last_and_no_longer(world: World) -> None:
    world.bump()
    watch = Watch(world)
    await world.run()
    assert world.states == [("open", 2)] * 2
    commands = [waited for step, waited in watch.seen if step in BARRIER]
    assert commands == [True] * 4
    assert not any(waited for step, waited in watch.seen if step == "status")
    await asyncio.wait_for(world.ctx.quiet.wait(), quiet.WAIT_SECONDS / 2)


async def test_a_run_that_fails_lets_the_others_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> bool:
        raise Retry(1.0, "the API server is away")

    monkeypatch.setattr(world.kube, "apply_policy_status", refused)
    world.bump()
    with pytest.raises(Retry):
        await world.run()
    await asyncio.wait_for(world.ctx.quiet.wait(), quiet.WAIT_SECONDS / 2)


async def test_whoever_took_longest_is_told_first(world: World) -> None:
    for slow in ("10.0.0.2", "10.0.0.1"):
        for pod in world.kube.pods:
            assert pod.metadata is not None
            assert pod.status is not None
            world.ctx.pace[pod.metadata.uid or ""] = 2.0 if pod.status.pod_ip == slow else 1.0
        world.bump()
        await world.run()
        first = next(each for each in world.asked if "quiesce" in each)
        assert slow in first


async def test_what_takes_long_to_read_is_read_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of thousands of pods must not come between the two calls of a pause."""
    monkeypatch.setattr(rounds, "RECENT_SECONDS", 0.0)
    read, reads = rounds.roster, []

    async def slowly(*given: Any) -> Any:
        reads.append(given)
        await asyncio.sleep(0.5)
        return await read(*given)

    world.bump()
    await world.run()
    often = len(reads)
    monkeypatch.setattr(rounds, "roster", slowly)
    world.bump()
    await world.run()
    assert (often, len(reads)) == (0, 1)
