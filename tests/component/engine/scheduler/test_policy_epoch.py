"""Patch policy-epoch: no block of another epoch is found, locally or in the store. Off must fail, on must pass."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import corekit as kit
import pytest

from moontide_engine import namespace
from moontide_engine.patches import policy_epoch, resume_safety


@pytest.fixture(params=[kit.off("hashes do not know of policies"), kit.ON])
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(policy_epoch.PATCH, on=request.param):
        yield request.param


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def change(core: kit.Core, policy: str, epoch: str, *, transit: bool = True) -> None:
    """A trainer's update: away from the old epoch, new weights, on to the new one."""
    fenced = hasattr(core.core, "moontide_switch")
    if fenced and transit:
        core.core.moontide_switch(f"{epoch}/transit")
    core.worker.policy = policy
    if fenced:
        core.core.moontide_switch(epoch)


def test_local_blocks_of_another_epoch_are_not_found(tiny: Path, patched: bool, scheduling: bool) -> None:
    core, text = kit.Core(tiny, async_scheduling=scheduling), kit.prompt(1)
    change(core, "a", "p/1")
    core.ask("old", text)
    change(core, "b", "p/2")
    assert core.ask("new", text) == kit.cold("b", text, 4)


def test_two_replicas_share_only_within_an_epoch(tiny: Path, patched: bool, scheduling: bool) -> None:
    store, text = kit.SimStore(), kit.prompt(1)
    ahead = kit.Core(tiny, store=store, async_scheduling=scheduling)
    behind = kit.Core(tiny, store=store, async_scheduling=scheduling)
    for core in (ahead, behind):
        change(core, "a", "p/1")
    behind.ask("first", text)
    behind.settle()
    change(ahead, "b", "p/2")
    assert ahead.ask("one is ahead", text) == kit.cold("b", text, 4)
    assert store.loaded == 0
    ahead.settle()
    change(behind, "b", "p/2")
    assert behind.ask("both", text) == kit.cold("b", text, 4)
    assert store.loaded == 6, "they share again"


def test_rollback(tiny: Path, patched: bool, scheduling: bool) -> None:
    store, text = kit.SimStore(), kit.prompt(1)
    core = kit.Core(tiny, store=store, async_scheduling=scheduling)
    for epoch, policy in (("p/1", "a"), ("p/2", "b"), ("p/3", "a")):
        change(core, policy, epoch)
        assert core.ask(epoch, text) == kit.cold(policy, text, 4)


def test_a_load_under_way_is_discarded(tiny: Path, patched: bool, scheduling: bool) -> None:
    store, text = kit.SimStore(load_steps=5), kit.prompt(1)
    source = kit.Core(tiny, store=store, async_scheduling=scheduling)
    core = kit.Core(tiny, store=store, async_scheduling=scheduling)
    for each in (source, core):
        change(each, "a", "p/1")
    source.ask("old", text)
    source.settle()
    core.add("loading", text)
    core.step(2)
    assert [each.status.name for each in core.scheduler.requests.values()] == ["WAITING_FOR_REMOTE_KVS"]
    change(core, "b", "p/2")
    core.run()
    assert core.tokens["loading"] == kit.cold("b", text, 4)
    assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 400


def test_kept_requests_start_over_beside_a_load_under_way(tiny: Path, patched: bool, scheduling: bool) -> None:
    """EngineCore takes no step while it keeps requests, so the load cannot end before the resume."""
    store, text = kit.SimStore(load_steps=5), kit.prompt(1)
    source = kit.Core(tiny, store=store, async_scheduling=scheduling)
    core = kit.Core(tiny, store=store, async_scheduling=scheduling)
    for each in (source, core):
        change(each, "a", "p/1")
    source.ask("old", text)
    source.settle()
    core.add("running", kit.prompt(2), 12)
    core.step(3)
    core.add("loading", text)
    core.step(2)
    states = {each.request_id: each.status.name for each in core.scheduler.requests.values()}
    assert states == {"running": "RUNNING", "loading": "WAITING_FOR_REMOTE_KVS"}
    core.core.pause_scheduler("keep", clear_cache=False)
    change(core, "b", "p/2", transit=False)
    begun = len(core.tokens["running"])
    if patched:
        assert core.core.moontide_start_over() is True
    core.core.resume_scheduler()
    with kit.installed(resume_safety.PATCH):
        core.run()
    assert core.tokens["loading"] == kit.cold("b", text, 4)
    # What it has said is what it goes on from, now with the KV of the new weights.
    said = core.tokens["running"][:begun]
    assert core.tokens["running"][begun:] == kit.cold("b", [*kit.prompt(2), *said], 12 - begun)


def test_a_request_hashed_before_the_switch_and_added_after_it(tiny: Path, patched: bool) -> None:
    core, text = kit.Core(tiny), kit.prompt(1)
    change(core, "a", "p/1")
    core.ask("old", text)
    hashed = core.core.preprocess_add_request(core.request("late", text))
    change(core, "b", "p/2")
    core.tokens["late"] = []
    core.core.add_request(*hashed)
    core.run()
    assert core.tokens["late"] == kit.cold("b", text, 4)


def test_waiting_requests_are_hashed_again(tiny: Path, patched: bool, scheduling: bool) -> None:
    core, text = kit.Core(tiny, max_num_seqs=1, async_scheduling=scheduling), kit.prompt(1)
    change(core, "a", "p/1")
    core.ask("old", text)
    core.add("busy", kit.prompt(2), 20)
    core.step(2)
    core.add("waiting", text)
    core.step(2)
    change(core, "b", "p/2")
    core.run()
    assert core.tokens["waiting"] == kit.cold("b", text, 4)


def test_what_a_running_request_still_stores_is_never_found(tiny: Path, patched: bool, scheduling: bool) -> None:
    store, text = kit.SimStore(), kit.prompt(1, 200)
    core = kit.Core(tiny, store=store, max_num_batched_tokens=64, async_scheduling=scheduling)
    other = kit.Core(tiny, store=store, policy="b", async_scheduling=scheduling)
    change(core, "a", "p/1")
    core.add("straddles", text, 30)
    core.step(2)
    change(core, "b", "p/2")
    change(other, "b", "p/2")
    core.run()
    core.settle()
    assert other.ask("remote", text) == kit.cold("b", text, 4)
    assert core.ask("local", text) == kit.cold("b", text, 4)


def test_a_preempted_request_starts_over_in_the_new_epoch(tiny: Path, patched: bool, scheduling: bool) -> None:
    text = kit.prompt(1)
    core = kit.Core(tiny, max_model_len=256, num_gpu_blocks_override=18, async_scheduling=scheduling)
    change(core, "a", "p/1")
    core.add("grows until no block is left", kit.prompt(2), 100)
    core.step(2)
    core.add("straddles", text, 30)
    core.step(3)
    straddler = core.scheduler.requests["straddles"]
    change(core, "b", "p/2")
    core.run()
    assert straddler.num_preemptions == 1
    # Its earlier tokens are those of a, but its context was computed again by b, and is what others may share.
    full = [*text, *core.tokens["straddles"]]
    assert core.ask("after", full) == kit.cold("b", full, 4)


@pytest.mark.parametrize("seed", range(6))
def test_switch_storm(tiny: Path, patched: bool, scheduling: bool, seed: int) -> None:
    """Sixty requests under fifty switches on two replicas: whoever began and ended in one epoch answers as if alone."""
    source = random.Random(seed)
    store = kit.SimStore(load_steps=2, save_steps=1)
    cores = [
        kit.Core(tiny, store=store, max_num_seqs=8, max_num_batched_tokens=128, async_scheduling=scheduling)
        for _ in range(2)
    ]
    texts = [kit.prompt(number, 90) for number in range(5)]
    born: dict[tuple[int, str], tuple[int, int]] = {}
    epochs, judged, right, asked = [0, 0], 0, 0, 0
    switches = 0
    while switches < 50 or asked < 60:
        which = source.randrange(2)
        core = cores[which]
        if asked < 60 and source.random() < 0.5:
            name, number = f"r{asked}", source.randrange(5)
            core.add(name, texts[number], 3)
            born[which, name] = (epochs[which], number)
            asked += 1
        if switches < 50 and source.random() < 0.3:
            epochs[which] += 1
            # A policy returns, but never its epoch.
            change(core, "ab"[epochs[which] % 2], f"p/{epochs[which]}", transit=source.random() < 0.5)
            switches += 1
        before = set(core.finished)
        core.step(source.randrange(1, 4))
        for name in core.finished.keys() - before:
            began, number = born[which, name]
            if began == epochs[which]:
                judged += 1
                right += core.tokens[name] == kit.cold("ab"[began % 2], texts[number], 3)
    for core in cores:
        core.run()
    print(f"{judged} of {asked} requests began and ended in one of {switches} epochs, {right} answers are right")
    assert right == judged > 5


def test_requests_during_a_weight_update_leave_nothing_behind(tiny: Path, patched: bool, scheduling: bool) -> None:
    """The transit epoch: blocks of a request that ran while weights changed are of neither policy."""
    store, text = kit.SimStore(), kit.prompt(1)
    core = kit.Core(tiny, store=store, max_num_seqs=8, max_num_batched_tokens=32, async_scheduling=scheduling)
    change(core, "a", "p/1")
    if patched:
        core.core.moontide_switch("p/2/transit")
    core.add("while it changes", text)
    core.step(2)
    core.worker.policy = "b"
    core.run()
    core.settle()
    if patched:
        core.core.moontide_switch("p/2")
    other = kit.Core(tiny, store=store, policy="b", async_scheduling=scheduling)
    change(other, "b", "p/2")
    assert core.ask("local", text) == kit.cold("b", text, 4)
    assert other.ask("remote", text) == kit.cold("b", text, 4)


def test_a_save_that_is_late_stays_in_its_epoch(tiny: Path, scheduling: bool) -> None:
    """The only worker of an engine without ranks shares EngineCore's objects, and reads hashes when it saves."""
    with kit.installed(policy_epoch.PATCH, resume_safety.PATCH):
        store, text = kit.SimStore(save_steps=8), kit.prompt(1)
        core = kit.Core(tiny, store=store, async_scheduling=scheduling)
        other = kit.Core(tiny, store=store, policy="b", async_scheduling=scheduling)
        core.worker.in_process = True
        change(core, "a", "p/1")
        change(other, "b", "p/2")
        core.add("straddles", text, 20)
        core.step(3)
        assert core.worker.saves
        change(core, "b", "p/2")
        core.core.moontide_start_over()
        core.run()
        core.settle()
        assert other.ask("remote", text) == kit.cold("b", text, 4)


def test_hashes_tell_their_epoch_and_what_nobody_may_find_tells_none(tiny: Path) -> None:
    """So that the wiper can tell old keys from those in use."""
    with kit.installed(policy_epoch.PATCH):
        store = kit.SimStore()
        core = kit.Core(tiny, store=store, max_num_batched_tokens=64)
        core.core.moontide_switch("p/1")
        core.add("straddles", kit.prompt(1, 200), 30)
        core.step(2)
        core.core.moontide_switch("p/2")
        core.run()
        core.ask("new", kit.prompt(2))
        core.settle()
        counts = Counter(bytes(value)[: namespace.TAG_BYTES] for value in store.blocks)
        first, second = counts.pop(namespace.tag("p/1")), counts.pop(namespace.tag("p/2"))
        assert first > 0
        assert second == 6
        assert set(counts.values()) == {1}
        assert first + len(counts) == 200 // kit.BLOCK


@pytest.mark.parametrize("epoch", ["", "p/1"])
def test_hashed_at_once_or_as_it_grows_is_the_same(tiny: Path, epoch: str) -> None:
    with kit.installed(policy_epoch.PATCH):
        core, text = kit.Core(tiny), kit.prompt(1, 130)
        core.core.moontide_switch(epoch)
        grown = core.core.preprocess_add_request(core.request("r", text[:70]))[0]
        grown.append_output_token_ids(text[70:])
        whole = core.core.preprocess_add_request(core.request("s", text))[0]
        assert grown.block_hashes == whole.block_hashes
        assert len(whole.block_hashes) == 130 // kit.BLOCK


def test_an_empty_epoch_leaves_hashes_as_stock(tiny: Path) -> None:
    stock = kit.Core(tiny)
    plain = stock.core.preprocess_add_request(stock.request("r", kit.prompt(1)))[0].block_hashes
    with kit.installed(policy_epoch.PATCH):
        core = kit.Core(tiny)
        assert core.core.preprocess_add_request(core.request("r", kit.prompt(1)))[0].block_hashes == plain
        core.core.moontide_switch("p/1")
        salted = core.core.preprocess_add_request(core.request("r", kit.prompt(1)))[0].block_hashes
        assert not set(salted) & set(plain)
