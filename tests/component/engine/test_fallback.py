"""An engine whose pool cannot be reached at its start: it serves without the store, or it ends and says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import enginekit as kit
import pytest

PORT, METRICS = 18164, 18165
WAIT = {"MOONTIDE_POOL_WAIT_SECONDS": "2"}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's configuration whose master nobody has started."""
    folder = tmp_path_factory.mktemp("apart")
    kit.store_config(folder, PORT)
    return folder


@pytest.fixture(scope="module")
def alone(apart: Path, models: dict[str, Path]) -> Iterator[kit.Replica]:
    """An engine that fell back."""
    command, env = kit.engine_command(models["a"], 7), kit.engine_environment(apart, 7)
    process = kit.spawn(command, {**env, **WAIT}, apart / "engine7.log")
    replica = kit.Replica(7, process)
    try:
        kit.wait_for("engine 7", lambda: kit.get(f"{replica.inference}/health"), kit.START_SECONDS, process)
        replica.boot_id = replica.status()["bootId"]
        yield replica
    finally:
        process.end()


def test_it_serves_and_changes_policies_without_the_store(apart: Path, alone: kit.Replica) -> None:
    status = alone.status()
    assert (status["store"]["configured"], status["store"]["attached"]) == (True, False)
    assert status["store"]["reason"].startswith(f"Fallback: the pool's master at 127.0.0.1:{PORT} did not answer")
    assert status["state"] == "closed"
    assert status["clean"]
    assert status["drained"]
    assert status["fence"]["supported"]

    # The pool is back, and this engine stays apart from it until it starts again.
    master = kit.Master(apart, PORT, METRICS)
    master.start()
    try:
        tokens = []
        prompt = " ".join(f"word{number}" for number in range(200))
        for epoch in (1, 2):
            if epoch > 1:
                alone.succeed("quiesce", epoch)
                assert alone.succeed("drain", epoch)["ranks"] == []
                alone.succeed("reset", epoch)
            alone.succeed("admit", epoch, version=f"v{epoch}", salt=f"policy/{epoch}")
            alone.succeed("resume", epoch)
            answer, hits = alone.hits(prompt)
            assert (answer.status, answer.epoch, answer.version) == (200, str(epoch), f"v{epoch}")
            assert hits["local"] == 0
            assert alone.hits(prompt)[1]["local"] > 0
            assert alone.status()["salt"] == f"policy/{epoch}"
            tokens.append(answer.tokens)
        assert tokens[0] == tokens[1]
        alone.succeed("fence", 3, version="v3", salt="policy/3")
        assert alone.hits(prompt)[1]["local"] == 0
        assert master.keys() == []
        assert master.segments() == []
        # Whoever asks for the store's keys to go is not told that they have gone.
        alone.succeed("quiesce", 4)
        told = alone.stock_reset(reset_external=True)
        assert (told["success"], told["cleared"], told["reason"]) == (False, ["local"], "StoreNotAttached")
    finally:
        assert master.process is not None
        master.process.end(10)


def test_with_crash_it_ends_and_its_last_line_says_why(apart: Path, models: dict[str, Path]) -> None:
    env = {**kit.engine_environment(apart, 6), **WAIT, "MOONTIDE_ON_POOL_FAILURE": "Crash"}
    process = kit.spawn(kit.engine_command(models["a"], 6), env, apart / "engine6.log")
    try:
        assert process.popen.wait(kit.START_SECONDS) != 0
    finally:
        process.end()
    last = process.tail(1)
    assert f"the pool's master at 127.0.0.1:{PORT} did not answer within 2 s" in last
    assert "kvCache.onPoolFailure is Crash" in last
