"""Gate middleware and admin app together, on a fake engine and a fake app, through their ASGI interface."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moontide_engine.admin import AdminApp, Commands
from moontide_engine.asgi import Message, Receive, Scope, Send, send_json
from moontide_engine.auth import TokenFile
from moontide_engine.engine import EngineFault, Probe, RankQueue
from moontide_engine.gate import Fence, Gate, Stamp, State
from moontide_engine.middleware import GateMiddleware


@dataclass
class FakeEngine:
    """An engine whose every answer the test decides."""

    running: int = 0
    waiting: int = 0
    settling: int = 0
    paused: bool = False
    left: list[int] = field(default_factory=lambda: [0, 0])
    prefix_held: bool = False
    hang: float = 0.0
    fault: Exception | None = None
    calls: list[str] = field(default_factory=list)
    version: str = "0.32.0"
    ranks: int = 2
    store_configured: bool = True
    fell_back: str = ""
    on_resume: Callable[[], None] | None = None
    fence_unsupported: str = ""
    live_fence_unsupported: str = ""
    salt: str = ""
    weights: str = "7"
    loads: asyncio.Event | None = None
    """A load takes until this is set."""
    load_fault: str = ""

    async def _say(self, call: str) -> None:
        self.calls.append(call)
        if self.hang:
            await asyncio.sleep(self.hang)
        if self.fault is not None:
            raise self.fault

    async def switch(self, salt: str) -> None:
        await self._say("switch")
        self.salt = salt

    async def probe(self) -> Probe:
        await self._say("probe")
        return Probe(self.running, self.waiting, self.settling, self.paused)

    async def queues(self) -> list[RankQueue]:
        await self._say("queues")
        return [RankQueue(rank, left, 0, True, "") for rank, left in enumerate(self.left)]

    async def weights_version(self) -> str:
        await self._say("weights_version")
        return self.weights

    async def set_weights_version(self, version: str) -> None:
        await self._say("set_weights_version")
        self.weights = version

    async def load_weights(self, source: str) -> None:
        await self._say(f"load {source}")
        if self.loads is not None:
            await self.loads.wait()
        if self.load_fault:
            raise EngineFault(self.load_fault)

    async def pause(self, mode: str) -> None:
        await self._say({"wait": "pause"}.get(mode, mode))
        self.paused = True
        if mode == "abort":
            self.running = self.waiting = 0

    async def resume(self) -> None:
        await self._say("resume")
        if self.on_resume is not None:
            self.on_resume()
        self.paused = False

    async def reset_prefix(self, preempt: bool = False) -> bool:
        await self._say("preempt" if preempt else "reset_prefix")
        return not self.prefix_held

    async def reset_encoder(self) -> None:
        await self._say("reset_encoder")

    async def reset_multimodal(self) -> None:
        await self._say("reset_multimodal")


class App:
    """The app behind the gate. ``/v1/completions`` answers when released, or at once if nobody asked it to wait."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.stream = False
        self.content_type = b"text/plain"
        self.disconnected = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        if self.stream:
            headers = [(b"content-type", self.content_type)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        gone = asyncio.ensure_future(receive())
        go = asyncio.ensure_future(self.release.wait())
        await asyncio.wait((gone, go), return_when=asyncio.FIRST_COMPLETED)
        go.cancel()
        if gone.done():
            self.disconnected += 1
            return
        gone.cancel()
        if self.stream:
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
        else:
            await send_json(send, 200, {"ok": True})


class Client:
    """One HTTP request on an ASGI app, with a client that can leave."""

    def __init__(self, app: Any, path: str = "/v1/completions", parts: tuple[bytes, ...] = (b"{}",)) -> None:
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        for number, part in enumerate(parts, 1):
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": number < len(parts)})
        self.sent: list[Message] = []
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        """The client goes away."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def done(self) -> None:
        """Until the app has returned."""
        await asyncio.wait_for(self.task, 2)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def whole(self) -> bool:
        return not self.sent[-1].get("more_body", False)


class Plane:
    """Everything wired as the server wires it."""

    def __init__(self, token_file: Path, max_held: int = 3) -> None:
        self.engine = FakeEngine()
        self.app = App()
        self.gate = Gate("boot", time.monotonic, admit_ttl=60)
        self.middleware = GateMiddleware(self.app, self.gate, max_held)
        self.commands = Commands(self.gate, self.middleware, self.engine, "pod", "ns")
        token_file.write_text("secret\n")
        self.admin = AdminApp(self.commands, self.middleware, self.app, TokenFile(str(token_file)))
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.admin),
            base_url="http://admin",
            headers={"authorization": "Bearer secret"},
        )
        self.open_http = httpx.AsyncClient(transport=httpx.ASGITransport(self.middleware), base_url="http://inference")

    async def command(self, name: str, epoch: int = 1, **more: object) -> tuple[int, dict[str, Any]]:
        body: dict[str, object] = {"term": 1, "epoch": epoch, "bootId": "boot", **more}
        if name in ("quiesce", "drain", "reset", "load"):
            body.setdefault("timeoutSeconds", 1)
        if name == "quiesce":
            body = {"mode": "wait", "requestsDuringBarrier": "Queue", "ttlSeconds": 30, **body}
        answer = await self.http.post(f"/moontide/v1/{name}", json=body)
        return answer.status_code, answer.json()

    async def succeed(self, name: str, epoch: int = 1, **more: object) -> dict[str, Any]:
        status, answer = await self.command(name, epoch, **more)
        assert (status, answer["success"]) == (200, True), answer
        return answer

    async def open(self, epoch: int = 1) -> None:
        await self.succeed("admit", epoch, version=f"v{epoch}")
        await self.succeed("resume", epoch)

    def request(self, **more: Any) -> Client:
        return Client(self.middleware, **more)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    made = Plane(tmp_path / "token")
    yield made
    await made.http.aclose()
    await made.open_http.aclose()


# -- the inference port ------------------------------------------------------------------------------------------------


async def test_closed_refuses_with_a_reason(plane: Plane) -> None:
    client = plane.request()
    await client.done()
    assert client.status == 503
    assert client.headers[b"retry-after"] == b"1"
    assert "Starting" in json.loads(client.sent[1]["body"])["error"]["message"]
    assert plane.app.paths == []


async def test_ready_follows_the_gate(plane: Plane) -> None:
    async def ready() -> tuple[int, Any]:
        answer = await plane.open_http.get("/moontide/v1/ready")
        return answer.status_code, answer.json()

    assert await ready() == (503, {"ready": False})
    await plane.open()
    assert await ready() == (200, {"ready": True})
    await plane.succeed("quiesce", 2)
    assert await ready() == (200, {"ready": True})
    await plane.succeed("close", 2, reason="Gone")
    assert await ready() == (503, {"ready": False})


async def test_the_gate_is_scraped(plane: Plane) -> None:
    async def scrape() -> dict[str, float]:
        answer = await plane.open_http.get("/moontide/v1/metrics")
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/plain")
        families = text_string_to_metric_families(answer.text)
        samples = [sample for family in families for sample in family.samples]
        return {
            " ".join((s.name, s.labels.get("state", ""), s.labels.get("reason", ""))).strip(): s.value for s in samples
        }

    closed = await scrape()
    assert closed["moontide_engine_state closed Starting"] == 1
    assert "moontide_engine_epoch" not in closed
    await plane.request().done()
    await plane.open()
    plane.app.release.clear()
    first = plane.request()
    await plane.settle()
    opened = await scrape()
    assert opened["moontide_engine_state open"] == 1
    assert opened["moontide_engine_state closed"] == 0
    assert opened["moontide_engine_epoch"] == 1
    assert opened["moontide_engine_requests_in_flight"] == 1
    assert opened["moontide_engine_requests_refused_total"] == 1
    plane.app.release.set()
    await first.done()
    await plane.succeed("quiesce", 2)
    held = plane.request()
    await plane.settle()
    paused = await scrape()
    assert paused["moontide_engine_state paused"] == 1
    assert paused["moontide_engine_requests_held"] == 1
    await plane.succeed("close", 2, reason="Gone")
    await held.done()
    assert (await scrape())["moontide_engine_state closed Gone"] == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pause"),
        ("OPTIONS", "/pause"),
        ("POST", "//pause"),
        ("POST", "/%70ause"),
        ("POST", "/v1/../pause"),
        ("GET", "/moontide/v1/status"),
        ("POST", "/moontide/v1/close"),
        ("POST", "/v1/load_lora_adapter"),
    ],
)
async def test_admin_routes_do_not_exist_on_the_inference_port(plane: Plane, method: str, path: str) -> None:
    await plane.open()
    answer = await plane.open_http.request(method, path, headers={"authorization": "Bearer secret"})
    assert answer.status_code == 404
    assert plane.app.paths == []


async def test_public_paths_pass_a_closed_gate(plane: Plane) -> None:
    assert (await plane.open_http.get("/health")).status_code == 200
    assert plane.app.paths == ["/health"]


async def test_websockets_are_turned_down(plane: Plane) -> None:
    await plane.open()
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    for app in (plane.middleware, plane.admin):
        await app({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"] * 2
    assert plane.app.paths == []


async def test_answers_carry_the_stamp(plane: Plane) -> None:
    await plane.open(3)
    client = plane.request()
    await client.done()
    assert client.status == 200
    assert client.headers[b"x-moontide-epoch"] == b"3"
    assert client.headers[b"x-moontide-version"] == b"v3"
    assert plane.gate.in_flight == 0


async def test_held_request_runs_in_the_new_epoch_with_its_whole_body(plane: Plane) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2)
    client = plane.request(parts=(b"one", b"two", b"three"))
    await plane.settle()
    assert plane.middleware.held == 1
    assert plane.app.paths == []
    for step in ("drain", "reset"):
        await plane.succeed(step, 2)
    await plane.open(2)
    await client.done()
    assert client.headers[b"x-moontide-epoch"] == b"2"
    assert plane.app.bodies == [b"onetwothree"]
    assert plane.middleware.held == 0
    assert plane.gate.in_flight == 0


async def test_held_request_whose_client_leaves_is_dropped(plane: Plane) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2)
    client = plane.request()
    await plane.settle()
    client.leave()
    await client.done()
    assert plane.middleware.held == 0
    assert client.sent == []
    assert plane.app.paths == []


async def test_holding_is_bounded(plane: Plane) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2)
    clients = [plane.request() for _ in range(5)]
    await plane.settle()
    assert plane.middleware.held == 3
    assert [c.status for c in clients if c.sent] == [503, 503]
    await plane.succeed("close", 2, reason="Enough")
    for client in clients:
        await client.done()
    assert [c.status for c in clients] == [503] * 5
    assert plane.middleware.held == 0


async def test_refuse_mode_refuses(plane: Plane) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2, requestsDuringBarrier="Refuse")
    client = plane.request()
    await client.done()
    assert client.status == 503
    assert plane.middleware.held == 0


async def test_close_ends_what_runs(plane: Plane) -> None:
    await plane.open(1)
    plane.app.release.clear()
    client = plane.request()
    await plane.settle()
    assert plane.gate.in_flight == 1
    await plane.succeed("close", 2, reason="Isolated")
    await client.done()
    assert client.status == 503
    assert "Isolated" in json.loads(client.sent[1]["body"])["error"]["message"]
    assert plane.app.disconnected == 1
    assert plane.gate.in_flight == 0
    await plane.settle()
    assert "abort" in plane.engine.calls


async def test_close_cuts_a_stream_short(plane: Plane) -> None:
    await plane.open(1)
    plane.app.release.clear()
    plane.app.stream = True
    client = plane.request()
    await plane.settle()
    await plane.succeed("close", 2, reason="Isolated")
    await client.done()
    assert client.status == 200
    assert not client.whole


async def test_termination_lets_what_runs_finish_and_answers_the_held(plane: Plane) -> None:
    await plane.open(1)
    plane.app.release.clear()
    running = plane.request()
    await plane.settle()
    await plane.command("quiesce", 2, timeoutSeconds=0.05)
    held = plane.request()
    await plane.settle()
    plane.gate.terminate()
    await held.done()
    assert held.status == 503
    plane.app.release.set()
    await running.done()
    assert running.status == 200
    assert running.whole


async def test_a_process_that_leaves_serves_on_and_closes_each_connection(plane: Plane) -> None:
    await plane.open(1)

    async def answer() -> tuple[int, bytes | None]:
        client = plane.request()
        await client.done()
        return client.status, client.headers.get(b"connection")

    assert await answer() == (200, None)
    plane.middleware.leave()
    assert await answer() == (200, b"close")
    plane.gate.terminate()
    assert await answer() == (503, b"close")


async def test_a_failing_app_leaves_the_gate(plane: Plane) -> None:
    await plane.open(1)

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("broken")

    middleware = GateMiddleware(broken, plane.gate, 1)
    with pytest.raises(ValueError, match="broken"):
        await Client(middleware).done()
    assert plane.gate.in_flight == 0


async def test_a_cancelled_request_leaves_the_gate(plane: Plane) -> None:
    await plane.open(1)
    plane.app.release.clear()
    client = plane.request()
    await plane.settle()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert plane.gate.in_flight == 0


# -- the admin port ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/moontide/v1/status", "/health", "/pause", "/nothing", "//pause", "/v1/completions"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_every_admin_path_needs_the_token(plane: Plane, method: str, path: str) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic secret"},
        {"authorization": "secret"},
    ):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(plane.admin), base_url="http://admin") as http:
            assert (await http.request(method, path, headers=headers)).status_code == 401
    assert plane.app.paths == []


async def test_vllms_own_routes_pass_behind_the_token(plane: Plane) -> None:
    assert (await plane.http.post("/collective_rpc", json={})).status_code == 200
    assert plane.app.paths == ["/collective_rpc"]


async def test_inference_on_the_admin_port_is_gated_too(plane: Plane) -> None:
    assert (await plane.http.post("/v1/completions", json={})).status_code == 503
    await plane.open(4)
    answer = await plane.http.post("/v1/completions", json={})
    assert (answer.status_code, answer.headers["x-moontide-epoch"]) == (200, "4")


async def test_bodies_are_checked_field_by_field(plane: Plane) -> None:
    whole: dict[str, object] = {"term": 1, "epoch": 1, "bootId": "boot", "timeoutSeconds": 1}
    for change, word in (
        ({"bogus": 1}, "bogus"),
        ({"term": "1"}, "term"),
        ({"term": True}, "term"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 1.5}, "epoch"),
        ({"bootId": ""}, "bootId"),
        ({"timeoutSeconds": 0}, "timeoutSeconds"),
        ({"timeoutSeconds": "9"}, "timeoutSeconds"),
        ({"timeoutSeconds": 1e9}, "timeoutSeconds"),
    ):
        answer = await plane.http.post("/moontide/v1/reset", json={**whole, **change})
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert word in answer.json()["message"]
    for missing in whole:
        answer = await plane.http.post("/moontide/v1/reset", json={k: v for k, v in whole.items() if k != missing})
        assert answer.status_code == 400
        assert missing in answer.json()["message"]
    for text in (b"", b"[]", b"null", b"{", b"[" * 50_000):
        answer = await plane.http.post("/moontide/v1/reset", content=text)
        assert answer.status_code == 400
    assert (await plane.http.post("/moontide/v1/reset", content=b" " * 70_000)).status_code == 413
    assert plane.engine.calls == []
    assert plane.gate.fence.term == 0


async def test_methods_and_unknown_commands(plane: Plane) -> None:
    assert (await plane.http.get("/moontide/v1/reset")).status_code == 405
    assert (await plane.http.post("/moontide/v1/status")).status_code == 405
    assert (await plane.http.post("/moontide/v1/explode", json={})).status_code == 404
    assert plane.app.paths == []


async def test_status_tells_everything(plane: Plane) -> None:
    await plane.open(5)
    status = (await plane.http.get("/moontide/v1/status")).json()
    assert status["state"] == "open"
    assert (status["epoch"], status["version"], status["admitted"], status["weightsVersion"]) == (5, "v5", True, "7")
    assert (status["term"], status["commandEpoch"]) == (1, 5)
    assert (status["clean"], status["drained"], status["responsive"]) == (False, False, True)
    assert status["store"] == {"configured": True, "attached": True, "reason": ""}
    assert status["keyNamespace"] == "ns"


async def test_an_engine_that_fell_back_has_a_store_that_is_not_attached(plane: Plane) -> None:
    plane.engine.fell_back, plane.engine.store_configured = "nobody there", False
    status = (await plane.http.get("/moontide/v1/status")).json()
    assert status["store"] == {"configured": True, "attached": False, "reason": "Fallback: nobody there"}


def acts(plane: Plane) -> list[str]:
    """What the engine was told to do, without what it was asked."""
    return [call for call in plane.engine.calls if call not in ("probe", "weights_version", "queues")]


async def test_the_answer_to_a_step_says_how_the_engine_is_now(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    await plane.open()
    answer = await plane.succeed("quiesce", 2)
    told, asked = answer["status"], (await plane.http.get("/moontide/v1/status")).json()
    timed = ("pausedSeconds", "pauseRemainingSeconds")
    assert {k: v for k, v in told.items() if k not in timed} == {k: v for k, v in asked.items() if k not in timed}
    assert (told["state"], told["epoch"], told["responsive"]) == ("paused", 1, True)
    # A step that failed, and one of an engine that has fallen silent since, leave it to the next look.
    _, failed = await plane.command("resume", 2)
    assert "status" not in failed
    await plane.succeed("admit", 2, version="v2", salt="uid/2")
    monkeypatch.setattr("moontide_engine.admin.TELL_SECONDS", 0.05)
    plane.engine.on_resume = lambda: setattr(plane.engine, "hang", 0.5)
    assert "status" not in await plane.succeed("resume", 2)


async def test_the_workers_of_an_open_engine_are_not_woken_by_every_status(plane: Plane) -> None:
    await plane.open(5)
    plane.engine.calls.clear()
    for _ in range(3):
        await plane.http.get("/moontide/v1/status")
    assert plane.engine.calls.count("probe") == 3
    # The answers to the commands that opened it have asked.
    assert plane.engine.calls.count("queues") == 0
    await plane.command("close", 5, reason="Test")
    for _ in range(2):
        await plane.http.get("/moontide/v1/status")
    assert plane.engine.calls.count("queues") == 2


async def test_a_silent_engine_is_waited_for_once(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide_engine.admin.STATUS_TIMEOUT", 0.2)
    monkeypatch.setattr("moontide_engine.admin.SILENT_SECONDS", 0.1)
    plane.engine.hang = 0.8
    assert not (await plane.commands.status())["responsive"]
    began = time.monotonic()
    for _ in range(5):
        assert not (await plane.commands.status())["responsive"]
    assert time.monotonic() - began < 0.2
    assert plane.engine.calls == ["probe"]
    plane.engine.hang = 0
    await asyncio.sleep(0.9)
    assert (await plane.commands.status())["responsive"]


async def test_status_of_an_engine_that_hangs_is_bounded_and_says_so(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moontide_engine.admin.STATUS_TIMEOUT", 0.05)
    plane.engine.hang = 5
    status = (await plane.http.get("/moontide/v1/status")).json()
    assert status["responsive"] is False
    assert status["running"] is None
    assert status["waiting"] is None
    assert status["fault"]
    assert status["store"]["attached"] is False


async def test_fencing_and_boot_id(plane: Plane) -> None:
    await plane.open(5)
    status, answer = await plane.command("close", 4, reason="Old")
    assert (status, answer["reason"], answer["term"], answer["epoch"]) == (409, "Fenced", 1, 5)
    status, answer = await plane.command("close", 9, reason="Other", bootId="other")
    assert (status, answer["reason"]) == (409, "BootIdMismatch")
    assert (await plane.http.get("/moontide/v1/status")).json()["state"] == "open"


async def test_quiesce_waits_for_gate_and_engine(plane: Plane) -> None:
    await plane.open(1)
    plane.app.release.clear()
    client = plane.request()
    await plane.settle()
    status, answer = await plane.command("quiesce", 2, timeoutSeconds=0.05)
    assert (status, answer["success"], answer["reason"], answer["inFlight"]) == (200, False, "RequestsRunning", 1)
    assert answer["state"] == "paused"
    assert "pause" not in plane.engine.calls
    plane.app.release.set()
    await client.done()
    plane.engine.running = 1
    status, answer = await plane.command("quiesce", 2, timeoutSeconds=0.05)
    assert (answer["success"], answer["reason"], answer["running"]) == (False, "RequestsRunning", 1)
    plane.engine.running = 0
    await plane.succeed("quiesce", 2)
    assert plane.engine.paused


async def test_quiesce_with_abort_ends_what_runs(plane: Plane) -> None:
    await plane.open(1)
    plane.engine.running = 2
    await plane.succeed("quiesce", 2, mode="abort")
    assert "abort" in plane.engine.calls


async def test_quiesce_of_a_closed_engine_succeeds_and_leaves_it_closed(plane: Plane) -> None:
    answer = await plane.succeed("quiesce", 1)
    assert answer["state"] == "closed"


async def test_drain_wants_every_rank_empty(plane: Plane) -> None:
    await plane.open(1)
    status, answer = await plane.command("drain", 2)
    assert (status, answer["success"], answer["reason"]) == (200, False, "NotQuiesced")
    await plane.succeed("quiesce", 2)
    plane.engine.left = [0, 3]
    status, answer = await plane.command("drain", 2, timeoutSeconds=0.05)
    assert (answer["success"], answer["reason"]) == (False, "StoreBusy")
    assert answer["ranks"][1] == {"rank": 1, "left": 3, "loading": 0}
    assert not plane.gate.drained
    asyncio.get_running_loop().call_later(0.05, lambda: plane.engine.left.__setitem__(1, 0))
    await plane.succeed("drain", 2)
    assert plane.gate.drained


async def test_drain_waits_for_requests_that_only_wait_for_their_transfer(plane: Plane) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2)
    plane.engine.settling = 1
    _, answer = await plane.command("drain", 2, timeoutSeconds=0.05)
    assert (answer["success"], answer["reason"]) == (False, "StoreBusy")


async def test_reset_clears_all_three_or_says_what_not(plane: Plane) -> None:
    await plane.open(1)
    status, answer = await plane.command("reset", 2)
    assert (status, answer["success"], answer["reason"], answer["cleared"]) == (200, False, "NotQuiesced", [])
    assert "reset_prefix" not in plane.engine.calls
    await plane.succeed("quiesce", 2)
    plane.engine.prefix_held = True
    status, answer = await plane.command("reset", 2, timeoutSeconds=0.05)
    assert (answer["success"], answer["reason"], answer["cleared"]) == (False, "BlocksHeld", [])
    assert plane.engine.calls.count("reset_prefix") > 1
    assert not plane.gate.clean
    plane.engine.prefix_held = False
    answer = await plane.succeed("reset", 2)
    assert answer["cleared"] == ["prefix", "encoder", "multimodal"]
    assert plane.gate.clean


async def test_drain_and_reset_do_not_take_silence_for_held_blocks_or_transfers(plane: Plane) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2)
    plane.engine.hang = 5
    for command in ("drain", "reset"):
        _, answer = await plane.command(command, 2, timeoutSeconds=0.05)
        assert (answer["success"], answer["reason"]) == (False, "EngineTimeout")


async def test_reset_does_not_count_while_a_request_is_on_its_way(plane: Plane) -> None:
    await plane.open(1)
    plane.app.release.clear()
    client = plane.request()
    await plane.settle()
    await plane.command("quiesce", 2, timeoutSeconds=0.05)
    _, answer = await plane.command("reset", 2, timeoutSeconds=0.05)
    assert answer["success"] is False
    assert "reset_prefix" not in plane.engine.calls
    plane.app.release.set()
    await client.done()


@pytest.mark.parametrize("command", ["quiesce", "drain", "reset", "resume"])
async def test_a_hanging_or_failing_engine_is_bounded_and_no_success(plane: Plane, command: str) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2)
    if command == "resume":
        for step in ("drain", "reset"):
            await plane.succeed(step, 2)
        await plane.succeed("admit", 2, version="v2")
    plane.engine.hang = 5
    began = time.monotonic()
    status, answer = await plane.command(command, 2, timeoutSeconds=0.1)
    assert (status, answer["success"]) == (200, False)
    assert time.monotonic() - began < 1
    plane.engine.hang = 0
    plane.engine.fault = RuntimeError("EngineDead")
    status, answer = await plane.command(command, 2, timeoutSeconds=0.1)
    assert (status, answer["success"]) == (200, False)
    assert answer["reason"] in ("EngineFault", "EngineTimeout")
    assert plane.gate.state == "paused"


async def test_admission_needs_drain_and_reset(plane: Plane) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2)
    status, answer = await plane.command("admit", 2, version="v2")
    assert (status, answer["reason"]) == (409, "NotClean")
    await plane.succeed("drain", 2)
    status, answer = await plane.command("admit", 2, version="v2")
    assert (status, answer["reason"]) == (409, "NotClean")
    await plane.succeed("reset", 2)
    await plane.succeed("admit", 2, version="v2")
    status, answer = await plane.command("resume", 3)
    assert (status, answer["reason"]) == (409, "NotAdmitted")


async def test_admission_switches_the_salt_of_block_hashes(plane: Plane) -> None:
    await plane.succeed("admit", 1, version="v1", salt="uid/1")
    await plane.succeed("resume", 1)
    assert plane.engine.salt == "uid/1"
    shown = (await plane.http.get("/moontide/v1/status")).json()
    assert (shown["salt"], shown["fence"]) == ("uid/1", {"supported": True, "live": True, "reason": ""})
    # The same admission again, of an open engine: nothing to do. Another one is refused, and nothing is switched.
    await plane.succeed("admit", 1, version="v1", salt="uid/1")
    status, answer = await plane.command("admit", 2, version="v2", salt="uid/2")
    assert (status, answer["reason"]) == (409, "NotClean")
    assert plane.engine.calls.count("switch") == 1


async def test_an_admission_may_resume_at_once(plane: Plane) -> None:
    assert (await plane.http.get("/moontide/v1/status")).json()["admitResumes"] is True
    answer = await plane.succeed("admit", 1, version="v1", salt="uid/1", resume=True)
    assert (answer["epoch"], answer["version"], answer["salt"], answer["state"]) == (1, "v1", "uid/1", "open")
    assert answer["status"]["state"] == "open"
    assert plane.engine.calls.count("resume") == 1
    # The same again has nothing to do, and one that is refused opens nothing.
    await plane.succeed("admit", 1, version="v1", salt="uid/1", resume=True)
    assert plane.engine.calls.count("resume") == 1
    await plane.succeed("quiesce", 2)
    plane.engine.fence_unsupported = "NixlConnector hands KV on"
    _, answer = await plane.command("admit", 2, version="v2", salt="uid/2", resume=True)
    assert (answer["success"], answer["reason"], answer["state"]) == (False, "FenceUnsupported", "paused")
    assert plane.engine.calls.count("resume") == 1


@pytest.mark.parametrize("closes", [True, False])
async def test_what_comes_while_an_admission_resumes_wins(plane: Plane, closes: bool) -> None:
    def meanwhile() -> None:
        plane.gate.accept(Fence(1, 2), "boot")
        if closes:
            plane.gate.close("Closed")

    plane.engine.on_resume = meanwhile
    _, answer = await plane.command("admit", 1, version="v1", resume=True)
    assert (answer["success"], answer["reason"]) == (False, "Superseded")
    assert plane.gate.state == ("closed" if closes else "paused")


async def test_an_admission_that_resumes_has_one_bound_for_both(plane: Plane) -> None:
    plane.engine.hang = 60
    began = time.monotonic()
    _, answer = await plane.command("admit", 1, version="v1", resume=True, timeoutSeconds=0.3)
    assert (answer["success"], answer["reason"]) == (False, "EngineTimeout")
    assert time.monotonic() - began < 2
    assert plane.gate.admitted, "the admission stands, and a resume is tried again"


async def test_no_admission_without_the_switch(plane: Plane) -> None:
    plane.engine.fault = RuntimeError("EngineDead")
    status, answer = await plane.command("admit", 1, version="v1", salt="uid/1")
    assert (status, answer["success"], answer["reason"]) == (200, False, "EngineFault")
    plane.engine.fault, plane.engine.hang = None, 5
    status, answer = await plane.command("admit", 1, version="v1", salt="uid/1", timeoutSeconds=0.1)
    assert (status, answer["success"], answer["reason"]) == (200, False, "EngineTimeout")
    plane.engine.hang, plane.engine.fence_unsupported = 0, "NixlConnector hands KV on"
    status, answer = await plane.command("admit", 1, version="v1", salt="uid/1")
    assert (status, answer["success"], answer["reason"]) == (200, False, "FenceUnsupported")
    assert not plane.gate.admitted
    await plane.succeed("admit", 1, version="v1")


async def test_a_newer_command_while_the_engine_resumes_wins(plane: Plane) -> None:
    await plane.succeed("admit", 1, version="v1")
    plane.engine.on_resume = lambda: plane.gate.accept(Fence(1, 2), "boot")
    status, answer = await plane.command("resume", 1)
    assert (status, answer["success"], answer["reason"]) == (200, False, "Superseded")
    assert plane.gate.state == "paused"


async def test_a_quiesce_that_waited_for_a_resume_does_not_pause_the_open_engine(plane: Plane) -> None:
    await plane.open(1)
    for step in ("quiesce", "drain", "reset"):
        await plane.succeed(step, 2)
    await plane.succeed("admit", 2, version="v2")
    plane.engine.hang = 0.1
    resume = asyncio.ensure_future(plane.command("resume", 2))
    await asyncio.sleep(0.05)
    # The same change's quiesce once more, late: the operator had given up waiting for its answer.
    status, answer = await plane.command("quiesce", 2)
    assert (status, answer["success"], answer["reason"]) == (200, False, "Superseded")
    assert (await resume)[1]["success"]
    assert (str(plane.gate.state), plane.engine.paused) == ("open", False)


async def test_pause_expires_by_itself_and_the_held_hear_of_it(plane: Plane) -> None:
    await plane.open(1)
    await plane.succeed("quiesce", 2, ttlSeconds=0.1)
    client = plane.request()
    await client.done()
    assert client.status == 503
    assert "PauseExpired" in json.loads(client.sent[1]["body"])["error"]["message"]
    assert (await plane.http.get("/moontide/v1/status")).json()["reason"] == "PauseExpired"


async def test_a_salted_admission_needs_neither_drain_nor_reset(plane: Plane) -> None:
    await plane.succeed("admit", 1, version="v1", salt="uid/1")
    await plane.succeed("resume", 1)
    plane.engine.left, plane.engine.prefix_held = [3], True
    await plane.succeed("quiesce", 2)
    status, answer = await plane.command("admit", 2, version="v2")
    assert (status, answer["reason"]) == (409, "NotClean")
    plane.engine.calls.clear()
    await plane.succeed("admit", 2, version="v2", salt="uid/2")
    # What can be let go of is, and what has no epoch in its key must be.
    assert acts(plane) == ["switch", "reset_prefix", "reset_encoder", "reset_multimodal"]
    await plane.succeed("resume", 2)
    assert plane.gate.stamp == Stamp(2, "v2")


async def test_a_closed_engine_is_switched_when_what_ran_has_ended(plane: Plane) -> None:
    await plane.succeed("admit", 1, version="v1", salt="uid/1")
    await plane.succeed("resume", 1)
    plane.app.release.clear()
    request = plane.request()
    await plane.settle()
    plane.engine.running = 1
    await plane.succeed("close", 1, reason="x")
    plane.engine.calls.clear()
    await plane.succeed("admit", 2, version="v2", salt="uid/2")
    assert plane.engine.running == 0
    assert plane.engine.calls.index("abort") < plane.engine.calls.index("switch")
    await request.done()


async def test_fence_moves_an_open_engine(plane: Plane) -> None:
    status, answer = await plane.command("fence", 1, version="v1", salt="uid/1")
    assert (status, answer["reason"]) == (409, "NotOpen")
    await plane.open()
    plane.engine.calls.clear()
    await plane.succeed("fence", 2, version="v2", salt="uid/2")
    await plane.succeed("fence", 2, version="v2", salt="uid/2")
    assert acts(plane) == ["switch"]
    assert (plane.engine.salt, plane.gate.stamp, plane.gate.state) == ("uid/2", Stamp(2, "v2"), State.OPEN)
    await plane.succeed("fence", 3, version=None, salt="uid/3")
    request = plane.request()
    await request.done()
    assert request.headers[b"x-moontide-epoch"] == b"3"
    assert b"x-moontide-version" not in request.headers
    status, answer = await plane.command("fence", 2, version="v2", salt="uid/2")
    assert (status, answer["reason"]) == (409, "Fenced")
    status, answer = await plane.command("fence", 4, version="v4")
    assert status == 400
    plane.engine.live_fence_unsupported = "the model is multi-modal"
    _, answer = await plane.command("fence", 4, version="v4", salt="uid/4")
    assert (answer["success"], answer["reason"]) == (False, "FenceUnsupported")
    plane.engine.live_fence_unsupported, plane.engine.hang = "", 5
    _, answer = await plane.command("fence", 4, version="v4", salt="uid/4", timeoutSeconds=0.05)
    assert (answer["success"], answer["reason"]) == (False, "EngineTimeout")
    assert plane.gate.stamp == Stamp(3, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ends_in_another_epoch_says_so(plane: Plane, stream: bool) -> None:
    await plane.open()
    plane.app.stream = stream
    plane.app.content_type = b"text/event-stream"
    plane.app.release.clear()
    request = plane.request()
    await plane.settle()
    await plane.succeed("fence", 2, version="v2", salt="uid/2")
    plane.app.release.set()
    await request.done()
    assert request.headers[b"x-moontide-epoch"] == b"1"
    assert request.headers.get(b"x-moontide-last-epoch") == (None if stream else b"2")
    assert request.sent[-1]["body"].endswith(b": x-moontide-last-epoch: 2\n\n") == stream
    whole = plane.request()
    await whole.done()
    assert b"x-moontide-last-epoch" not in whole.headers
    assert b"last-epoch" not in whole.sent[-1]["body"]


async def test_keep_stops_requests_and_they_start_over_in_the_new_epoch(plane: Plane) -> None:
    await plane.open()
    plane.app.release.clear()
    request = plane.request()
    await plane.settle()
    plane.engine.running = 1
    answer = await plane.succeed("quiesce", 2, mode="keep")
    assert (answer["inFlight"], answer["running"]) == (1, 1)
    plane.engine.calls.clear()
    plane.engine.prefix_held = True
    _, answer = await plane.command("admit", 2, version="v2", salt="uid/2", timeoutSeconds=0.1)
    assert (answer["success"], answer["reason"]) == (False, "BlocksHeld")
    assert set(plane.engine.calls) == {"switch", "preempt"}
    plane.engine.prefix_held = False
    await plane.succeed("admit", 2, version="v2", salt="uid/2")
    await plane.succeed("resume", 2)
    plane.app.release.set()
    await request.done()
    assert (request.headers[b"x-moontide-epoch"], request.headers[b"x-moontide-last-epoch"]) == (b"1", b"2")


# -- weights that the engine loads itself ------------------------------------------------------------------------------

LOAD = {"source": "/models/policy-8", "version": "8"}


@pytest.mark.parametrize("paused", [False, True])
async def test_a_load_then_an_admission(plane: Plane, paused: bool) -> None:
    if paused:
        await plane.open(1)
        await plane.succeed("quiesce", 2)
    plane.engine.calls.clear()
    answer = await plane.succeed("load", 2, **LOAD)
    calls = [c for c in plane.engine.calls if c.startswith(("load", "set"))]
    assert calls == ["set_weights_version", "load /models/policy-8", "set_weights_version"]
    assert answer["state"] == ("paused" if paused else "closed")
    status = await plane.commands.status()
    assert (status["weightsVersion"], status["loading"], status["admitted"]) == ("8", None, False)
    assert status["reason"] == ("" if paused else "Loaded")
    assert (await plane.command("resume", 2))[1]["reason"] == "NotAdmitted"
    await plane.succeed("admit", 2, version="8", salt="p/2")
    await plane.succeed("resume", 2)
    plane.engine.calls.clear()
    await plane.succeed("quiesce", 3)
    assert (await plane.succeed("load", 3, **LOAD))["version"] == "8"
    assert not [c for c in plane.engine.calls if c.startswith("load")]
    assert plane.gate.admitted


async def test_the_same_is_loaded_again_when_somebody_else_has_set_the_weights(plane: Plane) -> None:
    await plane.succeed("load", 1, **LOAD)
    plane.engine.weights = "9"
    plane.engine.calls.clear()
    await plane.succeed("load", 1, **LOAD)
    assert "load /models/policy-8" in plane.engine.calls
    assert plane.engine.weights == "8"


async def test_a_load_goes_on_after_its_answer(plane: Plane) -> None:
    await plane.open(1)
    await plane.commands.status()
    await plane.succeed("quiesce", 2, ttlSeconds=2)
    plane.engine.loads = asyncio.Event()
    code, answer = await plane.command("load", 2, **LOAD, timeoutSeconds=0.3)
    assert (code, answer["success"], answer["reason"]) == (200, False, "Loading")
    plane.engine.hang, calls = 60, len(plane.engine.calls)
    status = await plane.commands.status()
    assert (status["responsive"], status["fault"], status["weightsVersion"]) == (True, "", None)
    assert (status["running"], status["inFlight"]) == (None, 0)
    loading = status["loading"]
    assert isinstance(loading, dict)
    assert (loading["source"], loading["version"], loading["running"]) == ("/models/policy-8", "8", True)
    assert (loading["attempts"], loading["error"]) == (1, "")
    assert isinstance(status["store"], dict)
    assert status["store"]["attached"]
    # The same joins it, another is refused, and so is everything that would change the engine behind it.
    assert (await plane.command("load", 2, **LOAD, timeoutSeconds=0.05))[1]["reason"] == "Loading"
    code, answer = await plane.command("load", 2, source="hf://org/other", version="8")
    assert (code, answer["reason"]) == (409, "Loading")
    assert "/models/policy-8" in answer["message"]
    assert (await plane.command("load", 2, source="/models/policy-8", version="9"))[0] == 409
    assert (await plane.command("admit", 2, version="8"))[1]["reason"] == "Loading"
    assert (await plane.command("resume", 2))[1]["reason"] == "NotAdmitted"
    assert (await plane.http.post("/update_weight_version", json={})).status_code == 409
    assert (await plane.http.get("/weight_info")).status_code == 200
    assert plane.app.paths == ["/weight_info"]
    await asyncio.sleep((plane.gate.pause_remaining or 0) + 0.1)
    assert (plane.gate.state, plane.gate.reason) == (State.CLOSED, "PauseExpired")
    assert (await plane.commands.status())["responsive"]
    assert len(plane.engine.calls) == calls
    plane.engine.hang = 0
    plane.engine.loads.set()
    await plane.settle()
    status = await plane.commands.status()
    assert (status["loading"], status["weightsVersion"], status["reason"]) == (None, "8", "Loaded")


async def test_a_status_that_was_asked_for_before_the_load_is_no_fault(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moontide_engine.admin.STATUS_TIMEOUT", 1.0)
    real = plane.engine.probe
    asked = 0

    async def probe() -> Probe:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.sleep(60)
        return await real()

    monkeypatch.setattr(plane.engine, "probe", probe)
    plane.engine.loads = asyncio.Event()
    looking = asyncio.ensure_future(plane.commands.status())
    await plane.settle()
    assert (await plane.command("load", 1, **LOAD, timeoutSeconds=0.3))[1]["reason"] == "Loading"
    assert (await looking)["responsive"]
    plane.engine.loads.set()
    await plane.settle()


async def test_a_load_that_fails_leaves_weights_that_nobody_knows(plane: Plane) -> None:
    plane.engine.load_fault = "rank 0: /models/policy-8 is not a folder"
    for attempt in (1, 2):
        code, answer = await plane.command("load", 1, **LOAD)
        assert (code, answer["success"], answer["reason"]) == (200, False, "LoadFailed")
        assert answer["message"] == plane.engine.load_fault
        status = await plane.commands.status()
        assert status["weightsVersion"] is None
        loading = status["loading"]
        assert isinstance(loading, dict)
        assert (loading["running"], loading["attempts"]) == (False, attempt)
        assert loading["error"] == plane.engine.load_fault
    assert status["reason"] == "LoadFailed"
    for salt in (None, "p/1"):
        code, answer = await plane.command("admit", 1, version="7", salt=salt)
        assert (code, answer["success"], answer["reason"]) == (200, False, "LoadFailed")
    plane.engine.load_fault = ""
    await plane.succeed("load", 1, **LOAD)
    await plane.open(1)


async def test_a_trainer_makes_a_failed_load_good(plane: Plane) -> None:
    plane.engine.load_fault = "no"
    await plane.command("load", 1, **LOAD)
    plane.engine.weights = "9"
    status = await plane.commands.status()
    assert (status["weightsVersion"], status["loading"]) == ("9", None)
    await plane.open(1)


async def test_another_source_begins_anew(plane: Plane) -> None:
    plane.engine.load_fault = "no"
    await plane.command("load", 1, **LOAD)
    await plane.command("load", 1, **LOAD)
    await plane.command("load", 1, source="/models/policy-9", version="9")
    loading = (await plane.commands.status())["loading"]
    assert isinstance(loading, dict)
    assert (loading["source"], loading["attempts"]) == ("/models/policy-9", 1)


async def test_no_load_under_requests_that_run(plane: Plane) -> None:
    await plane.open(1)
    code, answer = await plane.command("load", 1, **LOAD)
    assert (code, answer["reason"]) == (409, "NotQuiesced")
    plane.app.release.clear()
    plane.engine.running = 1
    client = plane.request()
    await plane.settle()
    await plane.command("quiesce", 2, timeoutSeconds=0.05)
    code, answer = await plane.command("load", 2, **LOAD)
    assert (code, answer["success"], answer["reason"]) == (200, False, "RequestsRunning")
    assert not [c for c in plane.engine.calls if c.startswith("load")]
    # Kept ones stand still.
    await plane.succeed("load", 2, **LOAD, keep=True)
    assert "keep" in plane.engine.calls
    assert plane.engine.weights == "8"
    plane.engine.running = 0
    plane.app.release.set()
    await client.done()


async def test_a_closed_engine_loads_when_what_ran_has_ended(plane: Plane) -> None:
    plane.engine.running = 1
    await plane.succeed("load", 1, **LOAD)
    assert plane.engine.calls.index("abort") < plane.engine.calls.index("load /models/policy-8")


async def test_a_load_that_never_begins_is_bounded(plane: Plane) -> None:
    plane.engine.hang = 60
    assert (await plane.command("load", 1, **LOAD, timeoutSeconds=0.05))[1]["reason"] == "EngineTimeout"
    plane.engine.hang, plane.engine.fault = 0, RuntimeError("dead")
    assert (await plane.command("load", 1, **LOAD, timeoutSeconds=0.05))[1]["reason"] == "EngineFault"
    assert not plane.gate.loading


async def test_a_resume_that_waits_for_a_load_does_not_wake_the_engine(plane: Plane) -> None:
    """It was allowed before the load ended the admission."""
    await plane.succeed("admit", 1, version="7", salt="p/1")
    plane.engine.calls.clear()
    async with plane.commands._scheduler:
        resuming = asyncio.ensure_future(plane.command("resume", 1))
        await plane.settle()
        plane.gate.begin_load()
    code, answer = await resuming
    assert (code, answer["reason"]) == (409, "NotAdmitted")
    assert "resume" not in plane.engine.calls


@pytest.mark.parametrize(
    "source", ["models/policy", "", "hf://org", "hf://org/name/more", "hf:///name", "s3://bucket/name", 7]
)
async def test_sources_that_cannot_be_loaded_are_refused(plane: Plane, source: object) -> None:
    code, answer = await plane.command("load", 1, source=source, version="8")
    assert (code, answer["reason"]) == (400, "BadRequest")
    assert "hf://ORG/NAME" in answer["message"]
