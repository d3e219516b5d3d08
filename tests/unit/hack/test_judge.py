"""The judge of answers can say no: each way an answer may be wrong or beside the point is told apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hack.demo.cold import LOGPROB_TOLERANCE, Cold
from hack.demo.fleet import Answer
from hack.demo.judge import Window, judge

OLD, NEW = Cold((1, 2), (-0.5, -0.6)), Cold((3, 4), (-0.5, -0.6))
BY_VERSION = {"1": (OLD,), "2": (NEW,)}
GOOD = Answer(0, "r", 200, "1", 1, tokens=(1, 2), logprobs=(-0.5, -0.6), cached=32, began=10.0, ended=11.0)


def test_right_answer_counts_with_its_hit() -> None:
    verdict = judge([GOOD], BY_VERSION, [])
    assert (verdict.right, verdict.checked, verdict.cached, verdict.stale) == (1, 1, 1, [])


@pytest.mark.parametrize(
    "wrong",
    [
        replace(GOOD, version="2"),
        replace(GOOD, tokens=(1, 9)),
        replace(GOOD, tokens=(1,), logprobs=(-0.5,)),
        replace(GOOD, tokens=()),
        replace(GOOD, logprobs=(-0.5, -0.6 - 2 * LOGPROB_TOLERANCE)),
        replace(GOOD, logprobs=(-0.5,)),
    ],
)
def test_answer_that_is_not_the_cold_engines_is_stale(wrong: Answer) -> None:
    assert judge([wrong], BY_VERSION, []).stale == [wrong]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (replace(GOOD, status=0, error="ReadError"), "connection: ReadError"),
        (replace(GOOD, status=503), "HTTP 503"),
        (replace(GOOD, error="finished: stop"), "finished: stop"),
        (replace(GOOD, version=None, epoch=None), "claims version None"),
    ],
)
def test_answer_that_cannot_be_judged_is_counted_by_reason(answer: Answer, reason: str) -> None:
    verdict = judge([answer, GOOD], BY_VERSION, [])
    assert verdict.left_out == {reason: 1}
    assert verdict.left_out_share == 0.5


def test_window_excuses_only_what_overlaps_it_and_was_admitted_before() -> None:
    window = Window(10.5, 12.0, 2)
    assert window.blurs(GOOD)
    assert not window.blurs(replace(GOOD, began=12.0, ended=13.0)), "began when the change was over"
    assert not window.blurs(replace(GOOD, ended=10.4)), "ended before the change began"
    assert not window.blurs(replace(GOOD, epoch=2)), "admitted to the new epoch: no excuse"
    assert Window(10.5, math.inf, None).blurs(replace(GOOD, epoch=2))


def test_old_answer_that_claims_the_new_version_is_stale_within_the_window_too() -> None:
    liar = replace(GOOD, version="2", epoch=2)
    assert judge([liar], BY_VERSION, [Window(10.5, 12.0, 2)]).stale == [liar]


def test_answers_that_say_so_themselves_are_counted_apart() -> None:
    straddled, transit = replace(GOOD, last_epoch=2, tokens=(9,)), replace(GOOD, version=None, tokens=(9,))
    verdict = judge([straddled, transit, GOOD], BY_VERSION, [])
    assert (verdict.straddled, verdict.in_transit, verdict.checked) == (1, 1, 1)
    assert verdict.left_out.total() == 0
