"""The ledger of external matches: each plan ends exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moontide_engine import matches
from moontide_engine.matches import ExternalMatch, Ledger, Range, Reason


class Plan:
    """One lease."""


class Connector:
    """Gives a new plan at each call; knows what became of each."""

    def __init__(self, tokens: int | None = 100, hold: float = 0.0) -> None:
        self.tokens = tokens
        self.hold = hold
        self.now = 0.0
        self.given: list[Plan] = []
        self.committed: list[Plan] = []
        self.aborted: list[tuple[Plan, str]] = []
        self.ledger = Ledger(lambda plan, reason: self.aborted.append((plan, reason)), lambda: self.now)

    def ask(self) -> ExternalMatch:
        self.given.append(Plan())
        return ExternalMatch(self.given[-1], self.tokens, hold=self.hold)

    def commit(self, plan: Plan, tokens: int) -> int:
        self.committed.append(plan)
        return tokens

    def probe(self, request: str = "r", of: int = 0) -> ExternalMatch | None:
        return self.ledger.prepare(request, Range(of, 200, 12, b"h"), self.ask)

    @property
    def reasons(self) -> list[str]:
        return [reason for _, reason in self.aborted]


def test_a_second_probe_of_the_same_range_takes_no_second_plan() -> None:
    connector = Connector()
    assert connector.probe() is connector.probe()
    assert len(connector.given) == 1
    assert not connector.aborted
    assert (connector.ledger.counts.prepared, connector.ledger.counts.reused) == (1, 1)


def test_another_range_aborts_the_first_plan_before_it_asks() -> None:
    connector = Connector()
    connector.probe(of=0)
    seen: list[int] = []

    def ask() -> ExternalMatch:
        seen.append(len(connector.aborted))
        return connector.ask()

    connector.ledger.prepare("r", Range(16, 200, 12, b"h"), ask)
    assert seen == [1]
    assert connector.reasons == [Reason.RANGE]


@pytest.mark.parametrize(
    "other", [Range(1, 2, 1, b"x"), Range(0, 3, 1, b"x"), Range(0, 2, 2, b"x"), Range(0, 2, 1, b"y")]
)
def test_a_range_is_all_of_its_parts(other: Range) -> None:
    assert Range.of(0, 2, [b"a"]) != other
    assert Range.of(0, 2, [b"w", b"y"]) == Range(0, 2, 2, b"y")


def test_a_commit_may_accept_fewer() -> None:
    connector = Connector()
    connector.probe()
    assert connector.ledger.commit("r", 100, lambda plan, tokens: tokens // 2) == 50
    assert not connector.aborted
    assert not len(connector.ledger)
    assert (connector.ledger.counts.committed, connector.ledger.counts.clipped) == (1, 1)


@pytest.mark.parametrize(("accepts", "aborted"), [(100, []), (50, [Reason.CLIPPED]), (0, [])])
def test_an_exact_commit_of_fewer_is_aborted(accepts: int, aborted: list[Reason]) -> None:
    connector = Connector()
    connector.probe()
    assert connector.ledger.commit("r", 100, lambda plan, tokens: accepts, exact=True) == accepts
    assert connector.reasons == aborted
    assert not len(connector.ledger)


@pytest.mark.parametrize("accepts", [-1, 101])
def test_a_commit_of_more_than_asked_is_an_error(accepts: int) -> None:
    connector = Connector()
    connector.probe()
    with pytest.raises(ValueError, match="accepted"):
        connector.ledger.commit("r", 100, lambda plan, tokens: accepts)
    assert connector.reasons == [Reason.FAILED]


def test_a_commit_without_a_match_is_an_error() -> None:
    with pytest.raises(KeyError):
        Connector().ledger.commit("r", 1, lambda plan, tokens: tokens)


def test_a_step_that_ends_takes_what_may_not_wait() -> None:
    connector = Connector()
    connector.probe()
    connector.ledger.step_ends()
    assert connector.reasons == [Reason.NOT_SCHEDULED]
    assert not len(connector.ledger)


def test_a_held_match_waits_for_its_time_and_no_longer() -> None:
    connector = Connector(hold=2.0)
    connector.probe()
    assert not connector.ledger.drop("r", Reason.ALLOCATION)
    connector.now = 1.9
    connector.ledger.step_ends()
    assert connector.probe() is not None
    assert len(connector.given) == 1
    connector.now = 2.0
    connector.ledger.step_ends()
    assert connector.reasons == [Reason.EXPIRED]


def test_a_held_match_that_is_too_old_is_not_reused() -> None:
    connector = Connector(hold=2.0)
    connector.probe()
    connector.now = 2.0
    connector.probe()
    assert len(connector.given) == 2
    assert connector.reasons == [Reason.EXPIRED]


def test_no_room_aborts_what_may_not_wait() -> None:
    connector = Connector()
    connector.probe()
    assert connector.ledger.drop("r", Reason.ALLOCATION)
    assert connector.reasons == [Reason.ALLOCATION]
    assert not connector.ledger.drop("r", Reason.ALLOCATION)


def test_an_unknown_match_is_asked_again_and_keeps_its_plan() -> None:
    connector = Connector()
    plan = Plan()
    sizes = iter([None, None, 64])

    def ask() -> ExternalMatch:
        return ExternalMatch(plan, next(sizes))

    of = Range(0, 200, 12, b"h")
    for _ in range(2):
        match = connector.ledger.prepare("r", of, ask)
        assert match is not None
        assert match.tokens is None
        connector.ledger.step_ends()
    match = connector.ledger.prepare("r", of, ask)
    assert match is not None
    assert match.tokens == 64
    assert connector.ledger.counts.prepared == 1
    assert not connector.aborted


def test_an_unknown_match_that_becomes_another_or_none_is_aborted() -> None:
    connector = Connector(tokens=None)
    connector.probe()
    connector.probe()
    assert connector.reasons == [Reason.REPLACED]
    assert connector.ledger.prepare("r", Range(0, 200, 12, b"h"), lambda: None) is None
    assert connector.reasons == [Reason.REPLACED, Reason.NO_MATCH]
    assert not len(connector.ledger)


def test_a_match_of_nothing_is_none_and_its_plan_ends() -> None:
    connector = Connector(tokens=0)
    assert connector.probe() is None
    assert connector.reasons == [Reason.NO_MATCH]


def test_an_abort_that_raises_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    said: list[str] = []
    monkeypatch.setattr(matches, "log", lambda event, **_: said.append(event))

    def abort(plan: object, reason: str) -> None:
        done.append(plan)
        raise OSError("gone")

    ledger = Ledger(abort)
    for name in "ab":
        ledger.prepare(name, Range(0, 2, 1, b"x"), lambda: ExternalMatch(Plan(), 1))
    ledger.close(Reason.SHUTDOWN)
    assert len(done) == 2
    assert not len(ledger)
    assert said == ["match-abort-failed"] * 2


class Lives(RuleBasedStateMachine):
    """Any order of events: one outstanding plan at most for each request, each ended once, none left at the end."""

    names = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ends: Counter[int] = Counter()
        self.plans: dict[int, Plan] = {}
        self.owner: dict[int, str] = {}
        self.ledger = Ledger(lambda plan, reason: self.end(plan), lambda: self.now)

    def end(self, plan: Plan) -> None:
        self.ends[id(plan)] += 1

    def outstanding(self, request: str | None = None) -> list[int]:
        return [plan for plan in self.plans if not self.ends[plan] and (request is None or self.owner[plan] == request)]

    @rule(
        request=names,
        computed=st.sampled_from([0, 16]),
        tokens=st.sampled_from([None, 0, 32, 64]),
        hold=st.sampled_from([0.0, 3.0]),
        nothing=st.booleans(),
        same=st.booleans(),
    )
    def probe(self, request: str, computed: int, tokens: int | None, hold: float, nothing: bool, same: bool) -> None:
        before = self.ledger.get(request)

        def ask() -> ExternalMatch | None:
            if nothing:
                return None
            current = self.ledger.get(request)
            if same and current is not None:
                return ExternalMatch(current.plan, tokens, hold=hold)
            plan = Plan()
            self.plans[id(plan)], self.owner[id(plan)] = plan, request
            return ExternalMatch(plan, tokens, hold=hold)

        match = self.ledger.prepare(request, Range(computed, 100, 6, b"h"), ask)
        assert match is None or match is self.ledger.get(request)
        assert match is None or match.tokens != 0
        if before is not None and match is not before:
            assert before.tokens is None or id(before.plan) not in self.outstanding()

    @precondition(lambda self: self.outstanding())
    @rule(data=st.data(), accept=st.integers(0, 3), exact=st.booleans())
    def commit(self, data: st.DataObject, accept: int, exact: bool) -> None:
        request = self.owner[data.draw(st.sampled_from(self.outstanding()))]
        consumed: list[Plan] = []

        def call(plan: Plan, tokens: int) -> int:
            consumed.append(plan)
            return accept

        accepted = self.ledger.commit(request, 3, call, exact=exact)
        assert accepted == accept
        if not (exact and 0 < accept < 3):
            self.end(consumed[0])

    @precondition(lambda self: self.outstanding())
    @rule(data=st.data())
    def commit_fails(self, data: st.DataObject) -> None:
        request = self.owner[data.draw(st.sampled_from(self.outstanding()))]

        def call(plan: Plan, tokens: int) -> int:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            self.ledger.commit(request, 3, call)
        assert not self.outstanding(request)

    @rule(request=names, reason=st.sampled_from([Reason.FINISHED, Reason.PREEMPTED]))
    def ended(self, request: str, reason: Reason) -> None:
        self.ledger.abort(request, reason)
        assert not self.outstanding(request)

    @rule(request=names)
    def no_room(self, request: str) -> None:
        self.ledger.drop(request, Reason.ALLOCATION)

    @rule()
    def step(self) -> None:
        self.ledger.step_ends()
        for plan in self.outstanding():
            match = self.ledger.get(self.owner[plan])
            assert match is not None
            assert match.tokens is None or match.hold

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reset(self) -> None:
        self.ledger.close(Reason.RESET)
        assert not self.outstanding()

    @invariant()
    def each_ends_once(self) -> None:
        assert all(count == 1 for count in self.ends.values())
        assert len(self.outstanding()) == len(self.ledger)
        assert all(len(self.outstanding(request)) <= 1 for request in "abc")
        counts = self.ledger.counts
        assert counts.prepared == counts.committed + counts.aborted.total() + len(self.ledger)

    def teardown(self) -> None:
        self.ledger.close(Reason.SHUTDOWN)
        assert not self.outstanding()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
