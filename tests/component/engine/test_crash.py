"""A replica that dies while others rely on its memory. A third one, so that the fleet stays as it is."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import enginekit as kit
import pytest


@pytest.fixture(scope="module")
def started(fleet: kit.Fleet) -> Iterator[kit.Replica]:
    """One more replica with the fleet's store, closed."""
    command = kit.engine_command(fleet.models["a"], 4)
    process = kit.spawn(command, kit.engine_environment(fleet.folder, 4), fleet.folder / "engine4.log")
    replica = kit.Replica(4, process)
    try:
        kit.wait_for("engine 4", lambda: kit.get(f"{replica.inference}/health"), kit.START_SECONDS, process)
        replica.boot_id = replica.status()["bootId"]
        yield replica
    finally:
        if process.popen.poll() is None:
            process.signal(signal.SIGCONT)
        process.end()


@pytest.fixture
def third(open_fleet: kit.Fleet, started: kit.Replica) -> kit.Replica:
    """It, open in the fleet's epoch."""
    epoch = open_fleet.bump(salted=True)
    if started.status()["epoch"]:
        started.succeed("quiesce", epoch, mode="abort")
        started.succeed("drain", epoch)
        started.succeed("reset", epoch)
    started.succeed("admit", epoch, version=f"v{epoch}", salt=f"policy/{epoch}")
    started.succeed("resume", epoch)
    return started


def prompts(*tags: str) -> list[str]:
    """Long, so that some blocks of each lie in every segment: the master spreads them."""
    return [" ".join(f"{tag}{number}" for number in range(150)) for tag in tags]


def test_a_frozen_replica_costs_the_others_seconds(open_fleet: kit.Fleet, third: kit.Replica) -> None:
    """Its kernel still takes connections, so that stock waits a minute for each key."""
    survivor, other = open_fleet.replicas
    known, new = prompts("ice", "snow"), prompts(*(f"new{number}" for number in range(8)))
    cold = [third.complete(prompt) for prompt in known]
    kit.wait_for("saves", lambda: open_fleet.master.keys() and open_fleet.settled(), 60)
    before = survivor.counters()["external"]
    third.process.signal(signal.SIGSTOP)

    def timed(replica: kit.Replica, prompt: str) -> tuple[kit.Answer, float]:
        began = time.monotonic()
        return replica.complete(prompt), time.monotonic() - began

    try:
        # Loads of what lies in its memory, and saves that the master sends there, of eight new prompts at once.
        loads = [open_fleet.pool.submit(timed, survivor, prompt) for prompt in known]
        saves = [open_fleet.pool.submit(timed, other, prompt) for prompt in new]
        loaded, saved = ([future.result() for future in futures] for futures in (loads, saves))
    finally:
        third.process.signal(signal.SIGCONT)
    print(
        f"a frozen replica: loads {[f'{s:.1f}' for _, s in loaded]} s, new prompts {[f'{s:.1f}' for _, s in saved]} s"
    )
    assert [answer.tokens for answer, _ in loaded] == [answer.tokens for answer in cold]
    assert {answer.status for answer, _ in saved} == {200}
    assert max(seconds for _, seconds in loaded + saved) < 45
    promised = survivor.counters()["external"] - before
    tokens = sum(answer.body["usage"]["prompt_tokens"] for answer in cold)
    print(f"external hits counted: {promised:g} of {tokens} prompt tokens")
    # Hits are counted when they are promised, and a request is promised what it cannot get twice at most.
    assert promised <= 2 * tokens
    kit.wait_for("the frozen one's memory", lambda: len(open_fleet.master.segments()) == 3, kit.PATIENCE)


def test_blocks_in_the_memory_of_a_killed_replica_are_computed_again(open_fleet: kit.Fleet, third: kit.Replica) -> None:
    survivor = open_fleet.replicas[0]
    texts = prompts("lost", "gone", "late")
    cold = [third.complete(prompt) for prompt in texts]
    assert [answer.status for answer in cold] == [200] * 3
    kit.wait_for("saves", lambda: open_fleet.master.keys() and open_fleet.settled(), 60)
    assert len(open_fleet.master.segments()) == 3
    log = survivor.process.log
    before = log.read_text(errors="replace").count("Failed to get")
    third.process.signal(signal.SIGKILL)
    third.process.popen.wait(kit.PATIENCE)
    began = time.monotonic()
    # Two while the master still promises what is gone, the last one when it has noticed.
    for prompt, answer in zip(texts[:2], cold, strict=False):
        warm = survivor.complete(prompt)
        assert (warm.status, warm.finish) == (200, "length")
        assert warm.tokens == answer.tokens
    print(f"answered {time.monotonic() - began:.2f} s after the kill")
    failed = log.read_text(errors="replace").count("Failed to get") - before
    assert failed > 0
    kit.wait_for("the master to notice", lambda: len(open_fleet.master.segments()) == 2, 60)
    last = survivor.complete(texts[2])
    assert (last.status, last.tokens) == (200, cold[2].tokens)
    status = survivor.status()
    assert (status["running"], status["waiting"], status["responsive"]) == (0, 0, True)
