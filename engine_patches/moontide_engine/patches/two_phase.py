"""Patch ``two-phase-allocation``: every cache group holds its local hits before any group takes blocks to load into.

A request with local hits and external tokens gets its blocks from one coordinator, group by group. Before vLLM 0.24
each group touches its own hits and takes blocks for the external tokens at once, from the same free queue that the
hits of later groups are still in: cached, and referenced by nobody. A block taken from there is evicted, and then the
later group touches it as its hit: one block backs two groups, and the load of one overwrites what the other reads.
"""

from __future__ import annotations

from typing import Any

from moontide_engine.patches import Patch, replace

_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_POOL = "vllm.v1.core.block_pool:BlockPool"


def _allocate(original: Any) -> Any:
    def allocate_new_computed_blocks(
        self: Any,
        request_id: str,
        new_computed_blocks: Any,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        managers = self.single_type_managers
        if num_external_computed_tokens <= 0 or len(managers) < 2 or not self.enable_caching:
            original(self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens)
            return
        total = num_local_computed_tokens + num_external_computed_tokens
        pool = self.block_pool
        held: list[Any] = []
        try:
            # The first group touches its hits before anything is taken.
            for manager, hits in zip(managers[1:], new_computed_blocks[1:], strict=True):
                if not hits:
                    continue
                # No more than the group is going to touch: the rest has slid out of its window, and the capacity
                # check has counted it as free.
                for block in hits[manager.get_num_skipped_tokens(total) // manager.block_size :]:
                    if block.is_null:
                        continue
                    # BlockPool.touch would have the metrics count an access more.
                    if block.ref_cnt == 0:
                        pool.free_block_queue.remove(block)
                    block.ref_cnt += 1
                    held.append(block)
            original(self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens)
        finally:
            # The request has its own references by now, so none of these becomes free, unless the original failed:
            # then the tails go first, as ever.
            pool.free_blocks(reversed(held))

    return allocate_new_computed_blocks


def _install() -> None:
    replace(f"{_COORDINATOR}.allocate_new_computed_blocks", _allocate)


PATCH = Patch(
    name="two-phase-allocation",
    summary="no cache group takes a block that another one has just hit",
    references=(
        f"{_COORDINATOR}.allocate_new_computed_blocks",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        f"{_MANAGERS}:SingleTypeKVCacheManager.allocate_new_computed_blocks",
        f"{_MANAGERS}:CrossAttentionManager.allocate_new_computed_blocks",
        f"{_MANAGERS}:SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        f"{_MANAGERS}:SingleTypeKVCacheManager.get_num_skipped_tokens",
        f"{_MANAGERS}:SlidingWindowManager.get_num_skipped_tokens",
        f"{_MANAGERS}:ChunkedLocalAttentionManager.get_num_skipped_tokens",
        f"{_MANAGERS}:MambaManager.get_num_skipped_tokens",
        f"{_MANAGERS}:MambaManager.get_num_blocks_to_allocate",
        f"{_POOL}.touch",
        f"{_POOL}.free_blocks",
        f"{_POOL}.get_new_blocks",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove",
    ),
    install=_install,
    upstream=("0.24.0", "0.27.1", "0.32.0", "0.33.0"),
    optional=True,
)
