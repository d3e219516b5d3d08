"""Patch ``key-namespace``: the store's keys of this deployment begin with its namespace, before vLLM 0.24, too.

From 0.24 on the connector's ``cache_prefix`` does it. Older releases ignore it: two deployments with models of the
same name share keys, and a removal cannot be kept to one of them.
"""

from __future__ import annotations

from typing import Any

from moontide_engine.patches import Patch, replace
from moontide_engine.patches.probe import STORE

_WORKER = f"{STORE}.worker:MooncakeStoreWorker.__init__"
_KEY = f"{STORE}.data:PoolKey.to_string"

# A process has one store worker.
_prefix = ""


def _worker_init(original: Any) -> Any:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        global _prefix
        _prefix = str(vllm_config.kv_transfer_config.kv_connector_extra_config.get("cache_prefix", ""))
        original(self, vllm_config, *args, **kwargs)

    return init


def _to_string(original: Any) -> Any:
    def to_string(self: Any) -> str:
        key: str = original(self)
        return f"{_prefix}@{key}" if _prefix else key

    return to_string


def _install() -> None:
    replace(_WORKER, _worker_init)
    replace(_KEY, _to_string)


PATCH = Patch(
    name="key-namespace",
    summary="keys in the store begin with the deployment's namespace",
    references=(_WORKER, _KEY, f"{STORE}.data:KeyMetadata", f"{STORE}.worker:MooncakeStoreWorker.lookup"),
    install=_install,
    upstream=("0.24.0", "0.27.1", "0.32.0", "0.33.0"),
)
