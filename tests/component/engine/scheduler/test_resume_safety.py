"""Patch resume-safety: all running requests are preempted and resumed in one step. Off must fail, on must pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import corekit as kit
import pytest

from moontide_engine.patches import resume_safety


@pytest.fixture(params=[kit.off("EngineCore dies, or the load is never sent", (TypeError, kit.Stuck)), kit.ON])
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(resume_safety.PATCH, on=request.param):
        yield request.param


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("hit", [False, True], ids=["miss", "hit"])
def test_reset_with_64_running(tiny: Path, patched: bool, asynchronous: bool, hit: bool) -> None:
    store = kit.SimStore(load_steps=2)
    core = kit.Core(
        tiny, store=store, num_gpu_blocks_override=1024, max_num_batched_tokens=2048, async_scheduling=asynchronous
    )
    texts = [kit.prompt(number, 100) for number in range(64)]
    for number, text in enumerate(texts):
        core.add(f"r{number}", text, 12)
    core.step(8)
    assert len(core.scheduler.running) == 64
    if not hit:
        store.blocks.clear()
    loaded = store.loaded
    core.core.reset_prefix_cache(reset_running_requests=True)
    steps = core.run(300)
    right = sum(core.tokens[f"r{number}"] == kit.cold("a", text, 12) for number, text in enumerate(texts))
    print(f"{right} of 64 answers are right, {steps} steps after the reset, {store.loaded - loaded} blocks loaded")
    assert right == 64
    assert (store.loaded > loaded) == hit


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pause_keep_reset_resume(tiny: Path, patched: bool, asynchronous: bool) -> None:
    core = kit.Core(tiny, store=kit.SimStore(), async_scheduling=asynchronous)
    texts = [kit.prompt(number, 100) for number in range(4)]
    for number, text in enumerate(texts):
        core.add(f"r{number}", text, 12)
    core.step(5)
    core.core.pause_scheduler("keep", clear_cache=False)
    core.core.reset_prefix_cache(reset_running_requests=True)
    core.step(3)
    core.core.resume_scheduler()
    core.run()
    assert [core.tokens[f"r{number}"] for number in range(4)] == [kit.cold("a", text, 12) for text in texts]
