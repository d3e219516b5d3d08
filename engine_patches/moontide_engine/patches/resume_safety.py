"""Patch ``resume-safety``: a request that is preempted and scheduled again in one step keeps its store bookkeeping.

``reset_prefix_cache(reset_running_requests=True)`` preempts every running request, and the next ``schedule`` often
takes them up again at once: the same scheduler output then says *preempted* and *scheduled* of one request. Stock's
``build_connector_meta`` handles the preemption last and drops what ``update_state_after_alloc`` has just recorded for
the new allocation: EngineCore dies on the missing entry, or the load is never sent and the request waits for ever.

Until 0.24 the connector does not even hear of such preemptions: it goes on with blocks that are free, saves under the
request's hashes what others compute there, and reports the end of saves of requests that are gone (EngineCore dies).

Until 0.27 the worker counts the saves of a request by its name alone. The count of a request that is back in the step
of its preemption is deleted with its new saves in it, so its blocks are never freed; and saves queued before the
preemption run after it, over blocks that are others' by now. Here they are dropped, and each save is counted once.
"""

from __future__ import annotations

import importlib
from typing import Any

from moontide_engine.patches import Patch, replace
from moontide_engine.patches.probe import SCHEDULER, STORE

_SCHEDULER = f"{STORE}.scheduler:MooncakeStoreScheduler"
_SENDER = f"{STORE}.worker:KVCacheStoreSendingThread"
_WORKER = f"{STORE}.worker:MooncakeStoreWorker"


def _allocated(original: Any) -> Any:
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        result = original(self, request, blocks, num_external_tokens)
        try:
            self.moontide_allocated.append(request.request_id)
        except AttributeError:
            self.moontide_allocated = [request.request_id]
        return result

    return update_state_after_alloc


def _preempted(original: Any) -> Any:
    def preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        # Later releases tell the connector themselves.
        if not hasattr(self, "reset_preempted_req_ids"):
            for child in getattr(self.connector, "_connectors", None) or [self.connector]:
                store = getattr(child, "connector_scheduler", None)
                if store is not None and hasattr(store, "_request_trackers"):
                    vars(store).setdefault("moontide_preempted", set()).add(request.request_id)
                    # If it is aborted before the next step, the worker has no saves of it to report.
                    store._request_trackers.pop(request.request_id, None)
        return result

    return preempt


def _build(original: Any) -> Any:
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        allocated = self.moontide_allocated
        if allocated:
            self.moontide_allocated = []
        if not scheduler_output.preempted_req_ids and not self.moontide_preempted:
            return original(self, scheduler_output)
        preempted: set[str] = scheduler_output.preempted_req_ids or set()
        preempted = preempted | vars(self).pop("moontide_preempted", set())
        back = preempted.intersection(allocated)
        for request in back:
            # Of the time before the preemption; what belongs to the new allocation is not in it.
            tracker = self._request_trackers.pop(request, None)
            if tracker is not None:
                tracker.reset()
        # By this set old releases tell a request that resumes from one that goes on.
        vars(self).get("_preempted_req_ids", set()).update(back)
        told = scheduler_output.preempted_req_ids
        scheduler_output.preempted_req_ids = preempted - back
        try:
            meta = original(self, scheduler_output)
        finally:
            scheduler_output.preempted_req_ids = told
        # The worker has to hear of all of them.
        meta.preempted_req_ids = set(preempted)
        return meta

    return build_connector_meta


def _transfers(original: Any) -> Any:
    def get_finished(self: Any, finished_req_ids: set[str], meta: Any) -> Any:
        sender, preempted = self.kv_send_thread, meta.preempted_req_ids
        if sender is None:
            return original(self, finished_req_ids, meta)
        drop_saves(sender, preempted)
        jobs = vars(sender).setdefault("moontide_jobs", {})
        with sender.done_task_lock:
            for job in meta.requests:
                if job.can_save:
                    jobs.setdefault(job.req_id, {})[id(job)] = job
        # Stock would do it now, and after it has counted the new saves.
        meta.preempted_req_ids = set()
        try:
            return original(self, finished_req_ids, meta)
        finally:
            meta.preempted_req_ids = preempted

    return get_finished


def drop_saves(sender: Any, requests: set[str]) -> None:
    """Saves of ``requests`` that the sending thread has not begun do nothing; none that it has begun counts."""
    for request in requests:
        with sender.done_task_lock:
            for job in vars(sender).get("moontide_jobs", {}).pop(request, {}).values():
                job.moontide_counted = True
                job.token_len_chunk, job.partial_tail_offloads = 0, None
        sender.delete_finished_stored_request(request)


def _save(original: Any) -> Any:
    def _handle_request(self: Any, job: Any) -> None:
        self.moontide_job = job
        try:
            original(self, job)
        finally:
            # 0.22 forgets it when the store raises.
            self.dec_stored_request(job.req_id)
            with self.done_task_lock:
                mine = vars(self).get("moontide_jobs", {}).get(job.req_id, {})
                mine.pop(id(job), None)
                if not mine:
                    vars(self).get("moontide_jobs", {}).pop(job.req_id, None)

    return _handle_request


def _count(original: Any) -> Any:
    def dec_stored_request(self: Any, req_id: str) -> None:
        with self.done_task_lock:
            job = self.moontide_job
            if not getattr(job, "moontide_counted", False) and req_id in self.stored_requests:
                self.stored_requests[req_id] -= 1
            job.moontide_counted = True

    return dec_stored_request


def _install() -> None:
    half = importlib.import_module(_SCHEDULER.partition(":")[0]).MooncakeStoreScheduler
    # Until one has its own.
    half.moontide_allocated = half.moontide_preempted = ()
    replace(f"{_SCHEDULER}.update_state_after_alloc", _allocated)
    replace(f"{_SCHEDULER}.build_connector_meta", _build)
    replace(f"{SCHEDULER}._preempt_request", _preempted)
    worker = importlib.import_module(_SENDER.partition(":")[0])
    # Later releases hold the blocks of each save until its end, and count by job.
    if hasattr(worker.KVCacheStoreSendingThread, "dec_stored_request"):
        replace(f"{_SENDER}.dec_stored_request", _count)
        replace(f"{_SENDER}._handle_request", _save)
        replace(f"{_WORKER}.get_finished", _transfers)


PATCH = Patch(
    name="resume-safety",
    summary="preempted and resumed in one step is no loss",
    references=(
        f"{_SCHEDULER}.update_state_after_alloc",
        f"{_SCHEDULER}.build_connector_meta",
        f"{_SCHEDULER}.get_num_new_matched_tokens",
        f"{_SCHEDULER}.request_finished",
        f"{STORE}.data:RequestTracker.reset",
        f"{_SENDER}.add_stored_request",
        f"{_SENDER}.dec_stored_request",
        f"{_SENDER}.delete_finished_stored_request",
        f"{_SENDER}._handle_request",
        f"{_WORKER}.get_finished",
        f"{_WORKER}._get_and_clear_finished_sending",
        f"{SCHEDULER}._preempt_request",
        f"{SCHEDULER}.reset_prefix_cache",
    ),
    install=_install,
    optional=True,
)
