"""The hook over HTTP: routes, answers, waits; and trainers that use it in place of a kubeconfig."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from moontide.config import Config
from moontide.hook import server
from moontide.trainer import (
    AccessError,
    ApiError,
    ApiUnavailable,
    Engine,
    PolicyNotFound,
    PrepareFailed,
    policy_update,
    policy_update_async,
)
from moontide.trainer.cli import DONE, FAILED, main
from tests.unit.hook.hookkit import FLEET, POLICY, ROOT_KEY, Fault, Make, Running
from tests.unit.trainer.cluster import PATH

TOKEN = hmac.new(ROOT_KEY, b"uid-of-tiny", hashlib.sha256).hexdigest()


class BodyError(Exception):
    """What a body raises."""


def post(hook: Running, verb: str, query: str = "", **body: object) -> httpx.Response:
    return hook.http.post(f"{POLICY}/{verb}{query}", json=body, timeout=70)


def options(hook: Running) -> dict[str, Any]:
    return {"hook": hook.url, "token": "good", "namespace": "rl", "prepare_timeout": 20, "timeout": 20}


def test_the_state(make: Make) -> None:
    _, hook = make()
    answer = hook.http.get(POLICY)
    assert answer.headers["cache-control"] == "no-store"
    state = answer.json()
    assert (state["current"], state["prepared"], state["spec"]["version"]) == (True, False, 1)
    assert state["status"]["epoch"] == 1
    assert set(state["metadata"]) == {"name", "namespace", "generation", "resourceVersion"}
    assert state["state"].startswith("Current=True")
    assert TOKEN not in answer.text


def test_prepare_and_commit_by_hand(make: Make) -> None:
    cluster, hook = make()
    ready = post(hook, "prepare", "?wait=20", version=2)
    assert ready.status_code == 200
    (fleet,) = ready.json()["status"]["preparation"]["fleets"]
    assert (fleet["token"], fleet["addresses"][0]) == (TOKEN, "10.0.0.1:8001")
    assert hook.http.get(POLICY, params={"for": "prepared", "wait": "5"}).json()["prepared"]
    cluster.world.push_weights("2")
    done = post(hook, "commit", "?wait=20", version=2)
    assert (done.status_code, done.json()["current"]) == (200, True)
    assert post(hook, "commit", version=2).status_code == 200
    assert cluster.patches == [{"preparing": 2}, {"version": 2, "preparing": None}]
    again = post(hook, "commit")
    assert (again.status_code, again.json()["reason"]) == (409, "Refused")
    assert "no version of PolicyVersion rl/policy is being prepared" in again.json()["message"]
    assert ("prepare", 200) in hook.counted
    assert ("commit", 409) in hook.counted


def test_bump_abort_and_reset_by_hand(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moontide.hook")
    cluster, hook = make()
    cluster.world.push_weights("2")
    assert post(hook, "bump", "?wait=20", version=2).json()["current"]
    assert post(hook, "bump", version="2").json()["metadata"]["generation"] == 2
    assert post(hook, "prepare", version=3).json()["spec"]["preparing"] == 3
    busy = post(hook, "bump", version=4).json()
    assert (busy["code"], busy["kind"]) == (409, "Status")
    assert "kubectl moontide abort policy -n rl" in busy["message"]
    assert post(hook, "prepare", version=4).json()["reason"] == "Busy"
    assert "preparing" in post(hook, "abort", version=4).json()["spec"]
    assert "preparing" not in post(hook, "abort", version=3).json()["spec"]
    assert "preparing" not in post(hook, "abort").json()["spec"]
    assert post(hook, "reset", nonce="n-1").json()["spec"]["resetNonce"] == "n-1"
    assert len(post(hook, "reset").json()["spec"]["resetNonce"]) > 16
    lines = [(record.verb, record.user, record.resource) for record in caplog.records if record.msg == "changed: %s"]
    who = ("system:serviceaccount:rl:trainer", "PolicyVersion/rl/policy")
    assert lines == [(verb, *who) for verb in ("bump", "prepare", "abort", "reset", "reset")]
    assert "good" not in caplog.text


def test_what_is_waited_for_and_does_not_come_is_202(make: Make) -> None:
    cluster, hook = make()
    cluster.world.pod(0).engine.running = 1
    late = post(hook, "prepare", "?wait=0.1", version=2)
    assert (late.status_code, late.json()["prepared"]) == (202, False)
    assert hook.http.get(POLICY, params={"for": "prepared", "wait": "0.1"}).status_code == 202
    revision = hook.http.get(POLICY).json()["metadata"]["resourceVersion"]
    cluster.on_get = lambda: None
    revision = hook.http.get(POLICY).json()["metadata"]["resourceVersion"]
    began = time.monotonic()
    assert hook.http.get(POLICY, params={"after": revision, "wait": "0.2"}).status_code == 202
    assert hook.http.get(POLICY, params={"wait": "0.2"}).status_code == 202
    assert 0.4 <= time.monotonic() - began < 20
    assert hook.http.get(POLICY, params={"after": "1", "wait": "20"}).status_code == 200
    assert time.monotonic() - began < 20
    cluster.edit(preparing=None)
    gone = hook.http.get(POLICY, params={"for": "prepared", "wait": "5"})
    assert (gone.status_code, gone.json()["reason"]) == (409, "Refused")


def test_a_wait_ends_when_the_policy_changes(make: Make) -> None:
    cluster, hook = make()
    timer = threading.Timer(0.2, lambda: cluster.edit(resetNonce="x"))
    looks = itertools.count()
    # Not before the first look: the wait is for what comes after it.
    cluster.on_get = lambda: timer.start() if next(looks) == 0 else None
    began = time.monotonic()
    answer = hook.http.get(POLICY, params={"wait": "30"}, timeout=40)
    assert (answer.status_code, answer.json()["spec"]["resetNonce"]) == (200, "x")
    assert time.monotonic() - began < 25
    timer.join()


@pytest.mark.parametrize("query", [{}, {"for": "prepared"}])
def test_whoever_waits_is_answered_before_the_process_ends(make: Make, query: dict[str, str]) -> None:
    cluster, hook = make()
    cluster.edit(preparing=2)
    cluster.on_get = lambda: None
    timer = threading.Timer(0.2, hook.end)
    timer.start()
    began = time.monotonic()
    assert hook.http.get(POLICY, params={"wait": "30", **query}, timeout=40).status_code in (200, 202)
    assert time.monotonic() - began < 25
    timer.join()


def test_too_many_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, hook = make()
    monkeypatch.setattr(server, "MOST_WAITING", 0)
    answer = hook.http.get(POLICY, params={"wait": "1"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    done = post(hook, "reset", "?wait=1", nonce="n")
    assert (done.status_code, done.json()["spec"]["resetNonce"]) == (202, "n")


def test_a_right_that_is_withdrawn_during_a_wait(make: Make) -> None:
    cluster, hook = make()
    cluster.on_get = lambda: None
    timer = threading.Timer(0.1, lambda: hook.reviews.refused.add("get policyversions"))
    timer.start()
    assert hook.http.get(POLICY, params={"wait": "0.4"}).status_code == 403
    timer.join()


def test_strangers(make: Make) -> None:
    cluster, hook = make()
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = httpx.get(f"{hook.url}{POLICY}", headers=headers, trust_env=False)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith('Bearer realm="moontide"')
    hook.reviews.refused = {"patch policyversions", "bump policyversions"}
    for verb in ("bump", "prepare", "commit", "abort", "reset"):
        answer = post(hook, verb, version=2)
        assert (answer.status_code, answer.json()["reason"]) == (403, "Forbidden")
        assert "kubectl create role" in answer.json()["message"]
    assert hook.http.patch(POLICY, json={"spec": {"version": 2}}).status_code == 403
    assert hook.http.get(POLICY).status_code == 200
    hook.reviews.refused = {"get policyversions"}
    assert hook.http.get(POLICY).status_code == 403
    assert hook.http.get(f"{POLICY}-that-is-not-there").status_code == 403
    assert cluster.patches == []


@pytest.mark.parametrize("lacking", ["patch", "bump"])
def test_who_may_bump_through_the_hook_need_not_be_allowed_to_patch(make: Make, lacking: str) -> None:
    cluster, hook = make()
    hook.reviews.refused = {f"{lacking} policyversions"}
    with policy_update("policy", 2, **options(hook)):
        cluster.world.push_weights("2")
    assert post(hook, "reset", nonce="n").status_code == 200
    assert cluster.patches == [{"preparing": 2}, {"version": 2, "preparing": None}, {"resetNonce": "n"}]
    refused = hook.http.patch(POLICY, json={"spec": {"allowedNamespaces": ["*"]}})
    assert (refused.status_code, len(cluster.patches)) == (400, 3)
    hook.reviews.refused |= {"get policyversions"}
    assert post(hook, "reset", nonce="m").status_code == 403


def test_a_token_of_engines_that_is_not_allowed(make: Make) -> None:
    cluster, hook = make()
    hook.reviews.refused = {"get secrets"}
    answer = post(hook, "prepare", "?wait=20", version=2)
    (fleet,) = answer.json()["status"]["preparation"]["fleets"]
    assert "token" not in fleet
    assert "--resource=secrets --resource-name=tiny-admin" in fleet["tokenRefused"]
    assert TOKEN not in answer.text
    with pytest.raises(ApiError, match=r"may not get secrets .*tiny-admin") as raised:
        with policy_update("policy", 2, **options(hook)):
            raise AssertionError
    assert raised.value.status == 403
    assert "preparing" not in cluster.spec


def test_what_makes_no_sense(make: Make) -> None:
    cluster, hook = make()
    assert post(hook, "bump").status_code == 400
    assert post(hook, "bump", version="a b").status_code == 400
    assert post(hook, "frob").status_code == 404
    assert hook.http.get(f"{POLICY}/bump").status_code == 405
    assert hook.http.get(f"{POLICY}/bump").headers["allow"] == "POST"
    assert hook.http.get("/metrics").json()["kind"] == "Status"
    assert hook.http.get("/hook/v1/namespaces/A/policies/policy").status_code == 400
    assert hook.http.get(POLICY, params={"wait": "x"}).status_code == 400
    assert hook.http.post(f"{POLICY}/bump", content=b"x" * 20_000).status_code == 413
    missing = hook.http.get("/hook/v1/namespaces/rl/policies/other")
    assert (missing.status_code, missing.json()["details"]["name"]) == (404, "other")
    assert cluster.patches == []
    assert {verb for verb, _ in hook.counted} <= {"bump", "get", "other"}


def test_a_body_that_does_not_come(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, hook = make()
    monkeypatch.setattr(server, "BODY_SECONDS", 0.1)
    with socket.create_connection((hook.http.base_url.host, hook.http.base_url.port or 0), timeout=30) as raw:
        head = f"POST {POLICY}/bump HTTP/1.1\r\nhost: h\r\nauthorization: Bearer good\r\ncontent-length: 9\r\n\r\n{{"
        raw.sendall(head.encode())
        assert b" 408 " in raw.recv(4096).splitlines()[0]
    assert ("bump", 408) in hook.counted


@pytest.mark.parametrize("verb", ["bump", "reset"])
def test_a_body_that_is_nested_without_end(make: Make, verb: str) -> None:
    cluster, hook = make()
    answer = hook.http.post(f"{POLICY}/{verb}", content=b"[" * 16_000)
    assert (answer.status_code, answer.json()["reason"]) == (400, "BadRequest")
    assert answer.json()["message"].startswith("the body is no JSON")
    assert hook.http.patch(POLICY, content=b'{"spec":' * 2_000).status_code == 400
    assert hook.counted == [(verb, 400), ("patch", 400)]
    assert cluster.patches == []


def test_what_nobody_thought_of_is_an_answer_and_a_line_in_the_log(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, hook = make()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(server, "body_of", fail)
    answer = post(hook, "bump", version=2)
    assert (answer.status_code, answer.json()["reason"]) == (500, "InternalError")
    assert (answer.json()["kind"], answer.headers["cache-control"]) == ("Status", "no-store")
    assert "a mistake" not in answer.text
    assert hook.counted == [("bump", 500)]
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.getMessage() == f"POST {POLICY}/bump failed"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_another_namespace_than_the_operators(make: Make) -> None:
    _, hook = make(watch_namespace="elsewhere")
    answer = hook.http.get(POLICY)
    assert (answer.status_code, answer.json()["message"]) == (
        404,
        "this operator serves namespace elsewhere; name a policy of it",
    )


@pytest.mark.parametrize("status", [0, 500, 403, 401])
def test_an_api_server_that_does_not_help(make: Make, status: int) -> None:
    cluster, hook = make()
    # A connection that was cut is tried once more by the client itself.
    cluster.faults += [Fault("GET", status, path=PATH)] * (2 if status == 0 else 1)
    answer = hook.http.get(POLICY)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    hook.reviews.away = True
    assert hook.http.get(POLICY).headers["retry-after"] == "3"


@pytest.mark.parametrize(("phase", "used"), [("Introducing", "old"), ("Overlapping", "new"), ("Retiring", "new")])
def test_while_the_token_is_rotated_trainers_get_the_one_in_use(
    make: Make, monkeypatch: pytest.MonkeyPatch, phase: str, used: str
) -> None:
    rotation, other = ("old", "new") if phase == "Introducing" else ("new", "old")
    state = {"rotation": rotation, "other": other, "phase": phase, "since": "2026-01-02T00:00:00Z"}
    monkeypatch.setitem(FLEET, "status", {"adminToken": state})
    _, hook = make()
    (fleet,) = post(hook, "prepare", "?wait=20", version=2).json()["status"]["preparation"]["fleets"]
    assert fleet["token"] == hmac.new(ROOT_KEY, f"uid-of-tiny/{used}".encode(), hashlib.sha256).hexdigest()


def test_no_token_of_engines_while_the_api_server_is_away(make: Make) -> None:
    cluster, hook = make()
    assert post(hook, "prepare", version=2).status_code == 200
    cluster.settle()
    cluster.faults.append(Fault("GET", 500, path="/api/v1/namespaces/rl/secrets/moontide-root-key"))
    assert hook.http.get(POLICY).status_code == 503
    assert hook.http.get(POLICY).json()["status"]["preparation"]["fleets"][0]["token"] == TOKEN


def test_what_the_schema_refuses(make: Make) -> None:
    cluster, hook = make()
    cluster.faults.append(Fault("PATCH", 422, body={"message": "write something else"}, path=PATH))
    answer = post(hook, "bump", version=2)
    assert (answer.status_code, answer.json()["reason"]) == (422, "RefusedByApiServer")
    assert answer.json()["message"].endswith("write something else")


def test_a_patch_over_what_was_seen(make: Make) -> None:
    cluster, hook = make()
    body = {"spec": {"version": 2}, "metadata": {"resourceVersion": "1"}}
    answer = hook.http.patch(POLICY, json=body)
    assert (answer.status_code, answer.json()["reason"]) == (409, "Conflict")
    assert cluster.spec["version"] == 1


def test_an_update_through_the_hook(make: Make) -> None:
    cluster, hook = make()
    with policy_update("policy", 2, **options(hook)) as update:
        assert update.engines == (Engine("tiny", "10.0.0.1:8001", TOKEN),) * 2
        cluster.world.push_weights("2")
    assert (update.replicas, cluster.spec["version"]) == ("2/2", 2)
    with policy_update("policy", 2, **options(hook)) as again:
        assert again.already_current
    assert cluster.patches == [{"preparing": 2}, {"version": 2, "preparing": None}]


async def test_a_body_that_raises_or_is_cancelled_aborts(make: Make) -> None:
    cluster, hook = make()
    with pytest.raises(BodyError), policy_update("policy", 2, **options(hook)):
        raise BodyError
    assert "preparing" not in cluster.spec
    entered = asyncio.Event()

    async def body() -> None:
        async with policy_update_async("policy", 2, **options(hook)):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(body())
    await asyncio.wait_for(entered.wait(), 30)
    assert cluster.spec["preparing"] == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "preparing" not in cluster.spec


def test_errors_through_the_hook_are_those_of_a_kubeconfig(make: Make) -> None:
    cluster, hook = make()
    with pytest.raises(PolicyNotFound, match="there is no PolicyVersion rl/other"):
        with policy_update("other", 2, **options(hook)):
            raise AssertionError
    with pytest.raises(ApiError, match="the hook does not know the credentials") as raised:
        with policy_update("policy", 2, **{**options(hook), "token": "wrong"}):
            raise AssertionError
    assert raised.value.status == 401
    cluster.edit(preparing=9)
    with pytest.raises(PrepareFailed) as busy, policy_update("policy", 2, **options(hook)):
        raise AssertionError
    assert busy.value.reason == "Busy"
    hook.reviews.away = True
    with pytest.raises(ApiUnavailable, match="the hook does not answer usefully"):
        with policy_update("policy", 2, **{**options(hook), "prepare_timeout": 0.05}):
            raise AssertionError


def test_a_patch_whose_answer_is_lost_is_tried_again(make: Make) -> None:
    cluster, hook = make()
    cluster.faults.append(Fault("PATCH", 0, late=True, path=PATH))
    with policy_update("policy", 2, **options(hook)):
        cluster.world.push_weights("2")
    assert cluster.spec["version"] == 2


def test_a_trainer_waits_instead_of_asking_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, hook = make()
    cluster.edit(preparing=2)
    cluster.on_get = lambda: None
    timer = threading.Timer(0.5, lambda: setattr(cluster, "on_get", cluster.turn))
    timer.start()
    with policy_update("policy", 2, **options(hook)):
        cluster.world.push_weights("2")
    timer.join()
    assert len([each for each in hook.counted if each == ("get", 200)]) < 30
    assert cluster.body["status"]["version"] == "2"


def test_commands_through_the_hook(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, hook = make()
    (tmp_path / "token").write_text("good\n")
    where = ("-n", "rl", "--hook", hook.url, "--hook-token-file", str(tmp_path / "token"))
    assert main(["prepare", "policy", "2", "--wait", *where]) == DONE
    assert TOKEN not in capsys.readouterr().out
    assert main(["abort", "policy", *where]) == DONE
    monkeypatch.setenv("MOONTIDE_HOOK", hook.url)
    monkeypatch.setenv("MOONTIDE_HOOK_TOKEN_FILE", str(tmp_path / "token"))
    assert main(["reset", "policy", "--wait", "-n", "rl"]) == DONE
    assert main(["status", "policy", "-n", "rl"]) == DONE
    assert "  version      1\n" in capsys.readouterr().out
    assert main(["status", "policy"]) == FAILED
    assert "give the policy's, as namespace=, or with -n" in capsys.readouterr().err
    assert "resetNonce" in cluster.spec


def certificate(folder: Path, name: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += [
        "-keyout",
        str(folder / "tls.key"),
        "-out",
        str(folder / "tls.crt"),
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
    ]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def test_tls_and_a_certificate_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TLS_SECONDS", 0.05)
    certificate(tmp_path, "one")
    (tmp_path / "kept.crt").write_bytes((tmp_path / "tls.crt").read_bytes())
    port = free_port()
    config = Config(hook_port=port, hook_tls=str(tmp_path))
    url = f"https://127.0.0.1:{port}"

    reached = {"hook": url, "token": "wrong", "namespace": "rl", "ca_file": tmp_path / "kept.crt"}
    async with server.serving(config, lambda verb, status: None):
        with pytest.raises(ApiUnavailable, match="cannot be asked who you are"):
            async with policy_update_async("policy", 2, **reached, prepare_timeout=0.1):  # type: ignore[arg-type]
                raise AssertionError
        certificate(tmp_path, "two")
        await asyncio.sleep(0.5)
        with pytest.raises(AccessError, match="is not to be trusted"):
            async with policy_update_async("policy", 2, **reached):  # type: ignore[arg-type]
                raise AssertionError
        (tmp_path / "tls.key").write_text("no key")
        await asyncio.sleep(0.2)
    with pytest.raises(ValueError, match=r"tls\.crt and tls\.key are no certificate and key"):
        async with server.serving(config, lambda verb, status: None):
            raise AssertionError


async def test_a_pair_that_is_none_leaves_the_certificate_that_is_served(tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    kept = server.Certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=tmp_path / "tls.crt")
    key = (tmp_path / "tls.key").read_bytes()
    certificate(tmp_path, "two")
    (tmp_path / "tls.key").write_bytes(key)
    with pytest.raises(ValueError, match="are no certificate and key"):
        kept.look()

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=kept.context) as listening:
        host, port = listening.sockets[0].getsockname()
        _, writer = await asyncio.open_connection(host, port, ssl=trusted)
        writer.close()


async def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "Hook", None)
    async with server.serving(Config(), lambda verb, status: None):
        pass
