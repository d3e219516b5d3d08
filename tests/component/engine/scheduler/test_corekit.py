"""The simulated worker itself: without faults every answer is the cold engine's, and a wrong block is seen."""

from __future__ import annotations

from pathlib import Path

import corekit as kit
import pytest


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answers_are_a_cold_engines_hit_or_miss(tiny: Path, asynchronous: bool) -> None:
    store = kit.SimStore()
    first = kit.Core(tiny, store=store, async_scheduling=asynchronous)
    second = kit.Core(tiny, store=store, async_scheduling=asynchronous)
    text = kit.prompt(1)
    expected = kit.cold("a", text, 4)
    assert first.ask("miss", text) == expected
    assert first.ask("local hit", text) == expected
    first.settle()
    assert len(store.blocks) >= 6
    assert second.ask("remote hit", text) == expected
    assert store.loaded == 6


def test_a_stale_block_changes_the_answer(tiny: Path) -> None:
    core = kit.Core(tiny)
    text = kit.prompt(1)
    core.ask("old", text)
    core.worker.policy = "b"
    assert core.ask("new", text) != kit.cold("b", text, 4)
