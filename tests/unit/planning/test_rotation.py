"""How a token is rotated: what is tried and written in each phase, and what each phase waits for."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from moontide.api.v1alpha1 import AdminToken
from moontide.planning import rotation
from moontide.planning.model import Replica
from moontide.planning.rotation import ENGINES, WIPERS, Taker
from moontide.status import timestamp

NOW = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)


def replica(name: str, **more: Any) -> Replica:
    given = {"address": "10.0.0.1:8001", "container_id": "c://1", "may_have_served": True, **more}
    return Replica(name=name, pod_uid=f"pod-{name}", fleet="uid", **given)


def token(phase: Any, age: float = 1.0) -> AdminToken:
    since = timestamp(NOW - dt.timedelta(seconds=age))
    rotation_, other = ("new", "old") if phase in ("Overlapping", "Retiring") else ("old", "new")
    return AdminToken(rotation=rotation_, other=other, phase=phase, since=since)


def advance(
    now: AdminToken, answers: dict[str, str] | None = None, preparing: bool = False, **more: Any
) -> rotation.Step:
    asked = [rotation.engine(replica(name, **more), reason) for name, reason in (answers or {}).items()]
    takers = [each for each in asked if each is not None]
    return rotation.advance(ENGINES, now, takers, "a trainer pushes weights" if preparing else "", 600.0, NOW)


def test_what_is_tried_and_what_the_secret_holds_in_each_phase() -> None:
    assert (rotation.used(None), rotation.in_secret(None), rotation.probed(None)) == (("",), ("",), None)
    done = AdminToken(rotation="new")
    assert (rotation.used(done), rotation.in_secret(done), rotation.probed(done)) == (("new",), ("new",), None)
    coming, both, going = token("Introducing"), token("Overlapping"), token("Retiring")
    assert (rotation.used(coming), rotation.in_secret(coming)) == (("old", "new"),) * 2
    assert (rotation.used(both), rotation.in_secret(both)) == (("new", "old"),) * 2
    # A pod that started with what its node remembered takes the old one a while longer.
    assert (rotation.used(going), rotation.in_secret(going)) == (("new", "old"), ("new",))
    assert [rotation.probed(each) for each in (coming, both, going)] == ["new", None, "old"]


def test_an_annotation_with_another_value_begins_a_rotation_and_no_old_token_comes_back() -> None:
    assert rotation.begin(ENGINES, None, None, NOW) == rotation.Step(None)
    begun = rotation.begin(ENGINES, None, "november", NOW)
    assert begun.reason == "TokenRotating"
    assert begun.token is not None
    assert (begun.token.rotation, begun.token.other) == ("", "november@20260102T000000Z")
    done = AdminToken(rotation="november@20260102T000000Z")
    assert rotation.begin(ENGINES, done, "november", NOW) == rotation.Step(done)
    assert rotation.begin(ENGINES, done, None, NOW) == rotation.Step(done)
    again = rotation.begin(ENGINES, AdminToken(rotation="december@20260202T000000Z"), "november", NOW).token
    assert again is not None
    assert again.other != ""
    later = rotation.begin(
        ENGINES, AdminToken(rotation="x@20260101T000000Z"), "november", NOW + dt.timedelta(days=30)
    ).token
    assert later is not None
    assert later.other != again.other


@pytest.mark.parametrize("value", ["", "a@b", "x" * 400, "a/b\nc"])
def test_any_value_names_a_rotation_once(value: str) -> None:
    begun = rotation.begin(ENGINES, None, value, NOW).token
    if value == "":
        # The first token has no name; to ask for another one takes a value.
        assert begun is None
        return
    assert begun is not None
    assert begun.other is not None
    assert begun.other.count("@") == 1
    assert len(begun.other) <= 128
    assert rotation.begin(ENGINES, AdminToken(rotation=begun.other), value, NOW).reason == ""


def test_another_value_meanwhile_waits_for_the_rotation_under_way() -> None:
    assert rotation.begin(ENGINES, token("Overlapping"), "later", NOW) == rotation.Step(token("Overlapping"))


def test_the_new_token_is_used_once_every_engine_takes_it() -> None:
    waits = advance(token("Introducing"), {"a": "", "b": "Http401"})
    assert waits.token is not None
    assert (waits.token.phase, waits.reason) == ("Introducing", "")
    assert waits.token.message == "these do not take the new token yet: b (Http401)"
    step = advance(token("Introducing"), {"a": "", "b": ""}).token
    assert step == AdminToken(rotation="new", other="old", phase="Overlapping", since=timestamp(NOW))


def test_who_waits_long_is_named_in_an_event_once() -> None:
    late = advance(token("Introducing", 200), {"b": "Http401"})
    assert (late.reason, late.trouble) == ("TokenRotationWaits", True)
    assert late.token is not None
    assert advance(late.token, {"b": "Http401"}).reason == ""


def test_an_engine_that_answers_holds_it_up_for_ever_and_a_silent_one_for_minutes() -> None:
    long = rotation.PATIENCE_SECONDS + 1

    def phase(reason: str, age: float, **more: Any) -> str:
        found = advance(token("Introducing", age), {"b": reason}, **more).token
        assert found is not None
        return found.phase

    assert phase("Http401", long * 100) == "Introducing"
    assert phase("Unreachable", 5) == phase("Timeout", 5) == "Introducing"
    assert phase("Unreachable", long) == phase("Timeout", long) == "Overlapping"
    # Nobody brings an adopted engine its token but who launched it; it may wake and must then take commands.
    assert phase("Timeout", long, url="http://10.0.0.1:8001", container_id=None) == "Introducing"
    assert phase("Timeout", long, url="http://x", container_id=None, may_have_served=False) == "Overlapping"
    # What has not started, and what ends, is not waited for.
    assert phase("Unreachable", 5, container_id=None) == "Overlapping"
    assert phase("Http401", 5, terminating=True) == "Overlapping"


def test_the_old_token_retires_after_the_overlap_and_the_change_that_began_with_it() -> None:
    def phase(age: float, preparing: bool) -> str:
        found = advance(token("Overlapping", age), preparing=preparing).token
        assert found is not None
        return found.phase

    assert phase(599, False) == "Overlapping"
    assert phase(601, True) == "Overlapping"
    held = advance(token("Overlapping", 601), preparing=True).token
    assert held is not None
    assert held.message == "the old token is accepted until a change has ended: a trainer pushes weights"
    assert phase(601, False) == "Retiring"


def test_it_has_retired_when_every_engine_that_answers_refuses_it() -> None:
    waits = advance(token("Retiring"), {"a": "Http401", "b": ""}).token
    assert waits is not None
    assert (waits.phase, waits.message) == ("Retiring", "these do not refuse the old token yet: b (takes it)")
    assert advance(token("Retiring"), {"a": "Http401", "b": "Timeout"}).reason == ""
    done = advance(token("Retiring"), {"a": "Http401", "b": "Http401"})
    assert done.token == AdminToken(rotation="new", since=timestamp(NOW))
    assert done.reason == "TokenRotated"
    assert "each of the 2 engines" in done.message
    # One that takes it is waited for, terminating or not.
    assert advance(token("Retiring", 10_000), {"b": ""}, terminating=True).reason == "TokenRotationWaits"


def test_the_wipers_of_a_pool_take_the_same_way() -> None:
    begun = rotation.begin(WIPERS, None, "november", NOW)
    assert begun.message == "a new wiper token is introduced; the old one is used until every wiper takes the new one"

    def step(phase: str, *takers: Taker, age: float = 1.0) -> rotation.Step:
        return rotation.advance(WIPERS, token(phase, age), takers, "", 600.0, NOW)

    def phase(found: rotation.Step) -> str:
        assert found.token is not None
        return found.token.phase

    leader, standby = Taker("kv-master-a"), Taker("kv-master-b", "Http401")
    # A standby may lead tomorrow, so it is waited for as the leader is.
    assert phase(step("Introducing", leader, standby)) == "Introducing"
    assert phase(step("Introducing", leader, Taker("kv-master-b", "Http401", terminating=True))) == "Overlapping"
    assert phase(step("Introducing", leader, Taker("kv-master-b"))) == "Overlapping"
    assert phase(step("Overlapping", age=601)) == "Retiring"
    waits = step("Retiring", leader, standby)
    assert waits.token is not None
    assert waits.token.message == "these do not refuse the old token yet: kv-master-a (takes it)"
    done = step("Retiring", standby)
    assert done.message == "the wiper token was rotated; the old one is refused by each of the 1 wipers that answer"
    silent = step("Retiring", Taker("kv-master-a", "Unreachable"), age=rotation.PATIENCE_SECONDS + 1)
    assert (silent.reason, phase(step("Retiring", Taker("kv-master-a", "Unreachable")))) == ("TokenRotated", "Retiring")
    assert silent.message == "the wiper token was rotated; no wiper answers that could take the old one"
