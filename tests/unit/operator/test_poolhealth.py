"""When a pool is Degraded, what its Events say of it, and its figures for Prometheus."""

from __future__ import annotations

import datetime as dt
from typing import Any

from prometheus_client import generate_latest

from tests.unit.operator.poolworld import NOW, World


def _world(nodes: int = 2, **memory: Any) -> World:
    world = World({"replicas": nodes}, nodes)
    world.body["spec"]["memory"].update(memory)
    world.master(NOW - dt.timedelta(hours=1))
    return world


def _message(world: World) -> str:
    (found,) = (each for each in world.status.conditions if each.type == "Degraded")
    return str(found.message)


def _events(world: World, reason: str) -> list[tuple[str, ...]]:
    return [each for each in world.said if each[:2] == ("event", reason)]


async def test_as_expected() -> None:
    world = _world()
    await world.reconcile()
    assert world.condition("Degraded") == ("False", "AsExpected")
    assert (world.status.segments, world.status.evicted_keys, world.status.master_restarts) == (2, 7, None)


async def test_a_segment_that_is_missing() -> None:
    world = _world(nodes=3)
    await world.reconcile()
    assert world.condition("Degraded") == ("True", "ClientsDropped")
    assert "2 segments are mounted and 3 are expected: 3 of memory nodes" in _message(world)
    assert [each[3] for each in _events(world, "ClientsDropped")] == ["Warning"]
    world.mounted.append("10.0.0.3:1")
    await world.reconcile()
    assert world.condition("Degraded") == ("False", "AsExpected")
    assert [each[3] for each in _events(world, "AsExpected")] == ["Normal"]


async def test_engines_lend_one_segment_a_worker_once_they_have_settled() -> None:
    world = _world(perReplica="64Mi")
    world.fleet("chat", 2, engine={"args": ["--tensor-parallel-size", "2"]})
    await world.reconcile()
    assert "2 segments are mounted and 6 are expected: 2 of memory nodes and 4 of fleet chat" in _message(world)
    world.fleets.clear()
    world.fleet("chat", 2, reason="Updating")
    await world.reconcile()
    assert world.condition("Degraded") == ("False", "AsExpected")


async def test_engines_that_lend_nothing_are_not_counted() -> None:
    world = _world()
    world.fleet("chat", 5)
    await world.reconcile()
    assert world.condition("Degraded") == ("False", "AsExpected")


async def test_a_restart_of_the_master_is_counted_said_and_over_after_a_while() -> None:
    world = _world()
    await world.reconcile()
    world.master(NOW)
    world.now = NOW + dt.timedelta(seconds=3)
    await world.reconcile()
    assert world.condition("Degraded") == ("True", "MasterRestarted")
    assert world.status.master_restarts == 1
    said = [each for each in _events(world, "MasterRestarted") if "40 keys were lost" in each[2]]
    assert [each[3] for each in said] == ["Warning"]
    await world.reconcile()
    assert world.status.master_restarts == 1
    world.now = NOW + dt.timedelta(seconds=121)
    await world.reconcile()
    assert world.condition("Degraded") == ("False", "AsExpected")
    assert world.status.master_restarts == 1


async def test_a_master_that_is_away_is_no_restart_until_it_is_back() -> None:
    world = _world()
    await world.reconcile()
    world.masters.clear()
    await world.reconcile()
    assert world.status.master_restarts is None
    world.master(NOW)
    await world.reconcile()
    assert world.status.master_restarts == 1


async def test_fill_is_said_from_the_watermark_on_and_does_not_flip_with_each_eviction() -> None:
    world = _world()
    for allocated, status in (
        (949, "False"),
        (950, "True"),
        (900, "True"),
        (850, "True"),
        (849, "False"),
        (949, "False"),
    ):
        world.figures["master_allocated_bytes"] = allocated
        await world.reconcile()
        assert world.condition("Degraded")[0] == status, allocated
        if status == "True":
            assert world.condition("Degraded")[1] == "FillAboveWatermark"
            assert "evicts from 95 %" in _message(world)


async def test_a_master_that_does_not_serve_says_nothing() -> None:
    world = _world()
    del world.figures["master_key_count"]
    await world.reconcile()
    assert world.condition("Degraded") == ("Unknown", "MasterNotServing")


async def test_figures_for_prometheus() -> None:
    world = _world()
    await world.reconcile()
    text = generate_latest(world.told.registry).decode()
    for name, value in (("keys", 40), ("segments", 2), ("evicted_keys", 7)):
        assert f'moontide_pool_{name}{{namespace="ns",pool="kv"}} {value}.0' in text
    assert "moontide_pool_master_restarts{" not in text
    del world.figures["master_key_count"]
    await world.reconcile()
    assert "moontide_pool_keys{" not in generate_latest(world.told.registry).decode()
