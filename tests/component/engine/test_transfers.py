"""Loads from and saves to a client that stands still, without an engine. Stock takes 60 s, and writes afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import enginekit as kit
import peers
import pytest

PORT, METRICS = 18154, 18155
BOUND = 40.0
"""Seconds; stock needs 60, we 5 for a load and 10 for a save, and a busy machine may need some."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[peers.Peer, peers.Peer]]:
    """One that lends all the memory there is, and one that uses it, with the patch."""
    master = kit.Master(tmp_path, PORT, METRICS)
    ends = []
    try:
        master.start()
        for name, segment, kind in (("owner", 64 << 20, "stock"), ("user", 0, "bounded")):
            ends.append(peers.Peer(tmp_path / f"{name}.log", PORT, segment, kind))
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.end()
        if master.process is not None:
            master.process.end(10)


def test_a_load_from_a_frozen_owner_ends_and_writes_nothing_afterwards(pair: tuple[peers.Peer, peers.Peer]) -> None:
    owner, user = pair
    assert owner.ask("put", "x")["codes"] == {"0": peers.KEYS}
    user.ask("mark")
    loaded = user.ask("get", "x")
    assert (loaded["codes"], loaded["all"], loaded["lost"]) == ({str(peers.PORTION): peers.KEYS}, True, 0)
    user.ask("mark")
    owner.freeze()
    frozen = user.ask("get", "x")
    owner.thaw()
    print(f"a load from a frozen owner ended after {frozen['seconds']:.1f} s: {frozen['codes']}")
    assert frozen["seconds"] < BOUND
    assert sum(frozen["codes"].values()) == peers.KEYS
    assert all(int(code) < 0 for code in frozen["codes"])
    # What was on its way arrives within milliseconds of the thaw.
    time.sleep(2)
    assert user.ask("changed")["bytes"] == 0
    kit.wait_for(
        "the owner's memory to be lent again", lambda: user.ask("put", "y")["codes"] == {"0": peers.KEYS}, kit.PATIENCE
    )
    user.ask("mark")
    again = user.ask("get", "y")
    assert (again["codes"], again["all"]) == ({str(peers.PORTION): peers.KEYS}, True)


def test_a_save_to_a_frozen_owner_ends(pair: tuple[peers.Peer, peers.Peer]) -> None:
    owner, user = pair
    assert user.ask("put", "x")["codes"] == {"0": peers.KEYS}
    owner.freeze()
    frozen = user.ask("put", "y")
    owner.thaw()
    print(f"a save to a frozen owner ended after {frozen['seconds']:.1f} s: {frozen['codes']}")
    assert frozen["seconds"] < BOUND
    assert all(int(code) < 0 for code in frozen["codes"])
    kit.wait_for(
        "the owner's memory to be lent again", lambda: user.ask("put", "z")["codes"] == {"0": peers.KEYS}, kit.PATIENCE
    )
