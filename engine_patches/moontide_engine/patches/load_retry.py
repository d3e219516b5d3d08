"""Patch ``load-retry-bound``: a load that fails is tried once more; then the request goes on without the store.

With ``kv_load_failure_policy=recompute`` stock looks the request up again, and a store whose lookup keeps promising
what its load cannot give (an expired lease, a lost segment) is believed for ever. With ``fail``, upstream's default,
the client gets a 500. Here a failed load is always recomputed.

Up to vLLM 0.27 a failed load of a model with several groups of KV blocks ends EngineCore: the blocks that failed are
looked for in the only group there may be. Here they are looked for in all of them.
"""

from __future__ import annotations

import importlib
from typing import Any

from moontide_engine.patches import Patch, replace
from moontide_engine.patches.probe import SCHEDULER, STORE

MAX_FAILED_LOADS = 2

_STORE_SCHEDULER = f"{STORE}.scheduler:MooncakeStoreScheduler"


def _init(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.connector is not None:
            self.recompute_kv_load_failures = True

    return init


def _arrived(original: Any) -> Any:
    def update_waiting_for_remote_kv(self: Any, request: Any) -> Any:
        failed = request.request_id in self.failed_recving_kv_req_ids
        result = original(self, request)
        if failed and not vars(request).pop("moontide_dropped", False):
            request.moontide_failed_loads = getattr(request, "moontide_failed_loads", 0) + 1
        return result

    return update_waiting_for_remote_kv


def _invalid(original: Any) -> Any:
    def handle_invalid_blocks(self: Any, invalid_block_ids: set[int], num_scheduled_tokens: Any) -> Any:
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) < 2 or hasattr(self, "_handle_failed_recving"):
            return original(self, invalid_block_ids, num_scheduled_tokens)
        waiting = importlib.import_module("vllm.v1.request").RequestStatus.WAITING_FOR_REMOTE_KVS

        def holds(request: Any) -> bool:
            tables = self.kv_cache_manager.get_block_ids(request.request_id)
            return any(block in invalid_block_ids for table in tables for block in table)

        if any(holds(request) for request in self.running):
            # A load within the step, which this connector has not. Stock ends the engine, and nothing wrong is served.
            return original(self, invalid_block_ids, num_scheduled_tokens)
        for request in self.requests.values():
            if request.status == waiting and holds(request):
                # What is still valid would have to be told for each group: all of it is computed.
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request.request_id)
        return set()

    return handle_invalid_blocks


def _match(original: Any) -> Any:
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        if getattr(request, "moontide_failed_loads", 0) >= MAX_FAILED_LOADS:
            return 0, False
        return original(self, request, num_computed_tokens)

    return get_num_new_matched_tokens


def _install() -> None:
    replace(f"{SCHEDULER}.__init__", _init)
    replace(f"{SCHEDULER}._update_waiting_for_remote_kv", _arrived)
    replace(f"{SCHEDULER}._handle_invalid_blocks", _invalid)
    replace(f"{_STORE_SCHEDULER}.get_num_new_matched_tokens", _match)


PATCH = Patch(
    name="load-retry-bound",
    summary="a load that fails twice is computed instead",
    references=(
        f"{SCHEDULER}.__init__",
        f"{SCHEDULER}._update_waiting_for_remote_kv",
        f"{SCHEDULER}._handle_invalid_blocks",
        f"{SCHEDULER}._handle_failed_recving",
        f"{_STORE_SCHEDULER}.get_num_new_matched_tokens",
    ),
    install=_install,
    optional=True,
)
