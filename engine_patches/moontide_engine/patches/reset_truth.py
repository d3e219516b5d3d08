"""Patch ``reset-truth``: a reset of the caches through vLLM's own routes says what happened, and ends.

Stock vLLM drops the store's return code (success with a dead master), waits for the worker without bound and the engine
with it, wipes the store although the local reset was refused, wipes all that is on the master, takes a connector that
resets nothing for success, skips connectors behind one that raises, and resets nothing after an update of the weights.
"""

from __future__ import annotations

import importlib

from moontide_engine.patches import Patch, replace
from moontide_engine.patches import reset_truth_core as core
from moontide_engine.patches import reset_truth_front as front
from moontide_engine.patches import reset_truth_store as store
from moontide_engine.patches.probe import CORE, SCHEDULER, STORE

MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
OFFLINE = "vllm.entrypoints.rl.offline:RLOfflineMixin"

_REPLACED = {
    f"{STORE}.worker:MooncakeStoreWorker.__init__": store.worker_init,
    f"{STORE}.worker:LookupKeyServer.__init__": store.server_init,
    f"{STORE}.worker:LookupKeyClient.__init__": store.client_init,
    f"{STORE}.worker:LookupKeyClient._reset": store.client_reset_inner,
    f"{STORE}.worker:LookupKeyClient.reset": store.client_reset,
    f"{STORE}.scheduler:MooncakeStoreScheduler.reset_store": store.scheduler_reset_store,
    f"{STORE}.scheduler:MooncakeStoreScheduler.get_num_new_matched_tokens": store.scheduler_match,
    f"{MULTI}.reset_cache": core.multi_reset,
    f"{CORE}.reset_prefix_cache": core.core_reset,
    f"{CORE}._reset_caches": core.core_reset_caches,
    f"{front.ROUTER}:reset_prefix_cache": front.route,
    f"{ASYNC_LLM}.finish_weight_update": front.finish_online,
    f"{OFFLINE}.finish_weight_update": front.finish_offline,
}


def _install() -> None:
    for target, make in _REPLACED.items():
        replace(target, make)
    front.reroute()
    engine_core = importlib.import_module("vllm.v1.engine.core").EngineCore
    engine_core.moontide_reset = core.moontide_reset
    engine_core.moontide_reset_local = core.moontide_reset_local


PATCH = Patch(
    name="reset-truth",
    summary="cache resets are scoped, bounded and honest, and follow every update of the weights",
    references=(
        *_REPLACED,
        f"{STORE}.worker:LookupKeyClient._lookup",
        f"{STORE}.worker:LookupKeyClient.lookup",
        f"{STORE}.worker:LookupKeyClient.discard",
        f"{STORE}.worker:LookupKeyClient.close",
        f"{STORE}.worker:get_zmq_rpc_path_lookup",
        f"{STORE}.scheduler:MooncakeStoreScheduler._reference_save_blocks",
        f"{STORE}.scheduler:MooncakeStoreScheduler.register_finished_partial_tail",
        f"{STORE}.connector:MooncakeStoreConnector.reset_cache",
        f"{STORE}.connector:MooncakeStoreConnector.has_pending_push_work",
        f"{STORE}.data:PoolKey.to_string",
        f"{MULTI}.has_pending_push_work",
        f"{CORE}._finish_pause",
        f"{CORE}.sleep",
        f"{CORE}.wake_up",
        f"{CORE}.release_kv_cache_memory",
        "vllm.v1.engine.core:EngineCoreProc._invoke_utility_method",
        f"{SCHEDULER}.reset_prefix_cache",
        f"{SCHEDULER}.reset_connector_cache",
        "vllm.v1.engine.core_client:InprocClient.reset_prefix_cache",
        "vllm.v1.engine.core_client:SyncMPClient.call_utility",
        "vllm.v1.engine.core_client:AsyncMPClient.reset_prefix_cache_async",
        f"{ASYNC_LLM}.update_weight_version",
        f"{OFFLINE}.update_weight_version",
        f"{front.ROUTER}:engine_client",
        f"{front.ROUTER}:attach_router",
    ),
    install=_install,
    made_for=("0.32.0", "0.33.0"),
)
