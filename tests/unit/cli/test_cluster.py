"""How engines are asked: through the API server's proxy of pods (an HTTP server here), or at their addresses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moontide.cli import cluster as clusters
from moontide.cli.cluster import REFUSED, Cluster, Door
from moontide.engines.client import Unanswered
from moontide.planning.model import EngineStatus
from moontide.trainer.access import Access, find
from tests.unit.cli.paper import paper
from tests.unit.cli.test_rehearsal import world_of

ENGINE = next(each for each in paper(world_of(True)).answers.values() if isinstance(each, EngineStatus))
STATUS = ENGINE.model_dump(mode="json", by_alias=True)


class FakeApiServer(ThreadingHTTPServer):
    """Answers with what it is told to, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: tuple[int, Any] = (200, STATUS)
        self.held: threading.Event | None = None
        self.asked: list[tuple[str, dict[str, str]]] = []

    @property
    def access(self) -> Access:
        return Access(f"http://127.0.0.1:{self.server_port}", "rl", "a test", token="mine")


class _Handler(BaseHTTPRequestHandler):
    server: FakeApiServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        if self.server.held is not None:
            self.server.held.wait(60)
        code, body = self.server.answer
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            if server.held is not None:
                server.held.set()
            server.shutdown()
            thread.join()


@pytest.fixture(name="server")
def _server() -> Iterator[FakeApiServer]:
    with serving() as server:
        yield server


def doors(number: int, namespace: str = "rl", scheme: str = "") -> list[Door]:
    return [Door(f"{scheme}10.0.0.{each}:8001", "its", namespace, f"chat-{each}") for each in range(number)]


def of_server(code: int, message: str) -> tuple[int, dict[str, Any]]:
    """An answer of the API server's own."""
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def test_engines_are_asked_through_the_api_server_which_passes_their_token_on(server: FakeApiServer) -> None:
    with Cluster(server.access) as cluster:
        assert cluster.engines(doors(3)) == [ENGINE] * 3
        assert cluster.engines(doors(1, scheme="https://")) == [ENGINE]
    path = "/api/v1/namespaces/rl/pods/{}:8001/proxy/moontide/v1/status"
    names = ("chat-0", "chat-1", "chat-2", "https:chat-0")
    assert sorted(asked for asked, _ in server.asked) == sorted(path.format(name) for name in names)
    for _, headers in server.asked:
        assert headers["authorization"] == "Bearer mine"
        assert headers["x-admin-authorization"] == "Bearer its"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (of_server(403, 'pods "chat-0:8001" is forbidden'), "you may not get pods/proxy in rl"),
        (of_server(400, "address not allowed"), "the API server does not pass it on: address not allowed"),
    ],
)
def test_after_one_refusal_nobody_else_there_is_asked(
    server: FakeApiServer, answer: tuple[int, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = answer
    with Cluster(server.access) as cluster:
        assert cluster.engines(doors(50)) == [Unanswered(REFUSED, says)] * 50
        assert cluster.engines(doors(50)) == [Unanswered(REFUSED, says)] * 50
        assert len(server.asked) == 1
        server.answer = (200, STATUS)
        assert cluster.engines(doors(2, "lab")) == [ENGINE] * 2
    monkeypatch.setattr(clusters, "AGAIN_SECONDS", 0.0)
    with Cluster(server.access) as cluster:
        server.answer = answer
        assert cluster.engines(doors(2)) == [Unanswered(REFUSED, says)] * 2
        server.answer = (200, STATUS)
        assert cluster.engines(doors(2)) == [ENGINE] * 2


def test_one_that_is_not_there_says_nothing_of_the_others(server: FakeApiServer) -> None:
    with Cluster(server.access) as cluster:
        server.answer = of_server(503, "error trying to reach service: connection refused")
        assert (
            cluster.engines(doors(2))
            == [Unanswered("Unreachable", "error trying to reach service: connection refused")] * 2
        )
        server.answer = (401, {"success": False, "reason": "Unauthorized"})
        (found,) = cluster.engines(doors(1))
        assert isinstance(found, Unanswered)
        assert (found.reason, found.message[:21]) == ("Http401", "chat-0 answered 401: ")
        server.answer = (200, [])
        (found,) = cluster.engines(doors(1))
        assert isinstance(found, Unanswered)
        assert found.reason == "NotAStatus"
        assert len(server.asked) == 4


def test_where_all_are_silent_they_are_not_asked_again_at_once(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "ENGINE_SECONDS", 0.2)
    server.held = threading.Event()
    with Cluster(server.access) as cluster:
        found = cluster.engines(doors(2))
        assert [each.reason for each in found if isinstance(each, Unanswered)] == ["Timeout"] * 2
        assert cluster.engines(doors(2)) == [found[0]] * 2
    assert len(server.asked) == 2


def test_directly_the_api_server_is_not_asked_and_the_address_is(server: FakeApiServer) -> None:
    with serving() as engine:
        door = Door(f"127.0.0.1:{engine.server_port}", "its", "rl", "chat-0")
        with Cluster(server.access, direct=True) as cluster:
            assert cluster.engines([door]) == [ENGINE]
    assert server.asked == []
    ((path, headers),) = engine.asked
    assert (path, headers["authorization"]) == ("/moontide/v1/status", "Bearer its")


def test_only_a_pod_asks_directly_by_itself(tmp_path: Path) -> None:
    for name in ("token", "namespace"):
        (tmp_path / name).write_text("x")
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOME": str(tmp_path)}
    assert Cluster(find(environ=environ, service_account=tmp_path)).direct
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    # A pod with a kubeconfig: of whichever cluster.
    assert not Cluster(find(environ={**environ, "KUBECONFIG": str(path)}, service_account=tmp_path)).direct
    assert not Cluster(find(path)).direct
    assert Cluster(find(path), direct=True).direct
    assert "its" not in repr(doors(1))
