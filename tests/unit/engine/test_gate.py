"""The gate's state machine: examples of the contract, and its invariants under any order of calls."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moontide_engine.gate import DuringBarrier, Entry, Fence, Gate, Refusal, Stamp, State


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> Gate:
    return Gate("boot", clock, admit_ttl=100.0)


def opened(gate: Gate, epoch: int = 1) -> Gate:
    gate.admit(epoch, f"v{epoch}")
    gate.resume(epoch)
    return gate


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.message
    return caught.value.reason


def test_starts_closed_clean_and_drained(gate: Gate) -> None:
    assert (gate.state, gate.reason) == (State.CLOSED, "Starting")
    assert gate.clean
    assert gate.drained
    assert not gate.admitted
    assert gate.stamp is None
    assert gate.enter() is Entry.REFUSE
    assert gate.in_flight == 0


def test_does_not_open_without_admission(gate: Gate) -> None:
    assert refused(lambda: gate.resume(1)) == "NotAdmitted"
    assert gate.state is State.CLOSED


def test_opens_only_in_the_admitted_epoch(gate: Gate) -> None:
    gate.admit(2, "v2")
    assert gate.state is State.PAUSED
    assert gate.enter() is Entry.HOLD
    assert refused(lambda: gate.resume(1)) == "NotAdmitted"
    assert refused(lambda: gate.resume(3)) == "NotAdmitted"
    gate.resume(2)
    assert gate.state is State.OPEN
    assert gate.enter() is Entry.PASS
    assert gate.stamp == Stamp(2, "v2")


def test_opening_makes_dirty_and_undrained(gate: Gate) -> None:
    opened(gate)
    assert not gate.clean
    assert not gate.drained
    assert refused(lambda: gate.admit(2, "v2")) == "NotClean"
    assert refused(gate.set_clean) == "NotQuiesced"
    assert refused(gate.set_drained) == "NotQuiesced"


@pytest.mark.parametrize(("clean", "drained"), [(True, False), (False, True), (False, False)])
def test_admission_needs_both(gate: Gate, clean: bool, drained: bool) -> None:
    opened(gate).quiesce(DuringBarrier.QUEUE, 10)
    if clean:
        gate.set_clean()
    if drained:
        gate.set_drained()
    assert refused(lambda: gate.admit(2, "v2")) == "NotClean"
    assert gate.stamp == Stamp(1, "v1")


def test_a_request_in_flight_keeps_the_caches_dirty(gate: Gate) -> None:
    opened(gate).enter()
    gate.quiesce(DuringBarrier.QUEUE, 10)
    assert refused(gate.set_clean) == "RequestsRunning"
    assert refused(gate.set_drained) == "RequestsRunning"
    gate.leave()
    gate.set_clean()
    gate.set_drained()
    gate.admit(2, "v2")
    assert gate.state is State.PAUSED


def test_pause_measures_itself(gate: Gate, clock: Clock) -> None:
    opened(gate).quiesce(DuringBarrier.QUEUE, 30)
    clock.now += 4
    assert gate.paused_seconds == 4
    assert gate.pause_remaining == 26
    gate.resume(1)
    assert gate.last_pause_seconds == 4
    assert gate.paused_seconds is None
    assert gate.pause_remaining is None


def test_pause_that_runs_out_closes_and_never_opens(gate: Gate, clock: Clock) -> None:
    opened(gate).quiesce(DuringBarrier.QUEUE, 30)
    clock.now += 29.9
    assert gate.state is State.PAUSED
    clock.now += 0.2
    assert (gate.state, gate.reason) == (State.CLOSED, "PauseExpired")
    assert gate.enter() is Entry.REFUSE
    assert not gate.admitted
    assert refused(lambda: gate.resume(1)) == "NotAdmitted"
    clock.now += 1000
    assert gate.state is State.CLOSED


def test_quiesce_again_renews_the_time_to_live(gate: Gate, clock: Clock) -> None:
    opened(gate).quiesce(DuringBarrier.QUEUE, 30)
    clock.now += 20
    gate.quiesce(DuringBarrier.QUEUE, 30)
    clock.now += 20
    assert gate.state is State.PAUSED
    assert gate.paused_seconds == 40


def test_quiesce_leaves_a_closed_gate_closed(gate: Gate) -> None:
    gate.quiesce(DuringBarrier.QUEUE, 30)
    assert gate.state is State.CLOSED


def test_an_admission_that_is_not_resumed_runs_out(gate: Gate, clock: Clock) -> None:
    gate.admit(1, None)
    assert gate.pause_remaining == 100
    clock.now += 101
    assert (gate.state, gate.reason) == (State.CLOSED, "PauseExpired")


def test_refuse_mode_does_not_hold(gate: Gate) -> None:
    opened(gate).quiesce(DuringBarrier.REFUSE, 10)
    assert gate.enter() is Entry.REFUSE
    gate.quiesce(DuringBarrier.QUEUE, 10)
    assert gate.enter() is Entry.HOLD


def test_close_ends_the_admission_and_keeps_the_first_reason(gate: Gate) -> None:
    opened(gate).close("Isolated")
    gate.close("Again")
    assert (gate.state, gate.reason) == (State.CLOSED, "Isolated")
    assert refused(lambda: gate.resume(1)) == "NotAdmitted"
    assert refused(lambda: gate.admit(1, "v1")) == "NotClean"


def test_commands_are_idempotent(gate: Gate) -> None:
    gate.admit(1, "v1")
    gate.admit(1, "v1")
    gate.resume(1)
    gate.resume(1)
    gate.admit(1, "v1")
    assert gate.state is State.OPEN
    assert gate.opens == 1
    assert refused(lambda: gate.admit(1, "other")) == "NotClean"


def test_terminating_is_final_and_spares_what_runs(gate: Gate) -> None:
    opened(gate).enter()
    gate.terminate()
    assert (gate.state, gate.reason, gate.terminating) == (State.CLOSED, "Terminating", True)
    assert gate.in_flight == 1
    gate.leave()
    gate.set_clean()
    gate.set_drained()
    assert refused(lambda: gate.admit(2, "v2")) == "Terminating"


def test_leave_without_enter_is_an_error(gate: Gate) -> None:
    with pytest.raises(RuntimeError):
        gate.leave()


def test_time_to_live_must_be_a_time(gate: Gate) -> None:
    for ttl in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="ttl"):
            gate.quiesce(DuringBarrier.QUEUE, ttl)


def test_commands_for_another_process_move_nothing(gate: Gate) -> None:
    assert refused(lambda: gate.accept(Fence(9, 9), "other")) == "BootIdMismatch"
    assert gate.fence == Fence(0, 0)


def test_fence(gate: Gate) -> None:
    gate.accept(Fence(1, 5), "boot")
    gate.accept(Fence(1, 5), "boot")
    assert refused(lambda: gate.accept(Fence(1, 4), "boot")) == "Fenced"
    assert refused(lambda: gate.accept(Fence(0, 9), "boot")) == "Fenced"
    # A newer leader comes first, whatever its epoch.
    gate.accept(Fence(2, 1), "boot")
    assert gate.fence == Fence(2, 1)
    assert refused(lambda: gate.accept(Fence(1, 99), "boot")) == "Fenced"


def test_listeners_hear_each_change_once(gate: Gate, clock: Clock) -> None:
    seen: list[State] = []
    gate.listeners.append(lambda g: seen.append(g.state))
    opened(gate).quiesce(DuringBarrier.QUEUE, 5)
    gate.quiesce(DuringBarrier.QUEUE, 5)
    clock.now += 6
    assert gate.state is State.CLOSED
    gate.close("x")
    assert seen == [State.PAUSED, State.OPEN, State.PAUSED, State.CLOSED]


@pytest.mark.parametrize("paused", [False, True])
def test_a_load_ends_the_admission(gate: Gate, paused: bool) -> None:
    opened(gate).quiesce(DuringBarrier.QUEUE, 30)
    if not paused:
        gate.close("x")
    state = gate.state
    gate.begin_load()
    assert (gate.state, gate.admitted, gate.loading) == (state, False, True)
    assert gate.reason == ("" if paused else "Loading")
    assert refused(lambda: gate.resume(1)) == "NotAdmitted"
    assert refused(lambda: gate.admit(2, "v2", salted=True)) == "Loading"
    assert refused(gate.begin_load) == "Loading"
    gate.end_load(True)
    assert gate.reason == ("" if paused else "Loaded")
    assert refused(lambda: gate.resume(1)) == "NotAdmitted"
    gate.admit(2, "v2", salted=True)
    gate.resume(2)
    assert gate.state is State.OPEN


def test_a_load_needs_an_engine_at_rest(gate: Gate) -> None:
    opened(gate).enter()
    assert refused(gate.begin_load) == "NotQuiesced"
    gate.quiesce(DuringBarrier.QUEUE, 30)
    assert refused(gate.begin_load) == "RequestsRunning"
    gate.begin_load(standing=True)
    gate.end_load(False)
    gate.close("x")
    assert refused(lambda: gate.begin_load(standing=True)) == "RequestsRunning"
    gate.leave()
    gate.terminate()
    assert refused(gate.begin_load) == "Terminating"


def test_a_pause_may_run_out_while_weights_are_loaded(gate: Gate, clock: Clock) -> None:
    opened(gate).quiesce(DuringBarrier.QUEUE, 30)
    gate.begin_load()
    clock.now += 31
    assert (gate.state, gate.reason, gate.loading) == (State.CLOSED, "PauseExpired", True)
    gate.end_load(False)
    assert (gate.state, gate.reason) == (State.CLOSED, "LoadFailed")


class GateMachine(RuleBasedStateMachine):
    """Any interleaving of commands, requests and time, beside a model that knows only the promises."""

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.gate = Gate("boot", self.clock, admit_ttl=7.0)
        self.salt = 0
        self.kv: dict[int, set[Stamp]] = {}
        """What was computed under which stamp, by the salt in its key."""
        self.fences = [Fence(0, 0)]
        self.passed = 0
        self.admissions_since_close: int | None = None
        self.deadline = math.inf
        self.gate.listeners.append(self._seen)

    def _seen(self, gate: Gate) -> None:
        if gate.state is State.CLOSED:
            self.admissions_since_close = None

    @rule(seconds=st.floats(0.1, 10))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(term=st.integers(0, 3), epoch=st.integers(0, 5))
    def command(self, term: int, epoch: int) -> None:
        fence = Fence(term, epoch)
        try:
            self.gate.accept(fence, "boot")
        except Refusal:
            assert fence < self.fences[-1]
        else:
            assert fence >= self.fences[-1]
            self.fences.append(fence)

    @rule(ttl=st.floats(0.5, 20), mode=st.sampled_from(DuringBarrier))
    def quiesce(self, ttl: float, mode: DuringBarrier) -> None:
        self.gate.quiesce(mode, ttl)
        assert self.gate.state is not State.OPEN

    @rule()
    def request(self) -> None:
        before = self.gate.state
        entry = self.gate.enter()
        assert (entry is Entry.PASS) == (before is State.OPEN)
        if entry is Entry.PASS:
            self.passed += 1
            stamp = self.gate.stamp
            assert stamp is not None
            assert stamp.epoch == self.admissions_since_close
            found = self.kv.setdefault(self.salt, set())
            assert found <= {stamp}, "it can find what another epoch computed"
            found.add(stamp)

    @precondition(lambda self: self.passed > 0)
    @rule()
    def end(self) -> None:
        self.gate.leave()
        self.passed -= 1

    @rule()
    def reset(self) -> None:
        try:
            self.gate.set_clean()
        except Refusal:
            return
        assert self.gate.state is not State.OPEN
        assert self.passed == 0
        self.kv = {}

    @rule()
    def drain(self) -> None:
        try:
            self.gate.set_drained()
        except Refusal:
            return
        assert self.gate.state is not State.OPEN
        assert self.passed == 0

    @rule(epoch=st.integers(0, 5), version=st.sampled_from(["a", "b", None]), salted=st.booleans())
    def admit(self, epoch: int, version: str | None, salted: bool) -> None:
        again = self.gate.admitted and self.gate.stamp == Stamp(epoch, version)
        if salted and self.gate.state is not State.OPEN:
            self.salt += 1
        try:
            self.gate.admit(epoch, version, salted)
        except Refusal:
            return
        assert again or salted or not self.kv
        assert again or self.gate.state is State.PAUSED
        self.admissions_since_close = epoch

    @rule(epoch=st.integers(0, 5), version=st.sampled_from(["a", "b", None]))
    def move(self, epoch: int, version: str | None) -> None:
        if self.gate.state is State.OPEN:
            self.salt += 1
        try:
            self.gate.move(epoch, version)
        except Refusal:
            assert self.gate.state is not State.OPEN
            return
        assert self.gate.stamp == Stamp(epoch, version)
        self.admissions_since_close = epoch

    @rule(epoch=st.integers(0, 5))
    def resume(self, epoch: int) -> None:
        try:
            self.gate.resume(epoch)
        except Refusal:
            return
        assert self.gate.state is State.OPEN
        assert self.admissions_since_close == epoch

    @rule(standing=st.booleans())
    def begin_load(self, standing: bool) -> None:
        before = self.gate.state
        try:
            self.gate.begin_load(standing)
        except Refusal:
            assert before is State.OPEN or self.passed or self.gate.loading
            return
        assert before is not State.OPEN
        assert not self.passed or (standing and before is State.PAUSED)
        assert self.gate.loading
        self.admissions_since_close = None

    @precondition(lambda self: self.gate.loading)
    @rule(loaded=st.booleans())
    def end_load(self, loaded: bool) -> None:
        before = self.gate.state
        self.gate.end_load(loaded)
        assert not self.gate.loading
        assert self.gate.state is before

    @rule()
    def close(self) -> None:
        self.gate.close("x")
        assert self.gate.state is State.CLOSED

    @invariant()
    def open_means_admitted(self) -> None:
        if self.gate.state is State.OPEN:
            assert self.gate.admitted
            assert self.gate.stamp is not None
            assert self.gate.stamp.epoch == self.admissions_since_close

    @invariant()
    def nothing_is_admitted_while_weights_are_loaded(self) -> None:
        if self.gate.loading:
            assert not self.gate.admitted
            assert self.gate.state is not State.OPEN

    @invariant()
    def clean_means_no_kv(self) -> None:
        assert not (self.gate.clean and self.kv)
        assert not (self.gate.clean and self.gate.state is State.OPEN)
        assert not (self.gate.drained and self.gate.state is State.OPEN)

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.gate.in_flight == self.passed

    @invariant()
    def fence_is_the_highest_seen(self) -> None:
        assert self.gate.fence == max(self.fences)

    @invariant()
    def a_pause_always_ends(self) -> None:
        remaining = self.gate.pause_remaining
        assert (remaining is not None) == (self.gate.state is State.PAUSED)
        assert remaining is None or 0 < remaining < 20.001


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
