"""Patch two-phase-allocation on real managers with several cache groups. Before 0.24, off must fail; on must pass.

From 0.24 on stock must pass all of it: that is what says that the patch is not needed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import blockkit
import corekit as kit
import pytest
from blockkit import BLOCK, Blocks, Held, full, sliding, tokens
from hypothesis import HealthCheck, Phase, given, settings
from schedules import CASES, Case, cases, run, seeded

from moontide_engine.patches import two_phase

OFF = kit.off("one block backs two groups", blockkit.Wrong, two_phase.PATCH)
FAULT = pytest.mark.parametrize("patched", [OFF, kit.ON], indirect=True)
SOUND = pytest.mark.parametrize("patched", [pytest.param(False, id="stock"), kit.ON], indirect=True)
"""What stock does right, and the patch must not break."""


def installed(on: bool) -> Any:
    """The patch, where there is a need for it."""
    return kit.installed(two_phase.PATCH, on=on)


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with installed(request.param):
        yield request.param


TWO = (full(), sliding(5 * BLOCK))
THREE = (full(), sliding(5 * BLOCK), sliding(6 * BLOCK))
FULL = (full(), full(), sliding(5 * BLOCK))
"""No hit of the second group slides out of a window."""
SEVERAL = pytest.mark.parametrize("specs", [TWO, THREE, FULL], ids=["two", "three", "full"])


def with_old_hits(specs: tuple[Any, ...], prompt: list[int], *, preempted: bool = False) -> Blocks:
    """All blocks are free; those of a request that computed 6 blocks of ``prompt`` are the oldest."""
    blocks = Blocks(specs, 1 + len(specs) * 14)
    # Of the preempted one the rest of the prompt is yet to be computed.
    blocks.take("old", prompt if preempted else prompt[: 6 * BLOCK], chunk=6 * BLOCK)
    blocks.take("filler", tokens(9, 8 * BLOCK))
    assert not blocks.queue()
    if preempted:
        blocks.preempt("old")
    else:
        blocks.finish("old")
    blocks.finish("filler")
    return blocks


def evictable(blocks: Blocks, name: str, group: int, tokens_computed: int) -> int:
    """Hits of a group that are free now and that it will still see after so many tokens."""
    hits = blockkit.lookup(blocks.manager, blocks.preempted[name].request if name in blocks.preempted else name)
    skipped = blocks.groups[group].get_num_skipped_tokens(tokens_computed) // blocks.specs[group].block_size
    return sum(block.ref_cnt == 0 and not block.is_null for block in hits[0].blocks[group][skipped:])


@FAULT
def test_sliding_window_and_full_attention(patched: bool) -> None:
    prompt = tokens(1, 9 * BLOCK)
    blocks = with_old_hits(TWO, prompt)
    request = blocks.request("new", prompt)
    assert evictable(blocks, request, 1, 8 * BLOCK) == 3
    assert blocks.admit(Held(request), external=2 * BLOCK) == 6 * BLOCK
    assert [block.is_null for block in blocks.of("new", 1)] == [True] * 3 + [False] * 6
    blocks.finish("new")


@FAULT
@pytest.mark.parametrize("specs", [THREE, FULL], ids=["windows", "full"])
def test_three_groups(patched: bool, specs: tuple[Any, ...]) -> None:
    prompt = tokens(1, 9 * BLOCK)
    blocks = with_old_hits(specs, prompt)
    request = blocks.request("new", prompt)
    assert all(evictable(blocks, request, group, 8 * BLOCK) >= 3 for group in (1, 2))
    assert blocks.admit(Held(request), external=2 * BLOCK, chunk=0) == 6 * BLOCK
    blocks.arrive("new")
    while blocks.advance("new", 5) and len(blocks.queue()) > 3:
        pass
    blocks.finish("new")


@FAULT
@SEVERAL
def test_preempted_and_reallocated(patched: bool, specs: tuple[Any, ...]) -> None:
    """Preempted while its prompt was computed; meanwhile another engine has saved more of it."""
    prompt = tokens(1, 9 * BLOCK)
    blocks = with_old_hits(specs, prompt, preempted=True)
    assert evictable(blocks, "old", 1, 8 * BLOCK) >= 3
    assert blocks.resume("old", external=2 * BLOCK) == 6 * BLOCK
    blocks.advance("old", 1)
    blocks.preempt("old")
    assert blocks.resume("old") is not None
    blocks.finish("old")


@FAULT
@SEVERAL
@pytest.mark.parametrize("chunk", [0, BLOCK, None], ids=["load", "part", "whole"])
def test_local_and_external_hit(patched: bool, specs: tuple[Any, ...], chunk: int | None) -> None:
    """Local and external hits of a request together, as a load by itself or with tokens to compute."""
    prompt = tokens(1, 9 * BLOCK)
    blocks = with_old_hits(specs, prompt)
    assert blocks.take("first", prompt, external=2 * BLOCK, chunk=chunk) == 6 * BLOCK
    if chunk == 0:
        blocks.arrive("first")
    # What the first one has brought is a local hit of the second.
    assert blocks.take("second", prompt + tokens(3, BLOCK)) == (8 if chunk == 0 else 9) * BLOCK
    blocks.finish("first")
    blocks.finish("second")


@FAULT
def test_evictable_cached_blocks_are_not_allocated_twice(patched: bool) -> None:
    """Full attention's hits are held by a running request; the window of that one has left the other group's."""
    prompt = tokens(1, 12 * BLOCK)
    blocks = Blocks(TWO, 1 + 2 * 20)
    blocks.take("running", prompt, chunk=6 * BLOCK)
    blocks.take("filler", tokens(9, 7 * BLOCK))
    blocks.advance("running", 6 * BLOCK)
    blocks.advance("running", 1)
    blocks.finish("filler")
    request = blocks.request("new", prompt[: 6 * BLOCK] + tokens(2, 4 * BLOCK))
    hits = {block.block_id for block in blockkit.lookup(blocks.manager, request)[0].blocks[1]}
    for number in range(len(blocks.queue())):
        if blocks.queue()[0] in hits:
            break
        blocks.take(f"taker{number}", tokens(100 + number, 1))
    assert evictable(blocks, request, 0, 9 * BLOCK) == 0
    assert evictable(blocks, request, 1, 9 * BLOCK) == 2
    assert blocks.admit(Held(request), external=3 * BLOCK) == 6 * BLOCK
    assert blocks.local_and_external == 1


# -- what the patch must leave as it is --------------------------------------------------------------------------


def books(blocks: Blocks) -> dict[int, tuple[int, Any]]:
    """References and hash of every block."""
    return {block.block_id: (block.ref_cnt, block.block_hash) for block in blocks.pool.blocks if not block.is_null}


@pytest.mark.parametrize("patched", [kit.ON], indirect=True)
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_failure_leaves_nothing_held(patched: bool, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """The pool fails for one of the groups: what the request has is its own, and all is free once it is freed."""
    prompt = tokens(1, 9 * BLOCK)
    blocks = with_old_hits(THREE, prompt)
    request = blocks.request("new", prompt)
    hits, local = blockkit.lookup(blocks.manager, request)
    before = books(blocks)
    original = blocks.pool.get_new_blocks
    calls = []

    def get_new_blocks(count: int) -> Any:
        calls.append(count)
        if len(calls) > taken:
            raise ValueError("no blocks")
        return original(count)

    with monkeypatch.context() as patch:
        patch.setattr(blocks.pool, "get_new_blocks", get_new_blocks)
        with pytest.raises(ValueError, match="no blocks"):
            blocks.manager.allocate_slots(request, 1, local, hits, num_external_computed_tokens=2 * BLOCK)
    assert calls == [2] * (taken + 1)
    blocks.held["new"] = Held(request)
    blocks.check()
    blocks.finish("new")
    queue = blocks.queue()
    for group in range(taken + 1, 3):
        # Whoever gave it back, the end of the prompt is evicted first.
        skipped = blocks.groups[group].get_num_skipped_tokens(8 * BLOCK) // BLOCK
        places = [queue.index(block.block_id) for block in hits.blocks[group][skipped:]]
        assert len(places) > 1
        assert places == sorted(places, reverse=True)
    evicted = [block for block, (_, block_hash) in books(blocks).items() if block_hash != before[block][1]]
    assert len(evicted) <= 2 * taken
    assert blocks.take("next", tokens(8, 3 * BLOCK)) == 0


@SOUND
def test_running_request_has_no_new_hits(patched: bool) -> None:
    prompt = tokens(1, 9 * BLOCK)
    blocks = with_old_hits(TWO, prompt)
    blocks.take("running", prompt[: 4 * BLOCK])
    before = books(blocks), blocks.queue()
    coordinator = blocks.manager.coordinator
    hits, local = blockkit.lookup(blocks.manager, blocks.request("other", prompt))
    with pytest.raises(AssertionError):
        coordinator.allocate_new_computed_blocks("running", hits.blocks, local, 2 * BLOCK)
    coordinator.allocate_new_computed_blocks("running", ((), ()), 4 * BLOCK, 0)
    assert books(blocks) == before[0]
    # Others than the hits are where they were, too.
    found = {block.block_id for group in hits.blocks for block in group}
    assert [block for block in blocks.queue() if block not in found] == [b for b in before[1] if b not in found]


@SOUND
def test_nulls_and_one_block_for_two_groups(patched: bool) -> None:
    """Groups may be given the null block among their hits, and one block twice: each holder counts."""
    blocks = Blocks((full(), full(), sliding(8 * BLOCK)), 1 + 20)
    free = blocks.pool.blocks[6:9]
    null = blocks.pool.null_block
    hits = ([free[0], free[1]], [null, free[2]], [null, free[2]])
    blocks.manager.coordinator.allocate_new_computed_blocks("new", hits, 2 * BLOCK, BLOCK)
    assert [block.ref_cnt for block in free] == [1, 1, 2]
    assert null.block_id not in blocks.queue()
    assert blocks.queue() == [4, 5, *range(9, 21)]
    assert [[block.block_id for block in blocks.of("new", group)] for group in range(3)] == [
        [6, 7, 1],
        [0, 8, 2],
        [0, 8, 3],
    ]
    blocks.manager.coordinator.free("new")
    assert all(block.ref_cnt == 0 for block in free)
    assert sorted(blocks.queue()) == list(range(1, 21))


@SOUND
@pytest.mark.parametrize("specs", [TWO, THREE], ids=["two", "three"])
def test_without_caching(patched: bool, specs: tuple[Any, ...]) -> None:
    blocks = Blocks(specs, 1 + len(specs) * 20, {"enable_caching": False})
    prompt = tokens(1, 9 * BLOCK)
    assert blocks.take("first", prompt, external=3 * BLOCK, chunk=BLOCK) == 0
    assert blocks.take("second", prompt, external=3 * BLOCK) == 0
    assert [len(blocks.of("first", group)) for group in range(len(specs))] == [4] * len(specs)
    blocks.finish("first")
    blocks.finish("second")
    assert len(blocks.queue()) == len(specs) * 20


@SOUND
@pytest.mark.parametrize("spec", [full(), sliding(5 * BLOCK)], ids=["full", "sliding"])
def test_single_group(patched: bool, spec: Any) -> None:
    prompt = tokens(1, 9 * BLOCK)
    blocks = with_old_hits((spec,), prompt)
    assert blocks.take("new", prompt, external=2 * BLOCK) == 6 * BLOCK
    assert blocks.local_and_external == 1


@SOUND
def test_metrics_count_each_hit_once(patched: bool) -> None:
    """What moves blocks is also counted: a hit is one access, and only what was taken was evicted."""

    class Collector:
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        def __getattr__(self, name: str) -> Any:
            return lambda block: self.calls.append((name, block.block_id))

    prompt = tokens(1, 9 * BLOCK)
    blocks = Blocks(TWO, 1 + 2 * 20)
    blocks.take("old", prompt[: 6 * BLOCK])
    blocks.finish("old")
    blocks.pool.metrics_collector = collector = Collector()
    assert blocks.take("new", prompt, external=2 * BLOCK) == 6 * BLOCK
    accessed = [block for name, block in collector.calls if name == "on_block_accessed"]
    assert sorted(accessed) == sorted({*accessed})
    assert len(accessed) == 6 + 3
    allocated = [block for name, block in collector.calls if name == "on_block_allocated"]
    assert len(allocated) == 2 * 3
    assert not set(allocated) & set(accessed)


# -- random schedules ----------------------------------------------------------------------------------------------


@FAULT
def test_any_schedule(patched: bool) -> None:
    """What is wrong without the patch need not be made small."""

    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if patched else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check(case: Case) -> None:
        run(case)

    check()


def test_share_of_seeded_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {}
    met = 0
    for on in (False, True):
        with installed(on):
            failed = 0
            for seed in range(CASES):
                try:
                    met += run(seeded(seed))
                except blockkit.Wrong:
                    failed += 1
            wrong[on] = failed
    with capsys.disabled():
        print(f"\ntwo-phase: {CASES} cases, {wrong[False]} wrong off, {wrong[True]} wrong on")
    assert met > CASES
    assert wrong[True] == 0
    assert (wrong[False] > 0) == kit.needed(two_phase.PATCH)
