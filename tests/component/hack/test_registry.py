"""Images on their way to a registry: the real skopeo, and a fake registry that keeps what it is sent."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cluster.archives import SmallImage, write_small_image
from hack.cluster.errors import ClusterError
from hack.images import builder
from hack.images.builder import push_with_skopeo


class FakeRegistry(http.server.ThreadingHTTPServer):
    """The part of the distribution API that a push of one image needs. It is not TLS, as on a developer's machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.uploads: dict[str, bytes] = {}
        self.pushes = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeRegistry
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def do_GET(self) -> None:
        if self.path == "/v2/":
            self._answer(200)
        elif (match := re.fullmatch(r"/v2/(.+)/blobs/(sha256:\w+)", self.path)) and match[2] in self.server.blobs:
            self._answer(200, self.server.blobs[match[2]], Docker_Content_Digest=match[2])
        elif (match := re.fullmatch(r"/v2/(.+/manifests/.+)", self.path)) and match[1] in self.server.manifests:
            kind, body = self.server.manifests[match[1]]
            self._answer(200, body, Content_Type=kind)
        else:
            self._answer(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self._body()
        number = str(len(self.server.uploads))
        self.server.uploads[number] = b""
        self._answer(202, Location=f"/v2/uploads/{number}")

    def do_PATCH(self) -> None:
        number = self.path.rpartition("/")[2]
        self.server.uploads[number] += self._body()
        self._answer(202, Location=f"/v2/uploads/{number}")

    def do_PUT(self) -> None:
        body = self._body()
        if "/uploads/" in self.path:
            number = self.path.partition("?")[0].rpartition("/")[2]
            content = self.server.uploads[number] + body
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            self.server.blobs[digest] = content
            self._answer(201, Docker_Content_Digest=digest)
            return
        self.server.pushes += 1
        self.server.manifests[self.path.removeprefix("/v2/")] = (self.headers["Content-Type"], body)
        self._answer(201, Docker_Content_Digest=f"sha256:{hashlib.sha256(body).hexdigest()}")


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    server = FakeRegistry()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def image(tmp_path: Path) -> str:
    """A small image, as skopeo names it."""
    (tmp_path / "program").write_text("#!/bin/sh\n")
    write_small_image(SmallImage(("/program",), {"/program": tmp_path / "program"}), "a:1", tmp_path / "small.tar")
    return f"oci-archive:{tmp_path}/small.tar"


def test_an_image_is_pushed_once_under_the_name_that_pods_use(registry: FakeRegistry, image: str) -> None:
    for _ in range(2):
        push_with_skopeo(image, f"{registry.host}/team/demo/small:abc")
    assert registry.pushes == 1
    _, manifest = registry.manifests["team/demo/small/manifests/abc"]
    content = json.loads(manifest)
    assert {each["digest"] for each in (content["config"], *content["layers"])} <= registry.blobs.keys()
    push_with_skopeo(image, f"{registry.host}/team/demo/small:def")
    assert registry.pushes == 2


def test_another_machines_registry_is_not_spoken_to_without_tls(
    registry: FakeRegistry, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "RETRIES", 0)
    port = registry.server_address[1]
    # A name of this machine that is none of those that may do without.
    with pytest.raises(ClusterError, match="skopeo copy"):
        push_with_skopeo(image, f"127.0.0.2:{port}/team/small:abc")
    assert registry.pushes == 0
