"""The planner and replicas that have no pod: nobody can replace them, and nobody tells of their restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moontide.api.v1alpha1 import PolicyVersionSpec
from moontide.planning import protocol
from moontide.planning.model import Replace, Replica
from tests.unit.planning.world import Pod, World


class Adopted(World):
    """Every engine was launched by somebody else."""

    def _replica(self, fleet: str, pod: Pod) -> Replica:
        return replace(super()._replica(fleet, pod), url=f"http://{pod.uid}:8001")


def _bumped(fences: bool, **spec: object) -> Adopted:
    """Version 2 is asked for; the last of two engines that serve version 1 is frozen."""
    world = Adopted(PolicyVersionSpec.model_validate({"version": "1", "replicaTimeoutSeconds": 5, **spec}))
    world.fences = fences
    world.add_fleet("tiny", 2)
    world.run()
    world.serve()
    world.upload()
    world.push_weights("2")
    world.bump("2")
    world.pod(1).engine.hung = True
    return world


@pytest.mark.parametrize("fences", [True, False], ids=["salted", "plain"])
@pytest.mark.parametrize("chosen", ["Replace", "Isolate", "Hold"])
def test_a_frozen_one_is_given_up_where_that_is_safe_and_never_replaced(fences: bool, chosen: str) -> None:
    world = _bumped(fences, onReplicaFailure=chosen)
    world.run(turns=80)
    assert not any(isinstance(action, Replace) for plan in world.plans for action in plan.actions)
    first = world.pod(0).engine
    goes_on = fences and chosen != "Hold"
    assert first.state == ("open" if goes_on else "paused")
    (failure,) = world.status.failures
    assert ("isolated and not replaced" in failure.message) == (chosen == "Replace")
    world.pod(1).engine.hung = False
    world.run(turns=80)
    assert {(pod.engine.state, pod.engine.epoch) for pod in world.pods} == {("open", 2)}
    world.serve()


def test_they_are_asked_again_soon_for_a_restart_is_told_by_nobody() -> None:
    world = Adopted(PolicyVersionSpec.model_validate({"version": "1"}))
    world.add_fleet("tiny", 1)
    assert world.run().requeue_after == protocol.ADOPTED_REQUEUE
    world.restart(world.pod(0))
    world.run()
    assert world.pod(0).engine.state == "open"
