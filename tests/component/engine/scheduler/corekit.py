"""A real EngineCore, scheduler and scheduler half of the Mooncake connector, with a simulated worker.

The worker keeps, for each token slot of each block, a digest of the token, of the policy that computed it, and of what
the slot before it held. What it samples is a digest of every slot a request can see. So an answer is right only if
every block it was computed from was: the same prompt on a fresh engine with one policy is the oracle, exact to the
token.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import random
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm

# Imported late it brings warnings of torch, and conftest lets those pass that come with this module.
import vllm.v1.core.sched.scheduler
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data as store_data
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import worker_base

from moontide_engine.patches import APPLIED, Patch, reset_truth_front

BLOCK = 16
VOCABULARY = 500
Slot = tuple[str, int]
"""Policy that computed a token, digest of everything up to it."""


class Stuck(Exception):
    """Requests did not end within the steps they were given."""


RELEASE = vllm.__version__.partition("+")[0]
HOLDS_BLOCKS = hasattr(store_data, "MooncakeStoreWorkerMetadata")
"""Whether the scheduler holds the blocks of each save until its end is reported. Before, it did so only for requests
that have ended, until all saves of one had."""


def owner_of(target: str) -> Any:
    """What has, or may get, the function of a reference: its module or its class."""
    module, _, qualified = target.partition(":")
    owner: Any = importlib.import_module(module)
    for part in qualified.split(".")[:-1]:
        owner = getattr(owner, part)
    return owner


def quietly(module: str) -> Any:
    """A module of vLLM. Old releases import things that this torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def needed(patch: Patch) -> bool:
    """Whether the table says that the release under test needs it."""
    return patch.state(RELEASE) == APPLIED


def off(
    reason: str,
    raises: type[BaseException] | tuple[type[BaseException], ...] = AssertionError,
    patch: Patch | None = None,
) -> Any:
    """The parameter False, for a run without the patch: it must fail, with ``raises`` and nothing else.

    Where the table says that the release does not need ``patch`` it must pass: that is what proves the table.
    """
    if patch is not None and not needed(patch):
        return pytest.param(False, id="off")
    return pytest.param(
        False, id="off", marks=pytest.mark.xfail(strict=True, raises=raises, reason=f"stock vLLM: {reason}")
    )


ON = pytest.param(True, id="on")


def digest(*parts: object) -> int:
    """A stable number for a sequence of parts."""
    return zlib.crc32(repr(parts).encode())


@dataclass
class SimStore:
    """Blocks by hash, as one Mooncake store holds them for several engines."""

    blocks: dict[bytes, list[Slot]] = field(default_factory=dict)
    lookups: int = 0
    lookup_seconds: float = 0.0
    promise: bool = False
    """Promise every block, whether it is there or not."""
    fail_loads: bool = False
    load_steps: int = 1
    """Engine steps that a load takes."""
    save_steps: int = 0
    loaded: int = 0
    failed: int = 0

    def hits(self, num_tokens: int, hashes: Sequence[bytes]) -> int:
        """Tokens of the longest stored prefix; at least one token is left to compute."""
        self.lookups += 1
        if self.lookup_seconds:
            time.sleep(self.lookup_seconds)
        count = 0
        for value in hashes[: (num_tokens - 1) // BLOCK]:
            if not self.promise and bytes(value) not in self.blocks:
                break
            count += 1
        return count * BLOCK


@dataclass
class _Seen:
    tokens: list[int]
    blocks: list[int]


class SimExecutor(Executor):
    """One simulated worker. It sees what a worker process would: a pickled copy of each scheduler output."""

    layers: Mapping[str, Any] = {
        "layer": FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16)
    }
    """What it computes lies in the blocks of the first group; others have blocks, and nothing in them."""

    def _init_executor(self) -> None:
        self.policy = "a"
        self.store = SimStore()
        self.kv: dict[tuple[int, int], Slot] = {}
        self.seen: dict[str, _Seen] = {}
        self.steps = 0
        self.loads: list[tuple[int, str, list[tuple[int, bytes]]]] = []
        self.saves: list[tuple[int, Any]] = []
        self.pending: ModelRunnerOutput | None = None
        self.in_process = False
        """See the scheduler output itself, as the only worker of an engine without ranks does."""
        # Releases whose scheduler holds no blocks for saves: each request's saves under way, and who has ended.
        self.unsaved: dict[str, int] = {}
        self.ended: set[str] = set()

    def collective_rpc(  # type: ignore[override]
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        answers: dict[str, Any] = {
            "get_kv_cache_spec": dict(self.layers),
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "determine_available_memory": 1 << 30,
            "compile_or_warm_up_model": worker_base.CompilationTimes(0.0, 0.0),
            "moontide_store_queue": {"left": len(self.saves)},
        }
        if method == "execute_model":
            result = self._execute(args[0] if self.in_process else pickle.loads(pickle.dumps(args[0])))
        elif method == "sample_tokens":
            result, self.pending = self.pending, None
        else:
            result = answers.get(method)
        if not non_block:
            return [result]
        done: Future[Any] = Future()
        done.set_result(result)
        return [done]

    def check_health(self) -> None:
        """It is."""

    # -- one step ------------------------------------------------------------------------------------------------

    def _execute(self, output: Any) -> ModelRunnerOutput | None:
        self.steps += 1
        for gone in output.finished_req_ids:
            self.seen.pop(gone, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.seen[new.req_id] = _Seen(list(tokens), list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for index, request in enumerate(cached.req_ids):
            seen = self.seen[request]
            fresh = cached.new_block_ids[index]
            if request in cached.resumed_req_ids:
                seen.blocks = list(fresh[0])
                if request in cached.all_token_ids:
                    seen.tokens = list(cached.all_token_ids[request])
            elif fresh:
                seen.blocks.extend(fresh[0])
            starts[request] = cached.num_computed_tokens[index]
        transfers = self._transfers(output.kv_connector_metadata, output.finished_req_ids)
        ids, sampled = [], []
        for request, count in output.num_scheduled_tokens.items():
            seen = self.seen[request]
            end = starts[request] + count
            self._compute(seen, starts[request], min(end, len(seen.tokens)))
            token: list[int] = []
            if end >= len(seen.tokens):
                token = [digest(*self._visible(seen)) % VOCABULARY]
                seen.tokens.extend(token)
            ids.append(request)
            sampled.append(token)
        self._save(output.kv_connector_metadata)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: index for index, request in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=transfers,
        )
        if not ids:
            return result
        self.pending = result
        return None

    def _slot(self, seen: _Seen, position: int) -> tuple[int, int]:
        return seen.blocks[position // BLOCK], position % BLOCK

    def _compute(self, seen: _Seen, start: int, end: int) -> None:
        before = self.kv.get(self._slot(seen, start - 1)) if start else ("", 0)
        for position in range(start, end):
            before = (self.policy, digest(before, seen.tokens[position], self.policy))
            self.kv[self._slot(seen, position)] = before

    def _visible(self, seen: _Seen) -> list[Slot | None]:
        return [self.kv.get(self._slot(seen, position)) for position in range(len(seen.tokens))]

    def _transfers(self, metadata: Any, finished: set[str]) -> KVConnectorOutput | None:
        for meta in getattr(metadata, "requests", ()):
            spec = meta.load_spec
            if spec is not None and spec.can_load:
                first, last = spec.vllm_cached_tokens // BLOCK, spec.kvpool_cached_tokens // BLOCK
                wanted = [(meta.block_ids[0][i], bytes(meta.block_hashes[i])) for i in range(first, last)]
                self.loads.append((self.steps + self.store.load_steps, meta.req_id, wanted))
        output = KVConnectorOutput(finished_recving=set(), invalid_block_ids=set())
        for due, request, wanted in [load for load in self.loads if load[0] <= self.steps]:
            self.loads.remove((due, request, wanted))
            assert output.finished_recving is not None
            output.finished_recving.add(request)
            for block, key in wanted:
                content = None if self.store.fail_loads else self.store.blocks.get(key)
                if content is None:
                    if len(self.layers) > 1 and hasattr(output, "failed_recving"):
                        output.failed_recving.add(request)
                    else:
                        output.invalid_block_ids.add(block)
                    self.store.failed += 1
                    continue
                self.store.loaded += 1
                for offset, slot in enumerate(content):
                    self.kv[block, offset] = slot
        jobs = {}
        for due, meta in [save for save in self.saves if save[0] <= self.steps]:
            self.saves.remove((due, meta))
            self._store(meta)
            if HOLDS_BLOCKS:
                jobs[meta.store_job_id] = 1
            else:
                self.unsaved[meta.req_id] -= 1
        if jobs:
            output.kv_connector_worker_meta = store_data.MooncakeStoreWorkerMetadata(jobs)
        self.ended |= finished & self.unsaved.keys()
        output.finished_sending = {request for request in self.ended if not self.unsaved[request]}
        self.ended -= output.finished_sending
        for gone in output.finished_sending:
            del self.unsaved[gone]
        return None if metadata is None else output

    def _store(self, meta: Any) -> None:
        for index in range(min(meta.token_len_chunk // BLOCK, len(meta.block_hashes))):
            block = meta.block_ids[0][index]
            slots = [self.kv.get((block, offset)) for offset in range(BLOCK)]
            if None not in slots:
                self.store.blocks.setdefault(bytes(meta.block_hashes[index]), slots)

    def _save(self, metadata: Any) -> None:
        if not HOLDS_BLOCKS:
            for gone in getattr(metadata, "preempted_req_ids", ()):
                # Its blocks are free, so what was not saved in time is not saved.
                self.saves = [save for save in self.saves if save[1].req_id != gone]
                self.unsaved.pop(gone, None)
        for meta in getattr(metadata, "requests", ()):
            if not meta.can_save:
                continue
            self.saves.append((self.steps + 1 + self.store.save_steps, meta))
            if not HOLDS_BLOCKS:
                self.unsaved[meta.req_id] = self.unsaved.get(meta.req_id, 0) + 1


def _answer_lookups(client: Any, store: SimStore) -> None:
    if HOLDS_BLOCKS:
        client._lookup = lambda count, hashes: store_data.MooncakeLookupResult(store.hits(count, hashes))
    elif not hasattr(client, "_lookup"):
        # It waits for the answer. It asks for whole blocks, and leaves the last token out by itself.
        client.lookup = lambda count, hashes: store.hits(count + 1, hashes)
    elif "token_len" in inspect.signature(client._lookup).parameters:
        client._lookup = lambda count, hashes: store.hits(count + 1, hashes)
    else:
        client._lookup = store.hits


class Core:
    """An engine core and what became of its requests."""

    def __init__(
        self,
        model: Path,
        *,
        store: SimStore | None = None,
        policy: str = "a",
        load_failure: str = "recompute",
        lookup_async: bool = False,
        **overrides: Any,
    ) -> None:
        options: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 2048,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 512,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "async_scheduling": False,
            **overrides,
        }
        if store is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="MooncakeStoreConnector",
                kv_role="kv_both",
                kv_load_failure_policy=load_failure,
                kv_connector_extra_config={
                    "lookup_rpc_port": str(random.randrange(10**9)),
                    "lookup_async": lookup_async,
                },
            )
        config = EngineArgs(**options).create_engine_config()
        self.core = EngineCore(config, SimExecutor, log_stats=False)
        self.worker: Any = self.core.model_executor
        self.worker.policy = policy
        if store is not None:
            self.worker.store = store
            client = self.scheduler.connector.connector_scheduler.client
            _answer_lookups(client, store)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    @property
    def scheduler(self) -> Any:
        """The core's scheduler."""
        return self.core.scheduler

    def request(self, name: str, prompt: Sequence[int], tokens: int = 4) -> EngineCoreRequest:
        """A greedy request as the API server sends it."""
        parameters = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def add(self, name: str, prompt: Sequence[int], tokens: int = 4) -> None:
        """Hash it, as the input thread does, and add it, as the core thread does."""
        self.tokens[name] = []
        self.core.add_request(*self.core.preprocess_add_request(self.request(name, prompt, tokens)))

    def step(self, count: int = 1) -> None:
        """So many engine steps."""
        for _ in range(count):
            outputs, executed = self.core.step_fn()
            self.core.post_step(executed)
            for group in (outputs or {}).values():
                for output in group.outputs:
                    self.tokens[output.request_id].extend(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.finished[output.request_id] = str(output.finish_reason)
                        if output.prefill_stats is not None:
                            self.cached[output.request_id] = output.prefill_stats.num_cached_tokens

    def run(self, steps: int = 500) -> int:
        """Step until every request has ended; gives the steps. Raises Stuck if they do not."""
        for number in range(steps):
            if self.finished.keys() == self.tokens.keys():
                return number
            self.step()
        raise Stuck(f"{self.tokens.keys() - self.finished.keys()} have not ended after {steps} steps")

    def settle(self) -> None:
        """Step until nothing is left to save or to free."""
        for _ in range(50):
            if not self.scheduler.has_requests():
                return
            self.step()

    def ask(self, name: str, prompt: Sequence[int], tokens: int = 4) -> list[int]:
        """Add one request and run until it has ended."""
        self.add(name, prompt, tokens)
        self.run()
        return self.tokens[name]


def cold(policy: str, prompt: Sequence[int], tokens: int) -> list[int]:
    """What an engine with one policy and no cache answers: the worker's arithmetic, written out."""
    text = list(prompt)
    slots: list[Slot] = []
    answer = []
    for _ in range(tokens):
        for position in range(len(slots), len(text)):
            slots.append((policy, digest(slots[-1] if slots else ("", 0), text[position], policy)))
        answer.append(digest(*slots) % VOCABULARY)
        text.append(answer[-1])
    return answer


def prompt(seed: int, length: int = 100) -> list[int]:
    """Random tokens."""
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


@contextlib.contextmanager
def installed(*patches: Patch, on: bool = True) -> Iterator[None]:
    """The patches, for a while: what they replaced or added to classes comes back at the end.

    As in an engine, one that the release under test does not need is left out.
    """
    patches = tuple(patch for patch in patches if on and needed(patch))
    owners = set()
    for patch in patches:
        for target in patch.references:
            with contextlib.suppress(ImportError, AttributeError):
                owners.add(owner_of(target))
    kept = {owner: dict(vars(owner)) for owner in owners}
    # A router takes its handlers when they are declared.
    routes = reset_truth_front.router().router.routes
    declared = list(routes)
    try:
        for patch in patches:
            patch.install()
        yield
    finally:
        routes[:] = declared
        for owner, before in kept.items():
            for name in set(vars(owner)) - set(before):
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
