"""Patch ``resume-safety``: a request that is preempted and scheduled again in one step keeps its store bookkeeping.

``reset_prefix_cache(reset_running_requests=True)`` preempts every running request, and the next ``schedule`` often
takes them up again at once: the same scheduler output then says *preempted* and *scheduled* of one request. Stock's
``build_connector_meta`` handles the preemption last and drops what ``update_state_after_alloc`` has just recorded for
the new allocation: EngineCore dies on the missing entry, or the load is never sent and the request waits for ever.
"""

from __future__ import annotations

from typing import Any

from moontide_engine.patches import Patch, replace
from moontide_engine.patches.probe import SCHEDULER, STORE

_SCHEDULER = f"{STORE}.scheduler:MooncakeStoreScheduler"


def _allocated(original: Any) -> Any:
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        result = original(self, request, blocks, num_external_tokens)
        vars(self).setdefault("moontide_allocated", set()).add(request.request_id)
        return result

    return update_state_after_alloc


def _build(original: Any) -> Any:
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        allocated: set[str] = vars(self).setdefault("moontide_allocated", set())
        preempted: set[str] = scheduler_output.preempted_req_ids or set()
        back = preempted & allocated
        allocated.clear()
        if not back:
            return original(self, scheduler_output)
        for request in back:
            # Of the time before the preemption; what belongs to the new allocation is not in it.
            tracker = self._request_trackers.pop(request, None)
            if tracker is not None:
                tracker.reset()
        scheduler_output.preempted_req_ids = preempted - back
        try:
            meta = original(self, scheduler_output)
        finally:
            scheduler_output.preempted_req_ids = preempted
        # The worker has to hear of all of them.
        meta.preempted_req_ids = set(preempted)
        return meta

    return build_connector_meta


def _install() -> None:
    replace(f"{_SCHEDULER}.update_state_after_alloc", _allocated)
    replace(f"{_SCHEDULER}.build_connector_meta", _build)


PATCH = Patch(
    name="resume-safety",
    summary="preempted and resumed in one step is no loss",
    references=(
        f"{_SCHEDULER}.update_state_after_alloc",
        f"{_SCHEDULER}.build_connector_meta",
        f"{_SCHEDULER}.get_num_new_matched_tokens",
        f"{STORE}.data:RequestTracker.reset",
        f"{SCHEDULER}._preempt_request",
        f"{SCHEDULER}.reset_prefix_cache",
    ),
    install=_install,
    optional=True,
    made_for=("0.32.0", "0.33.0"),
)
