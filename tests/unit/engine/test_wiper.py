"""The wiper with its real HTTP server and its real child process; only the native store client is a fake."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moontide_engine
from moontide_engine.namespace import tag
from moontide_engine.wiper import Config, Wiper, count_keys, make_server

# Behaves as the file beside it says, read anew for each call.
STORE = """
import pathlib, time
CONTROL = pathlib.Path(__file__).with_name("control")
def act(step):
    with open(CONTROL.with_name("log"), "a") as log:
        log.write(step + "\\n")
    word = dict(line.split("=") for line in CONTROL.read_text().split()).get(step.split()[0], "0")
    if word == "hang":
        time.sleep(60)
    if word == "slow":
        time.sleep(0.4)
        word = "0"
    if word == "die":
        raise SystemExit(1)
    return int(word)
class MooncakeDistributedStore:
    def setup(self, host, meta, segment, buffer, protocol, devices, master):
        assert (segment, buffer) == (0, 0)
        return act("setup")
    def remove_by_regex(self, pattern, force):
        assert force is True
        return act("remove " + pattern)
    def batch_remove(self, keys, force):
        assert force is False
        code = act("batch " + " ".join(keys))
        return [-706 if key.endswith("used") else -704 if key.endswith("gone") else code for key in keys]
"""


class Store:
    """Control of the fake store, and a listener in the master's place."""

    def __init__(self, folder: Path) -> None:
        package = folder / "mooncake"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "store.py").write_text(STORE)
        self._control = package / "control"
        self._log = package / "log"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.behave()

    def behave(self, **words: str) -> None:
        self._control.write_text("\n".join(f"{step}={word}" for step, word in words.items()))

    @property
    def log(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    source = Path(moontide_engine.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{source}")
    made = Store(tmp_path)
    yield made
    made.listener.close()


@pytest.fixture
def wiper(store: Store) -> Iterator[Wiper]:
    made = Wiper(store.address)
    yield made
    made.close()


def test_removes_what_belongs_to_the_namespace(store: Store, wiper: Wiper) -> None:
    store.behave(remove="12")
    answer = wiper.wipe("ns-1", 10)
    assert (answer["success"], answer["removed"], answer["code"], answer["reason"]) == (True, 12, 12, "Done")
    store.behave(remove="0")
    assert wiper.wipe("ns-1", 10)["removed"] == 0
    assert store.log == ["setup", "remove ^ns-1@", "remove ^ns-1@"]


def test_a_negative_code_is_no_success_and_the_next_call_works(store: Store, wiper: Wiper) -> None:
    store.behave(remove="-900")
    answer = wiper.wipe("ns", 10)
    assert (answer["success"], answer["removed"], answer["code"]) == (False, None, -900)
    store.behave(remove="3")
    assert wiper.wipe("ns", 10)["removed"] == 3


def test_a_client_that_lost_its_master_is_replaced_within_the_call(store: Store, wiper: Wiper) -> None:
    assert wiper.wipe("ns", 10)["success"] is True
    store.behave(remove="die")
    answer = wiper.wipe("ns", 10)
    assert answer["success"] is False
    # The old client was tried, then a new one; a new one that fails at once is not tried again.
    assert store.log.count("setup") == 2
    assert store.log.count("remove ^ns@") == 3


@pytest.mark.parametrize("step", ["setup", "remove"])
def test_a_store_that_hangs_is_bounded_and_the_next_call_works(store: Store, wiper: Wiper, step: str) -> None:
    store.behave(**{step: "hang"})
    began = time.monotonic()
    answer = wiper.wipe("ns", 1.0)
    assert time.monotonic() - began < 2.5
    assert (answer["success"], answer["reason"], answer["removed"]) == (False, "StoreTimeout", None)
    store.behave(remove="4")
    assert wiper.wipe("ns", 10)["removed"] == 4


def test_a_setup_that_fails_is_no_success(store: Store, wiper: Wiper) -> None:
    store.behave(setup="-1")
    answer = wiper.wipe("ns", 10)
    assert (answer["success"], answer["code"]) == (False, -1)


def test_a_master_that_is_gone_is_known_at_once(store: Store, wiper: Wiper) -> None:
    store.listener.close()
    began = time.monotonic()
    answer = wiper.wipe("ns", 30)
    assert time.monotonic() - began < 2
    assert (answer["success"], answer["reason"]) == (False, "StoreUnavailable")


def test_warm_connects_ahead(store: Store, wiper: Wiper) -> None:
    wiper.warm()
    assert store.log == ["setup"]
    wiper.warm()
    wiper.wipe("ns", 10)
    assert store.log == ["setup", "remove ^ns@"]


def call(url: str, body: bytes | None = None, token: str | None = "t1") -> tuple[int, Any]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.fixture
def base(store: Store, wiper: Wiper, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "token").write_text("t1\nt2\n")
    config = Config("127.0.0.1", 0, str(tmp_path / "token"), store.address, "http://127.0.0.1:9")
    server = make_server(config, wiper)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_http(base: str, store: Store) -> None:
    store.behave(remove="5")
    assert call(f"{base}/healthz", token=None) == (200, {"ok": True})
    body = b'{"term": 1, "namespace": "ns", "timeoutSeconds": 10}'
    for token in ("t1", "t2"):
        status, answer = call(f"{base}/moontide/v1/wipe", body, token)
        assert (status, answer["success"], answer["removed"]) == (200, True, 5)


@pytest.mark.parametrize("token", [None, "", "wrong", "t1 t2"])
@pytest.mark.parametrize(
    "path", ["/moontide/v1/wipe", "/moontide/v1/collect", "/moontide/v1/keys?namespace=ns", "/nothing"]
)
def test_http_needs_the_token(base: str, store: Store, token: str | None, path: str) -> None:
    for body in (None, b'{"namespace": "ns", "timeoutSeconds": 1}'):
        status, answer = call(base + path, body, token)
        assert (status, answer["success"]) == (401, False)
    assert store.log == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"term": 1, "namespace": "ns"}',
        b'{"term": 1, "timeoutSeconds": 1}',
        b'{"term": 1, "namespace": "", "timeoutSeconds": 1}',
        b'{"term": 1, "namespace": ".*", "timeoutSeconds": 1}',
        b'{"term": 1, "namespace": "ns", "timeoutSeconds": 0}',
        b'{"term": 1, "namespace": "ns", "timeoutSeconds": true}',
        b'{"term": 1, "namespace": "ns", "timeoutSeconds": 1, "force": true}',
        b'{"namespace": "ns", "timeoutSeconds": 1}',
        b'{"term": true, "namespace": "ns", "timeoutSeconds": 1}',
        b'{"term": -1, "namespace": "ns", "timeoutSeconds": 1}',
    ],
)
def test_http_refuses_other_bodies(base: str, store: Store, body: bytes) -> None:
    status, answer = call(f"{base}/moontide/v1/wipe", body)
    assert (status, answer["success"], answer["reason"]) == (400, False, "BadRequest")
    assert store.log == []


@pytest.mark.parametrize("route", ["wipe", "collect"])
def test_a_leader_of_the_past_removes_nothing(base: str, store: Store, route: str) -> None:
    def ask(term: int, namespace: str = "ns") -> str:
        keep = ', "keep": ["p/1"]' if route == "collect" else ""
        body = f'{{"term": {term}, "namespace": "{namespace}", "timeoutSeconds": 1{keep}}}'
        status, answer = call(f"{base}/moontide/v1/{route}", body.encode())
        assert status == 200
        return str(answer["reason"])

    assert ask(7) != "Fenced"
    assert ask(7) != "Fenced"
    before = list(store.log)
    assert ask(6) == "Fenced"
    assert store.log == before
    assert ask(6, "another") != "Fenced", "each namespace has leaders of its own"
    assert ask(8) != "Fenced"
    assert ask(7) == "Fenced"


@contextlib.contextmanager
def listing(
    *keys: str, asked: list[str] | None = None, ready: threading.Event | None = None, short: int = 0
) -> Iterator[str]:
    """A master's metrics port that lists these keys, once it is ``ready``; its URL. ``asked`` gets each path, and the
    last ``short`` bytes of each listing are missing."""

    class Master(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/get_all_keys"
            if asked is not None:
                asked.append(self.path)
            if ready is not None:
                ready.wait(30)
            data = "".join(f"{key}\n" for key in keys).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) - short])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Master) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_keys_are_counted_from_the_masters_listing() -> None:
    with listing("ns@a", "ns@b", "ns2@a", "x-ns@a", "other@a") as metrics:
        assert count_keys(metrics, "ns", 5)["keys"] == 2
        assert count_keys(metrics, "nothing", 5)["keys"] == 0
    answer = count_keys(metrics, "ns", 5)
    assert (answer["success"], answer["keys"]) == (False, None)


NOW, OLD = tag("p/2").hex(), tag("p/1").hex()


def test_collects_what_is_of_another_epoch_and_no_more(store: Store, wiper: Wiper) -> None:
    mine = [f"ns@m@{OLD}01", f"ns@m@{NOW}02", "ns@m@0003"]
    with listing(*mine, f"ns2@m@{OLD}04", f"x-ns@m@{OLD}05", f"ns@{NOW}@{OLD}06") as metrics:
        answer = wiper.collect(metrics, "ns", ["p/2"], 10)
        assert (answer["success"], answer["removed"], answer["left"]) == (True, 3, 0)
        assert store.log == ["setup", f"batch ns@m@{OLD}01 ns@m@0003 ns@{NOW}@{OLD}06"]
        answer = wiper.collect(metrics, "ns", ["p/1", "p/2"], 10)
        assert store.log[-1] == "batch ns@m@0003"


def test_collects_in_batches_as_far_as_time_reaches(
    store: Store, wiper: Wiper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moontide_engine.wiper.BATCH", 2)
    with listing(*(f"ns@m@{OLD}{number}" for number in range(5))) as metrics:
        assert wiper.collect(metrics, "ns", ["p/2"], 10)["removed"] == 5
        assert [len(line.split()) - 1 for line in store.log if line.startswith("batch")] == [2, 2, 1]
        store.behave(batch="hang")
        answer = wiper.collect(metrics, "ns", ["p/2"], 0.5)
        assert (answer["success"], answer["reason"], answer["removed"]) == (False, "StoreTimeout", 0)


def test_the_next_call_goes_on_where_time_was_over(store: Store, wiper: Wiper, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a million keys, that no single call has time for."""
    monkeypatch.setattr("moontide_engine.wiper.BATCH", 2)
    # After a batch no call has time for another.
    monkeypatch.setattr("moontide_engine.wiper.BATCH_SECONDS", 9.7)
    store.behave(batch="slow")
    wiper.warm()
    asked: list[str] = []
    answers: list[dict[str, Any]] = []
    with listing(*(f"ns@m@{OLD}{number}" for number in range(5)), asked=asked) as metrics:
        while not answers or (answers[-1]["reason"] == "KeysLeft" and len(answers) < 50):
            answers.append(wiper.collect(metrics, "ns", ["p/2"], 10.0))
    worked = [each for each in answers if each["removed"]]
    assert [(a["success"], a["reason"], a["removed"], a["left"]) for a in worked] == [
        (False, "KeysLeft", 2, 3),
        (False, "KeysLeft", 2, 1),
        (True, "Done", 1, 0),
    ]
    assert len(asked) == 1, "they went through one listing"


def test_a_listing_may_take_longer_than_a_call(store: Store, wiper: Wiper) -> None:
    ready, asked = threading.Event(), list[str]()
    with listing(f"ns@m@{OLD}0", f"ns@m@{NOW}1", asked=asked, ready=ready) as metrics:
        for _ in range(2):
            answer = wiper.collect(metrics, "ns", ["p/2"], 0.5)
            assert (answer["success"], answer["reason"], answer["removed"]) == (False, "KeysLeft", 0)
            assert answer["left"] is None
        ready.set()
        answer = wiper.collect(metrics, "ns", ["p/2"], 10)
        assert (answer["success"], answer["removed"], len(asked)) == (True, 1, 1)
        wiper.collect(metrics, "ns", ["p/2"], 10)
        assert len(asked) == 2, "what is to verify a removal was listed after it"


def test_what_is_left_of_a_collection_is_for_these_epochs_and_for_now(
    store: Store, wiper: Wiper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moontide_engine.wiper.BATCH_SECONDS", 11)
    asked: list[str] = []
    with listing(f"ns@m@{OLD}0", asked=asked) as metrics:
        for epochs, count in ((["p/2"], 1), (["p/2"], 1), (["p/3"], 2), (["p/2"], 3)):
            wiper.collect(metrics, "ns", epochs, 10)
            assert len(asked) == count
        monkeypatch.setattr("moontide_engine.listing.STALE_SECONDS", -1)
        wiper.collect(metrics, "ns", ["p/2"], 10)
        assert len(asked) == 4
        wiper.tidy()
        monkeypatch.setattr("moontide_engine.listing.STALE_SECONDS", 60)
        wiper.collect(metrics, "ns", ["p/2"], 10)
        assert len(asked) == 5


def test_what_was_listed_before_a_collection_that_found_none_proves_nothing(store: Store, wiper: Wiper) -> None:
    """Two operators ask, as when one follows the other: the listing of the first is older than the second's proof."""
    ready, asked = threading.Event(), list[str]()
    with listing(f"ns@m@{NOW}0", asked=asked, ready=ready) as slow, listing() as quick:
        first = threading.Thread(target=wiper.collect, args=(slow, "ns", ["p/2"], 1.0))
        first.start()
        while not asked:
            time.sleep(0.01)
        assert wiper.collect(quick, "ns", ["p/2"], 10)["success"] is True
        first.join()
        ready.set()
        assert wiper.collect(slow, "ns", ["p/2"], 10)["success"] is True
        assert len(asked) == 2


def test_a_batch_whose_end_is_not_known_is_listed_again(
    store: Store, wiper: Wiper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moontide_engine.wiper.BATCH", 1)
    with listing(f"ns@m@{OLD}0", f"ns@m@{OLD}1") as metrics:
        store.behave(batch="-900")
        assert wiper.collect(metrics, "ns", ["p/2"], 10)["success"] is False
        store.behave()
        answer = wiper.collect(metrics, "ns", ["p/2"], 10)
        assert (answer["success"], answer["removed"], answer["left"]) == (True, 2, 0)


def test_a_listing_that_ends_early_proves_nothing(store: Store, wiper: Wiper) -> None:
    with listing(f"ns@m@{OLD}0", f"ns@m@{OLD}1", short=10) as metrics:
        answer = wiper.collect(metrics, "ns", ["p/2"], 10)
    assert (answer["success"], answer["reason"], answer["removed"]) == (False, "StoreUnavailable", 0)
    assert "early" in str(answer["message"])


def test_keys_in_use_are_left_and_said(store: Store, wiper: Wiper) -> None:
    with listing(f"ns@m@{OLD}used", f"ns@m@{OLD}gone", f"ns@m@{OLD}0") as metrics:
        answer = wiper.collect(metrics, "ns", ["p/2"], 10)
    assert (answer["success"], answer["reason"], answer["removed"], answer["left"]) == (False, "KeysLeft", 2, 1)


def test_a_dead_store_or_listing_is_no_success(store: Store, wiper: Wiper) -> None:
    with listing(f"ns@m@{OLD}0") as metrics:
        store.behave(batch="-900")
        answer = wiper.collect(metrics, "ns", ["p/2"], 10)
        assert (answer["success"], answer["reason"], answer["code"]) == (False, "StoreUnavailable", -900)
    answer = wiper.collect(metrics, "ns", ["p/2"], 10)
    assert (answer["success"], answer["reason"]) == (False, "StoreUnavailable")


@pytest.mark.parametrize("keep", ["", "[]", '""', '"p/1"', "[1]", '[""]', str(["p"] * 17).replace("'", '"')])
def test_http_collects_nothing_without_an_epoch_to_keep(base: str, store: Store, keep: str) -> None:
    named = f'"keep": {keep}, ' if keep else ""
    body = f'{{{named}"term": 1, "namespace": "ns", "timeoutSeconds": 1}}'.encode()
    status, answer = call(f"{base}/moontide/v1/collect", body)
    assert (status, answer["reason"]) == (400, "BadRequest")
    assert "'keep'" in answer["message"]
