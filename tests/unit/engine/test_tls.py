"""Certificates of admin ports and wipers: real ones, made by openssl, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from moontide_engine import plugin, settings, tls
from moontide_engine.asgi import Receive, Scope, Send, send_json
from moontide_engine.wiper import Config, Wiper, make_server
from tests.component.certificates import Authority

NAME = "chat.rl.svc"


@pytest.fixture(scope="module", name="authority")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.certificate)


def serial(port: int, context: ssl.SSLContext) -> str:
    """Of the certificate that a new connection gets. Raises SSLError."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as secured,
    ):
        found = secured.getpeercert()
    assert found is not None
    return str(found["serialNumber"])


def test_a_folder_without_a_pair_is_refused_with_what_to_write(tmp_path: Path, authority: Authority) -> None:
    assert tls.certificate("") is None
    with pytest.raises(tls.CertificateError, match=r"tls\.crt and tls\.key are no certificate with its key"):
        tls.certificate(str(tmp_path))
    authority.issue(tmp_path, NAME)
    key = (tmp_path / "tls.key").read_text()
    authority.issue(tmp_path, NAME)
    (tmp_path / "tls.key").write_text(key)
    with pytest.raises(tls.CertificateError, match=r"kubernetes\.io/tls has both"):
        tls.certificate(str(tmp_path))


def test_the_settings_name_the_folder() -> None:
    assert settings.load({}).admin_tls == ""
    assert settings.load({"MOONTIDE_ADMIN_TLS": "/etc/here"}).admin_tls == "/etc/here"


def until(done: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_an_engine_that_is_given_no_certificate_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONTIDE_ENABLED", "1")
    monkeypatch.setenv("MOONTIDE_ADMIN_TLS", str(tmp_path))
    with pytest.raises(tls.CertificateError):
        plugin.register()


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, 200, {"scheme": scope["scheme"]})


async def test_an_admin_port_takes_a_renewed_certificate_and_keeps_the_old_one_where_the_new_one_is_none(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.02)
    authority.issue(tmp_path, NAME)
    served, context = tls.Certificate(str(tmp_path)), trusting(authority)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_config=None)
    tls.secure(config, served)
    server = uvicorn.Server(config)
    tasks = [asyncio.create_task(server.serve()), asyncio.create_task(served.keep())]
    try:
        await asyncio.to_thread(until, lambda: server.started)
        port: int = server.servers[0].sockets[0].getsockname()[1]
        first = await asyncio.to_thread(serial, port, context)
        key = (tmp_path / "tls.key").read_bytes()
        authority.issue(tmp_path, NAME)
        (tmp_path / "tls.key").write_bytes(key)
        await asyncio.to_thread(until, lambda: "certificate-refused" in capfd.readouterr().err)
        assert await asyncio.to_thread(serial, port, context) == first
        authority.issue(tmp_path, NAME)
        await asyncio.to_thread(until, lambda: serial(port, context) != first)
        assert "certificate-replaced" in capfd.readouterr().err
    finally:
        tasks[1].cancel()
        server.should_exit = True
        await tasks[0]
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[1]


@pytest.fixture(name="wiper")
def _wiper(tmp_path: Path, authority: Authority) -> Iterator[int]:
    """The port of a wiper that serves TLS. There is no store behind it."""
    (tmp_path / "token").write_text("secret")
    authority.issue(tmp_path, NAME)
    config = Config("127.0.0.1", 0, str(tmp_path / "token"), "127.0.0.1:1", "http://127.0.0.1:1", tls=str(tmp_path))
    server = make_server(config, Wiper(config.master))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, context: ssl.SSLContext | None) -> tuple[int, Any]:
    connection: http.client.HTTPConnection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    if context is not None:
        connection.connect()
        connection.sock = context.wrap_socket(connection.sock, server_hostname=NAME)
    body = json.dumps({"term": 1, "namespace": "ns", "timeoutSeconds": 1})
    try:
        connection.request("POST", "/moontide/v1/wipe", body, {"authorization": "Bearer secret"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_a_wiper_speaks_tls_and_nothing_else_and_takes_a_renewed_certificate(
    tmp_path: Path, authority: Authority, wiper: int
) -> None:
    context = trusting(authority)
    status, answer = ask(wiper, context)
    assert (status, answer["reason"]) == (200, "StoreUnavailable")
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(wiper, None)
    first = serial(wiper, context)
    authority.issue(tmp_path, NAME)
    assert serial(wiper, context) != first
    assert ask(wiper, context)[0] == 200


def test_a_wiper_that_is_given_no_certificate_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(tls.CertificateError):
        make_server(Config("127.0.0.1", 0, str(tmp_path / "token"), "", "", tls=str(tmp_path)), Wiper(""))


def test_one_client_that_never_says_anything_keeps_no_other_from_a_wiper(authority: Authority, wiper: int) -> None:
    with socket.create_connection(("127.0.0.1", wiper)):
        assert ask(wiper, trusting(authority))[0] == 200
