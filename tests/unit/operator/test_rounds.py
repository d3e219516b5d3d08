"""What a run of a policy's reconcile waits for, and what it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moontide.engines.client import OWN_FAULT, Unanswered
from moontide.errors import Retry
from moontide.planning.model import Command, Replica, Result, Step
from moontide.reconcile import fleets, policyversion, quiet, rounds
from tests.unit.operator.doubles import Cluster

MODEL = {"source": "pvc://w/a", "servedName": "tiny", "version": "7"}
BARRIER = ["quiesce", "admit"]


class World(Cluster):
    """A policy, and a fleet of two that serves in its first epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kube.put("PolicyVersion", "rl", "policy", {"version": 7, "weights": "Unchecked"})
        fleet = self.kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL, "policyRef": {"name": "policy"}})
        self.two = [self.pod(fleet, f"chat-{number}", f"10.0.0.{number}") for number in (1, 2)]
        self.asked: list[str] = []
        transport, handle = self.network, self.network.handle_async_request

        async def counted(request: httpx.Request) -> httpx.Response:
            self.asked.append(f"{request.method} {request.url.host} {request.url.path.rpartition('/')[2]}")
            return await handle(request)

        transport.handle_async_request = counted  # type: ignore[method-assign]

    async def run(self) -> float:
        return await policyversion.reconcile(self.ctx, "rl", "policy")

    def bump(self) -> None:
        spec = self.kube.objects["PolicyVersion", "rl", "policy"]["spec"]
        self.kube.put("PolicyVersion", "rl", "policy", {**spec, "version": spec["version"] + 1})
        self.asked.clear()

    @property
    def status(self) -> dict[str, Any]:
        return self.kube.status("PolicyVersion", "rl", "policy")

    @property
    def states(self) -> list[tuple[str, int]]:
        return [engine.state for engine in self.two]


@pytest.fixture(name="world")
async def _world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    for _ in range(3):
        await made.run()
    assert made.states == [("open", 1)] * 2
    async with made.http:
        yield made


async def test_engines_are_looked_at_once_and_say_the_rest_with_their_answers(world: World) -> None:
    world.bump()
    await world.run()
    assert world.states == [("open", 2)] * 2
    for host in ("10.0.0.1", "10.0.0.2"):
        told = [each.split()[2] for each in world.asked if each.split()[1] == host]
        assert told == ["status", *BARRIER]
    assert world.kube.condition("PolicyVersion", "rl", "policy", "Current")[:2] == ("True", "Current")


async def test_a_pause_waits_for_no_write_but_that_of_its_epoch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write, gate, epochs = world.kube.apply_policy_status, asyncio.Event(), []

    async def slow(namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
        if status.epoch == 2 and 2 in epochs:
            await gate.wait()
        epochs.append(status.epoch)
        assert world.states == [("open", 1)] * 2 or 2 in epochs
        return await write(namespace, name, status, uid)

    monkeypatch.setattr(world.kube, "apply_policy_status", slow)
    world.bump()
    running = asyncio.ensure_future(world.run())
    for _ in range(400):
        await asyncio.sleep(0.005)
        if world.states == [("open", 2)] * 2:
            break
    # All of them serve, and the API server has only heard of the epoch.
    assert (world.states, epochs) == ([("open", 2)] * 2, [2])
    assert not running.done()
    gate.set()
    await running
    assert world.status["lastUpdate"]["resumedAt"] is not None
    assert world.status["replicas"]["summary"] == "2/2"


async def test_a_mark_has_the_pods_read_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a silent engine whose pod was just marked would be taken for one that never served."""
    fleet = world.kube.objects["InferenceDeployment", "rl", "chat"]
    world.pod(fleet, "chat-3", "10.0.0.3")
    handle, marks = world.network.handle_async_request, []
    ask = fleets.ask

    async def looked(ctx: Any, listed: Any, home: str, known: Any = None) -> Any:
        found = await ask(ctx, listed, home, known)
        marks.append([each.may_have_served for each in found.replicas if each.pod == "chat-3"])
        return found

    async def silent_once_admitted(request: httpx.Request) -> httpx.Response:
        if request.url.host == "10.0.0.3" and world.kube.annotated[-1:] == [("rl", "chat-3")]:
            raise httpx.ConnectError("refused")
        return await handle(request)

    monkeypatch.setattr("moontide.reconcile.rounds.ask", looked)
    monkeypatch.setattr(world.network, "handle_async_request", silent_once_admitted)
    world.bump()
    await world.run()
    assert world.kube.annotated[-1] == ("rl", "chat-3")
    assert marks[0] == [False]
    assert marks[-1] == [True]


async def test_an_operator_that_finds_a_policy_at_rest_counts_it(world: World) -> None:
    world.ctx.metrics.gone("PolicyVersion", "rl", "policy")
    name, labels = "moontide_policy_epoch", {"namespace": "rl", "policy": "policy"}
    assert world.ctx.metrics.registry.get_sample_value(name, labels) is None
    await world.run()
    assert world.ctx.metrics.registry.get_sample_value(name, labels) == 1


async def test_an_epoch_that_cannot_be_written_is_heard_of_by_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any, **__: Any) -> bool:
        raise Retry(2.0, "the API server is busy")

    monkeypatch.setattr(world.kube, "apply_policy_status", refused)
    world.bump()
    with pytest.raises(Retry):
        await world.run()
    assert [each for each in world.asked if each.startswith("POST")] == []
    assert world.states == [("open", 1)] * 2
    # And nobody waits for those who would have told engines something.
    await asyncio.wait_for(world.ctx.quiet.wait(), quiet.WAIT_SECONDS / 2)


async def test_a_write_that_fails_beside_the_pause_is_a_failure_of_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = world.kube.apply_policy_status, 0

    async def later(namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
        nonlocal count
        count += 1
        if count > 1:
            raise Retry(2.0, "the API server is busy")
        return await write(namespace, name, status, uid)

    monkeypatch.setattr(world.kube, "apply_policy_status", later)
    world.bump()
    with pytest.raises(Retry):
        await world.run()
    assert world.states == [("open", 2)] * 2
    monkeypatch.undo()
    await world.run()
    assert world.kube.condition("PolicyVersion", "rl", "policy", "Current")[:2] == ("True", "Current")


async def test_a_policy_that_is_deleted_during_its_change_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: Any, **__: Any) -> bool:
        return False

    monkeypatch.setattr(world.kube, "apply_policy_status", gone)
    world.bump()
    assert await world.run() == policyversion.GONE_SECONDS


async def test_a_hung_replica_holds_one_look_for_a_moment_and_later_ones_not_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "PATIENCE_SECONDS", 0.1)
    handle, hung, questions = world.network.handle_async_request, asyncio.Event(), []

    async def hanging(request: httpx.Request) -> httpx.Response:
        if request.url.host == "10.0.0.2" and not hung.is_set():
            questions.append(request.url.path.rpartition("/")[2])
            await hung.wait()
        return await handle(request)

    monkeypatch.setattr(world.network, "handle_async_request", hanging)
    world.bump()
    clock = asyncio.get_running_loop().time
    times = []
    for _ in range(4):
        began = clock()
        await world.run()
        times.append(clock() - began)
    assert times[0] < 2.0, times
    # The question of the first look is still open: nobody waits for its answer.
    assert max(times[1:]) < 0.1, times
    assert questions == ["status"]
    (failure,) = world.status["failures"]
    assert (failure["replica"], failure["reason"]) == ("chat-2", "Unreachable")
    hung.set()
    await asyncio.sleep(0.05)
    for _ in range(3):
        await world.run()
    assert world.states == [("open", 2)] * 2
    assert world.ctx.late == {}


async def test_an_engine_that_was_not_asked_is_not_taken_for_silent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def not_asked(*_: object, **__: object) -> Unanswered:
        return Unanswered(OWN_FAULT, "the operator may open no more files")

    monkeypatch.setattr(fleets, "engine_status", not_asked)
    world.bump()
    with pytest.raises(Retry, match="no more files"):
        await world.run()
    monkeypatch.undo()
    assert world.states == [("open", 1)] * 2
    await world.run()
    assert world.states == [("open", 2)] * 2


class Watch:
    """Notes at each request to an engine whether others had to wait then."""

    def __init__(self, world: World) -> None:
        self.seen: list[tuple[str, bool]] = []
        self._handle, self._ctx = world.network.handle_async_request, world.ctx
        world.network.handle_async_request = self._noted  # type: ignore[method-assign]

    async def _noted(self, request: httpx.Request) -> httpx.Response:
        others = asyncio.ensure_future(self._ctx.quiet.wait())
        await asyncio.sleep(0)
        self.seen.append((request.url.path.rpartition("/")[2], not others.done()))
        others.cancel()
        return await self._handle(request)


async def test_others_wait_from_the_first_command_to_the_last_and_no_longer(world: World) -> None:
    world.bump()
    watch = Watch(world)
    await world.run()
    assert world.states == [("open", 2)] * 2
    commands = [waited for step, waited in watch.seen if step in BARRIER]
    assert commands == [True] * 4
    assert not any(waited for step, waited in watch.seen if step == "status")
    await asyncio.wait_for(world.ctx.quiet.wait(), quiet.WAIT_SECONDS / 2)


async def test_whoever_took_longest_is_told_first(world: World) -> None:
    for slow in ("10.0.0.2", "10.0.0.1"):
        for pod in world.kube.pods:
            assert pod.metadata is not None
            assert pod.status is not None
            world.ctx.pace[pod.metadata.uid or ""] = 2.0 if pod.status.pod_ip == slow else 1.0
        world.bump()
        await world.run()
        first = next(each for each in world.asked if "quiesce" in each)
        assert slow in first


async def test_what_takes_long_to_read_is_read_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of thousands of pods must not come between the two calls of a pause."""
    read, reads, seconds = rounds.roster, 0, 0.0

    async def counted(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        await asyncio.sleep(seconds)
        return await read(*given)

    monkeypatch.setattr(rounds, "roster", counted)
    monkeypatch.setattr(rounds, "RECENT_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(rounds, "READ_SHARE", 1e9)
        world.bump()
        await world.run()
    assert reads > 2
    reads, seconds = 0, 0.5
    world.bump()
    await world.run()
    assert reads == 1


class Writes:
    """The states of the engines at each write of the policy's status."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[list[tuple[str, int]]] = []
        write = world.kube.apply_policy_status

        async def noted(namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
            self.states.append(world.states)
            return await write(namespace, name, status, uid)

        monkeypatch.setattr(world.kube, "apply_policy_status", noted)

    @property
    def paused(self) -> list[list[tuple[str, int]]]:
        return [states for states in self.states if any(state == "paused" for state, _ in states)]


async def test_the_status_of_a_short_pause_is_written_when_it_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the core that the calls of the pause need."""
    monkeypatch.setattr(rounds, "UNSAID_SECONDS", 30.0)
    writes = Writes(world, monkeypatch)
    world.bump()
    await world.run()
    assert writes.states[0] == [("open", 1)] * 2
    assert writes.paused == []
    assert writes.states[-1] == world.states == [("open", 2)] * 2
    assert world.kube.condition("PolicyVersion", "rl", "policy", "Current")[:2] == ("True", "Current")


async def test_the_status_of_a_pause_that_lasts_is_written_while_it_lasts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "UNSAID_SECONDS", 0.05)
    monkeypatch.setattr(rounds, "RECENT_SECONDS", 60.0)
    monkeypatch.setattr(policyversion, "PATIENCE_SECONDS", 0.05)
    writes, handle, late = Writes(world, monkeypatch), world.network.handle_async_request, asyncio.Event()

    async def slowly(request: httpx.Request) -> httpx.Response:
        if request.url.host == "10.0.0.2" and request.url.path.endswith("quiesce"):
            await late.wait()
        return await handle(request)

    monkeypatch.setattr(world.network, "handle_async_request", slowly)
    world.bump()
    running = asyncio.ensure_future(world.run())
    async with asyncio.timeout(10):
        while not writes.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    late.set()
    await running
    for _ in range(3):
        await world.run()
    assert world.states == [("open", 2)] * 2


async def test_what_is_written_meanwhile_waits_for_the_end_of_the_pause_or_for_its_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, run = Writes(world, monkeypatch), rounds.Round(world.ctx, "rl", "policy")
    for bound in (30.0, 0.1):
        monkeypatch.setattr(rounds, "UNSAID_SECONDS", bound)
        await run.look()
        run.acts(True)
        count = len(writes.states)
        for generation in (98, 99):
            await run.write(run.status.model_copy(update={"observed_generation": generation}))
            await asyncio.sleep(0.02)
        assert len(writes.states) == count
        if bound > 1.0:
            run.acts(False)
        async with asyncio.timeout(10):
            while len(writes.states) == count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        run.acts(False)
        await run.flush()
        # The newest alone.
        assert (len(writes.states), world.status["observedGeneration"]) == (count + 1, 99)


def steps_done(world: World, step: str) -> float:
    labels = {"step": step, "outcome": "done"}
    return world.ctx.metrics.registry.get_sample_value("moontide_steps_total", labels) or 0.0


async def test_what_came_of_a_pause_is_counted_when_it_is_over(world: World) -> None:
    before = [steps_done(world, step) for step in BARRIER]
    world.bump()
    await world.run()
    assert [steps_done(world, step) for step in BARRIER] == [count + 2 for count in before]

    run, replica = rounds.Round(world.ctx, "rl", "policy"), Replica("r", "uid", "fleet", None, None, True)
    run.acts(True)
    run.count([Result(Command(Step.QUIESCE, replica, 3), True)])
    assert steps_done(world, "quiesce") == before[0] + 2
    run.acts(False)
    assert steps_done(world, "quiesce") == before[0] + 3
    run.count([Result(Command(Step.QUIESCE, replica, 3), True)])
    assert steps_done(world, "quiesce") == before[0] + 4
