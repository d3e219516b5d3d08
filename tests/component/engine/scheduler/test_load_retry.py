"""Patch load-retry-bound: a store that promises and does not deliver. Off must fail, on must pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import corekit as kit
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from moontide_engine.patches import load_retry

FOR_EVER = kit.off("the request is looked up for ever", kit.Stuck)
# From 0.30 on the store's worker names failed requests, not blocks, where there are several groups.
BY_BLOCK = not hasattr(Scheduler, "_handle_failed_recving")
ENDS = kit.off("EngineCore ends, or the request is looked up for ever", ValueError if BY_BLOCK else kit.Stuck)
ERROR = kit.off("the request ends with an error")


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(load_retry.PATCH, on=request.param):
        yield request.param


@pytest.mark.parametrize("patched", [FOR_EVER, kit.ON], indirect=True)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", ["vanished", "expired lease"])
def test_what_cannot_be_loaded_is_computed(tiny: Path, patched: bool, asynchronous: bool, fault: str) -> None:
    store, text = kit.SimStore(), kit.prompt(1)
    core = kit.Core(tiny, store=store, async_scheduling=asynchronous)
    if fault == "vanished":
        store.promise = True
    else:
        other = kit.Core(tiny, store=store, async_scheduling=asynchronous)
        other.ask("first", text)
        other.settle()
        store.fail_loads = True
    core.add("r", text)
    steps = core.run(200)
    print(f"{fault}: {store.failed} blocks failed in {store.lookups} lookups, answered after {steps} steps")
    assert core.tokens["r"] == kit.cold("a", text, 4)
    assert store.failed == 12, "two loads of six blocks"


def test_one_failure_does_not_give_up_the_store(tiny: Path) -> None:
    store, text = kit.SimStore(fail_loads=True), kit.prompt(1)
    with kit.installed(load_retry.PATCH):
        first, second = (kit.Core(tiny, store=store) for _ in range(2))
        first.ask("first", text)
        first.settle()
        second.add("r", text)
        while not store.failed:
            second.step()
        store.fail_loads = False
        second.run()
    assert second.tokens["r"] == kit.cold("a", text, 4)
    assert store.loaded == 6


def test_a_lookup_beside_the_scheduler_may_take_its_time(tiny: Path) -> None:
    store, text = kit.SimStore(fail_loads=True, promise=True, lookup_seconds=0.005), kit.prompt(1)
    with kit.installed(load_retry.PATCH):
        core = kit.Core(tiny, store=store, lookup_async=True)
        core.add("r", text)
        for _ in range(2000):
            core.step()
            if core.finished:
                break
    print(f"{store.lookups} lookups")
    assert core.tokens["r"] == kit.cold("a", text, 4)
    assert store.lookups == 2, "one for each load"


@pytest.mark.parametrize("patched", [ENDS, kit.ON], indirect=True)
def test_a_load_that_fails_with_several_groups_of_blocks_is_computed(
    tiny: Path, patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = kit.SimExecutor.layers["layer"]
    window = SlidingWindowSpec(block_size=kit.BLOCK, num_kv_heads=1, head_size=8, dtype=full.dtype, sliding_window=64)
    monkeypatch.setattr(kit.SimExecutor, "layers", {"layer": full, "window": window})
    store, text = kit.SimStore(), kit.prompt(1)
    first, second = (kit.Core(tiny, store=store, disable_hybrid_kv_cache_manager=False) for _ in range(2))
    assert len(second.scheduler.kv_cache_config.kv_cache_groups) == 2
    first.ask("first", text)
    first.settle()
    store.fail_loads = True
    second.add("r", text)
    second.run(200)
    assert store.failed
    assert second.tokens["r"] == first.tokens["first"] == kit.cold("a", text, 4)


@pytest.mark.parametrize("patched", [ERROR, kit.ON], indirect=True)
def test_the_default_policy_is_no_error_either(tiny: Path, patched: bool) -> None:
    core = kit.Core(tiny, store=kit.SimStore(promise=True), load_failure="fail")
    core.ask("r", kit.prompt(1))
    assert core.finished["r"] == "length"
