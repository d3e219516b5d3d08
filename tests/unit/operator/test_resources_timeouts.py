"""How a pool's time limits reach its clients."""

from __future__ import annotations

import pytest
from kubernetes.aio import client as k8s
from pydantic import ValidationError

from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec
from moontide.api.v1alpha1.kvcachepool import ClientTimeouts
from moontide.resources import engine, store, timeouts

OWNER = k8s.V1OwnerReference(api_version="moontide.dev/v1alpha1", kind="KVCachePool", name="kv", uid="u-1")
SPEC = InferenceDeploymentSpec.model_validate(
    {"model": {"source": "hf://org/m", "servedName": "m"}, "kvCache": {"poolRef": {"name": "kv"}}}
)
OTHERS = {
    "rpcConnectMilliseconds": 700,
    "rpcMilliseconds": 4000,
    "handshakeSeconds": 2,
    "transferSeconds": 6,
    "loadSeconds": 9,
}


def _env(**client: int) -> dict[str, str]:
    made = engine.environment(SPEC, "u-2", "cuda", None, ClientTimeouts.model_validate(client) if client else None)
    return {each.name: each.value for each in made if each.name.startswith(("MC_", "MOONTIDE_LOAD"))}


def test_the_defaults_change_no_template() -> None:
    known = {"MC_RPC_CONNECT_TIMEOUT_MS": "500", "MC_RPC_TIMEOUT_MS": "2000", "MC_HANDSHAKE_CONNECT_TIMEOUT": "1"}
    assert _env() == known
    assert timeouts.engine(KVCachePoolSpec().client_timeouts) == known


def test_all_that_is_set_reaches_the_engine() -> None:
    assert _env(**OTHERS) == {
        "MC_RPC_CONNECT_TIMEOUT_MS": "700",
        "MC_RPC_TIMEOUT_MS": "4000",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "6",
        "MC_TCP_STATUS_TIMEOUT_SEC": "6",
        "MOONTIDE_LOAD_TIMEOUT_SECONDS": "9",
    }


def test_the_wiper_waits_as_long_for_the_master() -> None:
    pool = KVCachePoolSpec.model_validate({"clientTimeouts": OTHERS})
    made = store.deployment("kv", "ns", OWNER, pool, "moon:1").spec.template.spec.containers
    env = {each.name: each.value for each in next(c for c in made if c.name == store.WIPER_CONTAINER).env}
    assert (env["MC_RPC_CONNECT_TIMEOUT_MS"], env["MC_RPC_TIMEOUT_MS"]) == ("700", "4000")


@pytest.mark.parametrize("field", list(OTHERS))
def test_no_time_at_all_is_refused(field: str) -> None:
    with pytest.raises(ValidationError):
        KVCachePoolSpec.model_validate({"clientTimeouts": {field: 0}})
