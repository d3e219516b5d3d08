"""Patch external-match-lifecycle with the Mooncake store: what a lookup promised is dropped, or looked at again.

Off is without this patch. The others that deal with lookups and loads are there where a test says so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corekit as kit
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import LookupKeyClient

from moontide_engine.matches import ExternalMatch, Reason
from moontide_engine.patches import Patch, load_retry, lookup_economy, match_lifecycle, policy_epoch, resume_safety

OTHERS: tuple[Patch, ...] = (policy_epoch.PATCH, resume_safety.PATCH, load_retry.PATCH)
if hasattr(LookupKeyClient, "_lookup"):
    # vLLM before 0.24 asks in its scheduler's own thread.
    OTHERS += (lookup_economy.PATCH,)
MEMO = "MOONTIDE_LOOKUP_MEMO_SECONDS"


class Forgetful(kit.SimStore):
    """Loses, after its first answer, all that was saved but the blocks in ``keep``."""

    keep: frozenset[bytes] | None = None

    def hits(self, num_tokens: int, hashes: Sequence[bytes]) -> int:
        found = super().hits(num_tokens, hashes)
        if self.keep is not None:
            for value in set(self.blocks) - self.keep:
                del self.blocks[value]
        return found


def stored(model: Path, text: Sequence[int], store: kit.SimStore | None = None) -> kit.SimStore:
    """A store that has the blocks of a prompt."""
    store = kit.SimStore() if store is None else store
    seed = kit.Core(model, store=store)
    seed.ask("seed", text)
    seed.settle()
    store.lookups = 0
    assert store.blocks
    return store


def behind(model: Path, store: kit.SimStore, text: Sequence[int], **options: Any) -> kit.Core:
    """A core with one request that holds the blocks, and ``second``, which waits for them."""
    core = kit.Core(model, store=store, num_gpu_blocks_override=14, max_model_len=208, **options)
    core.add("first", kit.prompt(77, 130), 40)
    core.step(3)
    core.add("second", text)
    core.step(5)
    assert [request.request_id for request in core.scheduler.running] == ["first"]
    return core


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(match_lifecycle.PATCH, on=request.param):
        yield request.param


LEFT = kit.off("what a lookup recorded stays while the request waits")


@pytest.mark.parametrize("patched", [LEFT, kit.ON], indirect=True)
@pytest.mark.parametrize("way", ["abort", "reset", "time"])
def test_what_a_lookup_recorded_is_dropped_with_the_match(
    tiny: Path, patched: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMO, "0" if way == "time" else "300")
    text = kit.prompt(1, 130)
    core = behind(tiny, stored(tiny, text), text)
    store = core.scheduler.connector.connector_scheduler
    if way != "time":
        assert list(store.load_specs) == ["second"]
    if way == "abort":
        core.core.abort_requests(["second"])
    elif way == "reset":
        core.scheduler.reset_prefix_cache()
    assert not store.load_specs
    assert not getattr(store.client, "futures", {})
    counts = core.scheduler.moontide_matches.counts()
    assert counts.prepared == counts.aborted.total()
    assert set(counts.aborted) == {{"abort": Reason.FINISHED, "reset": Reason.RESET, "time": Reason.ALLOCATION}[way]}
    if way != "abort":
        core.run()
        assert core.tokens["second"] == kit.cold("a", text, 4)
        assert core.worker.store.loaded == 8


ONCE = kit.off("one lookup in each step of the request that waits for blocks")


def waits_and_is_loaded(model: Path) -> int:
    """Lookups for a request that waits for blocks and is loaded in the end, and the one before it."""
    text = kit.prompt(1, 130)
    store = stored(model, text)
    core = behind(model, store, text)
    core.run()
    assert core.tokens["second"] == kit.cold("a", text, 4)
    assert store.loaded > 0
    print(f"{store.lookups} lookups")
    return store.lookups


@pytest.mark.parametrize("patched", [ONCE, kit.ON], indirect=True)
def test_one_lookup_for_a_request_that_waits(tiny: Path, patched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMO, "300")
    assert waits_and_is_loaded(tiny) == 2, "one for each request"


def test_one_lookup_with_the_other_patches(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMO, "300")
    with kit.installed(*OTHERS, match_lifecycle.PATCH):
        assert waits_and_is_loaded(tiny) == 2, "one for each request"


LATE = kit.off("what the lookup found is gone when it is loaded")


@pytest.mark.parametrize("patched", [LATE, kit.ON], indirect=True)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("keep", [3, 0])
def test_a_late_commit_looks_again(
    tiny: Path, patched: bool, asynchronous: bool, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    # Every look at the clock takes a second.
    monkeypatch.setattr(match_lifecycle, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setenv(MEMO, "2")
    text = kit.prompt(1)
    store = Forgetful()
    stored(tiny, text, store)
    core = kit.Core(tiny, store=store, async_scheduling=asynchronous)
    core.add("r", text)
    hashes = [bytes(value) for value in core.scheduler.requests["r"].block_hashes]
    store.keep = frozenset(hashes[:keep])
    core.run()
    print(f"{store.lookups} lookups, {store.loaded} blocks loaded, {store.failed} failed")
    assert core.tokens["r"] == kit.cold("a", text, 4)
    assert store.failed == 0
    assert store.loaded == keep
    assert store.lookups == 2
    counts = core.scheduler.moontide_matches.counts()
    assert (counts.prepared, counts.committed, counts.clipped) == (1, 1, 1)


def test_a_commit_that_sees_more_keeps_to_what_was_asked(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMO, "0.001")
    text = kit.prompt(1, 150)
    with kit.installed(match_lifecycle.PATCH):
        store = stored(tiny, text)
        whole = dict(store.blocks)
        core = kit.Core(tiny, store=store)
        core.add("r", text)
        request = core.scheduler.requests["r"]
        for value in request.block_hashes[5:]:
            del store.blocks[bytes(value)]
        connector = core.scheduler.connector
        match = connector.prepare_external_match(request, 16)
        assert match.tokens == 64
        store.blocks.update(whole)
        time.sleep(0.002)
        assert connector.commit_external_match(match.plan, request, None, 64) == 64
        spec = connector.connector_scheduler.load_specs["r"]
        assert (spec.vllm_cached_tokens, spec.kvpool_cached_tokens) == (16, 80)
        assert store.lookups == 2


@pytest.mark.parametrize(("wanted", "accepted", "end"), [(64, 64, 80), (63, 48, 64), (17, 16, 32), (3, 0, None)])
def test_a_scheduler_that_wants_less_gets_whole_blocks(tiny: Path, wanted: int, accepted: int, end: int | None) -> None:
    text = kit.prompt(1, 90)
    with kit.installed(match_lifecycle.PATCH):
        core = kit.Core(tiny, store=stored(tiny, text))
        core.add("r", text)
        request = core.scheduler.requests["r"]
        connector = core.scheduler.connector
        match: ExternalMatch = connector.prepare_external_match(request, 16)
        assert connector.commit_external_match(match.plan, request, None, wanted) == accepted
        spec = connector.connector_scheduler.load_specs.get("r")
        assert (None if spec is None else spec.kvpool_cached_tokens) == end


def test_nothing_found_is_no_match_and_is_remembered(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMO, "300")
    with kit.installed(*OTHERS, match_lifecycle.PATCH):
        store = kit.SimStore()
        core = behind(tiny, store, kit.prompt(1, 130))
        assert core.scheduler.moontide_matches.counts().prepared == 0
        core.run()
    assert core.tokens["second"] == kit.cold("a", kit.prompt(1, 130), 4)


@pytest.mark.parametrize(("found", "forgotten"), [(0, []), (64, ["r"])])
def test_the_answer_that_there_is_nothing_is_not_forgotten(found: int, forgotten: list[str]) -> None:
    answers = iter([(None, False), (found, True)])
    discarded: list[str] = []
    store = SimpleNamespace(
        get_num_new_matched_tokens=lambda request, computed: next(answers),
        client=SimpleNamespace(discard=discarded.append),
        load_specs={},
    )
    connector, request = SimpleNamespace(connector_scheduler=store), SimpleNamespace(request_id="r")
    first = match_lifecycle.prepare_external_match(connector, request, 0)
    assert first is not None
    assert first.tokens is None
    second = match_lifecycle.prepare_external_match(connector, request, 0)
    assert (second is None) == (found == 0)
    assert second is None or second.plan is first.plan
    match_lifecycle.abort_external_match(connector, first.plan, "")
    assert discarded == forgotten
    assert connector.moontide_matches.plans == {}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_with_all_patches(tiny: Path, asynchronous: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMO, "0.01" if seed % 2 else "300")
    source = random.Random(seed)
    texts = {f"r{number}": kit.prompt(number % 5, 48) + kit.prompt(100 + number % 11, 70) for number in range(40)}
    with kit.installed(*OTHERS, match_lifecycle.PATCH):
        store = kit.SimStore(load_steps=2)
        cores = [
            kit.Core(
                tiny,
                store=store,
                num_gpu_blocks_override=40,
                max_model_len=320,
                max_num_batched_tokens=128,
                async_scheduling=asynchronous,
            )
            for _ in range(2)
        ]
        asked: list[dict[str, list[int]]] = [{}, {}]
        for name, text in texts.items():
            for core, own in zip(cores, asked, strict=True):
                core.add(name, text, 12)
                own[name] = text
                core.step(source.randrange(4))
                if not source.randrange(6):
                    gone = source.choice(sorted(own))
                    core.core.abort_requests([gone])
                    if gone not in core.finished:
                        del own[gone], core.tokens[gone]
            if not source.randrange(8):
                for value in source.sample(sorted(store.blocks), len(store.blocks) // 3):
                    del store.blocks[value]
            if seed > 1 and not source.randrange(8) and hasattr(cores[0].core, "moontide_switch"):
                for core in cores:
                    core.core.moontide_switch(f"p/{source.randrange(3)}")
        for core, own in zip(cores, asked, strict=True):
            core.run(3000)
            core.settle()
            for name, text in own.items():
                assert core.tokens[name] == kit.cold("a", text, 12), name
            lifecycle = core.scheduler.moontide_matches
            counts = lifecycle.counts()
            print(counts)
            assert counts.committed
            assert counts.prepared == counts.committed + counts.aborted.total()
            assert not lifecycle.outstanding()
            assert not core.scheduler.connector.connector_scheduler.load_specs
            assert not core.scheduler.connector.moontide_matches.plans
    assert store.loaded
