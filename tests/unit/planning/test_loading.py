"""``weights: Load``: engines that load their weights themselves, by example."""

from __future__ import annotations

import itertools

import pytest

from moontide.api.v1alpha1 import PolicyVersionSpec
from moontide.planning import protocol
from moontide.planning.model import Command, Replace, Result, Step
from tests.unit.planning.test_protocol import steps
from tests.unit.planning.world import World

SPEC = {"version": "1", "weights": "Load", "weightsSource": "/models/policy-{version}"}
BAD = "/models/policy-2"


def settled(size: int = 2, fences: bool = True, **spec: object) -> World:
    """A fleet that serves version 1 in epoch 1."""
    world = World(PolicyVersionSpec.model_validate({**SPEC, **spec}), fences=fences)
    world.add_fleet("tiny", size)
    world.run()
    assert world.condition("Current") == ("True", "Current")
    world.serve()
    world.upload()
    world.serve()
    return world


def turns(world: World, count: int, seconds: float = 1.0) -> list[str]:
    """Steps of so many turns."""
    seen = []
    for _ in range(count):
        plan = world.turn()
        seen += steps(plan)
        names = [failure.replica for failure in plan.status.failures]
        assert len(names) == len(set(names))
        world.serve()
        world.pass_time(seconds)
    return seen


def replaced(world: World) -> int:
    return sum(isinstance(action, Replace) for plan in world.plans for action in plan.actions)


@pytest.mark.parametrize(
    ("fences", "wanted"),
    [
        (True, [[], ["quiesce"], ["load"], ["admit"], ["resume"]]),
        (False, [[], ["quiesce"], ["drain"], ["reset"], ["Wipe"], ["load"], ["admit"], ["resume"]]),
    ],
)
def test_a_bump_alone_is_enough(fences: bool, wanted: list[list[str]]) -> None:
    world = settled(fences=fences)
    world.bump("2")
    assert [sorted(set(steps(world.turn()))) for _ in wanted] == wanted
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {(p.engine.state, p.engine.version, p.engine.weights, p.engine.source) for p in world.pods} == {
        ("open", "2", "2", "/models/policy-2")
    }
    world.serve()


def test_a_fleet_starts_and_a_replica_that_restarts_comes_back_without_a_trainer() -> None:
    world = World(PolicyVersionSpec.model_validate({**SPEC, "version": "7"}), fences=True)
    world.add_fleet("tiny", 2)
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {p.engine.weights for p in world.pods} == {"7"}
    world.restart(world.pod(0))
    assert world.pod(0).engine.weights == "1"
    world.run()
    assert (world.pod(0).engine.state, world.pod(0).engine.version, world.pod(0).engine.weights) == ("open", "7", "7")
    assert world.status.epoch == 1


def test_the_change_waits_for_loads_and_says_so() -> None:
    world = settled()
    world.load_seconds = 50
    world.bump("2")
    seen = turns(world, 30)
    assert seen.count("load") == 2
    assert world.condition("Current") == ("False", "Loading")
    assert world.condition("Progressing") == ("True", "Loading")
    assert world.condition("Degraded") == ("False", "AsExpected")
    assert world.status.last_update is not None
    assert (world.status.last_update.loaded_at, world.status.last_update.resumed_at) == (None, None)
    assert world.status.last_update.quiesced_at is not None
    assert world.status.last_update.invalidated_at is None
    assert world.plans[-1].requeue_after == protocol.BUSY_REQUEUE
    assert {p.engine.state for p in world.pods} == {"paused"}
    turns(world, 30)
    update = world.status.last_update
    assert update.loaded_at is not None
    assert update.invalidated_at is not None
    assert update.resumed_at is not None
    assert update.loaded_at <= update.invalidated_at <= update.resumed_at
    assert any(note.reason == "Loaded" for plan in world.plans for note in plan.notes)
    assert world.condition("Current") == ("True", "Current")


@pytest.mark.parametrize("fences", [True, False])
def test_who_has_loaded_serves_while_others_load(fences: bool) -> None:
    world = settled(fences=fences)
    world.bump("2")
    turns(world, 2, 0.1)
    world.give_weights(world.pod(0), "2")
    world.load_seconds = 50
    seen = turns(world, 9)
    assert world.pod(0).engine.state == "open"
    assert world.condition("Current") == ("False", "Loading")
    seen += turns(world, 55)
    assert seen.count("load") == 1
    assert world.condition("Current") == ("True", "Current")


@pytest.mark.parametrize("fences", [True, False])
def test_past_the_deadline_engines_close_and_go_on_loading(fences: bool) -> None:
    world = settled(fences=fences, deadlineSeconds=30)
    world.load_seconds = 50
    world.bump("2")
    seen = turns(world, 40)
    assert {p.engine.state for p in world.pods} == {"closed"}
    assert world.condition("Progressing") == ("False", "DeadlineExceeded")
    seen += turns(world, 20)
    assert seen.count("load") == 2
    assert replaced(world) == 0
    assert world.condition("Current") == ("True", "Current")


def test_a_version_that_comes_while_another_is_loaded_is_loaded_next() -> None:
    world = settled()
    world.load_seconds = 10
    world.bump("2")
    turns(world, 4)
    world.bump("3")
    seen = turns(world, 5)
    assert "load" not in seen
    turns(world, 20)
    assert {(p.engine.state, p.engine.weights) for p in world.pods} == {("open", "3")}


@pytest.mark.parametrize("failure", ["Isolate", "Replace", "Hold"])
@pytest.mark.parametrize("fences", [True, False])
def test_a_source_that_nobody_can_load_replaces_no_pod(failure: str, fences: bool) -> None:
    world = settled(fences=fences, onReplicaFailure=failure)
    names = {p.name for p in world.pods}
    world.sources.add(BAD)
    world.bump("2")
    turns(world, 12)
    assert {p.engine.state for p in world.pods} == {"paused"}
    assert world.condition("Current") == ("False", "LoadFailed")
    assert world.condition("Degraded") == ("True", "StepFailing")
    assert [(f.step, f.reason) for f in world.status.failures] == [("load", "LoadFailed")] * 2
    assert BAD in world.status.failures[0].message
    for _ in range(20):
        turns(world, 1)
        assert world.condition("Current") == ("False", "LoadFailed")
    # Whom it takes too long serves nothing, and holds nothing.
    assert {p.engine.state for p in world.pods} == {"paused" if failure == "Hold" else "closed"}
    turns(world, 100, 10)
    assert replaced(world) == 0
    assert {p.name for p in world.pods} == names
    assert {p.engine.state for p in world.pods} == {"closed"}
    assert world.condition("Current") == ("False", "LoadFailed")
    assert world.status.last_update is not None
    assert world.status.last_update.resumed_at is None
    world.sources.clear()
    turns(world, 14, 10)
    assert world.condition("Current") == ("True", "Current")
    assert world.status.failures == ()


def test_a_bad_source_is_left_by_going_back() -> None:
    world = settled()
    world.sources.add(BAD)
    world.bump("2")
    turns(world, 40)
    world.bump("1")
    turns(world, 10)
    assert {(p.engine.state, p.engine.version, p.engine.weights) for p in world.pods} == {("open", "1", "1")}


def test_a_source_that_is_corrected_is_loaded_at_once() -> None:
    world = settled()
    world.sources.add(BAD)
    world.bump("2")
    turns(world, 25)
    world.bump("2", weights_source="/other/policy-{version}")
    assert turns(world, 3).count("load") == 2
    assert {(p.engine.state, p.engine.source) for p in world.pods} == {("open", "/other/policy-2")}


def test_a_failed_load_is_tried_again_after_ever_longer() -> None:
    world = settled(onReplicaFailure="Hold")
    world.sources.add(BAD)
    world.bump("2")
    tries = []
    began = world.now
    for _ in range(300):
        if "load" in steps(world.turn()):
            tries.append((world.now - began).total_seconds())
        world.pass_time(1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps[:5] == [2, 4, 8, 16, 32]
    assert set(gaps[5:]) == {60}


def one_fails(failure: str, fences: bool = True) -> World:
    """One of two cannot load what the other has loaded."""
    world = settled(fences=fences, onReplicaFailure=failure)
    world.bump("2")
    while not any("load" in steps(plan) for plan in world.plans[-1:]):
        plan = world.plan()
        if any(isinstance(a, Command) and a.step is Step.LOAD for a in plan.actions):
            world.give_weights(world.pod(1), "2")
            world.sources.add(BAD)
        world.turn()
    return world


def test_a_load_that_fails_after_its_call_has_answered_is_told_once() -> None:
    world = settled()
    world.load_seconds = 3
    world.sources.add(BAD)
    world.bump("2")
    turns(world, 30)
    told = [note.message for plan in world.plans for note in plan.notes if note.reason == "LoadFailed"]
    assert sorted(message.split(":")[0] for message in told) == [pod.name for pod in world.pods]
    assert all(BAD in message for message in told), told


@pytest.mark.parametrize("fences", [True, False])
def test_the_others_go_on_without_one_that_cannot_load(fences: bool) -> None:
    world = one_fails("Isolate", fences)
    turns(world, 10)
    assert [p.engine.state for p in world.pods] == ["paused", "open"]
    assert world.condition("Current") == ("False", "LoadFailed")
    turns(world, 15)
    assert [(p.engine.state, p.engine.reason) for p in world.pods] == [("closed", "LoadFailed"), ("open", "Starting")]
    assert world.condition("Current") == ("True", "Current")
    assert world.condition("Degraded") == ("True", "StepFailing")
    assert world.status.last_update is not None
    assert world.status.last_update.resumed_at is not None
    turns(world, 100, 10)
    assert replaced(world) == 0
    world.sources.clear()
    turns(world, 10, 10)
    assert {p.engine.state for p in world.pods} == {"open"}
    assert world.condition("Degraded") == ("False", "AsExpected")


def test_one_that_is_given_up_does_not_hide_that_another_loads() -> None:
    world = settled(size=3, onReplicaFailure="Isolate")
    world.pod(2).engine.running = 1
    world.bump("2")
    turns(world, 2, 0.1)
    world.give_weights(world.pod(1), "2")
    world.sources.add(BAD)
    turns(world, 30)
    assert world.pod(0).engine.reason == "LoadFailed"
    world.load_seconds = 500
    world.pod(2).engine.running = 0
    turns(world, 4)
    assert [failure.replica for failure in world.status.failures] == [world.pod(0).name]
    assert world.condition("Current") == ("False", "Loading")


def test_a_pod_that_cannot_load_what_another_could_is_replaced_once() -> None:
    world = one_fails("Replace")
    assert not world.status.failures[0].message.startswith("again")
    turns(world, 100, 10)
    # The new one cannot either: it has never served, and the next would fare no better.
    assert replaced(world) == 1
    assert {p.engine.state for p in world.pods} == {"open", "closed"}
    assert world.condition("Current") == ("True", "Current")
    assert world.condition("Degraded") == ("True", "StepFailing")


def test_hold_waits_for_one_that_cannot_load() -> None:
    world = one_fails("Hold")
    turns(world, 100, 10)
    assert replaced(world) == 0
    assert world.condition("Current") == ("False", "LoadFailed")
    assert {p.engine.state for p in world.pods} == {"open", "closed"}


def test_newcomers_that_load_keep_no_change_waiting() -> None:
    world = settled()
    world.load_seconds = 1
    world.bump("2")
    turns(world, 2)
    world.add_pod("tiny")
    world.load_seconds = 2
    turns(world, 4)
    world.load_seconds = 500
    world.add_pod("tiny")
    turns(world, 12)
    assert [p.engine.state for p in world.pods] == ["open"] * 3 + ["closed"]
    assert world.condition("Current") == ("True", "Current")
    assert world.status.last_update is not None
    assert world.status.last_update.resumed_at is not None


def test_after_the_change_loads_move_no_condition_as_long_as_somebody_serves() -> None:
    world = settled()
    world.bump("2")
    world.run()
    world.load_seconds = 300
    world.restart(world.pod(0))
    turns(world, 150)
    assert world.condition("Current") == ("True", "Current")
    assert world.condition("Progressing") == ("False", "Idle")
    world.restart(world.pod(1))
    turns(world, 10)
    assert world.condition("Current") == ("False", "Loading")
    assert world.condition("Degraded") == ("False", "AsExpected")


def test_an_engine_that_crashes_while_it_loads_begins_anew() -> None:
    world = settled()
    world.load_seconds = 5
    world.bump("2")
    turns(world, 3)
    assert world.pod(0).engine.loads_as == "2"
    world.restart(world.pod(0))
    turns(world, 15)
    assert {(p.engine.state, p.engine.weights) for p in world.pods} == {("open", "2")}


@pytest.mark.parametrize("crash", range(4))
def test_another_operator_goes_on_with_what_is_loaded(crash: int) -> None:
    world = settled(size=3)
    world.load_seconds = 3
    world.bump("2")
    for _ in range(6):
        world.turn(crash_after=crash)
        world.pass_time(1)
    turns(world, 15)
    assert {(p.engine.state, p.engine.weights) for p in world.pods} == {("open", "2")}


def test_requests_that_are_kept_stand_still_while_weights_are_loaded() -> None:
    world = settled(runningRequests="Keep")
    world.pod(0).engine.running = 3
    world.bump("2")
    turns(world, 8, 0.1)
    assert {(p.engine.state, p.engine.weights) for p in world.pods} == {("open", "2")}
    assert world.pod(0).engine.running == 3


def test_a_fleet_that_can_keep_no_requests_loads_without_any() -> None:
    world = settled(fences=False, runningRequests="Keep")
    world.bump("2")
    turns(world, 8, 0.1)
    loads = [a for plan in world.plans for a in plan.actions if isinstance(a, Command) and a.step is Step.LOAD]
    assert [load.body["keep"] for load in loads] == [False, False]


def test_requests_that_run_are_waited_for_before_a_load() -> None:
    world = settled()
    world.pod(0).engine.running = 3
    world.bump("2")
    turns(world, 8, 0.1)
    assert world.pod(0).engine.loads_as == world.pod(0).engine.source == ""
    assert world.pod(1).engine.weights == "2"
    world.pod(0).engine.running = 0
    turns(world, 6, 0.1)
    assert {(p.engine.state, p.engine.weights) for p in world.pods} == {("open", "2")}


@pytest.mark.parametrize("weights", ["External", "Unchecked"])
def test_what_a_failed_load_has_left_is_never_admitted(weights: str) -> None:
    """Not by a policy that does not look at weights, either."""
    world = settled()
    world.sources.add(BAD)
    world.bump("2")
    turns(world, 5)
    world.bump("2", weights=weights, weights_source=None)
    seen = turns(world, 40)
    assert "admit" not in seen
    assert "load" not in seen
    assert {p.engine.state for p in world.pods} == {"closed"}
    assert world.status.failures == ()
    assert world.condition("Current") == ("False", "WaitingForWeights")
    world.push_weights("2")
    turns(world, 10)
    assert {p.engine.state for p in world.pods} == {"open"}


def test_a_pod_that_is_on_its_way_out_loads_nothing() -> None:
    world = settled()
    world.pod(0).terminating = True
    world.bump("2")
    turns(world, 10)
    assert world.pod(0).engine.source == ""
    assert world.pod(0).engine.state == "closed"
    assert world.condition("Current") == ("True", "Current")


def test_the_failure_of_a_pod_that_is_on_its_way_out_is_forgotten() -> None:
    world = settled()
    world.sources.add(BAD)
    world.bump("2")
    turns(world, 6)
    world.pod(0).terminating = True
    turns(world, 2)
    assert [failure.replica for failure in world.status.failures] == [world.pod(1).name]


def test_an_answer_that_it_loads_is_no_failure_and_mends_none() -> None:
    world = settled()
    world.sources.add(BAD)
    world.bump("2")
    turns(world, 4)
    since = world.status.failures[0].since
    world.load_seconds = 30
    turns(world, 10)
    assert {p.engine.loads_as for p in world.pods} == {"2"}
    assert world.status.failures[0].since == since
    command = next(a for plan in world.plans for a in plan.actions if isinstance(a, Command) and a.step is Step.LOAD)
    after = protocol.record(world.status, [Result(command, False, "Loading")], world.now)
    assert after.failures == world.status.failures


def test_a_plain_fleet_is_wiped_while_an_engine_that_holds_nothing_loads() -> None:
    """One that may still write is waited for."""
    world = settled(fences=False)
    world.bump("2")
    turns(world, 5, 0.1)
    world.give_weights(world.pod(0), "2")
    world.load_seconds = 20
    turns(world, 4, 0.1)
    assert [(p.engine.state, p.engine.loads_as) for p in world.pods] == [("open", ""), ("paused", "2")]
    world.bump("3")
    assert "Wipe" in turns(world, 6, 0.1)
    turns(world, 60)
    assert {(p.engine.state, p.engine.weights) for p in world.pods} == {("open", "3")}
    world.bump("4")
    turns(world, 5, 0.1)
    world.give_weights(world.pod(0), "4")
    turns(world, 4, 0.1)
    assert world.pod(1).engine.loads_as == "4"
    world.pod(1).engine.clean = False
    world.bump("5")
    assert "Wipe" not in turns(world, 8, 0.1)
    assert world.condition("Current") == ("False", "Quiescing")
    turns(world, 60)
    assert {(p.engine.state, p.engine.weights) for p in world.pods} == {("open", "5")}
