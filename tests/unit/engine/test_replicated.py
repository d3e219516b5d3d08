"""The proof that a removal outlives its master. A fake etcd holds what real masters were seen to write."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moontide_engine.replicated import Log, Unproven, removal

MASTER = "10.0.0.1:50051"
VIEW = "mooncake-store/x/master_view"
PREFIX = "/oplog/x/durable_prefix"


class FakeEtcd:
    """The range calls of etcd's HTTP gateway over a dictionary."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[str, int]] = {}
        self.revision = 0
        etcd = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                query = json.loads(self.rfile.read(int(self.headers["content-length"])))
                first, end = (base64.b64decode(query.get(name, "")).decode() for name in ("key", "range_end"))
                found = [
                    {
                        "key": base64.b64encode(key.encode()).decode(),
                        "value": base64.b64encode(value.encode()).decode(),
                        "create_revision": str(revision),
                    }
                    for key, (value, revision) in sorted(etcd.keys.items())
                    if (first <= key < end if end else key == first)
                ]
                body = json.dumps({"kvs": found} if found else {}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def elect(self, address: str) -> None:
        self.revision += 1
        self.keys[VIEW] = (address, self.revision)

    def write(self, batch: int, *keys: str, durable: bool = True) -> None:
        """A batch of the log; what is not durable is not yet to be replayed."""
        entries = [[1, "default", key, "cGxhY2U="] for key in keys]
        self.keys[f"/oplog/x/batches/{batch:020d}"] = (json.dumps([1, batch, batch, batch, entries, 7]), 1)
        if durable:
            self.keys[PREFIX] = (json.dumps({"batch_id": batch, "last_seq": batch, "schema_version": 1}), 1)


@pytest.fixture
def etcd() -> Iterator[FakeEtcd]:
    made = FakeEtcd()
    made.elect(MASTER)
    yield made
    made.server.shutdown()
    made.server.server_close()


def _remove(etcd: FakeEtcd, put: Callable[[str], object], remove: Callable[[], int] = lambda: 20) -> int:
    def marked(key: str) -> int:
        put(key)
        return 0

    return removal(Log((etcd.endpoint,), "x", MASTER), remove, marked, time.monotonic() + 0.5, "marker@1")


def test_a_removal_counts_when_the_key_put_after_it_is_in_the_log(etcd: FakeEtcd) -> None:
    etcd.write(1, "old@1")
    assert _remove(etcd, lambda key: etcd.write(2, "other@1", key)) == 20


def test_a_log_of_many_batches_is_read_to_its_end(etcd: FakeEtcd) -> None:
    def put(key: str) -> None:
        for batch in range(1, 450):
            etcd.write(batch, "other@1")
        etcd.write(450, key)

    assert _remove(etcd, put) == 20


def test_a_log_that_stands_still_proves_nothing(etcd: FakeEtcd) -> None:
    with pytest.raises(Unproven) as caught:
        _remove(etcd, lambda key: None)
    assert caught.value.reason == "NotLogged"


def test_what_is_written_and_not_to_be_replayed_proves_nothing(etcd: FakeEtcd) -> None:
    with pytest.raises(Unproven) as caught:
        _remove(etcd, lambda key: etcd.write(1, key, durable=False))
    assert caught.value.reason == "NotLogged"


@pytest.mark.parametrize("leader", ["10.0.0.2:50051", None])
def test_a_master_that_does_not_lead_removes_nothing(etcd: FakeEtcd, leader: str | None) -> None:
    if leader is None:
        del etcd.keys[VIEW]
    else:
        etcd.elect(leader)

    def remove() -> int:
        raise AssertionError("it was asked")

    with pytest.raises(Unproven) as caught:
        _remove(etcd, lambda key: None, remove)
    assert caught.value.reason == "NotLeader"


@pytest.mark.parametrize("leader", ["10.0.0.2:50051", MASTER])
def test_an_election_meanwhile_proves_nothing_whoever_won_it(etcd: FakeEtcd, leader: str) -> None:
    def put(key: str) -> None:
        etcd.write(1, key)
        etcd.elect(leader)

    with pytest.raises(Unproven) as caught:
        _remove(etcd, put)
    assert caught.value.reason == "LeaderChanged"


def test_a_log_of_another_schema_proves_nothing(etcd: FakeEtcd) -> None:
    etcd.keys[PREFIX] = ('{"batch_id":1,"schema_version":2}', 1)
    with pytest.raises(Unproven) as caught:
        _remove(etcd, lambda key: None)
    assert caught.value.reason == "LogUnreadable"


def test_one_endpoint_of_several_is_enough_and_none_is_too_few(etcd: FakeEtcd) -> None:
    assert Log(("127.0.0.1:1", etcd.endpoint), "x", MASTER).begin().batch == 0
    with pytest.raises(Unproven) as caught:
        Log(("127.0.0.1:1",), "x", MASTER).begin()
    assert caught.value.reason == "EtcdUnavailable"


def test_one_master_has_no_log_and_needs_none() -> None:
    assert Log.from_env({}, MASTER) is None
    assert removal(None, lambda: 3, lambda key: 1 // 0, 0.0, "m") == 3
