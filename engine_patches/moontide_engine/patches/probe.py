"""Patch ``probe``: two short read-only calls on EngineCore and on its workers. They replace nothing."""

from __future__ import annotations

import importlib
from typing import Any

from moontide_engine.patches import Patch

CORE = "vllm.v1.engine.core:EngineCore"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
ASYNC_CLIENT = "vllm.v1.engine.core_client:AsyncMPClient"
STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"


def moontide_probe(self: Any) -> dict[str, Any]:
    """Utility of EngineCore: requests in the scheduler, those that only wait for transfers, the pause, the patches."""
    from moontide_engine.plugin import PATCHES

    scheduler = self.scheduler
    running, waiting = scheduler.get_request_counts()
    connector = scheduler.connector
    # Before 0.24 connectors have no such question; a request with saves under way is then still in ``requests``.
    pushing = connector is not None and getattr(connector, "has_pending_push_work", bool)()
    return {
        "running": running,
        "waiting": waiting,
        "settling": max(len(scheduler.requests) - running - waiting, 0) + int(pushing),
        "paused": self.is_scheduler_paused(),
        "patches": dict(PATCHES.table),
    }


def moontide_store_queue(self: Any) -> dict[str, Any]:
    """Method of every worker: its store traffic that has not ended, and whether it has a store at all. Never waits."""
    answer: dict[str, Any] = {"rank": self.rank, "left": 0, "loading": 0, "attached": False, "reason": "NoConnector"}
    for worker in _store_workers():
        if worker.store is None:
            answer["reason"] = "the store was closed"
            continue
        sender = worker.kv_send_thread
        if sender is not None:
            answer["left"] += sender.request_queue.unfinished_tasks
            if not sender.is_alive():
                answer["reason"] = "the store's send thread has ended"
                continue
        # The receiving threads share one queue; before 0.27 there is one thread.
        loads = getattr(worker, "recv_request_queue", None) or worker.kv_recv_thread.request_queue
        answer["loading"] += loads.unfinished_tasks
        answer.update(attached=True, reason="")
    return answer


def _store_workers() -> list[Any]:
    transfer = importlib.import_module("vllm.distributed.kv_transfer")
    if not transfer.has_kv_transfer_group():
        return []
    group = transfer.get_kv_transfer_group()
    workers = (getattr(child, "connector_worker", None) for child in getattr(group, "_connectors", None) or [group])
    return [worker for worker in workers if worker is not None and hasattr(worker, "kv_send_thread")]


def _install() -> None:
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    base = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    core.moontide_probe = moontide_probe
    base.moontide_store_queue = moontide_store_queue


PATCH = Patch(
    name="probe",
    summary="request counts and store queues of every rank",
    references=(
        f"{CORE}.is_scheduler_paused",
        f"{CORE}.collective_rpc",
        f"{CORE}.reset_encoder_cache",
        f"{CORE}.reset_mm_cache",
        "vllm.v1.engine.core:EngineCoreProc.pause_scheduler",
        f"{SCHEDULER}.get_request_counts",
        f"{SCHEDULER}.has_finished_requests",
        f"{ASYNC_CLIENT}._call_utility_async",
        "vllm.v1.engine.async_llm:AsyncLLM.pause_generation",
        "vllm.v1.engine.async_llm:AsyncLLM.reset_mm_cache",
        f"{STORE}.scheduler:MooncakeStoreScheduler.has_pending_push_work",
        f"{STORE}.scheduler:MooncakeStoreScheduler.update_connector_output",
        f"{STORE}.worker:MooncakeStoreWorker.__init__",
        f"{STORE}.worker:KVTransferThread.run",
        f"{STORE}.worker:KVTransferThread.add_request",
        f"{STORE}.worker:KVCacheStoreSendingThread.add_request",
        f"{STORE}.worker:KVCacheStoreSendingThread._handle_request",
        f"{STORE}.worker:KVCacheStoreRecvingThread._handle_request",
    ),
    install=_install,
)
