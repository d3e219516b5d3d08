"""What the fields of spec.master promise of eviction, seen with a real master and a small segment."""

from __future__ import annotations

import time
from pathlib import Path

import enginekit as kit
import poolkit
import pytest
from poolkit import MIB, put, right

VALUE = b"\x01" * MIB
SEGMENT = 64


def test_eviction_begins_at_the_watermark_and_removes_the_ratio(tmp_path: Path) -> None:
    flags = ("-default_kv_lease_ttl=100", "-eviction_high_watermark_ratio=0.5", "-eviction_ratio=0.25")
    with poolkit.pool(tmp_path, *flags) as pool:
        pool.node(SEGMENT * MIB)
        client = pool.client()
        assert put(client, "a", 28, VALUE) == 28
        time.sleep(2)
        assert pool.metric("master_evicted_key_count") == 0
        assert pool.metric("master_key_count") == 28
        assert put(client, "a", 8, VALUE, first=28) == 8
        kit.wait_for("an eviction", lambda: pool.metric("master_evicted_key_count") > 0, kit.PATIENCE)
        time.sleep(1)
        evicted, left = pool.metric("master_evicted_key_count"), pool.metric("master_key_count")
        assert evicted + left == 36
        # A quarter of the keys, in whole keys of each of the master's shards.
        assert 5 <= evicted <= 16, evicted
        assert left <= SEGMENT / 2
        time.sleep(2)
        assert pool.metric("master_evicted_key_count") == evicted


@pytest.mark.parametrize("lease", [120_000, 100])
def test_a_key_that_was_looked_up_is_kept_for_its_lease(tmp_path: Path, lease: int) -> None:
    flags = (f"-default_kv_lease_ttl={lease}", "-eviction_high_watermark_ratio=0.5", "-eviction_ratio=0.25")
    with poolkit.pool(tmp_path, *flags) as pool:
        pool.node(SEGMENT * MIB)
        client = pool.client()
        assert put(client, "kept", 8, VALUE) == 8
        time.sleep(0.5)
        assert all(client.is_exist(f"kept@tiny@{i:06d}") == 1 for i in range(8))
        for round in range(6):
            put(client, "fill", 16, VALUE, first=16 * round)
            time.sleep(1)
        assert pool.metric("master_evicted_key_count") > 0
        found = right(client, "kept", 8, VALUE)
        assert found == 8 if lease > 10_000 else found < 8
