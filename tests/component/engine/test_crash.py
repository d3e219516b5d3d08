"""A replica that dies while others rely on its memory. A third one, so that the fleet stays as it is."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import enginekit as kit
import pytest


@pytest.fixture
def third(open_fleet: kit.Fleet) -> Iterator[kit.Replica]:
    """One more replica of the fleet, open in the fleet's epoch."""
    command = kit.engine_command(open_fleet.models["a"], 4)
    process = kit.spawn(command, kit.engine_environment(open_fleet.folder, 4), open_fleet.folder / "engine4.log")
    replica = kit.Replica(4, process)
    try:
        kit.wait_for("engine 4", lambda: kit.get(f"{replica.inference}/health"), kit.START_SECONDS, process)
        replica.boot_id = replica.status()["bootId"]
        epoch = open_fleet.bump(salted=True)
        replica.succeed("admit", epoch, version=f"v{epoch}", salt=f"policy/{epoch}")
        replica.succeed("resume", epoch)
        yield replica
    finally:
        process.end()


def test_blocks_in_the_memory_of_a_killed_replica_are_computed_again(open_fleet: kit.Fleet, third: kit.Replica) -> None:
    survivor = open_fleet.replicas[0]
    # Long, so that some blocks of each lie in the segment that goes: the master spreads them.
    prompts = [" ".join(f"{tag}{number}" for number in range(150)) for tag in ("lost", "gone", "late")]
    cold = [third.complete(prompt) for prompt in prompts]
    assert [answer.status for answer in cold] == [200] * 3
    kit.wait_for("saves", lambda: open_fleet.master.keys() and open_fleet.settled(), 60)
    assert len(open_fleet.master.segments()) == 3
    log = survivor.process.log
    before = log.read_text(errors="replace").count("Failed to get")
    third.process.signal(signal.SIGKILL)
    third.process.popen.wait(30)
    began = time.monotonic()
    # Two while the master still promises what is gone, the last one when it has noticed.
    for prompt, answer in zip(prompts[:2], cold, strict=False):
        warm = survivor.complete(prompt)
        assert (warm.status, warm.finish) == (200, "length")
        assert warm.tokens == answer.tokens
    print(f"answered {time.monotonic() - began:.2f} s after the kill")
    failed = log.read_text(errors="replace").count("Failed to get") - before
    assert failed > 0
    kit.wait_for("the master to notice", lambda: len(open_fleet.master.segments()) == 2, 60)
    last = survivor.complete(prompts[2])
    assert (last.status, last.tokens) == (200, cold[2].tokens)
    status = survivor.status()
    assert (status["running"], status["waiting"], status["responsive"]) == (0, 0, True)
