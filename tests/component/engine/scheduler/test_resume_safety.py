"""Patch resume-safety: all running requests are preempted and resumed in one step. Off must fail, on must pass."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corekit as kit
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data as store_data
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as store_worker

from moontide_engine.patches import resume_safety

# Old releases do not die of it: they save others' blocks (an answer is wrong), or die of a report of saves.
FAULTS = (AssertionError, TypeError, kit.Stuck)


@pytest.fixture(
    params=[kit.off("EngineCore dies, the load is never sent, or others' blocks are saved", FAULTS), kit.ON]
)
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(resume_safety.PATCH, on=request.param):
        yield request.param


def reset(core: kit.Core) -> None:
    """All that runs is preempted. vLLM raises afterwards if saves hold blocks."""
    with contextlib.suppress(RuntimeError):
        core.core.reset_prefix_cache(reset_running_requests=True)


def check(tiny: Path, core: kit.Core, store: kit.SimStore, texts: list[list[int]]) -> None:
    """Nothing is held any more, and what was stored is what a cold engine would have computed."""
    core.settle()
    assert not core.scheduler.requests
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    reader, loaded = kit.Core(tiny, store=store), store.loaded
    for number, text in enumerate(texts):
        assert reader.ask(f"r{number}", text) == kit.cold("a", text, 4)
    assert store.loaded > loaded


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("hit", [False, True], ids=["miss", "hit"])
def test_reset_with_64_running(tiny: Path, patched: bool, asynchronous: bool, hit: bool) -> None:
    store = kit.SimStore(load_steps=2, save_steps=0 if hit else 6)
    core = kit.Core(
        tiny, store=store, num_gpu_blocks_override=530, max_num_batched_tokens=2048, async_scheduling=asynchronous
    )
    texts = [kit.prompt(number, 100) for number in range(64)]
    for number, text in enumerate(texts):
        core.add(f"r{number}", text, 12)
    core.step(8)
    assert len(core.scheduler.running) == 64
    if not hit:
        store.blocks.clear()
    more = [kit.prompt(100 + number, 100) for number in range(8)]
    for number, text in enumerate(more):
        core.add(f"m{number}", text, 12)
    loaded = store.loaded
    reset(core)
    steps = core.run(300)
    right = sum(core.tokens[f"r{number}"] == kit.cold("a", text, 12) for number, text in enumerate(texts))
    print(f"{right} of 64 answers are right, {steps} steps after the reset, {store.loaded - loaded} blocks loaded")
    assert right == 64
    assert store.loaded > loaded or not hit
    check(tiny, core, store, [*texts, *more])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pause_keep_reset_resume(tiny: Path, patched: bool, asynchronous: bool) -> None:
    # Where nothing holds the blocks of saves, saves are late and blocks few, so that others compute in them. Where
    # something does, a pause with late saves takes steps, and in one of them the connector hears of the preemption.
    late, blocks = (0, 512) if kit.HOLDS_BLOCKS else (6, 34)
    store = kit.SimStore(save_steps=late)
    core = kit.Core(tiny, store=store, max_model_len=256, num_gpu_blocks_override=blocks, async_scheduling=asynchronous)
    texts = [kit.prompt(number, 100) for number in range(4)]
    for number, text in enumerate(texts):
        core.add(f"r{number}", text, 12)
    core.step(5)
    core.core.pause_scheduler("keep", clear_cache=False)
    reset(core)
    core.step(3)
    core.core.resume_scheduler()
    core.run()
    assert [core.tokens[f"r{number}"] for number in range(4)] == [kit.cold("a", text, 12) for text in texts]
    check(tiny, core, store, texts)


if not kit.HOLDS_BLOCKS:

    class Coordinator:
        """What a save asks first. It takes its time, and the save fails."""

        lcm_block_size = kit.BLOCK

        def __init__(self) -> None:
            self.begun = 0
            self.go_on = threading.Event()

        def store_mask(self, *_: Any, **__: Any) -> Any:
            self.begun += 1
            self.go_on.wait(10)
            raise OSError("the store is gone")

    def worker_half(coordinator: Coordinator) -> Any:
        """The worker's half of the connector, with its real sending thread and nothing else."""
        sender = store_worker.KVCacheStoreSendingThread(
            None, coordinator, [], kit.BLOCK, 0, 1, "kv_both", threading.Event()
        )
        sender.start()
        worker = store_worker.MooncakeStoreWorker.__new__(store_worker.MooncakeStoreWorker)
        vars(worker).update(
            kv_send_thread=sender, kv_recv_thread=None, kv_recv_threads=[], kv_role="kv_both", load_async=True,
            finished_store_req=set(), tp_rank=0, _capacity_only=False,
        )  # fmt: skip
        return worker

    def step(
        worker: Any, *saves: str, ended: frozenset[str] = frozenset(), preempted: frozenset[str] = frozenset()
    ) -> Any:
        """One step's transfers; gives the requests whose saves have all ended."""
        jobs = [
            store_data.ReqMeta(name, kit.BLOCK, ([0],), [b"0" * 32], can_save=True) for name in saves
        ]  # fmt: skip
        meta = SimpleNamespace(requests=jobs, preempted_req_ids=set(preempted))
        return worker.get_finished(set(ended), meta)[0]

    def test_the_worker_counts_saves_beyond_a_preemption(patched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.Event", lambda: SimpleNamespace(record=lambda: None))
        coordinator = Coordinator()
        worker = worker_half(coordinator)
        step(worker, "r")
        while not coordinator.begun:
            time.sleep(0.001)
        step(worker, "r")
        step(worker, "r", preempted=frozenset({"r"}))
        assert step(worker, ended=frozenset({"r"})) == set()
        coordinator.go_on.set()
        limit, done = time.monotonic() + 2, set()
        while not done and time.monotonic() < limit:
            done = step(worker)
            time.sleep(0.001)
        assert done == {"r"}
        assert coordinator.begun == 2, "the one under way, and the one after the preemption"
        assert not worker.kv_send_thread.stored_requests
