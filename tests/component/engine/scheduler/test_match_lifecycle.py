"""Patch external-match-lifecycle: leases are used or given back. Off must fail, on must pass.

``LeaseConnector`` takes a lease with each match, by the tuple API (stock) or by the three methods (patched), and has KV
for the start of every prompt. It is as simple as the tuple API suggests: a match ends when its load is ordered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corekit as kit
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput

from moontide_engine.matches import ExternalMatch, Reason
from moontide_engine.patches import match_lifecycle

LEAK = kit.off("nobody tells the connector that its match is not used")


# -- a connector and its worker ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Lease:
    """One reservation."""

    request: str
    tokens: int


@dataclass
class Order:
    """One load: tokens ``start`` to ``end`` of a request, whose text is ``tokens``."""

    request: str
    tokens: list[int]
    blocks: list[int]
    start: int
    end: int


@dataclass
class LeaseMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Orders of one step."""

    orders: list[Order] = field(default_factory=list)
    load_async: bool = False


class LeaseConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Scheduler's half. Options: ``tokens`` it has of each prompt, ``accept`` at most, ``load_async``, ``hold``, and
    ``unknown``, the probes of a request that it cannot answer yet."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.taken: list[Lease] = []
        self.ended: list[Lease] = []
        self.reasons: list[str] = []
        self.orders: list[Order] = []
        self.loaded = 0
        """Tokens of all orders."""
        self.probes: dict[str, int] = {}
        self.pending: dict[str, Lease] = {}

    @property
    def leaked(self) -> int:
        """Leases that have not ended."""
        return len(self.taken) - len(self.ended)

    def lease(self, request: Any, computed: int) -> tuple[Lease | None, bool]:
        """A new lease, if there is KV; and whether its size is known."""
        known = min(self.options["tokens"], request.num_tokens - 1) - computed
        if known <= 0:
            return None, True
        lease = Lease(request.request_id, known)
        self.taken.append(lease)
        count = self.probes[request.request_id] = self.probes.get(request.request_id, 0) + 1
        return lease, count > self.options.get("unknown", 0)

    def end(self, lease: Lease) -> None:
        assert lease in self.taken
        assert lease not in self.ended, "a lease ended twice"
        self.ended.append(lease)

    def order(self, request: Any, blocks: Any, count: int) -> int:
        """Order the load of as many tokens as it accepts."""
        count = min(count, self.options.get("accept", count))
        start = self.starts[request.request_id]
        self.loaded += count
        if count:
            tokens = list(request.all_token_ids[: start + count])
            self.orders.append(Order(request.request_id, tokens, list(blocks.get_block_ids()[0]), start, start + count))
        return count

    @property
    def starts(self) -> dict[str, int]:
        starts: dict[str, int] = vars(self).setdefault("_starts", {})
        return starts

    # The tuple API.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        lease, known = self.lease(request, num_computed_tokens)
        self.starts[request.request_id] = num_computed_tokens
        if lease is None:
            return 0, False
        self.pending[request.request_id] = lease
        return (lease.tokens, self.options["load_async"]) if known else (None, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        lease = self.pending.pop(request.request_id, None)
        if lease is not None and num_external_tokens:
            self.order(request, blocks, num_external_tokens)
            self.end(lease)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = LeaseMetadata(self.orders, self.options["load_async"])
        self.orders = []
        return meta

    # The three methods.

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> ExternalMatch | None:
        self.starts[request.request_id] = num_computed_tokens
        pending = self.pending.get(request.request_id)
        if pending is not None:
            count = self.probes[request.request_id] = self.probes[request.request_id] + 1
            lease, known = pending, count > self.options.get("unknown", 0)
        else:
            lease, known = self.lease(request, num_computed_tokens)
        if lease is None:
            return None
        if known:
            self.pending.pop(request.request_id, None)
        else:
            self.pending[request.request_id] = lease
        return ExternalMatch(
            lease, lease.tokens if known else None, self.options["load_async"], self.options.get("hold", 0.0)
        )

    def commit_external_match(self, plan: Lease, request: Any, blocks: Any, num_tokens: int) -> int:
        accepted = self.order(request, blocks, num_tokens)
        if accepted in (0, num_tokens) or not self.options.get("late_end"):
            self.end(plan)
        return accepted

    def abort_external_match(self, plan: Lease, reason: str) -> None:
        self.orders = [order for order in self.orders if order.request != plan.request]
        self.pending.pop(plan.request, None)
        self.end(plan)
        self.reasons.append(reason)

    # The worker's half, which is simulated below.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class TupleConnector(LeaseConnector):
    """Without the three methods."""

    prepare_external_match = None  # type: ignore[assignment]
    commit_external_match = None  # type: ignore[assignment]
    abort_external_match = None  # type: ignore[assignment]


class LeaseExecutor(kit.SimExecutor):
    """Writes what is ordered, token by token, into the slots; loads between steps take two of them."""

    def _transfers(self, metadata: Any, *_: Any) -> KVConnectorOutput | None:
        output = KVConnectorOutput(finished_recving=set(), invalid_block_ids=set())
        due: list[tuple[int, Order]] = vars(self).setdefault("_due", [])
        for part in getattr(metadata, "metadata", (metadata,)):
            for order in getattr(part, "orders", ()):
                if part.load_async:
                    due.append((self.steps + 2, order))
                else:
                    self._load(order)
        for when, order in list(due):
            if when <= self.steps:
                due.remove((when, order))
                self._load(order)
                assert output.finished_recving is not None
                output.finished_recving.add(order.request)
        return output

    def _load(self, order: Order) -> None:
        slot: kit.Slot = ("", 0)
        for position, token in enumerate(order.tokens):
            slot = ("a", kit.digest(slot, token, "a"))
            if order.start <= position < order.end:
                self.kv[order.blocks[position // kit.BLOCK], position % kit.BLOCK] = slot

    def _save(self, metadata: Any) -> None: ...


def core_with(model: Path, connector: type = LeaseConnector, *, extra: dict[str, Any], **overrides: Any) -> kit.Core:
    return kit.Core(
        model,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector.__name__,
            kv_connector_module_path=connector.__module__,
            kv_role="kv_both",
            kv_connector_extra_config={"tokens": 64, "load_async": False, **extra},
        ),
        **overrides,
    )


@pytest.fixture(autouse=True)
def executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "SimExecutor", LeaseExecutor)


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(match_lifecycle.PATCH, on=request.param):
        yield request.param


def right(core: kit.Core, texts: dict[str, Sequence[int]], tokens: int = 4) -> None:
    for name, text in texts.items():
        assert core.tokens[name] == kit.cold("a", text, tokens), name


both = pytest.mark.parametrize("patched", [LEAK, kit.ON], indirect=True)
loads = pytest.mark.parametrize("load_async", [False, True], ids=["within", "between"])
scheduling = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def stuck(
    model: Path, extra: dict[str, Any], **overrides: Any
) -> tuple[kit.Core, LeaseConnector, dict[str, list[int]]]:
    """A core whose blocks are all but taken by one request, and another one that waits for them."""
    core = core_with(model, extra=extra, num_gpu_blocks_override=14, max_model_len=208, **overrides)
    connector: LeaseConnector = core.scheduler.connector
    texts = {"first": kit.prompt(1, 130), "second": kit.prompt(2, 130)}
    connector.options["tokens"] = 0
    core.add("first", texts["first"], 40)
    core.step(3)
    connector.options["tokens"] = extra.get("tokens", 64)
    core.add("second", texts["second"], 4)
    core.step(5)
    assert [request.request_id for request in core.scheduler.running] == ["first"]
    assert connector.taken, "it was looked up"
    return core, connector, texts


# -- every way out -------------------------------------------------------------------------------------------------


@both
@loads
@scheduling
def test_no_room_for_its_blocks(tiny: Path, patched: bool, load_async: bool, asynchronous: bool) -> None:
    core, connector, texts = stuck(tiny, {"load_async": load_async}, async_scheduling=asynchronous)
    assert connector.leaked == 0
    assert set(connector.reasons) == {Reason.ALLOCATION}
    core.run()
    print(f"{len(connector.taken)} leases taken, {len(connector.ended)} ended")
    assert connector.leaked == 0
    assert core.tokens["second"] == kit.cold("a", texts["second"], 4)
    assert core.tokens["first"] == kit.cold("a", texts["first"], 40)
    assert connector.loaded == 64


@both
@scheduling
def test_no_tokens_left_in_the_step(tiny: Path, patched: bool, asynchronous: bool) -> None:
    core = core_with(
        tiny,
        extra={},
        max_model_len=256,
        max_num_batched_tokens=256,
        enable_chunked_prefill=False,
        async_scheduling=asynchronous,
    )
    connector: LeaseConnector = core.scheduler.connector
    texts = {name: kit.prompt(number, 250) for number, name in enumerate("abc")}
    for name, text in texts.items():
        core.add(name, text)
    core.step()
    assert len(connector.taken) == 2, "the first was scheduled, the second looked up"
    assert connector.leaked == 0
    core.run()
    right(core, texts)
    assert connector.leaked == 0
    assert Reason.NOT_SCHEDULED in connector.reasons


@both
@pytest.mark.parametrize("way", ["abort", "reset", "local reset", "shutdown"])
def test_held_and_then(tiny: Path, patched: bool, way: str) -> None:
    core, connector, _ = stuck(tiny, {"hold": 60.0})
    if way == "abort":
        core.core.abort_requests(["second"])
        reason = Reason.FINISHED
    elif way == "shutdown":
        core.scheduler.shutdown()
        reason = Reason.SHUTDOWN
    else:
        connector.reset_cache = lambda: True  # type: ignore[method-assign]
        core.scheduler.reset_prefix_cache(reset_connector=way == "reset")
        reason = Reason.RESET
    print(f"{len(connector.taken)} leases taken, {len(connector.ended)} ended")
    assert connector.leaked == 0
    assert connector.reasons == [reason]


@both
def test_a_held_match_of_another_range_goes_first(tiny: Path, patched: bool) -> None:
    core, connector, _ = stuck(tiny, {"hold": 60.0})
    request = core.scheduler.requests["second"]
    connector.get_num_new_matched_tokens(request, 16)
    assert connector.leaked == 1
    assert connector.reasons == [Reason.RANGE]
    del request.block_hashes[-1]
    connector.get_num_new_matched_tokens(request, 16)
    assert connector.leaked == 1
    assert connector.reasons == [Reason.RANGE] * 2


@both
@loads
@scheduling
def test_probes_of_a_held_match_take_one_lease(tiny: Path, patched: bool, load_async: bool, asynchronous: bool) -> None:
    core, connector, texts = stuck(tiny, {"hold": 60.0, "load_async": load_async}, async_scheduling=asynchronous)
    assert len(connector.taken) == 1
    core.run()
    assert core.tokens["second"] == kit.cold("a", texts["second"], 4)
    assert len(connector.taken) == len(connector.ended) == 1
    if patched:
        counts = core.scheduler.moontide_matches.counts()
        print(counts)
        assert counts.reused > 5
        assert (counts.prepared, counts.committed) == (1, 1)


@both
@loads
def test_a_match_that_is_not_known_yet_takes_one_lease(tiny: Path, patched: bool, load_async: bool) -> None:
    core = core_with(tiny, extra={"unknown": 5, "load_async": load_async})
    connector: LeaseConnector = core.scheduler.connector
    texts = {"r": kit.prompt(1), "gone": kit.prompt(2)}
    core.add("r", texts["r"])
    core.add("gone", texts["gone"])
    core.step(3)
    core.core.abort_requests(["gone"])
    assert [lease.request for lease in connector.ended] == ["gone"]
    core.step(2)
    assert len(connector.taken) == 2
    del core.tokens["gone"]
    core.run()
    right(core, {"r": texts["r"]})
    assert connector.leaked == 0


@both
@loads
@scheduling
def test_preempted_for_want_of_blocks(tiny: Path, patched: bool, load_async: bool, asynchronous: bool) -> None:
    core = core_with(
        tiny,
        extra={"load_async": load_async},
        num_gpu_blocks_override=24,
        max_model_len=320,
        async_scheduling=asynchronous,
    )
    connector: LeaseConnector = core.scheduler.connector
    texts = {f"r{number}": kit.prompt(number, 90) for number in range(6)}
    for name, text in texts.items():
        core.add(name, text, 60)
    preempted = 0
    for _ in range(2000):
        if core.finished.keys() == texts.keys():
            break
        core.step()
        preempted = max([preempted, *(request.num_preemptions for request in core.scheduler.requests.values())])
        assert connector.leaked == 0
    assert preempted, "somebody was"
    right(core, texts, 60)


# -- fewer than promised -------------------------------------------------------------------------------------------

CLIPPED = kit.off(
    "what the connector does not load is taken for loaded, or waited for",
    (AssertionError, kit.Stuck, RuntimeError),
)
fewer = pytest.mark.parametrize("patched", [CLIPPED, kit.ON], indirect=True)


@fewer
@loads
@scheduling
@pytest.mark.parametrize("budget", [512, 24], ids=["whole", "chunks"])
@pytest.mark.parametrize("accept", [50, 48, 7, 0])
def test_fewer_than_promised(
    tiny: Path, patched: bool, load_async: bool, asynchronous: bool, budget: int, accept: int
) -> None:
    core = core_with(
        tiny,
        extra={"tokens": 100, "accept": accept, "load_async": load_async},
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        async_scheduling=asynchronous,
    )
    connector: LeaseConnector = core.scheduler.connector
    text, other = kit.prompt(1, 140), kit.prompt(2, 140)
    assert core.ask("other", other) == kit.cold("a", other, 4)
    assert core.ask("r", text, 1) == kit.cold("a", text, 1)
    assert core.cached["r"] == accept
    assert connector.loaded == 2 * accept
    assert connector.leaked == 0
    # What is cached now was computed or loaded.
    connector.options["tokens"] = 0
    longer = text + kit.prompt(3, 40)
    assert core.ask("again", longer) == kit.cold("a", longer, 4)
    assert core.ask("more", text, 1) == kit.cold("a", text, 1)
    assert core.cached["more"] == 128


def test_the_rest_of_the_prompt_is_an_ordinary_chunk(tiny: Path) -> None:
    with kit.installed(match_lifecycle.PATCH):
        core = core_with(tiny, extra={"tokens": 100, "accept": 50})
        core.add("r", kit.prompt(1, 140))
        request = core.scheduler.requests["r"]
        # Of some releases only: what these must still get is kept free.
        unfinished = getattr(core.scheduler, "_inflight_prefills", {request})
        core.step()
        assert request.num_computed_tokens == 90, "50 that were loaded and the 40 that were going to be computed"
        assert request in unfinished
        core.run()
        assert request not in getattr(core.scheduler, "_inflight_prefills", ())
    assert core.tokens["r"] == kit.cold("a", kit.prompt(1, 140), 4)


@fewer
@loads
@pytest.mark.parametrize("accept", [50, 0])
def test_fewer_behind_a_local_hit_and_after_a_preemption(
    tiny: Path, patched: bool, load_async: bool, accept: int
) -> None:
    core = core_with(tiny, extra={"tokens": 0, "accept": accept, "load_async": load_async})
    connector: LeaseConnector = core.scheduler.connector
    shared = kit.prompt(1, 48)
    core.ask("before", shared)
    connector.options["tokens"] = 148
    texts = {f"r{number}": [*shared, *kit.prompt(10 + number, 120)] for number in range(3)}
    for name, text in texts.items():
        core.add(name, text, 30)
    core.step(10)
    connector.options["tokens"] = 150
    connector.reset_cache = lambda: True  # type: ignore[method-assign]
    core.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    core.run()
    right(core, texts, 30)
    assert connector.leaked == 0


@fewer
@loads
@pytest.mark.parametrize("accept", [50, 0])
def test_fewer_where_a_request_cannot_start_earlier(
    tiny: Path, patched: bool, load_async: bool, accept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(match_lifecycle.Lifecycle, "_may_start_earlier", lambda self: False)
    core = core_with(tiny, extra={"tokens": 100, "accept": accept, "load_async": load_async, "late_end": True})
    connector: LeaseConnector = core.scheduler.connector
    texts = {f"r{number}": kit.prompt(number, 140) for number in range(4)}
    for name, text in texts.items():
        core.add(name, text)
    core.run()
    right(core, texts)
    assert connector.leaked == 0
    assert connector.reasons == [Reason.CLIPPED] * (4 if accept else 0)
    assert connector.loaded == accept * (8 if accept else 0)
    connector.options["tokens"] = 0
    for name, text in texts.items():
        assert core.ask(f"{name}-again", text) == kit.cold("a", text, 4)


@both
@scheduling
@pytest.mark.parametrize("seed", range(3))
def test_a_storm(tiny: Path, patched: bool, asynchronous: bool, seed: int) -> None:
    source = random.Random(seed)
    core = core_with(
        tiny,
        extra={"load_async": bool(seed % 2), "hold": 0.002 * seed},
        num_gpu_blocks_override=40,
        max_model_len=320,
        max_num_batched_tokens=64,
        async_scheduling=asynchronous,
    )
    connector: LeaseConnector = core.scheduler.connector
    connector.reset_cache = lambda: True  # type: ignore[method-assign]
    texts: dict[str, list[int]] = {}
    for number in range(40):
        name = f"r{number}"
        texts[name] = kit.prompt(number % 7, 32) + kit.prompt(number, source.randrange(20, 120))
        core.add(name, texts[name], 12)
        connector.options.update(
            tokens=source.choice([0, 33, 64, 100]),
            accept=source.choice([0, 16, 50, 100]),
            unknown=source.choice([0, 2]),
        )
        core.step(source.randrange(3))
        if not source.randrange(6):
            gone = source.choice(sorted(texts))
            core.core.abort_requests([gone])
            if gone not in core.finished:
                del texts[gone], core.tokens[gone]
        if not source.randrange(10):
            core.scheduler.reset_prefix_cache(reset_connector=True)
        live = [lease.request for lease in connector.taken if lease not in connector.ended]
        assert len(live) == len(set(live)), "one lease for each request"
    core.run(3000)
    core.settle()
    right(core, texts, 12)
    counts = core.scheduler.moontide_matches.counts()
    print(counts)
    assert counts.prepared == counts.committed + counts.aborted.total()
    assert connector.leaked == 0
    assert counts.clipped


# -- others --------------------------------------------------------------------------------------------------------


def history(core: kit.Core) -> list[object]:
    """Everything that a scheduler says while it serves some requests."""
    said: list[object] = []
    build = core.scheduler.connector.build_connector_meta

    def note(output: Any) -> Any:
        meta = build(output)
        said.append((output, meta))
        return meta

    core.scheduler.connector.build_connector_meta = note
    for number in range(6):
        core.add(f"r{number}", kit.prompt(number, 90), 20)
    core.run()
    return [repr(each) for each in said]


@loads
def test_a_connector_without_the_methods_is_left_alone(tiny: Path, load_async: bool) -> None:
    told, leaked = [], []
    for on in (False, True):
        with kit.installed(match_lifecycle.PATCH, on=on):
            core = core_with(
                tiny, TupleConnector, extra={"load_async": load_async}, num_gpu_blocks_override=24, max_model_len=320
            )
            if on:
                assert core.scheduler.moontide_matches is None
                assert not {"schedule", "_free_request", "shutdown"} & set(vars(core.scheduler))
                assert "allocate_slots" not in vars(core.scheduler.kv_cache_manager)
            told.append(history(core))
            leaked.append(core.scheduler.connector.leaked)
    assert told[0] == told[1]
    assert len(told[0]) > 20
    assert leaked[0] == leaked[1]


@both
@loads
def test_of_two_connectors_the_second_lets_go(tiny: Path, patched: bool, load_async: bool) -> None:
    child = {
        "kv_connector": "LeaseConnector",
        "kv_connector_module_path": LeaseConnector.__module__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tokens": 64, "load_async": load_async, "accept": 50},
    }
    core = kit.Core(
        tiny,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [child, child]}
        ),
    )
    first, second = core.scheduler.connector._connectors
    text = kit.prompt(1)
    core.ask("r", text, 1)
    assert (first.leaked, second.leaked) == (0, 0)
    assert core.tokens["r"] == kit.cold("a", text, 1)
    assert (first.reasons, second.reasons) == ([], [Reason.NOT_USED])
    assert core.cached["r"] == 50
