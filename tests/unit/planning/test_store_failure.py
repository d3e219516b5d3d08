"""``onStoreFailure``: what a store that does not answer holds up."""

from __future__ import annotations

import pytest

from moontide.planning.model import Collect, Wipe
from tests.unit.planning.test_protocol import settled, steps
from tests.unit.planning.world import World


def changed(fences: bool = True, **spec: object) -> World:
    """The store goes down in a change, when all are quiesced and their puts have ended."""
    world = settled(fences=fences, **spec)
    world.push_weights("2")
    world.bump("2")
    world.turn()
    world.turn()
    world.upload()
    world.store_up = False
    return world


def turns(world: World, count: int = 12) -> list[str]:
    seen = []
    for _ in range(count):
        seen += steps(world.turn())
        world.serve()
        world.pass_time(0.5)
    return seen


def old_keys(world: World) -> int:
    return sum(epoch < world.status.epoch for kvs in world.store.values() for _, epoch in kvs)


def test_detach_serves_on_and_collects_later() -> None:
    world = changed()
    seen = turns(world)
    assert world.condition("Current") == ("True", "Current")
    assert world.condition("Degraded") == ("True", "StoreUnavailable")
    assert "Wipe" not in seen
    assert old_keys(world)
    world.store_up = True
    turns(world)
    assert not old_keys(world)
    assert world.condition("Degraded") == ("False", "AsExpected")


def test_hold_waits_for_the_verified_removal() -> None:
    world = changed(onStoreFailure="Hold")
    seen = turns(world)
    assert not {"admit", "resume"} & set(seen)
    assert {p.engine.state for p in world.pods} == {"paused"}
    assert world.condition("Current") == ("False", "StoreUnavailable")
    message = next(c.message for c in world.status.conditions if c.type == "Current")
    assert "Detach" not in message
    world.store_up = True
    seen = turns(world)
    assert seen.index("Wipe") < seen.index("admit") < seen.index("resume")
    assert not old_keys(world)
    assert world.condition("Current") == ("True", "Current")
    update = world.status.last_update
    assert update is not None
    assert update.drained_at is not None
    assert update.wiped_at is not None
    assert update.resumed_at is not None
    assert update.wiped_at <= update.resumed_at
    assert update.keys_removed


def test_hold_drains_first_so_that_nothing_old_comes_later() -> None:
    world = settled(fences=True, onStoreFailure="Hold")
    assert any(p.engine.queue for p in world.pods)
    world.push_weights("2")
    world.bump("2")
    seen = [sorted(set(steps(world.turn()))) for _ in range(8)]
    assert seen == [[], ["quiesce"], ["drain"], ["reset"], ["Wipe"], ["admit"], ["resume"], []]
    assert not any(p.engine.queue for p in world.pods)
    # It is still a fleet whose keys carry the epoch.
    assert [member.salted for member in world.status.members] == [True]
    assert all(p.engine.salt == f"policy/{world.status.epoch}" for p in world.pods)


def test_hold_waits_for_an_engine_that_may_still_write() -> None:
    world = settled(fences=True, onStoreFailure="Hold", onReplicaFailure="Isolate")
    world.pod(0).engine.hung = True
    world.push_weights("2")
    world.bump("2")
    for _ in range(100):
        assert not any(isinstance(a, Wipe | Collect) for a in world.turn().actions)
        world.pass_time(1)
    assert world.condition("Current") == ("False", "ReplicaUnreachable")
    world.remove(world.pod(0))
    world.push_weights("2")
    world.run()
    assert world.condition("Current") == ("True", "Current")


def test_hold_with_requests_that_would_be_kept_waits_for_them() -> None:
    world = settled(fences=True, onStoreFailure="Hold", runningRequests="Keep")
    world.pod(0).engine.running = 2
    world.push_weights("2")
    world.bump("2")
    turns(world)
    assert {p.engine.state for p in world.pods} == {"paused"}
    world.pod(0).engine.running = 0
    turns(world)
    assert world.condition("Current") == ("True", "Current")


def test_a_plain_fleet_waits_either_way_and_says_so() -> None:
    world = changed(fences=False)
    assert "admit" not in turns(world)
    assert world.condition("Current") == ("False", "StoreUnavailable")
    message = next(c.message for c in world.status.conditions if c.type == "Current")
    assert "with onStoreFailure Detach, too" in message
    world.store_up = True
    turns(world)
    assert world.condition("Current") == ("True", "Current")


def test_hold_stops_nobody_who_serves_in_the_epoch_already() -> None:
    world = changed()
    turns(world)
    world.bump("2", on_store_failure="Hold")
    seen = turns(world)
    assert set(seen) == {"Collect"}
    assert {p.engine.state for p in world.pods} == {"open"}
    world.push_weights("3")
    world.bump("3")
    assert "resume" not in turns(world)
    assert {p.engine.state for p in world.pods} == {"paused"}


def test_hold_in_the_midst_of_a_change_leaves_a_fleet_alone_that_is_done_with_it() -> None:
    """Its old keys are gone, and the one that is closed writes what nobody finds."""
    world = settled(fences=True, onReplicaFailure="Isolate")
    world.add_fleet("late", 1)
    world.run()
    late = world.fleets["late"][0]
    closed = world.pod(0)
    closed.engine.core_hung = True
    world.push_weights("2")
    late.engine.running = 1
    world.bump("2")
    for _ in range(60):
        world.turn()
        world.pass_time(1)
    closed.engine.core_hung = False
    closed.engine.weights = "other"
    assert (closed.engine.state, closed.engine.clean, late.engine.state) == ("closed", False, "paused")
    assert world.status.last_update is not None
    assert world.status.last_update.resumed_at is None
    world.bump("2", on_store_failure="Hold")
    for _ in range(12):
        world.turn()
        assert world.pod(1).engine.state == "open"
        world.pass_time(0.5)


def test_detach_lets_those_go_who_are_held() -> None:
    world = changed(onStoreFailure="Hold")
    turns(world)
    world.bump("2", on_store_failure="Detach")
    turns(world)
    assert world.condition("Current") == ("True", "Current")
    assert {p.engine.state for p in world.pods} == {"open"}


def test_newcomers_are_admitted_after_the_removal_and_not_before() -> None:
    world = changed(onStoreFailure="Hold")
    turns(world)
    pod = world.add_pod("tiny")
    world.give_weights(pod, "2")
    assert "admit" not in turns(world)
    world.store_up = True
    turns(world)
    assert pod.engine.state == "open"
    world.store_up = False
    pod = world.add_pod("tiny")
    world.give_weights(pod, "2")
    turns(world)
    assert pod.engine.state == "open"


@pytest.mark.parametrize("crash", range(4))
def test_hold_under_another_operator(crash: int) -> None:
    world = settled(fences=True, onStoreFailure="Hold")
    world.push_weights("2")
    world.bump("2")
    for _ in range(8):
        world.turn(crash_after=crash)
        open_again = [p for p in world.pods if p.engine.state == "open" and p.engine.epoch == world.status.epoch]
        assert not (open_again and old_keys(world))
        world.pass_time(0.1)
    turns(world)
    assert world.condition("Current") == ("True", "Current")
