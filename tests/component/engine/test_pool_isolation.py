"""Several fleets in one pool: a wipe of one leaves the keys of the others, whatever their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import poolkit
import pytest
from poolkit import MIB, put, right

from moontide_engine.wiper import Wiper

VALUE = b"\x02" * 4096
ONE = "9b2c1c1e-0000-4000-8000-0000000000aa"
OTHERS = (
    "9b2c1c1e-0000-4000-8000-0000000000ab",
    "9b2c1c1e-0000-4000-8000-0000000000aa2",
    "x9b2c1c1e-0000-4000-8000-0000000000aa",
    "9b2c1c1e-0000-4000-8000-0000000000a",
    "fleet.one",
    "fleetxone",
)


@pytest.fixture
def wiper() -> Iterator[Wiper]:
    os.environ.update(poolkit.NATIVE)
    made = Wiper(f"127.0.0.1:{poolkit.PORT}")
    yield made
    made.close()


def test_a_wipe_of_one_fleet_leaves_the_keys_of_the_others(tmp_path: Path, wiper: Wiper) -> None:
    with poolkit.pool(tmp_path) as pool:
        pool.node(64 * MIB)
        client = pool.client()
        for namespace in (ONE, *OTHERS):
            assert put(client, namespace, 20, VALUE) == 20
        answer = wiper.wipe(ONE, 20)
        assert (answer["success"], answer["removed"]) == (True, 20)
        assert right(client, ONE, 20, VALUE) == 0
        assert [right(client, namespace, 20, VALUE) for namespace in OTHERS] == [20] * len(OTHERS)
        # A dot is no wildcard.
        assert wiper.wipe("fleet.one", 20)["removed"] == 20
        assert right(client, "fleetxone", 20, VALUE) == 20
