"""examples/trainers against the real planner and engines that answer as vLLM's admin routes do."""

from __future__ import annotations

import importlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moontide.planning.model import Observed
from tests.unit.trainer.cluster import Cluster, TokenWorld

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "trainers"
Served = Callable[..., tuple[Cluster, Path]]


def weights(fill: bytes) -> bytes:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [100], "data_offsets": [0, 200]}}).encode()
    return struct.pack("<Q", len(header)) + header + fill * 200


@pytest.fixture(name="models")
def _models(tmp_path: Path) -> Path:
    for name, fill in (("policy-a", b"a"), ("policy-b", b"b")):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
        (tmp_path / "models" / name / "model.safetensors").write_bytes(weights(fill))
    return tmp_path / "models"


class Engines:
    """Two engines behind one port: vLLM's routes, as far as trainers use them."""

    def __init__(self, cluster: Cluster) -> None:
        self.loaded: list[str] = []
        self.tokens: set[str | None] = set()
        engines = self

        class Handler(BaseHTTPRequestHandler):
            wbufsize = -1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                version = engines.post(self.path, body, self.headers.get("authorization"))
                self.send_response(200)
                self.send_header("x-moontide-version", version)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._cluster = cluster
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def post(self, path: str, body: dict[str, Any], token: str | None) -> str:
        with self._cluster.lock:
            if path == "/collective_rpc":
                assert {pod.engine.state for pod in self._cluster.world.pods} == {"paused"}
                self.loaded.append(body["kwargs"]["weights_path"])
                self.tokens.add(token)
            elif path == "/update_weight_version":
                self._cluster.world.push_weights(body["new_version"])
            return str(self._cluster.world.pod(0).engine.version)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture(name="engines")
def _engines(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines of a cluster that $KUBECONFIG names; the examples can be imported."""
    cluster, kubeconfig = served()
    engines = Engines(cluster)
    observe = TokenWorld.observe

    def with_addresses(world: TokenWorld, recent: bool = False) -> Observed:
        seen = observe(world, recent)
        fleets = [
            replace(fleet, replicas=tuple(replace(each, address=engines.address) for each in fleet.replicas))
            for fleet in seen.fleets
        ]
        return replace(seen, fleets=tuple(fleets))

    monkeypatch.setattr(TokenWorld, "observe", with_addresses)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield engines
    engines.close()


@pytest.mark.parametrize("example", ["prime_style", "verl_style"])
def test_it_runs(engines: Engines, models: Path, example: str) -> None:
    arguments = ["--models", str(models), "--url", f"http://{engines.address}", "--namespace", "rl"]
    seen = importlib.import_module(example).main([*arguments, "--first", "101", "--steps", "2"])
    assert engines.loaded == ["/models/step-101"] * 2 + ["/models/step-102"] * 2
    assert engines.tokens == {"Bearer first"}
    if example == "verl_style":
        assert seen == [{"101"}, {"102"}]
    else:
        assert set(seen) <= {"1", "101", "102", "None"}
        assert seen["102"] > 0 or seen["101"] > 0
    made = (models / "step-102" / "model.safetensors").read_bytes()
    assert made == weights(b"b")[: made.index(b"a" * 100)] + weights(b"a")[made.index(b"a" * 100) :]
    assert (models / "step-102" / "config.json").exists()


def test_models_of_two_shapes_are_refused(engines: Engines, models: Path) -> None:
    (models / "policy-b" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(ValueError, match="not of one shape"):
        importlib.import_module("tiny").save(models, 1)
    assert engines.loaded == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_they_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
