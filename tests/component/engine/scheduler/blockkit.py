"""A real KVCacheManager with several cache groups, without an engine, and what must be true of its blocks.

:class:`Blocks` does what a scheduler does with it: admits requests with local hits and external tokens, computes on,
finishes and preempts them. After each of its calls it checks the books of the pool, and raises :class:`Wrong`.
"""

from __future__ import annotations

import inspect
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

BLOCK = 16
VOCABULARY = 500


class Wrong(AssertionError):
    """The manager has given out or taken back blocks wrongly."""


def must(condition: bool, text: str) -> None:
    """Raises Wrong with ``text`` unless it is so."""
    if not condition:
        raise Wrong(text)


# -- what differs between releases ---------------------------------------------------------------------------------

if hasattr(single_type_kv_cache_manager, "register_all_kvcache_specs"):
    # From 0.23 on the engine's start does it.
    single_type_kv_cache_manager.register_all_kvcache_specs(None)
kv_cache_utils.init_none_hash(sha256)


def build(specs: Sequence[Any], num_blocks: int, **options: Any) -> Any:
    """A manager with a group for each spec; ``num_blocks`` includes the null block."""
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    given = {
        "max_model_len": 4096,
        "hash_block_size": BLOCK,
        "scheduler_block_size": math.lcm(*(spec.block_size for spec in specs)),
        **options,
    }
    taken = inspect.signature(KVCacheManager).parameters
    return KVCacheManager(config, **{name: value for name, value in given.items() if name in taken})


def lookup(manager: Any, request: Any) -> tuple[Any, int]:
    """Local hits and their tokens. Later releases tell more."""
    blocks, count, *_ = manager.get_computed_blocks(request)
    return blocks, count


# -- the same for all ----------------------------------------------------------------------------------------------


def full(blocks: int = 1, heads: int = 1) -> Any:
    """Full attention. ``blocks``: block size in hashed blocks."""
    return FullAttentionSpec(block_size=blocks * BLOCK, num_kv_heads=heads, head_size=8, dtype=torch.float16)


def sliding(window: int, blocks: int = 1) -> Any:
    """Attention to the last ``window`` tokens."""
    return SlidingWindowSpec(
        block_size=blocks * BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16, sliding_window=window
    )


def chunked(chunk: int) -> Any:
    """Attention within chunks of so many tokens."""
    return ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16, attention_chunk_size=chunk
    )


def is_full(spec: Any) -> bool:
    """Whether it is full attention."""
    return isinstance(spec, FullAttentionSpec)


def is_chunked(spec: Any) -> bool:
    """Whether it is attention within chunks."""
    return isinstance(spec, ChunkedLocalAttentionSpec)


def tokens(seed: int, count: int) -> list[int]:
    """Random tokens; those of one seed begin alike."""
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(count)]


@dataclass
class Held:
    """A request that has blocks, or had them until it was preempted."""

    request: Any
    loading: bool = False


@dataclass
class Blocks:
    """A manager and the requests that hold its blocks."""

    specs: Sequence[Any]
    num_blocks: int
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.manager = build(self.specs, self.num_blocks, **self.options)
        self.pool = self.manager.block_pool
        self.groups = self.manager.coordinator.single_type_managers
        self.align = math.lcm(*(spec.block_size for spec in self.specs))
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        self.held: dict[str, Held] = {}
        self.preempted: dict[str, Held] = {}
        self.local_and_external = 0
        """Requests that were admitted with both."""

    def request(self, name: str, prompt: Sequence[int]) -> Any:
        """As the scheduler has it."""
        return Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=1000),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def queue(self) -> list[int]:
        """Ids of the free blocks, the next to be taken first."""
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def of(self, name: str, group: int) -> list[Any]:
        """Blocks of a request in a group, nulls included."""
        return list(self.groups[group].req_to_blocks.get(name, ()))

    def take(self, name: str, prompt: Sequence[int], external: int = 0, chunk: int | None = None) -> int | None:
        """Admit a new request: its local hit in tokens, or None if it does not fit. See :meth:`admit`."""
        return self.admit(Held(self.request(name, prompt)), external, chunk)

    def admit(self, held: Held, external: int = 0, chunk: int | None = None, whole: bool = True) -> int | None:
        """Give a request its local hits, room for ``external`` tokens (rounded down to what can be hit; at most what
        is missing), and room for ``chunk`` more: None is all the rest, 0 an asynchronous load.
        """
        request = held.request
        self.manager.new_step_starts()
        hits, local = lookup(self.manager, request)
        missing = (request.num_tokens - 1 - local) // self.align * self.align
        external = min(external // self.align * self.align, missing)
        rest = request.num_tokens - local - external
        new = rest if chunk is None else min(chunk, rest)
        if external == 0 and new == 0:
            new = 1
        before = self.queue()
        hit = {
            (group, index): (block.block_id, block.block_hash)
            for group, blocks in enumerate(hits.blocks)
            for index, block in enumerate(blocks)
            if not block.is_null
        }
        result = self.manager.allocate_slots(
            request,
            new,
            local,
            hits,
            num_external_computed_tokens=external,
            delay_cache_blocks=new == 0,
            full_sequence_must_fit=whole,
        )
        if result is None:
            must(self.queue() == before, "a request that does not fit has moved blocks")
            return None
        self.held[request.request_id] = held
        self.local_and_external += local > 0 and external > 0
        held.loading = new == 0
        request.num_computed_tokens = local + external + new
        self._check_hits(request.request_id, hit, before)
        self.check()
        return local

    def arrive(self, name: str) -> None:
        """The load of a request has ended well."""
        held = self.held[name]
        held.loading = False
        self.manager.cache_blocks(held.request, held.request.num_computed_tokens)
        self.check()

    def advance(self, name: str, count: int) -> bool:
        """Compute up to ``count`` more tokens, which are sampled if the prompt has been computed. False: no room."""
        request = self.held[name].request
        self.manager.new_step_starts()
        rest = request.num_tokens - request.num_computed_tokens
        if rest == 0:
            request.append_output_token_ids(tokens(request.num_tokens, count))
            rest = count
        new = min(count, rest)
        if self.manager.allocate_slots(request, new) is None:
            self.check()
            return False
        request.num_computed_tokens += new
        self.check()
        return True

    def finish(self, name: str) -> None:
        """It is done."""
        self.manager.free(self.held.pop(name).request)
        self.check()

    def preempt(self, name: str) -> None:
        """Take its blocks; :meth:`resume` may give it others."""
        held = self.held.pop(name)
        self.manager.free(held.request)
        held.request.num_computed_tokens = 0
        held.loading = False
        self.preempted[name] = held
        self.check()

    def resume(self, name: str, external: int = 0, chunk: int | None = None) -> int | None:
        """Admit a preempted request again."""
        local = self.admit(self.preempted[name], external, chunk)
        if local is not None:
            del self.preempted[name]
        return local

    # -- what must be true -----------------------------------------------------------------------------------------

    def _check_hits(self, name: str, hit: dict[tuple[int, int], tuple[int, Any]], before: list[int]) -> None:
        """Hits are where they were, as they were, and all else that it got were the blocks next in turn."""
        kept = set()
        for (group, index), (block_id, block_hash) in hit.items():
            block = self.of(name, group)[index]
            if not block.is_null:
                must(block.block_id == block_id, f"group {group} has another block than its hit")
                must(block.block_hash == block_hash, f"the hit of group {group} was evicted for another group")
                kept.add(block_id)
        free = [block for block in before if block not in kept]
        after = self.queue()
        must(after == free[len(free) - len(after) :], "not the least recently used blocks were taken")

    def check(self) -> None:
        """The books of the pool against the blocks of all requests."""
        holders: defaultdict[int, list[tuple[str, int, int]]] = defaultdict(list)
        for name in self.held:
            for group in range(len(self.groups)):
                for index, block in enumerate(self.of(name, group)):
                    if not block.is_null:
                        holders[block.block_id].append((name, group, index))
        for block_id, where in holders.items():
            self._check_shared(block_id, where)
        queue = self.queue()
        free = set(queue)
        must(len(free) == len(queue), "a block is in the free queue twice")
        must(len(queue) == self.pool.get_num_free_blocks(), "the free queue does not have the length it tells")
        for block in self.pool.blocks:
            if block.is_null:
                must(block.block_id not in free, "the null block is free")
                continue
            count = len(holders[block.block_id])
            must(block.ref_cnt == count, f"block {block.block_id} has {block.ref_cnt} references, {count} holders")
            must((block.block_id in free) == (count == 0), f"block {block.block_id} with {count} holders")

    def _check_shared(self, block_id: int, where: list[tuple[str, int, int]]) -> None:
        must(len({group for _, group, _ in where}) == 1, f"block {block_id} backs two groups: {where}")
        must(len({name for name, _, _ in where}) == len(where), f"block {block_id} is in a request twice: {where}")
        if len(where) == 1:
            return
        block = self.pool.blocks[block_id]
        group = where[0][1]
        must(block.block_hash is not None, f"block {block_id} is shared and has no hash: {where}")
        must(kv_cache_utils.get_group_id(block.block_hash) == group, f"block {block_id} has the hash of another group")
        size = self.specs[group].block_size
        texts = {tuple(self.held[name].request.all_token_ids[: (index + 1) * size]) for name, _, index in where}
        must(len(texts) == 1, f"block {block_id} is shared by different texts: {where}")
