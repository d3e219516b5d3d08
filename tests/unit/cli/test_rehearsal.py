"""A dry run asks for just what the planner then asks for when it is done."""

from __future__ import annotations

from typing import Any

import pytest

from moontide.api.v1alpha1 import PolicyVersionSpec
from moontide.cli.rehearsal import LOOKS, Rehearsal, rehearse
from moontide.planning import protocol
from tests.unit.planning.world import World


def world_of(fences: bool, size: int = 2, **spec: Any) -> World:
    made = World(PolicyVersionSpec.model_validate({"version": 1, **spec}), fences=fences)
    made.add_fleet("chat", size)
    made.run()
    made.serve()
    return made


def dry(world: World) -> Rehearsal:
    return rehearse(world.spec, world.generation, world.status, world.observe())


def steps(actions: Any) -> list[tuple[str, str]]:
    return sorted((protocol.step_of(each).value, protocol.name_of(each)) for each in actions)


@pytest.mark.parametrize(
    ("fences", "spec"),
    [
        (False, {"weights": "Unchecked"}),
        (True, {"weights": "Unchecked"}),
        (True, {"weights": "Unchecked", "strategy": "Fence"}),
        (False, {"weights": "Unchecked", "strategy": "Fence"}),
        (True, {"weights": "Unchecked", "onStoreFailure": "Hold"}),
        (True, {"weights": "Load", "weightsSource": "/models/{version}"}),
        (False, {"weights": "Load", "weightsSource": "/models/{version}"}),
    ],
)
def test_it_is_what_happens(fences: bool, spec: dict[str, Any]) -> None:
    world = world_of(fences, **spec)
    world.bump("2")
    asked = dry(world)
    before = len(world.plans)
    world.run()
    happened = [steps(plan.actions) for plan in world.plans[before:] if plan.actions]
    assert [steps(each.actions) for each in asked.rounds if each.actions] == happened
    assert asked.settled
    assert asked.decision.startswith("begins a new epoch: version 2 is asked for")
    assert asked.end.startswith("Current=True Current: 2/2 replicas serve version 2")
    assert (asked.status.version, asked.status.epoch) == (world.status.version, world.status.epoch)


def test_nothing_to_do_is_nothing() -> None:
    asked = dry(world_of(True, weights="Unchecked"))
    assert asked.rounds == ()
    assert asked.decision.startswith("begins no new epoch")


def test_weights_that_nobody_has_hold_it() -> None:
    world = world_of(True)
    world.bump("2")
    asked = dry(world)
    assert "begins nothing, WaitingForWeights: no serving replica reports weight version '2'" in asked.decision
    assert not any(each.actions for each in asked.rounds)
    world.give_weights(world.pod(0), "2")
    asked = dry(world)
    assert asked.settled
    assert ("close", world.pod(1).name) in [step for each in asked.rounds for step in steps(each.actions)]


def test_an_engine_that_does_not_answer_holds_a_plain_fleet() -> None:
    world = world_of(False, weights="Unchecked", onReplicaFailure="Hold")
    world.bump("2")
    world.pod(0).engine.hung = True
    asked = dry(world)
    assert asked.end.startswith(f"Current=False ReplicaUnreachable: {world.pod(0).name}")
    assert len(asked.rounds) <= LOOKS


def test_lines_name_a_few_of_many() -> None:
    world = world_of(True, size=9, weights="Unchecked")
    world.bump("2")
    lines = [line for each in dry(world).rounds for line in each.lines()]
    assert any(line.startswith("quiesce chat-1, chat-2") and "and 3 more (wait for requests" in line for line in lines)
    assert "admit chat-1, chat-2, chat-3, chat-4, chat-5, chat-6 and 3 more (with the epoch in the keys)" in lines
