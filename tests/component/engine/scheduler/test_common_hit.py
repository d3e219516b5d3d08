"""Patch common-hit on real managers with two kinds of full attention. Before 0.32, off must fail; on must pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import blockkit
import corekit as kit
import pytest
from blockkit import BLOCK, Blocks, Held, full, sliding, tokens
from hypothesis import HealthCheck, Phase, given, settings
from schedules import CASES, Case, cases, run, seeded

from moontide_engine.patches import common_hit, two_phase

OFF = kit.off("a second kind of full attention keeps hits beyond the common length", AssertionError, common_hit.PATCH)
FAULT = pytest.mark.parametrize("patched", [OFF, kit.ON], indirect=True)


def installed(on: bool) -> Any:
    """The patch, where there is a need for it; the fault of two-phase-allocation is mended either way."""
    return kit.installed(two_phase.PATCH, *([common_hit.PATCH] if on else []))


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with installed(request.param):
        yield request.param


DRAFTER = (full(), full(heads=2), sliding(2 * BLOCK))
LARGER = (full(blocks=2), full(), sliding(2 * BLOCK))
KINDS = pytest.mark.parametrize("specs", [DRAFTER, LARGER], ids=["drafter", "larger"])


def without_window(specs: tuple[Any, ...], prompt: list[int]) -> Blocks:
    """Of a request that has ended, full attention has all blocks, and the window none of the first ones."""
    blocks = Blocks(specs, 1 + 3 * 14)
    blocks.take("old", prompt, chunk=8 * BLOCK)
    blocks.advance("old", 4 * BLOCK)
    blocks.advance("old", 1)
    # What has slid out is free; now others take it.
    while len(blocks.queue()) >= len(specs):
        blocks.take(f"taker{len(blocks.held)}", tokens(100 + len(blocks.held), 1))
    for name in list(blocks.held):
        blocks.finish(name)
    return blocks


@FAULT
@KINDS
def test_hits_are_cut_to_what_all_kinds_have(patched: bool, specs: tuple[Any, ...]) -> None:
    prompt = tokens(1, 12 * BLOCK)
    blocks = without_window(specs, prompt)
    request = blocks.request("new", prompt[: 8 * BLOCK] + tokens(2, 4 * BLOCK))
    hits, local = blockkit.lookup(blocks.manager, request)
    assert [len(group) * spec.block_size for group, spec in zip(hits.blocks, specs, strict=True)] == [local] * 3


@FAULT
@KINDS
@pytest.mark.parametrize("chunk", [0, BLOCK, None], ids=["load", "part", "whole"])
def test_external_tokens_after_such_a_hit(patched: bool, specs: tuple[Any, ...], chunk: int | None) -> None:
    prompt = tokens(1, 12 * BLOCK)
    blocks = without_window(specs, prompt)
    request = blocks.request("new", prompt[: 8 * BLOCK] + tokens(2, 4 * BLOCK))
    assert blocks.admit(Held(request), external=2 * BLOCK, chunk=chunk) == 0
    blocks.finish("new")


@FAULT
def test_any_schedule(patched: bool) -> None:
    """What is wrong without the patch need not be made small."""

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if patched else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(fulls=3))
    def check(case: Case) -> None:
        run(case)

    check()


def test_share_of_seeded_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {}
    for on in (False, True):
        with installed(on):
            failed = 0
            for seed in range(CASES):
                try:
                    run(seeded(seed, fulls=3))
                except AssertionError:
                    failed += 1
            wrong[on] = failed
    with capsys.disabled():
        print(f"\ncommon-hit: {CASES} cases, {wrong[False]} wrong off, {wrong[True]} wrong on")
    assert wrong[True] == 0
    assert (wrong[False] > 0) == kit.needed(common_hit.PATCH)
