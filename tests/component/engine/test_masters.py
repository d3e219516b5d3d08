"""A failover of real masters: keys survive it, and what was wiped does not come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import enginekit as kit
import masterkit
import pytest

KEPT = [f"kept@{number}" for number in range(20)]
OLD = [f"old@{number}" for number in range(20)]


@pytest.fixture
def masters(tmp_path: Path) -> Iterator[masterkit.Masters]:
    made = masterkit.Masters(tmp_path)
    yield made
    made.end()


@pytest.fixture
def client(masters: masterkit.Masters) -> Iterator[masterkit.Client]:
    masters.leader()
    made = masterkit.Client(masters)
    kit.wait_for("the client", lambda: made.put(KEPT) == len(KEPT), kit.PATIENCE)
    assert made.put(OLD) == len(OLD)
    yield made
    made.end()


def test_a_wipe_that_was_verified_outlives_the_leader(masters: masterkit.Masters, client: masterkit.Client) -> None:
    first = masters.leader()
    for standby in masters.all:
        if standby is not first:
            assert standby.wipe("old")["reason"] == "NotLeader"
    answer = first.wipe("old")
    assert (answer["success"], answer["removed"]) == (True, len(OLD)), answer
    first.process.signal(signal.SIGKILL)
    killed = time.monotonic()
    second = masters.leader(first)
    serving = time.monotonic() - killed
    kit.wait_for("the keys", lambda: client.found(KEPT) == len(KEPT), 60)
    print(f"another master serves after {serving:.1f} s, clients find keys after {time.monotonic() - killed:.1f} s")
    assert (second.keys("kept"), second.keys("old"), client.found(OLD)) == (len(KEPT), 0, 0)
    # The wiper of the new leader works.
    answer = second.wipe("kept")
    assert (answer["success"], answer["removed"]) == (True, len(KEPT)), answer
    assert client.found(KEPT) == 0


def test_a_removal_that_the_log_did_not_take_comes_back_and_is_never_verified(
    masters: masterkit.Masters, client: masterkit.Client
) -> None:
    """Mooncake answers a removal before it is in the log. Should this ever fail, the wiper's proof can go."""
    first = masters.leader()
    masters.etcd.process.signal(signal.SIGSTOP)
    assert first.wipe("old", 1.5)["success"] is False
    assert client.remove("^old@") == len(OLD)
    first.process.signal(signal.SIGKILL)
    masters.etcd.process.signal(signal.SIGCONT)
    second = masters.leader(first)
    back = kit.wait_for("what was removed", lambda: client.found(OLD), 60)
    print(f"{back} of {len(OLD)} keys whose removal was answered are back")
    answer = second.wipe("old")
    assert answer["success"] is True, answer
    assert client.found(OLD) == 0


def test_a_leader_that_was_frozen_wipes_nothing(masters: masterkit.Masters, client: masterkit.Client) -> None:
    """It takes itself for the leader for a moment, and would say that it removed what its successor serves."""
    first = masters.leader()
    assert first.wipe("nobody")["success"] is True
    first.process.signal(signal.SIGSTOP)
    second = masters.leader(first)
    kit.wait_for("the keys", lambda: client.found(OLD) == len(OLD), 60)
    first.process.signal(signal.SIGCONT)
    answers = [first.wipe("old", 2.0) for _ in range(3)]
    assert {answer["success"] for answer in answers} == {False}, answers
    assert second.keys("old") == len(OLD)
    assert second.wipe("old")["removed"] == len(OLD)
