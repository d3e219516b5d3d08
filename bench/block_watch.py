"""A vLLM plugin for benches: counts the KV blocks that an engine gives out twice. It changes nothing.

After each allocation the scheduler's books are read: a block that two groups of KV cache hold, of one request or of
two, was given out twice (blocks that requests of the same group share are the prefix cache), and a block that a request
holds and that counts no reference can be given out again at any time. The counts go to the file ``BLOCK_WATCH_FILE``.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any


def look(manager: Any) -> dict[str, int]:
    """Blocks held by two groups, and blocks held without a reference, of all requests together."""
    holders: dict[int, set[int]] = {}
    unreferenced = set()
    for group, single in enumerate(manager.coordinator.single_type_managers):
        for blocks in single.req_to_blocks.values():
            for block in blocks:
                if block.is_null:
                    continue
                holders.setdefault(block.block_id, set()).add(group)
                if block.ref_cnt < 1:
                    unreferenced.add(block.block_id)
    return {"twice": sum(len(groups) > 1 for groups in holders.values()), "unreferenced": len(unreferenced)}


def register() -> None:
    """Entry point of the plugin."""
    path = os.environ.get("BLOCK_WATCH_FILE")
    if not path:
        return
    target = Path(path)
    owner: Any = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    original = owner.allocate_slots
    counts = {"allocations": 0, "twice": 0, "unreferenced": 0, "worst": 0}

    def allocate_slots(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        counts["allocations"] += 1
        found = look(self)
        if found["twice"] or found["unreferenced"]:
            counts["twice"] += bool(found["twice"])
            counts["unreferenced"] += bool(found["unreferenced"])
            counts["worst"] = max(counts["worst"], found["twice"])
        if any(found.values()) or counts["allocations"] % 50 == 1:
            new = target.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(counts))
            new.replace(target)
        return made

    # The patches ask for the source of what they rely on.
    allocate_slots.__moontide_original__ = original  # type: ignore[attr-defined]
    owner.allocate_slots = allocate_slots
