"""The protocol by example: what a change does, step by step, and what each fault does to it."""

from __future__ import annotations

import pytest

from moontide.api.v1alpha1 import Member, PolicyVersionSpec, PolicyVersionStatus, Preparation, ReplicaCounts
from moontide.planning import protocol
from moontide.planning.model import Command, Replace, Result, Step, Wipe
from tests.unit.planning.world import StaleReadError, World


def settled(size: int = 2, fences: bool = False, **spec: object) -> World:
    """A fleet that serves version 1 in epoch 1, with KV of epoch 1 everywhere. ``fences``: it is a salted one."""
    world = World(PolicyVersionSpec.model_validate({"version": "1", **spec}), fences=fences)
    world.add_fleet("tiny", size)
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {p.engine.state for p in world.pods} == {"open"}
    world.serve()
    world.upload()
    world.serve()
    return world


def bumped(size: int = 2, fences: bool = False, **spec: object) -> World:
    world = settled(size, fences, **spec)
    world.push_weights("2")
    world.bump("2")
    return world


def steps(plan: protocol.Plan) -> list[str]:
    return [a.step.value if isinstance(a, Command) else type(a).__name__ for a in plan.actions]


def test_a_bump_goes_through_the_steps_in_order() -> None:
    world = bumped()
    seen = []
    for _ in range(8):
        plan = world.turn()
        seen.append(sorted(set(steps(plan))))
    assert seen == [[], ["quiesce"], ["drain"], ["reset"], ["Wipe"], ["admit"], ["resume"], []]
    assert world.condition("Current") == ("True", "Current")
    assert {(p.engine.state, p.engine.epoch, p.engine.version) for p in world.pods} == {("open", 2, "2")}
    world.serve()


def test_the_epoch_is_in_status_before_an_engine_hears_of_it() -> None:
    world = bumped()
    plan = world.plan()
    assert plan.status.epoch == 2
    assert plan.actions == ()
    assert plan.requeue_after == 0.0
    assert 2 not in world.told


def test_the_timeline_and_the_history_are_written() -> None:
    world = bumped()
    for pod in world.pods:
        pod.engine.running = 1
    world.turn()
    world.turn()
    assert world.status.last_update is not None
    assert world.status.last_update.quiesced_at is None
    for pod in world.pods:
        pod.engine.running = 0
    world.run()
    update = world.status.last_update
    assert update is not None
    times = [update.started_at, update.quiesced_at, update.drained_at, update.invalidated_at, update.wiped_at]
    assert None not in times
    assert times == sorted(t for t in times if t)
    assert update.resumed_at is not None
    assert update.keys_removed == 1
    assert update.replicas == 2
    assert world.status.version == "2"
    assert [u.version for u in world.status.history] == ["2", "1"]


def test_requests_that_run_are_waited_for_and_are_no_failure() -> None:
    world = bumped()
    world.pod(0).engine.running = 3
    for _ in range(10):
        world.turn()
        world.pass_time(3)
    assert world.pod(0).engine.state == "paused"
    assert world.pod(1).engine.clean
    assert world.status.failures == ()
    assert not any(isinstance(a, Wipe | Replace) for plan in world.plans[-5:] for a in plan.actions)
    world.pod(0).engine.running = 0
    world.run()
    assert world.condition("Current") == ("True", "Current")


def test_abort_does_not_wait() -> None:
    world = bumped(runningRequests="Abort")
    world.pod(0).engine.running = 3
    world.run()
    assert world.condition("Current") == ("True", "Current")


def test_a_silent_engine_that_served_blocks_the_wipe_until_it_is_replaced() -> None:
    world = bumped(replicaTimeoutSeconds=20)
    world.pod(0).engine.queue.add(("", 1))
    world.pod(0).engine.hung = True
    hung = world.pod(0)
    for _ in range(6):
        world.turn()
        world.pass_time(1)
    assert world.condition("Current") == ("False", "ReplicaUnreachable")
    assert world.store["tiny"] == {("", 1)}
    assert world.pod(1).engine.state == "paused"
    world.pass_time(20)
    world.run()
    assert hung not in world.pods
    assert world.condition("Current") == ("True", "Current")
    world.serve()


def test_hold_never_deletes_a_pod() -> None:
    world = bumped(onReplicaFailure="Hold")
    world.pod(0).engine.hung = True
    for _ in range(20):
        world.turn()
        world.pass_time(30)
    assert not any(isinstance(a, Replace) for plan in world.plans for a in plan.actions)
    assert world.condition("Current")[0] == "False"
    assert world.condition("Progressing") == ("False", "DeadlineExceeded")
    assert world.pod(1).engine.state == "closed"
    world.pod(0).engine.hung = False
    world.run()
    assert world.condition("Current") == ("True", "Current")


def test_a_refused_reset_is_never_taken_for_done() -> None:
    world = bumped(onReplicaFailure="Hold")
    world.pod(1).engine.refuses_reset = True
    for _ in range(20):
        world.turn()
    assert world.condition("Current") == ("False", "ReplicaFailing")
    assert world.status.failures[0].reason == "BlocksHeld"
    assert world.store["tiny"] == {("", 1)}
    world.pod(1).engine.refuses_reset = False
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert world.status.failures == ()


def test_a_dead_store_holds_the_fleet_and_comes_back_by_itself() -> None:
    world = bumped()
    world.upload()
    world.store_up = False
    for _ in range(10):
        world.turn()
    assert world.condition("Current") == ("False", "StoreUnavailable")
    assert {p.engine.state for p in world.pods} == {"paused"}
    world.pass_time(200)
    world.turn()
    assert {p.engine.state for p in world.pods} == {"closed"}
    assert world.condition("Progressing") == ("False", "DeadlineExceeded")
    world.store_up = True
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {p.engine.state for p in world.pods} == {"open"}
    world.serve()


def test_puts_that_hang_on_a_dead_store_cost_no_replica() -> None:
    world = bumped()
    world.store_up = False
    for _ in range(10):
        world.turn()
        world.pass_time(10)
    assert world.condition("Current") == ("False", "ReplicaFailing")
    assert not any(isinstance(a, Replace) for plan in world.plans for a in plan.actions)
    world.store_up = True
    world.run()
    assert world.condition("Current") == ("True", "Current")


def test_newcomers_are_not_waited_for_and_stay_closed_until_proven() -> None:
    world = bumped()
    newcomer = world.add_pod("tiny")
    newcomer.engine.hung = True
    world.run(turns=8)
    assert world.condition("Current") == ("True", "Current")
    newcomer.engine.hung = False
    world.run()
    assert newcomer.engine.state == "closed"
    assert world.condition("Degraded") == ("True", "WaitingForWeights")
    newcomer.engine.weights = "2"
    world.run()
    assert newcomer.engine.state == "open"
    assert newcomer.engine.epoch == 2


def test_a_restarted_replica_has_base_weights_and_stays_closed() -> None:
    world = bumped()
    world.run()
    world.restart(world.pod(0))
    world.run()
    assert world.pod(0).engine.state == "closed"
    assert world.pod(1).engine.state == "open"
    assert world.condition("Current") == ("True", "Current")


def test_a_bump_before_the_weights_disturbs_nothing() -> None:
    world = settled()
    world.bump("2")
    world.run()
    assert world.condition("Current") == ("False", "WaitingForWeights")
    assert {(p.engine.state, p.engine.epoch) for p in world.pods} == {("open", 1)}
    assert world.status.epoch == 1
    world.serve()
    world.push_weights("2")
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert world.status.epoch == 2


def test_a_bump_before_the_weights_waits_for_replicas_that_do_not_answer_too() -> None:
    world = settled()
    for pod in world.pods:
        pod.engine.hung = True
    world.bump("2")
    world.run()
    assert world.status.epoch == 1
    for pod in world.pods:
        pod.engine.hung = False
    world.run()
    assert {(p.engine.state, p.engine.epoch) for p in world.pods} == {("open", 1)}


def test_a_replica_without_the_new_weights_is_closed_and_the_others_serve() -> None:
    world = settled(3)
    world.pod(0).engine.weights = world.pod(1).engine.weights = "2"
    world.bump("2")
    world.run()
    assert [p.engine.state for p in world.pods] == ["open", "open", "closed"]
    assert world.pod(2).engine.reason == "WaitingForWeights"
    world.pod(2).engine.weights = "2"
    world.run()
    assert {p.engine.state for p in world.pods} == {"open"}


def test_unchecked_does_not_look_at_weights() -> None:
    world = settled(weights="Unchecked")
    world.bump("anything")
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert world.status.version == "anything"


def test_the_same_version_at_the_same_generation_does_nothing() -> None:
    world = settled()
    before = world.status
    plan = world.turn()
    assert plan.actions == ()
    assert world.status == before


def test_a_changed_deadline_alone_changes_nothing() -> None:
    world = settled()
    world.bump("1", deadline_seconds=300)
    world.run()
    assert world.status.epoch == 1


def test_a_change_away_and_back_unseen_invalidates() -> None:
    world = settled()
    world.generation += 2
    world.run()
    assert world.status.epoch == 2
    assert world.condition("Current") == ("True", "Current")


def test_three_bumps_in_a_row_end_at_the_last() -> None:
    world = settled(weights="Unchecked")
    for version in ("7", "8", "9"):
        world.bump(version)
        world.turn()
        world.turn()
    world.run()
    assert world.status.version == "9"
    assert {p.engine.version for p in world.pods} == {"9"}
    world.serve()


def test_a_version_that_returns_gets_a_new_epoch() -> None:
    world = settled(weights="Unchecked")
    for version in ("2", "1"):
        world.bump(version)
        world.run()
    assert world.status.epoch == 3


def test_an_int_and_its_string_are_one_version() -> None:
    world = settled()
    world.bump(1)
    world.run()
    assert world.status.epoch == 1


def test_a_recreated_policy_never_reuses_an_epoch() -> None:
    world = settled()
    for pod in world.pods:
        pod.engine.epoch = pod.engine.highest = 7
    world.status = PolicyVersionStatus()
    world.run()
    assert world.status.epoch == 8
    assert world.condition("Current") == ("True", "Current")


def test_a_second_fleet_joins_without_pausing_the_first() -> None:
    world = settled()
    world.add_fleet("late", 1)
    count = len(world.plans)
    world.run()
    touched = {a.replica.fleet for p in world.plans[count:] for a in p.actions if isinstance(a, Command)}
    assert touched == {"fleet-late"}
    assert world.status.epoch == 1
    assert {p.engine.state for p in world.pods} == {"open"}


def test_a_fleet_that_served_before_it_joins_is_invalidated() -> None:
    world = settled()
    world.add_fleet("late", 1)
    engine = world.fleets["late"][0].engine
    engine.state, engine.clean, engine.local = "open", False, {("", 0)}
    world.fleets["late"][0].mark = world.fleets["late"][0].container
    world.store["late"].add(0)
    world.run()
    assert engine.epoch == 1
    world.serve()


def test_a_terminating_replica_is_part_of_the_barrier() -> None:
    world = bumped()
    world.pod(0).terminating = True
    world.pod(0).engine.hung = True
    for _ in range(10):
        world.turn()
        world.pass_time(10)
    assert world.condition("Current") == ("False", "ReplicaUnreachable")
    assert not any(isinstance(a, Replace) for plan in world.plans for a in plan.actions)
    world.remove(world.pod(0))
    world.run()
    assert world.condition("Current") == ("True", "Current")


def test_a_fleet_scaled_to_zero_is_wiped_all_the_same() -> None:
    world = bumped()
    world.fleets["tiny"].clear()
    world.run()
    assert world.store["tiny"] == set()
    assert world.condition("Current") == ("True", "Current")


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_operator_killed_anywhere_is_taken_over(turn: int, after: int) -> None:
    world = bumped()
    for _ in range(turn):
        world.turn()
    world.turn(crash_after=after)
    world.serve()
    world.upload()
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {(p.engine.state, p.engine.epoch) for p in world.pods} == {("open", 2)}
    world.serve()


def test_the_world_sees_a_stale_read() -> None:
    """The oracle of these tests can fail: without a wipe the read is stale."""
    world = settled()
    for pod in world.pods:
        pod.engine.epoch = 2
    with pytest.raises(StaleReadError):
        world.serve()


def test_failures_are_listed_up_to_ten_and_the_rest_counted() -> None:
    world = bumped(14, onReplicaFailure="Hold")
    for pod in world.pods:
        pod.engine.hung = True
    world.turn()
    world.pod(0).engine.weights = "2"
    for _ in range(3):
        world.turn()
    if world.status.epoch == 2:
        assert len(world.status.failures) == 10
        assert world.status.failures_omitted == 4


def test_the_pause_lives_no_longer_than_the_deadline() -> None:
    world = bumped(deadlineSeconds=60, replicaTimeoutSeconds=20)
    world.turn()
    world.pass_time(45)
    plan = world.turn()
    ttls = [a.body["ttlSeconds"] for a in plan.actions if isinstance(a, Command) and a.step is Step.QUIESCE]
    assert ttls == [15.0, 15.0]


def test_a_replica_that_lost_its_mark_and_wakes_in_the_old_epoch_is_caught_and_the_fleet_wiped_again() -> None:
    world = bumped()
    lost = world.pod(0)
    lost.mark, lost.engine.hung = None, True
    world.run()
    assert world.condition("Current") == ("True", "Current")
    lost.engine.hung = False
    world.upload()
    assert ("", 1) in world.store["tiny"]
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert world.store["tiny"] == set()
    assert {(p.engine.state, p.engine.epoch) for p in world.pods} == {("open", 2)}
    world.serve()


# -- salted fleets: the epoch is in the keys ---------------------------------------------------------------------------


def seen_steps(world: World, turns: int = 8) -> list[list[str]]:
    return [sorted(set(steps(world.turn()))) for _ in range(turns)]


def test_a_salted_fleet_needs_no_drain_reset_or_wipe_and_collects_when_it_serves() -> None:
    world = bumped(fences=True)
    assert world.status.members[0].salted
    assert seen_steps(world, 6) == [[], ["quiesce"], ["admit"], ["resume"], ["Collect"], []]
    assert {(p.engine.state, p.engine.epoch, p.engine.salt) for p in world.pods} == {("open", 2, "policy/2")}
    world.serve()
    world.upload()
    world.serve()
    update = world.status.last_update
    assert update is not None
    assert (update.keys_removed, update.drained_at) == (1, None)
    times = [update.started_at, update.quiesced_at, update.invalidated_at, update.resumed_at, update.wiped_at]
    assert times == sorted(t for t in times if t)
    assert world.status.history[0] == update


def test_engines_that_can_are_resumed_with_their_admission() -> None:
    world = World(PolicyVersionSpec.model_validate({"version": "1"}), fences=True, opens=True)
    world.add_fleet("tiny", 2)
    assert seen_steps(world, 4) == [[], ["Wipe"], ["admit"], []], "the first change of a fleet is a plain one"
    world.serve()
    world.push_weights("2")
    world.bump("2")
    assert seen_steps(world, 5) == [[], ["quiesce"], ["admit"], ["Collect"], []]
    assert {(p.engine.state, p.engine.epoch, p.engine.salt) for p in world.pods} == {("open", 2, "policy/2")}
    update = world.status.last_update
    assert update is not None
    times = [update.started_at, update.quiesced_at, update.invalidated_at, update.resumed_at, update.wiped_at]
    assert times == sorted(times)  # type: ignore[type-var]


def test_nobody_is_resumed_with_its_admission_while_another_may_be_open() -> None:
    world = World(
        PolicyVersionSpec.model_validate({"version": "1", "replicaTimeoutSeconds": 20}), fences=True, opens=True
    )
    world.add_fleet("tiny", 3)
    world.run()
    world.bump("2", weights="Unchecked")
    world.pod(0).engine.hung = True
    seen = seen_steps(world, 5)
    assert seen == [[], ["quiesce"], ["admit"], [], []]
    assert {(p.engine.state, p.engine.epoch) for p in world.pods[1:]} == {("paused", 2)}
    world.pass_time(21)
    assert sorted(steps(world.turn())) == ["Replace", "resume", "resume"]


def test_engines_of_two_plugins_are_each_told_what_they_know() -> None:
    world = bumped(fences=True)
    world.pod(1).engine.opens = True
    assert seen_steps(world, 3) == [[], ["quiesce"], ["admit"]]
    assert [p.engine.state for p in world.pods] == ["paused", "open"]
    assert steps(world.turn()) == ["resume"]
    world.serve()


def test_late_puts_are_collected_too() -> None:
    world = bumped(fences=True)
    world.run()
    world.pod(0).engine.queue.add(("policy/1", 1))
    world.upload()
    assert ("policy/1", 1) in world.store["tiny"]
    assert world.turn().actions == ()
    world.pass_time(31)
    assert steps(world.turn()) == ["Collect"]
    assert world.store["tiny"] == set()
    assert world.status.last_update is not None
    assert world.status.last_update.keys_removed == 2
    world.pass_time(31)
    assert world.turn().actions == ()


def test_the_first_change_of_a_fleet_is_a_plain_one() -> None:
    world = World(PolicyVersionSpec.model_validate({"version": "1"}), fences=True)
    world.add_fleet("tiny", 1)
    assert seen_steps(world, 5) == [[], ["Wipe"], ["admit"], ["resume"], []]
    assert world.pod(0).engine.salt == "policy/1"


def test_an_engine_that_cannot_fence_makes_its_fleet_plain_before_it_is_admitted() -> None:
    world = settled(fences=True)
    world.fences = False
    unable = world.add_pod("tiny")
    plan = world.plan()
    assert steps(plan) == ["admit"]
    assert "salt" not in plan.actions[0].body  # type: ignore[union-attr]
    assert not plan.status.members[0].salted
    world.run()
    assert unable.engine.state == "open"
    world.serve()
    world.push_weights("2")
    world.bump("2", strategy="Fence")
    assert [note.reason for note in world.plan().notes] == ["EpochAllotted", "FenceUnsupported"]
    assert seen_steps(world, 7) == [[], ["quiesce"], ["drain"], ["reset"], ["Wipe"], ["admit"], ["resume"]]
    world.serve()


def test_an_engine_that_holds_kv_without_a_salt_makes_its_fleet_plain() -> None:
    world = settled(fences=True)
    engine = world.pod(0).engine
    engine.epoch, engine.salt, engine.local = 0, "", {("", 0)}
    world.run()
    assert any(isinstance(a, Wipe) for plan in world.plans[-8:] for a in plan.actions)
    assert (engine.epoch, engine.local) == (1, set())
    world.serve()


def test_a_dead_store_costs_a_salted_fleet_nothing_and_is_collected_later() -> None:
    world = bumped(fences=True)
    world.store_up = False
    world.run(8)
    assert world.condition("Current") == ("True", "Current")
    assert world.condition("Degraded") == ("True", "StoreUnavailable")
    world.store_up = True
    world.upload()
    world.serve()
    world.run()
    assert world.condition("Degraded") == ("False", "AsExpected")
    assert {salt for salt, _ in world.store["tiny"]} <= {"policy/2"}


def test_a_hung_engine_costs_a_salted_fleet_its_timeout_and_is_closed_by_its_gate() -> None:
    world = bumped(fences=True, replicaTimeoutSeconds=20, onReplicaFailure="Isolate")
    hung = world.pod(0)
    hung.engine.core_hung, hung.engine.running = True, 1
    world.run(6)
    assert (hung.engine.state, world.pod(1).engine.state) == ("paused", "paused")
    assert world.condition("Current")[0] == "False"
    world.pass_time(20)
    world.run(6)
    assert (hung.engine.state, hung.engine.reason) == ("closed", "EngineUnresponsive")
    assert world.condition("Current") == ("True", "Current")
    world.serve()
    # It goes on after the barrier: what it still puts is not found, and it is taken in again.
    hung.engine.core_hung = False
    hung.engine.queue.add(("policy/1", 1))
    world.upload()
    world.serve()
    world.run()
    assert (hung.engine.state, hung.engine.epoch) == ("open", 2)
    world.serve()


def test_a_hung_engine_with_nothing_to_do_costs_nothing_and_is_closed_all_the_same() -> None:
    world = bumped(fences=True, replicaTimeoutSeconds=20, onReplicaFailure="Isolate")
    hung = world.pod(0)
    hung.engine.core_hung = True
    for _ in range(8):
        world.turn()
        world.pass_time(0.5)
    assert world.condition("Current") == ("True", "Current")
    assert (hung.engine.state, world.pod(1).engine.state) == ("paused", "open")
    world.pass_time(20)
    plan = world.turn()
    assert plan.requeue_after <= protocol.POLL_SECONDS
    assert (hung.engine.state, hung.engine.reason) == ("closed", "EngineUnresponsive")
    hung.engine.core_hung = False
    world.run()
    assert (hung.engine.state, hung.engine.epoch) == ("open", 2)
    world.serve()


def test_an_answer_that_was_not_waited_for_neither_starts_nor_ends_a_failure() -> None:
    world = bumped(fences=True)
    world.pod(0).engine.core_hung = True
    world.turn()
    plan = world.turn()
    since = world.status.failures[0].since
    world.pass_time(1)
    late = [Result(a, False, protocol.STILL_WAITING) for a in plan.actions]
    after = protocol.record(world.status, late, world.now)
    assert after.failures == world.status.failures
    assert after.failures[0].since == since


@pytest.mark.parametrize("failure", ["Isolate", "Replace"])
def test_a_frozen_replica_costs_a_salted_fleet_its_timeout(failure: str) -> None:
    world = bumped(fences=True, replicaTimeoutSeconds=20, onReplicaFailure=failure)
    frozen = world.pod(0)
    frozen.engine.hung = True
    for _ in range(5):
        world.turn()
        world.pass_time(1)
    assert world.pod(1).engine.state == "paused"
    world.pass_time(20)
    world.run(6)
    assert world.pods[0 if failure == "Replace" else 1].engine.state == "open"
    assert (frozen in world.pods) == (failure == "Isolate")
    if failure == "Isolate":
        assert world.condition("Current") == ("False", "ReplicaUnreachable")
        # It wakes up open, in the old epoch: it meets no new KV, nobody meets its own, and it is caught.
        frozen.engine.hung = False
        world.serve()
        world.upload()
        world.serve()
        world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {p.engine.epoch for p in world.pods if p.engine.state == "open"} == {2}


def test_hold_makes_the_others_wait_for_a_frozen_replica() -> None:
    world = bumped(fences=True, onReplicaFailure="Hold")
    world.pod(0).engine.hung = True
    for _ in range(20):
        world.turn()
        world.pass_time(5)
    assert world.pod(1).engine.state == "paused"
    assert world.condition("Current") == ("False", "ReplicaUnreachable")


def test_a_replica_that_falls_silent_between_changes_is_left_to_its_probes() -> None:
    world = settled(fences=True)
    world.pod(0).engine.hung = True
    for _ in range(20):
        assert world.turn().actions == ()
        world.pass_time(30)
    assert world.condition("Current") == ("True", "Current")
    assert world.status.failures == ()


def test_nobody_resumes_while_requests_of_the_old_epoch_run_on() -> None:
    world = bumped(fences=True)
    world.pod(0).engine.running = 1
    world.run(8)
    assert [p.engine.state for p in world.pods] == ["paused", "paused"]
    assert world.pod(0).engine.epoch == 1
    world.pod(0).engine.running = 0
    world.run()
    assert world.condition("Current") == ("True", "Current")


def test_keep_does_not_wait_for_requests() -> None:
    world = bumped(fences=True, runningRequests="Keep")
    world.pod(0).engine.running = 1
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert world.pod(0).engine.running == 1


def test_keep_waits_where_keys_have_no_salt() -> None:
    world = bumped(runningRequests="Keep")
    world.pod(0).engine.running = 1
    world.turn()
    assert {a.body["mode"] for a in world.turn().actions if isinstance(a, Command)} == {"wait"}


# -- Fence -------------------------------------------------------------------------------------------------------------


def test_fence_pauses_nobody() -> None:
    world = bumped(fences=True, strategy="Fence")
    world.pod(0).engine.running = 5
    assert seen_steps(world, 4) == [[], ["fence"], ["Collect"], []]
    assert {(p.engine.state, p.engine.epoch, p.engine.salt) for p in world.pods} == {("open", 2, "policy/2")}
    assert world.condition("Current") == ("True", "Current")
    assert world.status.last_update is not None
    assert world.status.last_update.pause_seconds is None


def test_fence_takes_a_barrier_without_a_wipe_where_requests_must_not_run() -> None:
    world = settled(fences=True, strategy="Fence")
    world.multimodal = True
    world.push_weights("2")
    world.bump("2")
    assert [note.reason for note in world.plan().notes] == ["EpochAllotted", "FenceUnsupported"]
    assert seen_steps(world, 5) == [[], ["quiesce"], ["admit"], ["resume"], ["Collect"]]
    world.serve()


def test_fence_takes_each_replica_when_it_has_its_weights() -> None:
    world = settled(fences=True, strategy="Fence")
    world.pod(0).engine.weights = "2"
    world.bump("2")
    world.run(6)
    assert [p.engine.epoch for p in world.pods] == [2, 1]
    assert world.condition("Current") == ("False", "WaitingForWeights")
    assert "policy/1" in {salt for salt, _ in world.store["tiny"]}, "keys that are in use are not collected"
    world.push_weights("2")
    world.run()
    assert world.condition("Current") == ("True", "Current")


def test_fence_admits_newcomers_and_closed_engines() -> None:
    world = bumped(fences=True, strategy="Fence")
    world.pod(0).engine.state = "closed"
    late = world.add_pod("tiny")
    late.engine.weights = "2"
    world.run()
    assert {p.engine.state for p in world.pods} == {"open"}
    world.serve()


# -- prepare, commit, abort --------------------------------------------------------------------------------------------


def prepared(**spec: object) -> World:
    world = settled(fences=bool(spec.pop("fences", True)), **spec)  # type: ignore[arg-type]
    world.bump(world.spec.version, preparing="2")
    world.run(8)
    assert world.condition("Prepared") == ("True", "Prepared")
    return world


@pytest.mark.parametrize("fences", [True, False])
def test_prepare_quiesces_and_holds_until_the_commit(fences: bool) -> None:
    world = prepared(fences=fences)
    assert world.condition("Current") == ("False", "Preparing")
    assert {p.engine.state for p in world.pods} == {"paused"}
    preparation = world.status.preparation
    assert preparation is not None
    assert (preparation.version, preparation.epoch) == ("2", 2)
    assert preparation.fleets[0].addresses == ("10.0.0.1:8001", "10.0.0.1:8001")
    world.pass_time(60)
    world.run(5)
    assert {p.engine.state for p in world.pods} == {"paused"}
    world.push_weights("2")
    world.bump("2", preparing=None)
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {(p.engine.state, p.engine.epoch, p.engine.version) for p in world.pods} == {("open", 3, "2")}
    assert world.status.preparation is None
    assert world.status.version == "2"
    assert [u.version for u in world.status.history] == ["2", "1"]
    world.serve()


def test_a_fenced_preparation_goes_on_serving_in_an_epoch_of_transit() -> None:
    world = prepared(strategy="Fence")
    assert {(p.engine.state, p.engine.epoch, p.engine.version) for p in world.pods} == {("open", 2, None)}
    world.serve()
    world.push_weights("2")
    world.serve()
    world.bump("2", preparing=None)
    world.run()
    assert {(p.engine.state, p.engine.epoch, p.engine.version) for p in world.pods} == {("open", 3, "2")}
    world.serve()
    assert {salt for salt, _ in world.store["tiny"]} <= {"policy/3"}


def test_committing_by_version_alone_is_enough() -> None:
    world = prepared()
    world.push_weights("2")
    world.bump("2")
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert world.status.preparation is None


@pytest.mark.parametrize("strategy", ["Barrier", "Fence"])
def test_abort_goes_back_in_a_new_epoch_and_what_has_other_weights_stays_out(strategy: str) -> None:
    world = prepared(strategy=strategy)
    world.pod(0).engine.weights = "2"
    world.bump("1", preparing=None)
    plan = world.plan()
    assert [note.reason for note in plan.notes] == ["EpochAllotted", "PreparationAborted"]
    world.run()
    assert (world.pod(1).engine.state, world.pod(1).engine.epoch) == ("open", 3)
    assert (world.pod(0).engine.state, world.pod(0).engine.epoch) != ("open", 3)
    assert world.condition("Degraded") == ("True", "WaitingForWeights")
    world.serve()
    world.pod(0).engine.weights = "1"
    world.run()
    assert {(p.engine.state, p.engine.epoch) for p in world.pods} == {("open", 3)}
    world.serve()


def test_a_trainer_that_dies_is_aborted_at_the_deadline_and_not_prepared_for_again() -> None:
    world = prepared(prepareDeadlineSeconds=100)
    world.pass_time(101)
    plan = world.plan()
    assert [note.reason for note in plan.notes] == ["EpochAllotted", "PreparationExpired"]
    world.run()
    assert {(p.engine.state, p.engine.epoch, p.engine.version) for p in world.pods} == {("open", 3, "1")}
    assert world.condition("Current") == ("True", "Current")
    assert world.condition("Prepared") == ("False", "Expired")
    world.bump("1", preparing=None)
    world.run()
    world.bump("1", preparing="2")
    world.run(8)
    assert world.condition("Prepared") == ("True", "Prepared")


def test_a_commit_without_its_weights_is_not_current() -> None:
    world = prepared()
    world.bump("2", preparing=None)
    world.run()
    assert {p.engine.state for p in world.pods} == {"closed"}
    assert world.condition("Current") == ("False", "WaitingForWeights")
    world.pod(0).engine.weights = "2"
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert world.condition("Degraded") == ("True", "WaitingForWeights")


@pytest.mark.parametrize("end", ["commit", "abort", "deadline"])
def test_suspend_lets_a_preparation_end(end: str) -> None:
    world = prepared()
    world.bump("1", suspend=True)
    world.run(4)
    assert world.condition("Prepared") == ("True", "Prepared")
    if end == "commit":
        world.push_weights("2")
        world.bump("2", preparing=None)
    elif end == "abort":
        world.bump("1", preparing=None)
    else:
        world.pass_time(world.spec.prepare_deadline_seconds)
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {p.engine.version for p in world.pods} == {"2" if end == "commit" else "1"}


def test_the_replica_that_holds_a_change_up_is_named() -> None:
    world = bumped(fences=True)
    world.pod(0).engine.running = 1
    world.run(4)
    message = next(c.message for c in world.status.conditions if c.type == "Current")
    assert world.pod(0).name in message
    assert world.pod(1).name not in message


def test_another_version_than_the_prepared_one_ends_the_preparation() -> None:
    world = prepared()
    world.push_weights("9")
    world.bump("9", preparing=None)
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert world.status.version == "9"


# -- reset and suspend -------------------------------------------------------------------------------------------------


def test_a_reset_is_a_new_epoch_of_the_same_version() -> None:
    world = settled(fences=True)
    world.bump("1", reset_nonce="now")
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {(p.engine.epoch, p.engine.version) for p in world.pods} == {(2, "1")}
    assert world.plan().actions == ()


def test_suspend_begins_nothing_finishes_what_is_under_way_and_admits_newcomers() -> None:
    world = settled(fences=True)
    world.push_weights("2")
    world.bump("2")
    world.turn()
    world.turn()
    world.bump("2", suspend=True)
    world.run()
    assert world.condition("Current") == ("True", "Current")
    world.push_weights("3")
    world.bump("3")
    late = world.add_pod("tiny")
    late.engine.weights = "2"
    world.run()
    assert world.condition("Current") == ("False", "Suspended")
    assert {p.engine.epoch for p in world.pods} == {2}
    assert late.engine.state == "open"
    world.bump("3", suspend=False)
    world.push_weights("3")
    world.run()
    assert world.condition("Current") == ("True", "Current")
    assert {p.engine.epoch for p in world.pods} == {3}


@pytest.mark.parametrize("fences", [True, False])
def test_a_fleet_that_is_closed_for_its_weights_is_at_no_moment_current(fences: bool) -> None:
    world = settled(fences=fences)
    world.bump("1", preparing="2")
    world.run()
    world.bump("2", preparing=None)
    for _ in range(12):
        world.turn()
        assert world.condition("Current")[0] == "False"
        world.pass_time(0.5)
    assert {p.engine.state for p in world.pods} == {"closed"}
    assert world.condition("Current") == ("False", "WaitingForWeights")


def test_the_planner_is_asked_again_when_the_first_replica_is_waited_for_no_longer() -> None:
    world = bumped(fences=True, replicaTimeoutSeconds=20, onReplicaFailure="Isolate")
    hung = world.pod(0)
    hung.engine.hung = True
    for _ in range(4):
        world.turn()
    assert world.turn().requeue_after == protocol.BUSY_REQUEUE
    assert world.pod(1).engine.state == "paused"
    world.pass_time(19.8)
    assert 0.1 < world.turn().requeue_after < 0.3
    world.pass_time(0.2)
    world.run()
    assert (world.pod(1).engine.state, world.pod(1).engine.epoch) == ("open", 2)


def test_what_is_known_of_epochs_and_keys_is_written_before_anybody_acts_on_it() -> None:
    written = PolicyVersionStatus(epoch=2, target_version="2")
    for changes in (
        {"epoch": 3},
        {"target_version": "3"},
        {"reset_nonce": "again"},
        {"members": (Member(name="a", uid="u", wiped_epoch=2),)},
        {"preparation": Preparation(version="3", epoch=3, started_at="2026-01-01T00:00:00Z")},
    ):
        assert protocol.must_precede(written, written.model_copy(update=changes)), changes
    told = {"replicas": ReplicaCounts(total=2, current=1, closed=0, summary="1/2"), "failures_omitted": 3}
    assert not protocol.must_precede(written, written.model_copy(update=told))


# What engines are probably told next ----------------------------------------------------------------------------------


def calls(commands: object) -> list[tuple[Step, str, int, dict[str, object], float]]:
    """Commands as engines get them."""
    assert isinstance(commands, tuple)
    return [
        (c.step, c.replica.pod_uid, c.epoch, dict(c.body), c.timeout_seconds)
        for c in commands
        if isinstance(c, Command)
    ]


@pytest.mark.parametrize("mode", ["Wait", "Abort", "Keep"])
@pytest.mark.parametrize("weights", ["Unchecked", "External"])
def test_what_is_ahead_of_engines_that_are_quiesced_is_what_they_are_told_next(mode: str, weights: str) -> None:
    spec = {"version": "1", "runningRequests": mode, "weights": weights}
    world = World(PolicyVersionSpec.model_validate(spec), fences=True, opens=True)
    world.add_fleet("tiny", 3)
    world.run()
    for version in ("2", "3"):
        world.push_weights(version)
        world.bump(version)
        assert world.turn().ahead == ()
        plan = world.turn()
        assert steps(plan) == ["quiesce"] * 3
        after = world.turn()
        assert steps(after) == ["admit"] * 3
        assert calls(plan.ahead) == calls(after.actions)
        assert all(body["resume"] for *_, body, _ in calls(plan.ahead))
        assert after.ahead == ()
        world.run()
        assert {(p.engine.state, p.engine.version) for p in world.pods} == {("open", version)}


def test_nothing_is_ahead_where_something_else_comes_first() -> None:
    older = World(PolicyVersionSpec.model_validate({"version": "1"}), fences=True, opens=False)
    plain = World(PolicyVersionSpec.model_validate({"version": "1"}), fences=False, opens=True)
    fenced = World(PolicyVersionSpec.model_validate({"version": "1", "strategy": "Fence"}), fences=True, opens=True)
    for world, told in ((older, "quiesce"), (plain, "quiesce"), (fenced, "fence")):
        world.add_fleet("tiny", 2)
        world.run()
        world.push_weights("2")
        world.bump("2")
        world.turn()
        plan = world.turn()
        assert (steps(plan), plan.ahead) == ([told] * 2, ())


def test_nothing_is_ahead_of_an_engine_that_lacks_its_weights() -> None:
    world = World(PolicyVersionSpec.model_validate({"version": "1"}), fences=True, opens=True)
    world.add_fleet("tiny", 3)
    world.run()
    for pod in world.pods[1:]:
        world.give_weights(pod, "2")
    world.bump("2")
    world.turn()
    plan = world.turn()
    assert steps(plan) == ["quiesce"] * 3
    assert [command.replica.pod_uid for command in plan.ahead] == [pod.uid for pod in world.pods[1:]]


def test_nothing_is_ahead_while_weights_are_pushed() -> None:
    world = World(PolicyVersionSpec.model_validate({"version": "1"}), fences=True, opens=True)
    world.add_fleet("tiny", 2)
    world.run()
    world.spec = world.spec.model_copy(update={"preparing": "2"})
    world.generation += 1
    plans = [world.turn() for _ in range(4)]
    assert ["quiesce"] * 2 in [steps(plan) for plan in plans]
    assert all(plan.ahead == () for plan in plans)
