"""Pod templates of specs that users have written stay as they are: a changed template restarts every engine of a fleet.

The files in ``golden/`` are what the last release makes. Change one knowingly, with a word in the release's notes:
``MOONTIDE_GOLDEN=write python -m pytest tests/unit/operator/test_golden_templates.py`` writes them anew, and fails.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec
from moontide.resources import engine, store

GOLDEN = Path(__file__).parent / "golden"
MODEL = {"source": "pvc://weights/tiny/a", "servedName": "tiny", "version": "7"}

FLEETS: dict[str, dict[str, Any]] = {
    "fleet-least": {"model": MODEL},
    "fleet-of-a-pool": {
        "model": MODEL,
        "replicas": 3,
        "kvCache": {"poolRef": {"name": "kv"}},
        "policyRef": {"name": "p"},
    },
    "fleet-on-the-cpu": {
        "model": {**MODEL, "source": "hf://org/name"},
        "engine": {"device": "cpu", "args": ["--max-model-len", "512"], "env": [{"name": "MINE", "value": "x"}]},
        "resources": {"limits": {"memory": "6Gi"}, "requests": {"cpu": "300m"}},
        "sharedMemory": "256Mi",
        "rollout": {"maxSurge": 1, "maxUnavailable": 0, "drainSeconds": 90},
    },
}
POOLS: dict[str, dict[str, Any]] = {
    "pool-least": {},
    "pool-with-all": {
        "master": {"image": "moon:2", "resources": {"limits": {"memory": "1Gi"}}, "leaseTtlMilliseconds": 900}
    },
}


def _owner(kind: str, name: str) -> k8s.V1OwnerReference:
    return k8s.V1OwnerReference(
        api_version="moontide.dev/v1alpha1", kind=kind, name=name, uid="uid", controller=True, block_owner_deletion=True
    )


def _fleet(spec: dict[str, Any]) -> k8s.V1Deployment:
    parsed, pool = InferenceDeploymentSpec.model_validate(spec), KVCachePoolSpec()
    mooncake = engine.mooncake_json("ns", "kv", pool) if parsed.kv_cache is not None else None
    return engine.deployment(
        "chat",
        "ns",
        _owner("InferenceDeployment", "chat"),
        parsed,
        engine_image="engine:1",
        default_device="cuda",
        mooncake=mooncake,
        memo=engine.memo_seconds(pool),
    )


def _pool(spec: dict[str, Any]) -> k8s.V1Deployment:
    return store.deployment("kv", "ns", _owner("KVCachePool", "kv"), KVCachePoolSpec.model_validate(spec), "moon:1")


@pytest.mark.parametrize("name", [*FLEETS, *POOLS])
def test_an_upgrade_of_the_operator_restarts_nothing(name: str) -> None:
    made = _fleet(FLEETS[name]) if name in FLEETS else _pool(POOLS[name])
    template = k8s.ApiClient().sanitize_for_serialization(made)["spec"]["template"]
    path = GOLDEN / f"{name}.json"
    if os.environ.get("MOONTIDE_GOLDEN") == "write":
        path.write_text(json.dumps(template, indent=1) + "\n")
        pytest.fail(f"{path.name} is written; look at its difference before you commit it")
    assert template == json.loads(path.read_text()), "this change restarts every engine, or every master, at an upgrade"
