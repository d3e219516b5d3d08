"""The admin plane: status and the commands of the barrier, on their own port, behind a token.

Every wait is bounded by the command's ``timeoutSeconds`` and happens here, in the API server process, by polling with
short calls; EngineCore never waits. A command that fails answers 200 with ``success: false`` and the reason; one that
is refused answers 4xx.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from moontide_engine import __version__
from moontide_engine.asgi import App, BodyTooLarge, Receive, Scope, Send, read_body, refuse_websocket, send_json
from moontide_engine.auth import TokenFile, bearer_tokens
from moontide_engine.engine import Engine, EngineFault, Probe, RankQueue
from moontide_engine.gate import DuringBarrier, Fence, Gate, Refusal, State
from moontide_engine.jsonlog import log
from moontide_engine.middleware import GateMiddleware
from moontide_engine.routes import Kind, classify

PREFIX = "/moontide/v1/"
BODY_LIMIT = 64 * 1024
MAX_SECONDS = 86_400.0
STATUS_TIMEOUT = 2.0
SILENT_SECONDS = 0.5
ABORT_TIMEOUT = 10.0
POLL_SECONDS = 0.01
# Asking the workers makes each of them wait busily for a second (vLLM's shared-memory queue). An open engine's status
# needs of them only whether the store is attached, so it asks this rarely.
ATTACHED_SECONDS = 30.0

TELLING = frozenset({"quiesce", "drain", "reset", "admit", "fence", "resume"})
"""Commands whose answers come with a status."""
TELL_SECONDS = 0.5

UNKNOWN_WEIGHTS = ""
"""vLLM's weight version from the moment in which a load begins until it has ended well: no policy has that version."""

Answer = dict[str, object]


_REQUIRED: Any = object()


@dataclass(frozen=True)
class Field:
    """One field of a command's body: what it must be, and its default if it may be left out."""

    check: Callable[[Any], bool]
    expected: str
    default: Any = _REQUIRED


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_seconds(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 < value <= MAX_SECONDS
    )


def _is_label(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.isprintable() and 0 < len(value) <= 253)


def _is_source(value: Any) -> bool:
    if not (isinstance(value, str) and value.isprintable() and len(value) <= 2048):
        return False
    kind, mark, name = value.partition("://")
    return value.startswith("/") if not mark else kind == "hf" and len(name.split("/")) == 2 and all(name.split("/"))


_COMMON = {
    "term": Field(_is_int, "an integer, 0 or more"),
    "epoch": Field(_is_int, "an integer, 0 or more"),
    "bootId": Field(lambda v: isinstance(v, str) and bool(v), "a string"),
}
_TIMEOUT = {"timeoutSeconds": Field(_is_seconds, "a number of seconds above 0")}

COMMANDS: Mapping[str, Mapping[str, Field]] = {
    "quiesce": {
        **_COMMON,
        **_TIMEOUT,
        "mode": Field(lambda v: v in ("wait", "abort", "keep"), "wait, abort or keep"),
        "requestsDuringBarrier": Field(lambda v: v in tuple(DuringBarrier), "Queue or Refuse"),
        "ttlSeconds": Field(_is_seconds, "a number of seconds above 0"),
    },
    "drain": {**_COMMON, **_TIMEOUT},
    "reset": {**_COMMON, **_TIMEOUT},
    "admit": {
        **_COMMON,
        "version": Field(_is_label, "a printable string or null", None),
        "salt": Field(_is_label, "a printable string or null", None),
        "resume": Field(lambda v: isinstance(v, bool), "true or false", False),
        "timeoutSeconds": Field(_is_seconds, "a number of seconds above 0", 10.0),
    },
    "fence": {
        **_COMMON,
        "version": Field(_is_label, "a printable string or null", None),
        "salt": Field(lambda v: _is_label(v) and v is not None, "a printable string"),
        "timeoutSeconds": Field(_is_seconds, "a number of seconds above 0", 10.0),
    },
    "load": {
        **_COMMON,
        **_TIMEOUT,
        "source": Field(_is_source, "the path of a folder in the pod, or hf://ORG/NAME"),
        "version": Field(lambda v: _is_label(v) and v is not None, "a printable string"),
        "keep": Field(lambda v: isinstance(v, bool), "true or false", False),
    },
    "resume": {**_COMMON, "timeoutSeconds": Field(_is_seconds, "a number of seconds above 0", 10.0)},
    "close": {**_COMMON, "reason": Field(lambda v: _is_label(v) and v is not None, "a printable string", "Closed")},
}


class BadRequest(Exception):
    """A body that is not a command; the message says which field."""


def parse(command: str, data: bytes) -> dict[str, Any]:
    """Body of a command, checked field by field, defaults filled in. Raises BadRequest."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    fields = COMMANDS[command]
    if unknown := sorted(set(body) - set(fields)):
        raise BadRequest(f"unknown field {', '.join(map(repr, unknown))}; known: {', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        if name not in body:
            if spec.default is _REQUIRED:
                raise BadRequest(f"field {name!r} is missing")
            values[name] = spec.default
        elif not spec.check(body[name]):
            raise BadRequest(f"field {name!r} must be {spec.expected}")
        else:
            values[name] = body[name]
    return values


def success(message: str = "", **more: object) -> Answer:
    """Answer of a command that did what it says."""
    return {"success": True, "reason": "Done", "message": message, **more}


def failure(reason: str, message: str, **more: object) -> Answer:
    """Answer of a command that was allowed and did not succeed."""
    return {"success": False, "reason": reason, "message": message, **more}


@dataclass
class Load:
    """The last load of weights, under way or over."""

    source: str
    version: str
    since: float
    """When it began; once it is over, when it ended."""
    attempts: int = 1
    """Loads of this source as this version, one after the other."""
    running: bool = True
    error: str = ""
    """Of the last attempt that is over."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def same(self, body: Mapping[str, Any]) -> bool:
        """Whether a command asks for this one."""
        return bool(self.source == body["source"] and self.version == body["version"])

    def as_json(self) -> Answer:
        """As status shows it."""
        return {
            "source": self.source,
            "version": self.version,
            "running": self.running,
            "seconds": round(time.monotonic() - self.since, 3),
            "attempts": self.attempts,
            "error": self.error,
        }


class Commands:
    """The barrier's commands on one engine."""

    def __init__(
        self, gate: Gate, middleware: GateMiddleware, engine: Engine, pod_uid: str, key_namespace: str
    ) -> None:
        self._gate = gate
        self._middleware = middleware
        self._engine = engine
        self._pod_uid = pod_uid
        self._key_namespace = key_namespace
        self._patches: Mapping[str, str] = {}
        self._seen: tuple[float, list[RankQueue]] | None = None
        self._salt = ""
        self._background: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None
        # Pausing and resuming vLLM's scheduler: in the order in which the gate allowed them.
        self._scheduler = asyncio.Lock()
        self._switching = asyncio.Lock()
        self._looking: tuple[float, asyncio.Task[tuple[Probe, str, list[RankQueue]]]] | None = None
        self._last_load: Load | None = None
        gate.listeners.append(self._on_change)

    @property
    def gate(self) -> Gate:
        """The gate these commands act on."""
        return self._gate

    def set_patches(self, patches: Mapping[str, str]) -> None:
        """Patch table that status shows."""
        self._patches = dict(patches)

    async def run(self, command: str, body: Mapping[str, Any]) -> Answer:
        """Carry out one parsed command. Raises Refusal."""
        self._gate.accept(Fence(body["term"], body["epoch"]), body["bootId"])
        started = time.monotonic()
        handler: Callable[[Mapping[str, Any]], Awaitable[Answer]] = getattr(self, f"_{command}")
        answer = await handler(body)
        answer["seconds"] = round(time.monotonic() - started, 6)
        answer.update(bootId=self._gate.boot_id, state=str(self._gate.state))
        if answer["success"] and command in TELLING:
            # Who asked need not look again. Where the engine has fallen silent meanwhile, they do.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_SECONDS):
                    answer["status"] = await self.status()
        log(
            "command",
            boot=self._gate.boot_id,
            step=command,
            term=body["term"],
            epoch=body["epoch"],
            success=answer["success"],
            reason=answer["reason"],
            message=answer["message"],
            seconds=answer["seconds"],
            state=answer["state"],
        )
        return answer

    async def status(self) -> Answer:
        """Everything the operator looks at. Bounded; what the engine does not say in time is null."""
        gate, engine = self._gate, self._engine
        probe: Probe | None = None
        weights: str | None = None
        queues: list[RankQueue] | None = None
        fault = ""
        looking: asyncio.Task[tuple[Probe, str, list[RankQueue]]] | None = None
        if not gate.loading:
            began, looking = self._look()
            await asyncio.wait((looking,), timeout=max(began + STATUS_TIMEOUT - time.monotonic(), 0.0))
        if looking is None or (gate.loading and not looking.done()):
            # The engine core is busy with its weights and answers nobody.
            queues = None if self._seen is None else self._seen[1]
        elif not looking.done():
            fault = f"the engine did not answer within {STATUS_TIMEOUT:g} s"
        elif error := looking.exception():
            fault = f"the engine failed: {type(error).__name__}: {error}"
        else:
            probe, weights, queues = looking.result()
        if gate.loading or weights == UNKNOWN_WEIGHTS:
            weights = None
        load = self._last_load
        # Whoever has given the engine weights since then has made a failed load good.
        shown = load is not None and (load.running or (bool(load.error) and weights is None))
        stamp = gate.stamp
        return {
            "bootId": gate.boot_id,
            "podUid": self._pod_uid,
            "state": str(gate.state),
            "reason": gate.reason,
            "term": gate.fence.term,
            "commandEpoch": gate.fence.epoch,
            "epoch": 0 if stamp is None else stamp.epoch,
            "version": None if stamp is None else stamp.version,
            "admitted": gate.admitted,
            "admitResumes": True,
            "weightsVersion": weights,
            "loading": load.as_json() if shown and load is not None else None,
            "clean": gate.clean,
            "drained": gate.drained,
            "inFlight": gate.in_flight,
            "running": None if probe is None else probe.running,
            "waiting": None if probe is None else probe.waiting,
            "held": self._middleware.held,
            "pausedSeconds": gate.paused_seconds,
            "lastPauseSeconds": gate.last_pause_seconds,
            "pauseRemainingSeconds": gate.pause_remaining,
            "responsive": not fault,
            "fault": fault,
            "engineVersion": engine.version,
            "pluginVersion": __version__,
            "patches": dict(self._patches),
            "ranks": engine.ranks,
            "store": self._store(queues, fault),
            "keyNamespace": self._key_namespace,
            "salt": self._salt,
            "fence": {
                "supported": not engine.fence_unsupported,
                "live": not engine.live_fence_unsupported,
                "reason": engine.live_fence_unsupported,
            },
        }

    def _look(self) -> tuple[float, asyncio.Task[tuple[Probe, str, list[RankQueue]]]]:
        """What status asks of the engine, and since when. Whoever asks an engine again that has been silent for a while
        waits for the first question's answer, and hears the sooner that there is none."""

        async def look() -> tuple[Probe, str, list[RankQueue]]:
            return await self._engine.probe(), await self._engine.weights_version(), await self._seen_queues()

        now = time.monotonic()
        if self._looking is None or self._looking[1].done() or now - self._looking[0] < SILENT_SECONDS:
            self._looking = now, asyncio.ensure_future(look())
            # A failure that nobody is there to hear is no news.
            self._looking[1].add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._looking

    async def _seen_queues(self) -> list[RankQueue]:
        """Store traffic for the status; of an open engine up to ``ATTACHED_SECONDS`` old."""
        now = time.monotonic()
        if self._gate.state is State.OPEN and self._seen is not None and now - self._seen[0] < ATTACHED_SECONDS:
            return self._seen[1]
        queues = await self._engine.queues()
        self._seen = (now, queues)
        return queues

    def _store(self, queues: list[RankQueue] | None, fault: str) -> Answer:
        if self._engine.fell_back:
            return {"configured": True, "attached": False, "reason": f"Fallback: {self._engine.fell_back}"}
        if not self._engine.store_configured:
            return {"configured": False, "attached": False, "reason": "NotConfigured"}
        if queues is None:
            return {"configured": True, "attached": False, "reason": fault or "not asked while weights are loaded"}
        detached = [f"rank {q.rank}: {q.reason}" for q in queues if not q.attached]
        return {"configured": True, "attached": not detached, "reason": "; ".join(detached)}

    # -- commands ------------------------------------------------------------------------------------------------

    async def _quiesce(self, body: Mapping[str, Any]) -> Answer:
        gate = self._gate
        gate.quiesce(DuringBarrier(body["requestsDuringBarrier"]), body["ttlSeconds"])
        self._arm()
        opens = gate.opens
        mode: str = body["mode"]
        deadline = time.monotonic() + body["timeoutSeconds"]
        probe: Probe | None = None
        fault = ""
        while True:
            if gate.opens != opens or gate.state is State.OPEN:
                return failure("Superseded", "the engine was resumed while this quiesce waited")
            left = deadline - time.monotonic()
            try:
                async with asyncio.timeout(max(left, 0.0)):
                    # In mode wait, vLLM is paused only once nothing is in flight: a request that has passed the gate
                    # but not yet reached the scheduler would otherwise stay in its queue for ever.
                    if mode != "wait" or gate.in_flight == 0:
                        await self._pause_scheduler(mode)
                    probe = await self._engine.probe()
                    still = mode == "keep" or (gate.in_flight == 0 and probe.idle)
                    if gate.opens == opens and still and probe.paused:
                        return success(running=probe.running, waiting=probe.waiting, inFlight=gate.in_flight)
                    if mode == "wait":
                        await self._middleware.wait_idle(left)
                    await asyncio.sleep(POLL_SECONDS if mode == "wait" else 5 * POLL_SECONDS)
            except TimeoutError:
                break
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                break
        counts: dict[str, object] = {
            "running": None if probe is None else probe.running,
            "waiting": None if probe is None else probe.waiting,
            "inFlight": gate.in_flight,
        }
        if fault:
            return failure("EngineFault", fault, **counts)
        if gate.in_flight or (probe is not None and not probe.idle):
            return failure("RequestsRunning", f"{gate.in_flight} requests are still in flight", **counts)
        return failure("EngineTimeout", "the engine did not answer in time", **counts)

    async def _drain(self, body: Mapping[str, Any]) -> Answer:
        gate = self._gate
        if gate.state is State.OPEN:
            return failure("NotQuiesced", "an open engine keeps on putting", ranks=[])
        opens = gate.opens
        queues: list[RankQueue] = []
        probe = Probe(0, 0, 0, False)

        async def drained() -> bool:
            nonlocal queues, probe
            probe = await self._engine.probe()
            if not probe.idle and gate.state is State.CLOSED:
                # Requests that a close ended and that reached the scheduler after its abort.
                await self._pause_scheduler("abort")
            # Read after the counts: with nothing in any scheduler no new put can be queued.
            queues = await self._engine.queues()
            busy = any(q.left or q.loading for q in queues)
            return gate.in_flight == 0 and probe.idle and probe.settling == 0 and not busy

        failed = await self._until(drained, body["timeoutSeconds"])
        ranks = [queue.as_json() for queue in queues]
        if failed is not None:
            left = sum(q.left + q.loading for q in queues)
            if failed["reason"] == "Timeout":
                requests = gate.in_flight or not probe.idle
                failed.update(
                    reason="RequestsRunning" if requests else "StoreBusy",
                    message=f"in flight {gate.in_flight}, running {probe.running}, waiting {probe.waiting}, "
                    f"settling {probe.settling}, transfers {left}",
                )
            return {**failed, "ranks": ranks}
        if gate.opens != opens:
            return failure("Superseded", "the engine was resumed while this drain waited", ranks=ranks)
        gate.set_drained()
        return success(ranks=ranks)

    async def _reset(self, body: Mapping[str, Any]) -> Answer:
        gate, engine = self._gate, self._engine
        if gate.state is State.OPEN:
            return failure("NotQuiesced", "an open engine fills its caches again at once", cleared=[])
        opens = gate.opens
        cleared: list[str] = []
        deadline = time.monotonic() + body["timeoutSeconds"]

        async def prefix() -> bool:
            # Only with nothing in flight: a request on its way to the scheduler would fill the cache behind the reset.
            return gate.in_flight == 0 and (await engine.probe()).idle and await engine.reset_prefix()

        async def encoder() -> bool:
            await engine.reset_encoder()
            return True

        async def multimodal() -> bool:
            await engine.reset_multimodal()
            return True

        for name, part in (("prefix", prefix), ("encoder", encoder), ("multimodal", multimodal)):
            failed = await self._until(part, deadline - time.monotonic())
            if failed is not None:
                if failed["reason"] == "Timeout":
                    held = name == "prefix"
                    failed.update(
                        reason="BlocksHeld" if held else "EngineTimeout",
                        message="blocks of the local prefix cache are still held"
                        if held
                        else f"the {name} cache was not cleared in time",
                    )
                return {**failed, "cleared": cleared}
            cleared.append(name)
        if gate.opens != opens:
            return failure("Superseded", "the engine was resumed while this reset ran", cleared=[])
        gate.set_clean()
        return success(cleared=cleared)

    async def _admit(self, body: Mapping[str, Any]) -> Answer:
        salt: str | None = body["salt"]
        deadline = time.monotonic() + body["timeoutSeconds"]
        if failed := await self._half_loaded(body["timeoutSeconds"]):
            return failed
        # An open engine is not switched here: its admission is refused below, or is the one it has.
        salted = salt is not None and self._gate.state is not State.OPEN
        if salted and (failed := await self._switch(body)):
            return failed
        self._gate.admit(body["epoch"], body["version"], salted)
        self._arm()
        if body["resume"]:
            # One round trip less for whoever is paused. What may come between two commands may come between these.
            left = max(deadline - time.monotonic(), POLL_SECONDS)
            return {**await self._resume({**body, "timeoutSeconds": left}), "salt": self._salt}
        return success(epoch=body["epoch"], version=body["version"], salt=self._salt)

    async def _fence(self, body: Mapping[str, Any]) -> Answer:
        gate, version = self._gate, body["version"]
        if gate.check_move(body["epoch"], version):
            if reason := self._engine.live_fence_unsupported:
                return failure("FenceUnsupported", reason)
            if failed := await self._switch(body):
                return failed
            # Requests that passed before this line say the old epoch; those that end after it say both.
            gate.move(body["epoch"], version)
        return success(epoch=body["epoch"], version=version, salt=self._salt, inFlight=gate.in_flight)

    async def _switch(self, body: Mapping[str, Any]) -> Answer | None:
        """Put the command's salt into the block hashes of every rank. None, or why it did not come to that.

        A paused engine lets go of what has no epoch in its key (outputs of the encoder), of the prefix cache as far as
        nothing holds it, and requests that were kept start over: their KV is computed anew.
        """
        gate, engine, salt = self._gate, self._engine, body["salt"]
        if reason := engine.fence_unsupported:
            return failure("FenceUnsupported", reason)
        kept, mine = False, Fence(body["term"], body["epoch"])
        try:
            async with asyncio.timeout(body["timeoutSeconds"]), self._switching:
                if gate.fence > mine:
                    return failure("Superseded", "a newer command came before the engine switched")
                while gate.state is State.CLOSED and not (gate.in_flight == 0 and (await engine.probe()).idle):
                    # What a close has ended at the gate may run on behind it for a moment.
                    await self._pause_scheduler("abort")
                    await asyncio.sleep(POLL_SECONDS)
                await engine.switch(salt)
                self._salt = salt
                if gate.state is not State.OPEN:
                    kept = gate.state is State.PAUSED and gate.in_flight > 0
                    cleared = await engine.reset_prefix(preempt=kept)
                    while kept and not cleared:
                        await asyncio.sleep(POLL_SECONDS)
                        cleared = await engine.reset_prefix(preempt=True)
                    await engine.reset_encoder()
                    await engine.reset_multimodal()
        except TimeoutError:
            what = "requests that are kept still hold blocks" if kept else "the engine did not switch in time"
            return failure("BlocksHeld" if kept else "EngineTimeout", what)
        except Exception as error:
            return failure("EngineFault", f"{type(error).__name__}: {error}")
        return failure("Superseded", "a newer command came while the engine switched") if gate.fence > mine else None

    async def _resume(self, body: Mapping[str, Any]) -> Answer:
        gate = self._gate
        epoch = body["epoch"]
        if gate.check_resume(epoch):
            try:
                async with asyncio.timeout(body["timeoutSeconds"]), self._scheduler:
                    # A load of weights may have ended the admission meanwhile.
                    gate.check_resume(epoch)
                    await self._engine.resume()
                    # A close or a newer quiesce may have come in meanwhile.
                    if gate.fence > Fence(body["term"], epoch):
                        return failure("Superseded", "a newer command came while the engine resumed")
                    # With the lock held: an older quiesce that still waits for it finds the gate open.
                    gate.resume(epoch)
            except TimeoutError:
                return failure("EngineTimeout", "the engine did not resume in time")
            except Refusal:
                raise
            except Exception as error:
                return failure("EngineFault", f"{type(error).__name__}: {error}")
            self._arm()
        stamp = gate.stamp
        return success(
            epoch=epoch, version=None if stamp is None else stamp.version, lastPauseSeconds=gate.last_pause_seconds
        )

    async def _load(self, body: Mapping[str, Any]) -> Answer:
        """Begin to load weights, or join the load that is under way. It goes on when this has answered."""
        deadline = time.monotonic() + body["timeoutSeconds"]
        load = self._last_load
        if load is not None and load.running:
            if not load.same(body):
                text = f"{load.source} is being loaded as version {load.version!r}; ask again when that has ended"
                raise Refusal("Loading", text)
        elif answer := await self._begin_load(body):
            return answer
        load = self._last_load
        assert load is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await load.ended.wait()
        if load.running:
            return failure("Loading", f"{load.source} is being loaded", loading=load.as_json())
        if load.error:
            return failure("LoadFailed", load.error, loading=load.as_json())
        return success(version=load.version)

    async def _begin_load(self, body: Mapping[str, Any]) -> Answer | None:
        """Start a load once nothing runs. None, or the answer where none is started."""
        gate, engine, last = self._gate, self._engine, self._last_load
        again = last is not None and last.same(body)
        try:
            async with asyncio.timeout(body["timeoutSeconds"]):
                if last is not None and again and not last.error and await engine.weights_version() == last.version:
                    return success(version=last.version)
                idle = gate.in_flight == 0 and (await engine.probe()).idle
                while gate.state is State.CLOSED and not idle:
                    # What a close has ended at the gate may run on behind it for a moment.
                    await self._pause_scheduler("abort")
                    await asyncio.sleep(POLL_SECONDS)
                    idle = gate.in_flight == 0 and (await engine.probe()).idle
                standing = not idle and gate.state is State.PAUSED and body["keep"]
                if standing:
                    await self._pause_scheduler("keep")
                elif not idle and gate.state is State.PAUSED:
                    return failure("RequestsRunning", f"{gate.in_flight} requests are still in flight")
                async with self._scheduler:
                    gate.begin_load(standing)
        except TimeoutError:
            return failure("EngineTimeout", "the engine did not come to rest in time")
        except Refusal:
            raise
        except Exception as error:
            return failure("EngineFault", f"{type(error).__name__}: {error}")
        load = Load(body["source"], body["version"], time.monotonic())
        if last is not None and again and last.error:
            load.attempts, load.error = last.attempts + 1, last.error
        self._last_load = load
        self._spawn(self._carry_load(load))
        return None

    async def _carry_load(self, load: Load) -> None:
        """Load, however long it takes. The old version is not claimed from the first new weight on."""
        error = "the process is shutting down"
        log("load", boot=self._gate.boot_id, source=load.source, version=load.version, attempt=load.attempts)
        try:
            await self._engine.set_weights_version(UNKNOWN_WEIGHTS)
            await self._engine.load_weights(load.source)
            await self._engine.set_weights_version(load.version)
            if (seen := await self._engine.weights_version()) != load.version:
                raise EngineFault(f"the weights version was set to {load.version!r} and reads {seen!r}")
            error = ""
        except Exception as fault:
            error = str(fault) if isinstance(fault, EngineFault) else f"{type(fault).__name__}: {fault}"
        finally:
            seconds = time.monotonic() - load.since
            load.running, load.error, load.since = False, error, time.monotonic()
            self._gate.end_load(not error)
            load.ended.set()
            log(
                "loaded" if not error else "load-failed",
                boot=self._gate.boot_id,
                source=load.source,
                version=load.version,
                seconds=round(seconds, 3),
                error=error,
            )

    async def _half_loaded(self, seconds: float) -> Answer | None:
        """Why the engine must not be admitted: its weights are those that a failed load has left. None if not so."""
        load = self._last_load
        if load is None or load.running or not load.error:
            return None
        try:
            async with asyncio.timeout(seconds):
                known = await self._engine.weights_version() != UNKNOWN_WEIGHTS
        except TimeoutError:
            return failure("EngineTimeout", "the engine did not answer in time")
        except Exception as error:
            return failure("EngineFault", f"{type(error).__name__}: {error}")
        return None if known else failure("LoadFailed", load.error)

    async def _close(self, body: Mapping[str, Any]) -> Answer:
        self._gate.close(body["reason"])
        return success(inFlight=self._gate.in_flight)

    # -- inside --------------------------------------------------------------------------------------------------

    async def _pause_scheduler(self, mode: str) -> None:
        """Pause vLLM's scheduler and return when it says it is paused; nothing while the gate is open.

        vLLM's own call returns when its saves have ended too, which is what drain is for: it goes on beside. Only to
        keep requests is it waited for: the step that they are in must have ended before weights change.
        """

        async def pause() -> None:
            try:
                await self._engine.pause(mode)
            except Exception as error:
                log("pause-failed", boot=self._gate.boot_id, error=f"{type(error).__name__}: {error}")

        async with self._scheduler:
            if self._gate.state is State.OPEN:
                # Resumed while this waited for its turn: an open gate before a paused scheduler would hold requests
                # for ever.
                return
            task = self._spawn(pause())
            while not task.done():
                if mode != "keep" and (await self._engine.probe()).paused:
                    break
                await asyncio.wait((task,), timeout=POLL_SECONDS)

    async def _until(self, done: Callable[[], Awaitable[bool]], seconds: float) -> Answer | None:
        """Ask until it is so. None, or why it did not come to that within ``seconds``."""
        asked: float | None = None
        answers = 0
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                while True:
                    asked = time.monotonic()
                    if await done():
                        return None
                    asked = None
                    answers += 1
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            if asked is not None and (not answers or time.monotonic() - asked >= STATUS_TIMEOUT):
                return failure("EngineTimeout", "the engine did not answer in time")
            return failure("Timeout", "")
        except Exception as error:
            return failure("EngineFault", f"{type(error).__name__}: {error}")

    def _arm(self) -> None:
        """Have the pause looked at when its time is up, even if nobody asks."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        remaining = self._gate.pause_remaining
        if remaining is not None:
            self._expiry = asyncio.get_running_loop().call_later(max(remaining, 0.0) + 0.001, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        # Reading the state is what expires it; a timer that came too early is set again.
        if self._gate.state is State.PAUSED:
            self._arm()

    def _on_change(self, gate: Gate) -> None:
        if gate.state is not State.PAUSED and self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if gate.state is State.CLOSED and gate.in_flight and not gate.terminating:
            self._spawn(self._abort())

    async def _abort(self) -> None:
        """End in the engine what a close has ended at the gate."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                await self._pause_scheduler("abort")
        except Exception as error:
            log("abort-failed", boot=self._gate.boot_id, error=f"{type(error).__name__}: {error}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class AdminApp:
    """ASGI app of the admin port: token first, then our routes, then vLLM's own."""

    def __init__(
        self, commands: Commands, gate: GateMiddleware, app: App, tokens: TokenFile, root_path: str = ""
    ) -> None:
        self._commands = commands
        self._gate = gate
        self._app = app
        self._tokens = tokens
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse_websocket(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected scope {scope['type']}")
        if not self._tokens.accepts(bearer_tokens(scope["headers"])):
            body = failure("Unauthorized", "a valid bearer token is needed")
            await send_json(send, 401, body, [(b"www-authenticate", b"Bearer")])
            return
        path: str = scope["path"]
        if path.startswith(PREFIX):
            await self._own(path.removeprefix(PREFIX), scope["method"], receive, send)
        elif classify(path, self._root_path) is Kind.INFERENCE:
            # No way round the gate: what runs is counted and stamped on this port too.
            await self._gate.infer(scope, receive, send)
        elif self._commands.gate.loading and scope["method"] not in ("GET", "HEAD"):
            # What changes an engine would wait behind the load, and then change what was loaded.
            await send_json(send, 409, failure("Loading", "weights are being loaded; ask again when that has ended"))
        else:
            await self._app(scope, receive, send)

    async def _own(self, name: str, method: str, receive: Receive, send: Send) -> None:
        if name == "status" and method == "GET":
            await send_json(send, 200, await self._commands.status())
            return
        if name == "status" or name in COMMANDS:
            if method != "POST" or name == "status":
                allowed = b"GET" if name == "status" else b"POST"
                body = failure("MethodNotAllowed", f"use {allowed.decode()}")
                await send_json(send, 405, body, [(b"allow", allowed)])
                return
            await self._command(name, receive, send)
            return
        await send_json(send, 404, failure("NotFound", f"no such command: {name}"))

    async def _command(self, name: str, receive: Receive, send: Send) -> None:
        gate = self._commands.gate
        try:
            data = await read_body(receive, BODY_LIMIT)
            if data is None:
                return
            status, answer = 200, await self._commands.run(name, parse(name, data))
        except BodyTooLarge:
            status, answer = 413, failure("BadRequest", f"the body is longer than {BODY_LIMIT} bytes")
        except BadRequest as error:
            status, answer = 400, failure("BadRequest", str(error))
        except Refusal as error:
            status = 409
            answer = failure(
                error.reason,
                error.message,
                term=gate.fence.term,
                epoch=gate.fence.epoch,
                bootId=gate.boot_id,
                state=str(gate.state),
            )
            log("refused", boot=gate.boot_id, step=name, reason=error.reason, message=error.message)
        answer.setdefault("seconds", 0.0)
        await send_json(send, status, answer)
