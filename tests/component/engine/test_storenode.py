"""Memory nodes with a real master: what outlives whom, and what becomes of the keys of a node that goes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import enginekit as kit
import poolkit
import pytest
from poolkit import MIB, put, right

VALUE = os.urandom(256 * 1024)
A, B = "fleet-a", "fleet-b"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[poolkit.Pool]:
    with poolkit.pool(tmp_path) as made:
        yield made


def test_keys_outlive_who_wrote_them(pool: poolkit.Pool) -> None:
    node = pool.node(64 * MIB)
    assert node.status()["segment"] in pool.segments()
    writer = pool.client()
    assert put(writer, A, 20, VALUE) == 20
    writer.close()
    assert right(pool.client(), A, 20, VALUE) == 20


def test_a_node_that_goes_moves_its_keys(pool: poolkit.Pool) -> None:
    leaver = pool.node(64 * MIB)
    client = pool.client()
    assert put(client, A, 40, VALUE) == 40
    stayer = pool.node(64 * MIB)
    said = leaver.leave()
    assert (said["reason"], said["moved_keys"], said["left_bytes"]) == ("Moved", 40, 0)
    assert pool.segments() == [stayer.status()["segment"]]
    assert right(client, A, 40, VALUE) == 40


def test_what_there_is_no_time_for_is_dropped_and_counted(pool: poolkit.Pool) -> None:
    leaver = pool.node(64 * MIB, drain_seconds=2)
    client = pool.client()
    assert put(client, A, 120, VALUE) == 120
    pool.node(64 * MIB)
    said = leaver.leave()
    assert said["reason"] == "TimeIsOver"
    assert 0 < said["moved_keys"] < 120
    assert said["left_bytes"] == said["held_bytes"] - said["moved_bytes"] > 0
    # A key that was under way at the end may be on either side.
    assert said["moved_keys"] <= right(client, A, 120, VALUE) < 120


def test_with_nowhere_to_go_it_goes_at_once(pool: poolkit.Pool) -> None:
    node = pool.node(64 * MIB, drain_seconds=120)
    client = pool.client()
    assert put(client, A, 5, VALUE) == 5
    began = time.monotonic()
    said = node.leave()
    assert (said["reason"], said["left_bytes"]) == ("NowhereToGo", 5 * len(VALUE))
    assert time.monotonic() - began < 15 + kit.BUSY
    assert pool.segments() == []
    assert right(client, A, 5, VALUE) == 0


def test_a_key_that_is_wiped_while_it_moves_never_comes_back(pool: poolkit.Pool) -> None:
    leaver = pool.node(64 * MIB)
    client = pool.client()
    assert put(client, A, 100, VALUE) == 100
    assert put(client, B, 10, VALUE) == 10
    pool.node(64 * MIB)
    leaver.process.popen.terminate()
    kit.wait_for("keys move", lambda: (leaver.status().get("drain") or {}).get("moved_keys"), kit.PATIENCE)
    assert client.remove_by_regex(f"^{A}@", True) == 100
    while leaver.process.popen.poll() is None:
        assert pool.keys(f"{A}@") == []
        time.sleep(0.1)
    assert pool.keys(f"{A}@") == []
    assert right(client, A, 100, VALUE) == 0


def test_a_new_master_gets_the_segment_again(pool: poolkit.Pool) -> None:
    node = pool.node(64 * MIB)
    ready = node.get("/readyz")
    assert ready is not None
    assert ready.status_code == 200
    pool.kill()
    kit.wait_for("the node says so", lambda: node.state == "apart", kit.PATIENCE)
    ready = node.get("/readyz")
    assert ready is not None
    assert ready.status_code == 503
    pool.start()
    kit.wait_for("the node lends again", lambda: node.state == "lending", 60)
    assert pool.segments() == [node.status()["segment"]]


def test_without_a_master_it_ends_in_time(pool: poolkit.Pool) -> None:
    node = pool.node(64 * MIB)
    pool.kill()
    assert node.leave().get("reason", "").startswith("MasterGone")


def test_it_waits_for_a_master_and_obeys_meanwhile(tmp_path: Path) -> None:
    node = poolkit.Node(tmp_path, 0, 16 * MIB, 1)
    kit.wait_for("it serves", lambda: node.state == "connecting", kit.PATIENCE, node.process)
    node.process.popen.send_signal(signal.SIGTERM)
    assert node.process.popen.wait(kit.PATIENCE) == 0
