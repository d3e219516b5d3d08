"""Weights that a real engine loads itself: two tensor-parallel ranks, closed and paused, and what goes wrong."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import enginekit as kit
import pytest

NUMBER = 30
PROMPTS = tuple(f"{start} and what was written on the sand is gone " * 8 for start in ("the tide", "a moon", "no wind"))


def start(folder: Path, model: Path) -> kit.Replica:
    """An engine of two ranks without a store."""
    command = [*kit.engine_command(model, NUMBER)[:-2], "--tensor-parallel-size", "2"]
    process = kit.spawn(command, kit.engine_environment(folder, NUMBER), folder / f"engine-{model.parent.name}.log")
    replica = kit.Replica(NUMBER, process)
    try:
        kit.wait_for("the engine", lambda: kit.get(f"{replica.inference}/health"), kit.START_SECONDS, process)
        replica.boot_id = replica.status()["bootId"]
    except BaseException:
        process.end()
        raise
    return replica


class Loader:
    """The engine, the folders it may load from, and the answers that cold engines give."""

    def __init__(self, replica: kit.Replica, models: dict[str, Path], cold: dict[str, list[list[int]]]) -> None:
        self.replica = replica
        self.models = models
        self.cold = cold
        self.epoch = 0

    def load(self, source: object, version: str, **more: Any) -> dict[str, Any]:
        body = {"source": str(source), "version": version, "timeoutSeconds": 60, **more}
        status, answer = self.replica.command("load", self.epoch, **body)
        assert status == 200, answer
        return answer

    def pause(self, **more: Any) -> None:
        self.epoch += 1
        self.replica.succeed("quiesce", self.epoch, **more)

    def open(self, version: str) -> None:
        self.replica.succeed("admit", self.epoch, version=version, salt=f"policy/{self.epoch}")
        self.replica.succeed("resume", self.epoch)

    def answers(self) -> list[list[int]]:
        found = [self.replica.complete(prompt) for prompt in PROMPTS]
        assert {answer.status for answer in found} == {200}
        return [answer.tokens for answer in found]

    @property
    def weights(self) -> str | None:
        found: str | None = self.replica.status()["weightsVersion"]
        return found


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Loader]:
    folder = tmp_path_factory.mktemp("load")
    kit.store_config(folder)
    cold = {}
    for name in ("b", "a"):
        replica = start(folder, models[name])
        loader = Loader(replica, models, cold)
        try:
            loader.epoch = 1
            if name == "a":
                loader.at_start = loader.load(models["b"], "first")  # type: ignore[attr-defined]
            loader.open("first")
            cold[name] = loader.answers()
            if name == "a":
                yield loader
        finally:
            replica.process.end()


@pytest.fixture
def loader(started: Loader) -> Loader:
    """Paused in a new epoch."""
    started.pause()
    return started


def test_a_newcomer_loads_before_it_is_admitted(started: Loader) -> None:
    """It was started with the other weights, and loaded while it was closed."""
    assert started.at_start["success"]  # type: ignore[attr-defined]
    assert started.cold["a"] == started.cold["b"]


def test_a_paused_engine_answers_like_a_cold_one(loader: Loader) -> None:
    before = loader.cold["b"]
    answer = loader.load(loader.models["a"], "42")
    assert answer["success"]
    assert answer["state"] == "paused"
    status = loader.replica.status()
    assert (status["weightsVersion"], status["loading"], status["admitted"]) == ("42", None, False)
    loader.open("42")
    others = loader.answers()
    assert all(mine != other for mine, other in zip(others, before, strict=True))
    loader.pause()
    assert loader.load(loader.models["b"], "43")["success"]
    loader.open("43")
    assert loader.answers() == before
    assert loader.replica.complete(PROMPTS[0]).version == "43"


def test_the_same_again_loads_nothing(loader: Loader) -> None:
    assert loader.load(loader.models["b"], "44")["success"]
    log = loader.replica.process.log.read_text(errors="replace")
    assert loader.load(loader.models["b"], "44")["success"]
    since = loader.replica.process.log.read_text(errors="replace")[len(log) :]
    event = '"event": "load"'
    assert event in log
    assert event not in since


def test_a_folder_that_is_not_there(loader: Loader) -> None:
    for state in ("paused", "closed"):
        answer = loader.load("/nowhere/at-all", "45")
        assert (answer["success"], answer["reason"], answer["state"]) == (False, "LoadFailed", state)
        assert "/nowhere/at-all is not a folder in the engine's pod" in answer["message"]
        status = loader.replica.status()
        assert status["weightsVersion"] is None
        assert status["loading"]["error"] == answer["message"]
        code, refused = loader.replica.command("admit", loader.epoch, version="45", salt="policy/bad")
        assert (code, refused["success"], refused["reason"]) == (200, False, "LoadFailed")
        assert loader.replica.complete("hello", 1).status == 503 if state == "closed" else True
        loader.replica.succeed("close", loader.epoch, reason="Test")
    assert loader.replica.status()["reason"] == "LoadFailed"
    assert loader.load(loader.models["b"], "45")["success"]
    loader.open("45")
    assert loader.answers() == loader.cold["b"]


def changed(model: Path, target: Path, lacks: str = "", wrong: str = "") -> Path:
    """A copy of a model that lacks a tensor, or has one of another shape."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    if lacks:
        del tensors[lacks]
    if wrong:
        tensors[wrong] = tensors[wrong][:-8].contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


LATE = "model.layers.2.mlp.down_proj.weight"


def test_a_checkpoint_of_another_shape_leaves_nothing_behind(loader: Loader, tmp_path: Path) -> None:
    """It fails half-way; what it had loaded is not mixed into what is loaded next."""
    bad = changed(loader.models["a"], tmp_path / "wrong", wrong=LATE)
    answer = loader.load(bad, "46")
    assert (answer["success"], answer["reason"]) == (False, "LoadFailed")
    assert loader.weights is None
    assert (
        loader.replica.command("load", loader.epoch, source=str(bad), version="46", timeoutSeconds=60)[1]["loading"][
            "attempts"
        ]
        == 2
    )
    assert loader.load(loader.models["b"], "47")["success"]
    loader.open("47")
    assert loader.answers() == loader.cold["b"]


def test_a_checkpoint_that_lacks_a_tensor_is_not_taken(loader: Loader, tmp_path: Path) -> None:
    answer = loader.load(changed(loader.models["a"], tmp_path / "lacks", lacks=LATE), "48")
    assert (answer["success"], answer["reason"]) == (False, "LoadFailed")
    assert f"has no weights for {LATE}" in answer["message"]
    assert loader.weights is None
    assert loader.load(loader.models["b"], "49")["success"]
    loader.open("49")
    assert loader.answers() == loader.cold["b"]


def test_a_load_that_takes_long(loader: Loader, tmp_path: Path) -> None:
    """The engine's core is busy; the gate in front of it tells, refuses, and closes when its time is up."""
    slow = tmp_path / "slow"
    shutil.copytree(loader.models["a"], slow)
    (slow / "model.safetensors").unlink()
    os.mkfifo(slow / "model.safetensors")
    loader.replica.succeed("quiesce", loader.epoch, ttlSeconds=6)
    try:
        answer = loader.load(slow, "50", timeoutSeconds=0.2)
        assert (answer["success"], answer["reason"], answer["loading"]["running"]) == (False, "Loading", True)
        status = loader.replica.status()
        assert (status["responsive"], status["weightsVersion"], status["state"]) == (True, None, "paused")
        assert (status["loading"]["source"], status["loading"]["version"]) == (str(slow), "50")
        assert loader.load(slow, "50", timeoutSeconds=0.2)["reason"] == "Loading"
        body = {"source": str(loader.models["b"]), "version": "51", "timeoutSeconds": 1}
        code, refused = loader.replica.command("load", loader.epoch, **body)
        assert (code, refused["reason"]) == (409, "Loading")
        assert str(slow) in refused["message"]
        code, refused = loader.replica.command("admit", loader.epoch, version="50")
        assert (code, refused["reason"]) == (409, "Loading")
        assert loader.replica.post("/resume").status_code == 409
        kit.wait_for("the pause to end", lambda: loader.replica.status()["state"] == "closed", kit.PATIENCE)
        assert loader.replica.status()["loading"]["running"]
    finally:
        # Whoever opens it, often enough for both ranks and each look: not a checkpoint.
        stop = threading.Event()

        def feed() -> None:
            while not stop.is_set():
                try:
                    handle = os.open(slow / "model.safetensors", os.O_WRONLY | os.O_NONBLOCK)
                except OSError:
                    stop.wait(0.05)
                    continue
                os.close(handle)

        with ThreadPoolExecutor(1) as pool:
            fed = pool.submit(feed)
            kit.wait_for("the load to end", lambda: not loader.replica.status()["loading"]["running"], 60)
            stop.set()
            fed.result()
    assert loader.replica.status()["loading"]["error"]
    assert loader.load(loader.models["b"], "52")["success"]
    loader.open("52")
    assert loader.answers() == loader.cold["b"]


def test_requests_that_are_kept_go_on_with_the_new_weights(loader: Loader) -> None:
    loader.load(loader.models["b"], "53")
    loader.open("53")
    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(loader.replica.complete, "a long story", 400)
        kit.wait_for("a running request", lambda: loader.replica.status()["running"] > 0, kit.PATIENCE)
        loader.pause(mode="keep")
        assert loader.load(loader.models["a"], "54", timeoutSeconds=5)["reason"] == "RequestsRunning"
        assert loader.load(loader.models["a"], "54", keep=True)["success"]
        loader.open("54")
        done = flight.result(120)
    assert (done.status, done.finish, len(done.tokens)) == (200, "length", 400)
    loader.pause()
    assert loader.load(loader.models["b"], "55")["success"]
    loader.open("55")
    assert loader.answers() == loader.cold["b"]


def test_stock_answers_the_next_call_with_the_error_of_the_last(loader: Loader, tmp_path: Path) -> None:
    """What the patch is for; it leaves an engine that nobody can use, so it is the last."""
    bad = changed(loader.models["a"], tmp_path / "wrong", wrong=LATE)

    def reload(path: Path) -> int:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        return loader.replica.post("/collective_rpc", body).status_code

    assert reload(bad) == 500
    # The other rank's error is still in its queue, so a call gets it that went well.
    later = [reload(loader.models["b"]), reload(loader.models["b"])]
    code, answer = loader.replica.command("admit", loader.epoch, version="stock", salt="policy/stock")
    print(f"after a load that failed, good ones answered {later}, and an admission {code} {answer['message'][:200]}")
    assert later != [200, 200] or not answer["success"]
