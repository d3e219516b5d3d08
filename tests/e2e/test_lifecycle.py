"""Deleting each kind leaves nothing of it behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hack.demo.fleet import Fleet
from hack.demo.kube import Kube, Object, names, wait

NAMESPACE = "moontide-lifecycle"
CHILDREN = "deployments,replicasets,pods,services,configmaps,secrets,endpointslices,poddisruptionbudgets"
API = "moontide.dev/v1alpha1"


@pytest.fixture(scope="module")
def namespace(kube: Kube, demo: object) -> Iterator[str]:
    amount = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Mi"}}}
    claim = {"metadata": {"name": "tiny-models", "namespace": NAMESPACE}, "spec": amount}
    kube.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim},
    )
    yield NAMESPACE
    kube.run("delete", "namespace", NAMESPACE, "--timeout=90s", timeout=100)


def _object(kind: str, spec: Object) -> Object:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": "short-lived", "namespace": NAMESPACE}, "spec": spec}


POOL = _object("KVCachePool", {"memory": {"perReplica": "64Mi"}})
POLICY = _object("PolicyVersion", {"version": 1})
FLEET = _object(
    "InferenceDeployment",
    {
        "replicas": 0,
        "model": {"source": "pvc://tiny-models/policy-a", "servedName": "tiny", "version": "1"},
        "engine": {"device": "cpu"},
        "kvCache": {"poolRef": {"name": "short-lived"}},
        "policyRef": {"name": "short-lived"},
    },
)


def _children(kube: Kube) -> list[str]:
    """Everything in the namespace but what the cluster itself puts into each."""
    return sorted(name for name in names(kube.list(CHILDREN, NAMESPACE)) if name not in ("ConfigMap/kube-root-ca.crt",))


@pytest.mark.parametrize(
    ("kind", "wanted", "expected"),
    [
        ("kvp", (POOL,), {"Deployment/short-lived-master", "Service/short-lived-master", "Secret/short-lived-wiper"}),
        (
            "ifd",
            (FLEET,),
            {
                "Deployment/short-lived",
                "Service/short-lived",
                "ConfigMap/short-lived-mooncake",
                "Secret/short-lived-admin",
                "PodDisruptionBudget/short-lived",
            },
        ),
        ("polv", (POLICY,), set[str]()),
    ],
)
def test_deletion_leaves_no_child(
    kind: str, wanted: tuple[Object, ...], expected: set[str], kube: Kube, namespace: str, fleet: Fleet
) -> None:
    # A fleet's Mooncake configuration needs its pool.
    around = (POOL,) if kind == "ifd" else ()
    if around:
        kube.apply(*around)
        wait(lambda: kube.find("service", "short-lived-master", namespace), 60, "the pool's Service")
    before = set(_children(kube)) if around else set[str]()
    kube.apply(*wanted)
    wait(
        lambda: expected <= set(_children(kube)) or None,
        60,
        f"children of {kind}",
        last=lambda: f"there are {_children(kube)}",
    )
    kube.run("delete", kind, "short-lived", "--namespace", namespace, "--timeout=60s", timeout=70)
    wait(
        lambda: not [name for name in _children(kube) if name not in before and not _of_pool(name, around)] or None,
        60,
        f"nothing left of {kind}",
        last=lambda: f"there are {_children(kube)}",
    )
    if around:
        kube.run("delete", "kvp", "short-lived", "--namespace", namespace, "--timeout=60s", timeout=70)
        wait(lambda: not _children(kube) or None, 60, "an empty namespace", last=lambda: str(_children(kube)))


def _of_pool(name: str, around: tuple[Object, ...]) -> bool:
    """Whether a child may be the pool's own, which stays while only the fleet is deleted."""
    return bool(around) and "/short-lived-master" in name
