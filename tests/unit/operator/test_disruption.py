"""Budgets and spread of a fleet."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide.api.v1alpha1 import InferenceDeploymentSpec
from moontide.resources import disruption, engine

OWNER = k8s.V1OwnerReference(api_version="v", kind="InferenceDeployment", name="chat", uid="u", controller=True)
MODEL = {"source": "pvc://weights/a", "servedName": "tiny"}


def _spec(**more: Any) -> InferenceDeploymentSpec:
    return InferenceDeploymentSpec.model_validate({"model": MODEL, **more})


@pytest.mark.parametrize(("unavailable", "surge", "allowed"), [(1, 0, 1), (3, 0, 3), (0, 1, 1)])
@pytest.mark.parametrize("replicas", [0, 1, 8])
def test_a_drain_takes_as_many_as_a_rollout_and_never_none(
    replicas: int, unavailable: int, surge: int, allowed: int
) -> None:
    spec = _spec(replicas=replicas, rollout={"maxUnavailable": unavailable, "maxSurge": surge})
    made = disruption.budget("chat", "ns", OWNER, spec)
    wire = k8s.ApiClient().sanitize_for_serialization(made)
    # A budget in terms of minAvailable would hold the only pod of a fleet, and its node, for ever.
    assert wire["spec"] == {
        "maxUnavailable": allowed,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {
            "matchLabels": {
                "app.kubernetes.io/managed-by": "moontide",
                "app.kubernetes.io/component": "engine",
                "moontide.dev/deployment": "chat",
            }
        },
    }
    assert wire["metadata"]["name"] == "chat"


def test_no_budget_where_none_is_wanted_or_no_pod_is() -> None:
    assert disruption.budget("chat", "ns", OWNER, _spec(rollout={"disruptionBudget": "Off"})) is None
    adopting = InferenceDeploymentSpec.model_validate({"endpoints": {"urls": []}})
    assert disruption.budget("chat", "ns", OWNER, adopting) is None


@pytest.mark.parametrize(("asked", "when"), [("Prefer", "ScheduleAnyway"), ("Require", "DoNotSchedule"), (None, None)])
def test_spread_is_in_the_template_when_asked_for(asked: str | None, when: str | None) -> None:
    spec = _spec(**({"spread": asked} if asked else {}))
    made = engine.deployment("chat", "ns", OWNER, spec, engine_image="e:1", default_device="cuda", mooncake=None)
    pod = k8s.ApiClient().sanitize_for_serialization(made)["spec"]["template"]["spec"]
    if when is None:
        assert "topologySpreadConstraints" not in pod
        return
    (constraint,) = pod["topologySpreadConstraints"]
    assert constraint["whenUnsatisfiable"] == when
    assert (constraint["maxSkew"], constraint["topologyKey"]) == (1, "kubernetes.io/hostname")
    assert constraint["labelSelector"]["matchLabels"]["moontide.dev/deployment"] == "chat"
    assert constraint["matchLabelKeys"] == ["pod-template-hash"]
