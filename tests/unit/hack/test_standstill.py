"""A processor that stood still is noted; a machine that is merely busy is not."""

from __future__ import annotations

import os
import threading

from hack.test.standstill import Standstill, Watch, in_words


class Clock:
    """Goes on only by what is slept, and by what the host takes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.taken = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.taken
        self.taken = 0.0


def test_only_a_wake_up_that_comes_far_too_late_counts() -> None:
    clock = Clock()
    watch = Watch(late=2.0, clock=lambda: clock.now, sleep=clock.sleep)
    for taken in (0.0, 1.9, 11.0, 0.3):
        clock.taken = taken
        watch.look(1)
    assert [(each.processor, round(each.seconds, 3)) for each in watch.found] == [(1, 11.0)]


def test_a_thread_looks_at_each_processor_until_the_block_ends() -> None:
    processors = sorted(os.sched_getaffinity(0))
    looked: set[frozenset[int]] = set()
    all_looked = threading.Event()

    def sleep(seconds: float) -> None:
        del seconds
        looked.add(frozenset(os.sched_getaffinity(threading.get_native_id())))
        if len(looked) == len(processors):
            all_looked.set()
        all_looked.wait(10)

    before = threading.active_count()
    with Watch(late=60.0, sleep=sleep).on(processors):
        assert all_looked.wait(10)
    assert looked == {frozenset({each}) for each in processors}
    assert threading.active_count() == before


def test_the_words_name_the_longest_and_count_the_others() -> None:
    found = [Standstill(number % 2, 3600.0 * number, 2.0 + number) for number in range(1, 8)]
    words = in_words(found)
    assert "processor 1 for 9.0 s until 07:00:00" in words
    assert "processor 1 for 5.0 s until 03:00:00, processor 0 for 6.0 s until 04:00:00" in words
    assert "02:00:00" not in words
    assert ", and 2 shorter ones; " in words


def test_there_are_no_words_for_nothing() -> None:
    assert in_words([]) == ""
