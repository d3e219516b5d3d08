"""What can wait while engines are told something does, and not for ever."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from moontide import app
from moontide.handlers.loops import Key
from moontide.reconcile import quiet
from moontide.reconcile.quiet import Quiet
from tests.unit.operator.doubles import Cluster


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


async def test_fleets_and_pools_wait_and_policies_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    async def counted(_: object, key: Key) -> float:
        ran.append(key.kind)
        return 0.0

    monkeypatch.setattr(app, "reconcile", counted)
    world = Cluster(tmp_path)
    begun, kinds = asyncio.Event(), ("InferenceDeployment", "KVCachePool", "PolicyVersion")
    world.ctx.quiet.begin()
    running = [asyncio.ensure_future(app.run_one(world.ctx, world.ctx, begun, Key(kind, "rl", "x"))) for kind in kinds]
    begun.set()
    await running[-1]
    assert ran == ["PolicyVersion"]
    world.ctx.quiet.end()
    await asyncio.gather(*running)
    assert sorted(ran) == sorted(kinds)


@pytest.fixture
def _collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.mark.usefixtures("_collecting")
async def test_cycles_are_not_looked_for_while_engines_are_told_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "WAIT_SECONDS", 30.0)
    made = Quiet(collects=False)
    made.begin()
    made.begin()
    made.end()
    assert not gc.isenabled()
    made.end()
    assert gc.isenabled()
    made.begin()
    made.end()
    assert gc.isenabled()


@pytest.mark.usefixtures("_collecting")
async def test_cycles_are_looked_for_again_although_a_replica_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "WAIT_SECONDS", 0.01)
    made = Quiet(collects=False)
    made.begin()
    async with asyncio.timeout(10):
        while not gc.isenabled():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    made.end()


@pytest.mark.usefixtures("_collecting")
async def test_the_bound_of_one_pause_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Quiet(collects=False)
    monkeypatch.setattr(quiet, "WAIT_SECONDS", 0.05)
    made.begin()
    made.end()
    monkeypatch.setattr(quiet, "WAIT_SECONDS", 30.0)
    made.begin()
    await asyncio.sleep(0.2)
    assert not gc.isenabled()
    made.end()
    assert gc.isenabled()


@pytest.mark.usefixtures("_collecting")
async def test_only_what_is_of_the_process_decides_about_cycles() -> None:
    made = Quiet()
    made.begin()
    assert gc.isenabled()
    made.end()
