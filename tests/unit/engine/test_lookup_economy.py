"""Breaker, memo, settings and socket probe of lookup-economy, without vLLM."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moontide_engine.patches.lookup_economy import (
    Admission,
    Breaker,
    Line,
    LookupSettings,
    Memo,
    listening,
    load,
    signature_of,
)
from moontide_engine.settings import SettingsError

ASK, TRIAL, REFUSE = Admission.ASK, Admission.TRIAL, Admission.REFUSE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    assert breaker.failure() == 0
    assert breaker.admit() is ASK
    assert breaker.failure() == 1
    return breaker


def test_breaker_opens_after_two_failures_in_a_row_alone() -> None:
    breaker = Breaker(Clock())
    for _ in range(5):
        assert breaker.failure() == 0
        assert not breaker.success()
        assert breaker.admit() is ASK
        assert not breaker.refuses()
    breaker.failure()
    assert breaker.failure() == 1
    assert breaker.admit() is REFUSE
    assert breaker.refuses()


def test_breaker_lets_one_trial_through_after_each_backoff_and_doubles_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    backoffs = []
    backoff = 1.0
    for _ in range(7):
        clock.now += backoff - 0.01
        assert breaker.admit() is REFUSE
        clock.now += 0.02
        assert breaker.admit() is TRIAL
        assert not breaker.refuses()
        assert [breaker.admit() for _ in range(3)] == [REFUSE] * 3
        backoff = breaker.failure()
        assert breaker.refuses()
        backoffs.append(backoff)
    assert backoffs == [2, 4, 8, 16, 30, 30, 30]
    clock.now += 30
    assert breaker.admit() is TRIAL
    assert breaker.success()
    assert breaker.admit() is ASK
    assert (breaker.failure(), breaker.failure()) == (0, 1)


def test_failures_of_lookups_from_before_it_opened_do_not_lengthen_the_backoff() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert breaker.failure() == 0
    clock.now += 1
    assert breaker.admit() is TRIAL


def test_one_of_many_threads_gets_the_trial() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1
    start = threading.Barrier(8)
    got: list[Admission] = []

    def ask() -> None:
        start.wait(10)
        got.append(breaker.admit())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(got, key=lambda a: a.value) == [REFUSE] * 7 + [TRIAL]


def test_memo_is_valid_for_the_same_question_call_and_time() -> None:
    clock = Clock()
    memo = Memo(clock, 2.5)
    call = object()
    asked = signature_of(64, [b"a", b"b"])
    assert not memo.valid("r", asked, call)
    memo.note("r", asked, call)
    memo.given("r")
    assert memo.valid("r", asked, call)
    assert not memo.valid("other", asked, call)
    assert not memo.valid("r", asked, object())
    clock.now += 2.4
    assert memo.valid("r", asked, call)
    clock.now += 0.1
    assert not memo.valid("r", asked, call)


def test_memo_counts_age_only_from_the_first_use() -> None:
    clock = Clock()
    memo = Memo(clock, 0)
    call = object()
    asked = signature_of(64, [b"a"])
    memo.note("r", asked, call)
    clock.now += 1000
    assert memo.valid("r", asked, call)
    memo.given("r")
    assert not memo.valid("r", asked, call)


@pytest.mark.parametrize(
    ("tokens", "hashes"), [(65, [b"a", b"b"]), (64, [b"a", b"c"]), (64, [b"a"]), (64, [b"b"]), (64, [])]
)
def test_memo_is_not_valid_for_another_question(tokens: int, hashes: list[bytes]) -> None:
    memo = Memo(Clock(), 2.5)
    call = object()
    memo.note("r", signature_of(64, [b"a", b"b"]), call)
    assert not memo.valid("r", signature_of(tokens, hashes), call)


def test_memo_forgets() -> None:
    memo = Memo(Clock(), 2.5)
    call = object()
    memo.note("r", signature_of(1, []), call)
    assert len(memo) == 1
    memo.drop("r")
    memo.drop("r")
    memo.given("r")
    assert len(memo) == 0
    assert not memo.valid("r", signature_of(1, []), call)


def test_settings_have_defaults_and_bounds() -> None:
    assert load({}) == LookupSettings(timeout=1.0, memo=2.5)
    env = {"MOONTIDE_LOOKUP_TIMEOUT_SECONDS": "0.25", "MOONTIDE_LOOKUP_MEMO_SECONDS": "0"}
    assert load(env) == LookupSettings(timeout=0.25, memo=0)
    for name, value in [("TIMEOUT", "0"), ("TIMEOUT", "x"), ("MEMO", "-1"), ("MEMO", "nan")]:
        with pytest.raises(SettingsError, match=f"MOONTIDE_LOOKUP_{name}_SECONDS"):
            load({f"MOONTIDE_LOOKUP_{name}_SECONDS": value})


def test_a_socket_is_taken_only_while_somebody_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert not listening(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(0)
        assert listening(path)
    assert Path(path).exists()
    assert not listening(path)
    plain = tmp_path / "file"
    plain.touch()
    assert not listening(str(plain))


def test_a_line_is_idle_only_while_no_call_runs_or_waits() -> None:
    go, began = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        go.wait(20)

    with ThreadPoolExecutor(1) as pool:
        line = Line(pool)
        assert line.idle()
        running = line.submit(hang)
        assert began.wait(20)
        waiting = line.submit(int)
        # Given up is not ended: the first call still has the socket.
        assert not running.cancel()
        assert waiting.cancel()
        assert not line.idle()
        go.set()
        running.result(20)
        assert line.idle()
        assert not line.calls
