"""What is said of memory nodes that go."""

from __future__ import annotations

import pytest

from moontide.planning.storenodes import Leaving, Segment, going, ready, said

MIB = 2**20
NODES = frozenset({"10.0.0.1", "10.0.0.2"})
FULL = (
    Segment("10.0.0.1", 512 * MIB, 1024 * MIB, True),
    Segment("10.0.0.2", 512 * MIB, 1024 * MIB, True),
    Segment("10.0.0.9", 0, 1024 * MIB, True),
)


def _going(segments: tuple[Segment, ...] | None = FULL, **more: int) -> str:
    given = {"before": 2, "after": 1, "keys": 512, "drain_seconds": 60, **more}
    return going(hosts=NODES, segments=segments, **given)


def test_all_moves_where_there_is_room_and_time() -> None:
    text = _going()
    assert text == (
        "memory nodes go from 2 to 1: those that go hold about 256 keys (512 MiB), which move to other segments"
    )


def test_too_little_time_is_counted_in_keys() -> None:
    text = _going(drain_seconds=4)  # 64 keys of 2 MiB
    assert "about 128 MiB move to other segments and 384 MiB are dropped" in text
    assert "16 keys a second and node can move in drainSeconds=4" in text


def test_without_room_the_rest_is_dropped() -> None:
    alone = (Segment("10.0.0.1", 512 * MIB, 512 * MIB, True), Segment("10.0.0.2", 512 * MIB, 600 * MIB, True))
    text = _going(alone)
    assert "44 MiB move" in text
    assert "468 MiB are dropped: the rest of the pool has no room" in text
    assert "are dropped" in _going((*FULL[:2],), before=2, after=0)


def test_a_segment_that_drains_itself_is_no_room() -> None:
    text = _going((FULL[0], Segment("10.0.0.2", 512 * MIB, 1024 * MIB, False)), after=0)
    assert "1024 MiB are dropped" in text


def test_words_for_the_other_cases() -> None:
    assert _going(None).endswith("the master does not answer, so what they hold is not moved")
    assert _going((Segment("10.0.0.1", 0, MIB, True),)).endswith("they hold nothing")
    assert "drainSeconds is 0" in _going(drain_seconds=0)


@pytest.mark.parametrize(
    ("leaving", "text"),
    [
        (Leaving("n"), "n is going and does not say how far it is"),
        (Leaving("n", "Draining", 40 * MIB, 3, 12 * MIB), "n moves its keys: 3 so far, 12 MiB of 40 MiB"),
        (Leaving("n", "Empty", ended=True), "n held nothing"),
        (Leaving("n", "Moved", 40 * MIB, 9, 40 * MIB, True), "n moved 9 keys (40 MiB), all that it held"),
        (
            Leaving("n", "TimeIsOver", 40 * MIB, 3, 12 * MIB, True),
            "n moved 3 keys (12 MiB) and drops 28 MiB: TimeIsOver",
        ),
    ],
)
def test_each_node_says_what_becomes_of_its_keys(leaving: Leaving, text: str) -> None:
    assert said(leaving) == text


def test_condition() -> None:
    assert (ready(2, 2, ()).status, ready(2, 2, ()).reason) == ("True", "Lending")
    assert (ready(2, 1, ()).status, ready(2, 1, ()).reason) == ("False", "Starting")
    draining = ready(1, 1, (Leaving("n", "Draining", MIB),))
    assert (draining.status, draining.reason) == ("False", "Draining")
    assert "n moves its keys" in draining.message
