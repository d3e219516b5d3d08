"""What keeps a fleet's engines apart, and from being evicted all at once. Pure."""

from __future__ import annotations

from kubernetes.aio import client as k8s

from moontide import labels
from moontide.api.v1alpha1 import InferenceDeploymentSpec
from moontide.resources import common

HOSTNAME = "kubernetes.io/hostname"
TEMPLATE = "pod-template-hash"


def budget(
    name: str, namespace: str, owner: k8s.V1OwnerReference, spec: InferenceDeploymentSpec
) -> k8s.V1PodDisruptionBudget | None:
    """The fleet's PodDisruptionBudget; None where it has no pods, or wants none.

    It never stands in the way of a drain for good: it always lets one engine go, the only one of a fleet too, and an
    engine that is not ready at any time.
    """
    if spec.endpoints is not None or spec.rollout.disruption_budget == "Off":
        return None
    selector = labels.engine_labels(name)
    return k8s.V1PodDisruptionBudget(
        api_version="policy/v1",
        kind="PodDisruptionBudget",
        metadata=common.metadata(name, namespace, owner, selector),
        spec=k8s.V1PodDisruptionBudgetSpec(
            max_unavailable=max(1, spec.rollout.max_unavailable),
            unhealthy_pod_eviction_policy="AlwaysAllow",
            selector=k8s.V1LabelSelector(match_labels=selector),
        ),
    )


def spread(name: str, spec: InferenceDeploymentSpec) -> list[k8s.V1TopologySpreadConstraint] | None:
    """Keeps the replicas of one template apart; None leaves it to the scheduler. Old pods do not count in a rollout."""
    if spec.spread is None:
        return None
    return [
        k8s.V1TopologySpreadConstraint(
            max_skew=1,
            topology_key=HOSTNAME,
            when_unsatisfiable="DoNotSchedule" if spec.spread == "Require" else "ScheduleAnyway",
            label_selector=k8s.V1LabelSelector(match_labels=labels.engine_labels(name)),
            match_label_keys=[TEMPLATE],
        )
    ]
