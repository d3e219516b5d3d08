"""The operator's client and real admin planes over real TLS: whom it trusts, and what it says of the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

from moontide.engines import tls as trust
from moontide.engines.client import Unanswered, engine_status, fan_out, new_http_client, send, wipe, wiper_refusal
from moontide.engines.wire import Session
from moontide.planning.model import Command, EngineStatus, Fleet, Replica, Step, Wipe
from moontide_engine import tls
from moontide_engine.wiper import Config, Wiper, make_server
from tests.component.certificates import Authority
from tests.unit.operator.doubles import Engine

NAME, TOKEN = "chat.rl.svc", "secret"


@pytest.fixture(scope="module", name="authority")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module", name="other")
def _other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "others")


@dataclass
class Peer:
    """An engine's admin port."""

    folder: Path
    """Of its certificate."""
    engine: Engine
    port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def ask(self, http: Session, name: str = NAME) -> EngineStatus | Unanswered:
        return await engine_status(http, self.url, TOKEN, 60.0, name)

    async def why(self, http: Session, name: str = NAME) -> str:
        """Why it is not trusted."""
        answer = await self.ask(http, name)
        assert isinstance(answer, Unanswered), answer
        assert answer.reason == "TLSHandshake"
        return answer.message


@contextlib.asynccontextmanager
async def serving(folder: Path, secured: bool = True) -> AsyncIterator[Peer]:
    """The real admin plane, with the certificate of ``folder``."""
    engine = Engine(folder, "b1", TOKEN)
    config = uvicorn.Config(engine.app, host="127.0.0.1", port=0, lifespan="off", log_config=None)
    tasks = []
    if secured:
        served = tls.Certificate(str(folder))
        tls.secure(config, served)
        tasks.append(asyncio.create_task(served.keep()))
    server = uvicorn.Server(config)
    serve = asyncio.create_task(server.serve())
    try:
        for _ in range(1000):
            if server.started:
                break
            await asyncio.sleep(0.01)
        yield Peer(folder, engine, server.servers[0].sockets[0].getsockname()[1])
    finally:
        for task in tasks:
            task.cancel()
        server.should_exit = True
        await serve


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(trust, "LOOK_SECONDS", 0.0)


async def test_a_peer_of_the_right_name_and_authority_is_asked_and_told(tmp_path: Path, authority: Authority) -> None:
    authority.issue(tmp_path, NAME)
    async with serving(tmp_path) as peer, new_http_client(str(authority.certificate)) as http:
        status = await peer.ask(http)
        assert isinstance(status, EngineStatus)
        replica = Replica("r", "pod", "fleet", peer.url, "c", True, status=status, server_name=NAME)
        result = await send(http, Command(Step.CLOSE, replica, 1, {"reason": "Test"}), TOKEN, 1)
        assert result.success, result


async def test_whoever_cannot_prove_its_name_is_refused_with_what_to_do(
    tmp_path: Path, authority: Authority, other: Authority
) -> None:
    authority.issue(tmp_path, NAME)
    async with serving(tmp_path) as peer:
        async with new_http_client(str(authority.certificate)) as http:
            assert "is not for kind.rl.svc: make one with that name among its dnsNames" in await peer.why(
                http, "kind.rl.svc"
            )
            # A connection that was verified for one name is used for no other.
            assert isinstance(await peer.ask(http), EngineStatus)
            assert "is not for kind.rl.svc" in await peer.why(http, "kind.rl.svc")
            # By the URL alone, as an engine is asked that others launched.
            assert "is not for 127.0.0.1" in await peer.why(http, "")
        for trusted in (str(other.certificate), "", str(tmp_path / "not there")):
            async with new_http_client(trusted) as http:
                assert "is of no authority that the operator trusts: put" in await peer.why(http)
        assert peer.engine.heard == []
    authority.issue(tmp_path, NAME, days=-1)
    async with serving(tmp_path) as peer, new_http_client(str(authority.certificate)) as http:
        assert "has expired: renew it in its Secret" in await peer.why(http)


async def test_without_a_name_it_is_the_hosts(tmp_path: Path, authority: Authority) -> None:
    """As for an engine that others launched: its URL is all that is known of it."""
    authority.issue(tmp_path, "127.0.0.1")
    async with serving(tmp_path) as peer, new_http_client(str(authority.certificate)) as http:
        assert isinstance(await peer.ask(http, ""), EngineStatus)


async def test_a_peer_without_tls_is_sent_nothing(tmp_path: Path, authority: Authority) -> None:
    async with (
        serving(tmp_path, secured=False) as peer,
        new_http_client(str(authority.certificate)) as http,
    ):
        assert "speaks plain HTTP, and is sent nothing" in await peer.why(http)
        plain = await engine_status(http, f"127.0.0.1:{peer.port}", TOKEN, 60.0)
        assert isinstance(plain, EngineStatus)


async def test_a_certificate_is_renewed_while_both_run(tmp_path: Path, authority: Authority) -> None:
    authority.issue(tmp_path, NAME, days=-1)
    async with serving(tmp_path) as peer, new_http_client(str(authority.certificate)) as http:
        assert "has expired" in await peer.why(http)
        authority.issue(tmp_path, NAME)
        for _ in range(500):
            if isinstance(await peer.ask(http), EngineStatus):
                break
            await asyncio.sleep(0.02)
        assert isinstance(await peer.ask(http), EngineStatus)


async def test_authorities_come_change_and_go_while_both_run(
    tmp_path: Path, authority: Authority, other: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    authority.issue(tmp_path, NAME)
    file = tmp_path / "authorities.crt"
    async with serving(tmp_path) as peer, new_http_client(str(file)) as http:
        assert "no authority" in await peer.why(http)
        file.write_bytes(authority.certificate.read_bytes())
        assert isinstance(await peer.ask(http), EngineStatus)
        # What is no certificate takes nobody's trust away.
        file.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
        with caplog.at_level(logging.ERROR):
            assert isinstance(await peer.ask(http), EngineStatus)
            assert isinstance(await peer.ask(http), EngineStatus)
        assert caplog.text.count("holds no certificates (PEM)") == 1
        file.write_bytes(other.certificate.read_bytes())
        assert "no authority" in await peer.why(http)
        file.write_bytes(other.certificate.read_bytes() + authority.certificate.read_bytes())
        assert isinstance(await peer.ask(http), EngineStatus)


async def test_whoever_does_not_shake_hands_keeps_nobody_waiting(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.issue(tmp_path, NAME)
    monkeypatch.setattr(trust, "HANDSHAKES", 2)
    begun: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: begun.append(writer), "127.0.0.1", 0)
    url = f"https://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with serving(tmp_path) as peer, new_http_client(str(authority.certificate)) as http:
        waiting = [asyncio.create_task(engine_status(http, url, TOKEN, 60.0, NAME)) for _ in range(5)]
        await asyncio.sleep(0)
        assert isinstance(await peer.ask(http), EngineStatus)
        assert not any(each.done() for each in waiting)
        assert len(begun) >= 4
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    for writer in begun:
        writer.close()
    silent.close()


async def test_many_connections_take_little_memory(tmp_path: Path, authority: Authority) -> None:
    authority.issue(tmp_path, NAME)
    async with serving(tmp_path) as peer, new_http_client(str(authority.certificate)) as http:
        assert isinstance(await peer.ask(http), EngineStatus)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            answers = await fan_out([NAME] * 16, lambda name: peer.ask(http, name))
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert all(isinstance(each, EngineStatus) for each in answers)
    # Both ends are here. With asyncio's own buffers it is 256 KiB an end.
    assert (after - before) / 16 < 2 * 100 * 1024


@pytest.fixture(name="wiper")
def _wiper(tmp_path: Path, authority: Authority) -> Iterator[int]:
    """The port of a wiper without a store."""
    authority.issue(tmp_path, "localhost")
    (tmp_path / "token").write_text(TOKEN)
    config = Config("127.0.0.1", 0, str(tmp_path / "token"), "127.0.0.1:1", "http://127.0.0.1:1", tls=str(tmp_path))
    server = make_server(config, Wiper(config.master))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_wiper_is_verified_by_the_name_of_its_host(authority: Authority, other: Authority, wiper: int) -> None:
    action, url = Wipe(Fleet("f", "uid", "kv", "pool-uid"), 2.0), f"https://localhost:{wiper}"
    async with new_http_client(str(authority.certificate)) as http:
        assert (await wipe(http, action, url, TOKEN, 1)).reason == "StoreUnavailable"
        assert (await wipe(http, action, f"https://127.0.0.1:{wiper}", TOKEN, 1)).reason == "TLSHandshake"
        # Of several, each is asked at its own address by the name that they share.
        pod = f"https://127.0.0.1:{wiper}"
        assert await wiper_refusal(http, pod, TOKEN, server_name="localhost") == ""
        assert await wiper_refusal(http, pod, "another", server_name="localhost") == "Http401"
        assert await wiper_refusal(http, pod, TOKEN, server_name="kv-master.rl.svc") == "TLSHandshake"
    async with new_http_client(str(other.certificate)) as http:
        refused = await wipe(http, action, url, TOKEN, 1)
        assert (refused.success, refused.reason) == (False, "TLSHandshake")
        assert "no authority that the operator trusts" in refused.message
