"""Patch ``reset-truth``: a reset of the caches through vLLM's own routes says what happened, and ends.

Stock vLLM drops the store's return code (success with a dead master), waits for the worker without bound and the engine
with it, wipes the store although the local reset was refused, wipes all that is on the master, takes a connector that
resets nothing for success, skips connectors behind one that raises, and resets nothing after an update of the weights.
"""

from __future__ import annotations

import contextlib
import importlib

from moontide_engine.fingerprint import Missing
from moontide_engine.patches import Patch, replace
from moontide_engine.patches import lookup_channel as channel
from moontide_engine.patches import reset_truth_core as core
from moontide_engine.patches import reset_truth_front as front
from moontide_engine.patches import reset_truth_store as store
from moontide_engine.patches.probe import ASYNC_CLIENT, CORE, SCHEDULER, STORE

MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
OFFLINE = ("vllm.entrypoints.rl.offline:RLOfflineMixin", "vllm.entrypoints.llm:LLM")
"""Where an update of the weights ends without a server, since 0.32 and before."""

_REPLACED = {
    f"{STORE}.worker:MooncakeStoreWorker.__init__": store.worker_init,
    f"{STORE}.worker:LookupKeyServer.__init__": store.server_init,
    f"{channel.CLIENT}.__init__": store.client_init,
    f"{channel.CLIENT}._reset": store.client_reset_inner,
    f"{channel.CLIENT}.reset": store.client_reset,
    f"{channel.HALF}.reset_store": store.scheduler_reset_store,
    f"{MULTI}.reset_cache": core.multi_reset,
    f"{CORE}.reset_prefix_cache": core.core_reset,
    f"{CORE}._reset_caches": core.core_reset_caches,
    "vllm.v1.engine.core:EngineCoreProc.pause_scheduler": core.core_pause,
    f"{ASYNC_CLIENT}.reset_prefix_cache_async": front.reset_everywhere,
    f"{front.ROUTERS[0]}:reset_prefix_cache": front.route,
    f"{front.ROUTERS[1]}:reset_prefix_cache": front.route,
    f"{ASYNC_LLM}.finish_weight_update": front.finish_online,
    f"{OFFLINE[0]}.finish_weight_update": front.finish_offline,
    f"{OFFLINE[1]}.finish_weight_update": front.finish_offline,
}


def _install() -> None:
    channel.shape()
    for target, make in _REPLACED.items():
        # What is not there was found to be a known absence.
        with contextlib.suppress(Missing):
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
        f"{channel.HALF}.get_num_new_matched_tokens",
        f"{channel.CLIENT}._lookup",
        f"{channel.CLIENT}.lookup",
        f"{channel.CLIENT}.discard",
        f"{channel.CLIENT}.close",
        f"{STORE}.worker:get_zmq_rpc_path_lookup",
        f"{channel.HALF}.build_connector_meta",
        f"{channel.HALF}.has_pending_push_work",
        f"{channel.HALF}._reference_save_blocks",
        f"{channel.HALF}.register_finished_partial_tail",
        f"{STORE}.connector:MooncakeStoreConnector.reset_cache",
        f"{STORE}.connector:MooncakeStoreConnector.has_pending_push_work",
        f"{STORE}.data:PoolKey.to_string",
        f"{STORE}.worker:KVCacheStoreSendingThread._handle_request",
        f"{MULTI}.has_pending_push_work",
        f"{CORE}._finish_pause",
        f"{CORE}.sleep",
        f"{CORE}.wake_up",
        f"{CORE}.release_kv_cache_memory",
        f"{CORE}.collective_rpc",
        "vllm.v1.engine.core:EngineCoreProc._invoke_utility_method",
        "vllm.v1.engine.core:EngineCoreProc._notify_idle_state_callbacks",
        f"{SCHEDULER}.reset_prefix_cache",
        f"{SCHEDULER}.reset_connector_cache",
        "vllm.v1.engine.core_client:InprocClient.reset_prefix_cache",
        "vllm.v1.engine.core_client:SyncMPClient.call_utility",
        f"{ASYNC_CLIENT}._call_utility_async",
        f"{ASYNC_CLIENT}.call_utility_all_async",
        f"{ASYNC_LLM}.update_weight_version",
        f"{OFFLINE[0]}.update_weight_version",
        f"{OFFLINE[1]}.update_weight_version",
        f"{front.ROUTERS[0]}:engine_client",
        f"{front.ROUTERS[0]}:attach_router",
        f"{front.ROUTERS[1]}:engine_client",
        f"{front.ROUTERS[1]}:attach_router",
    ),
    install=_install,
)
