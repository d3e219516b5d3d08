"""Patch ``common-hit``: every kind of full attention is given hits of the common length, not only the first kind.

A model with several kinds of KV blocks has a local hit as long as the shortest of its kinds. Full attention is looked
up once and cut when another kind has less. Before vLLM 0.32 that is done for the first kind of full attention alone:
a second one (a drafter with other heads, say, beside full attention and sliding windows) keeps its longer hit. Where
external tokens then follow, that group asks the block pool for a negative number of blocks: the free queue counts
more than it has, and EngineCore ends when it takes them.
"""

from __future__ import annotations

import importlib
from typing import Any

from moontide_engine.patches import Patch, replace

_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator"
_INTERFACE = "vllm.v1.kv_cache_interface"


def _find(original: Any) -> Any:
    full = importlib.import_module(_INTERFACE).FullAttentionSpec

    def find_longest_cache_hit(self: Any, block_hashes: Any, max_cache_hit_length: int) -> Any:
        found = original(self, block_hashes, max_cache_hit_length)
        # Later releases tell more.
        hits, length = found[0], found[1]
        for group, manager, blocks in zip(
            self.kv_cache_config.kv_cache_groups, self.single_type_managers, hits, strict=True
        ):
            if isinstance(group.kv_cache_spec, full):
                # A hit may end within a block since 0.27.
                del blocks[-(-length // manager.block_size) :]
        return found

    return find_longest_cache_hit


def _install() -> None:
    replace(f"{_COORDINATOR}.find_longest_cache_hit", _find)


PATCH = Patch(
    name="common-hit",
    summary="a local hit is as long in every kind of full attention as in the others",
    references=(
        f"{_COORDINATOR}.__init__",
        f"{_COORDINATOR}.find_longest_cache_hit",
        f"{_COORDINATOR}.verify_and_split_kv_cache_groups",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.__init__",
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit",
        f"{_INTERFACE}:FullAttentionSpec",
    ),
    install=_install,
    upstream=("0.32.0", "0.33.0"),
    optional=True,
)
