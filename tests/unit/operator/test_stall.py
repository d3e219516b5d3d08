"""A stalled rollout names the pod and the reason, and what is normal life is no stall."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide.planning.model import Replica
from moontide.planning.stall import UNPREPARED, UNSCHEDULABLE, Stall
from moontide.reconcile.stalls import facts, stall_of

BEGAN = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
LATER = BEGAN + dt.timedelta(minutes=10)
FULL = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def _at(moment: dt.datetime) -> str:
    return moment.isoformat()


def _pod(
    name: str = "a",
    *,
    engine: dict[str, Any] | None = None,
    conditions: dict[str, tuple[str, dict[str, Any]]] | None = None,
    leaving: bool = False,
    more: list[dict[str, Any]] | None = None,
) -> Replica:
    """A pod as the API server sends it."""
    base = {"name": "engine", "image": "e:1", "imageID": "", "ready": False, "restartCount": 0, "started": False}
    metadata = {"name": name, "uid": name, "creationTimestamp": _at(BEGAN)}
    metadata |= {"deletionTimestamp": _at(BEGAN)} if leaving else {}
    said = conditions if conditions is not None else {"PodScheduled": ("True", {})}
    body = {
        "metadata": metadata,
        "status": {
            "phase": "Pending",
            "conditions": [
                {"type": kind, "status": status, "lastTransitionTime": _at(BEGAN), **fields}
                for kind, (status, fields) in said.items()
            ],
            "containerStatuses": [{**base, **engine}] if engine is not None else [],
            "initContainerStatuses": [{**base, **each} for each in more or ()],
        },
    }
    pod = k8s.V1Pod.from_dict(body)
    assert pod is not None
    return Replica(
        name=name,
        pod_uid=name,
        fleet="u",
        address=None,
        container_id=None,
        may_have_served=False,
        pod_state=facts(pod),
    )


def _waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}, **more}


def _ended(code: int, **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": "Error", **more}}


RUNNING = {"running": {"startedAt": _at(BEGAN)}}
UNPLACED = {"PodScheduled": ("False", {"reason": "Unschedulable", "message": FULL})}
UNPREPARED_NOW = {"PodScheduled": ("True", {}), "PodReadyToStartContainers": ("False", {})}
NOT_READY = {"PodScheduled": ("True", {}), "Ready": ("False", {})}

STALLS: list[tuple[Replica, Stall]] = [
    (
        _pod(engine=_waiting("ErrImagePull", "no such image")),
        Stall("a", "ImagePullBackOff", "container engine has image e:1: no such image"),
    ),
    (
        _pod(engine=_waiting("ImagePullBackOff", 'Back-off pulling image "e:1": ErrImagePull: no such image')),
        Stall("a", "ImagePullBackOff", "container engine has image e:1: no such image"),
    ),
    (
        _pod(engine=_waiting("CreateContainerConfigError", 'secret "hf" not found')),
        Stall("a", "CreateContainerConfigError", 'container engine: secret "hf" not found'),
    ),
    (
        _pod(engine=_waiting("CrashLoopBackOff", "back-off 10s", lastState=_ended(1, message="no such model\n"))),
        Stall("a", "CrashLoopBackOff", "container engine ended last with exit status 1: no such model"),
    ),
    (
        _pod(engine=_waiting("CrashLoopBackOff", lastState=_ended(137, reason="OOMKilled"))),
        Stall("a", "CrashLoopBackOff", "container engine ended last with exit status 137 (OOMKilled)"),
    ),
    (
        _pod(engine={"state": RUNNING, "restartCount": 2, "lastState": _ended(1, signal=11)}),
        Stall("a", "CrashLoopBackOff", "container engine ended last with signal 11"),
    ),
    (
        _pod(more=[{"name": "fetch", **_waiting("CrashLoopBackOff", lastState=_ended(2))}]),
        Stall("a", "CrashLoopBackOff", "container fetch ended last with exit status 2"),
    ),
    (_pod(conditions=UNPLACED), Stall("a", "Unschedulable", FULL)),
    (
        _pod(conditions=UNPREPARED_NOW, engine=_waiting("ContainerCreating")),
        Stall("a", "NotPrepared", "its volumes or its network are not there; kubectl describe pod a says which"),
    ),
    (
        _pod(engine={"state": RUNNING, "restartCount": 2, "lastState": _ended(137)}),
        Stall(
            "a",
            "CrashLoopBackOff",
            "container engine ended last with exit status 137 (it was killed, perhaps as a probe failed: see "
            "spec.startupSeconds)",
        ),
    ),
]


@pytest.mark.parametrize(("replica", "wanted"), STALLS, ids=[stall.reason for _, stall in STALLS])
def test_a_stall_names_the_pod_and_the_reason(replica: Replica, wanted: Stall) -> None:
    assert stall_of(None, [replica], LATER) == wanted
    assert str(wanted) == f"pod a: {wanted.reason}: {wanted.message}"


@pytest.mark.parametrize(
    ("replica", "now"),
    [
        (_pod(conditions=UNPLACED), BEGAN + UNSCHEDULABLE / 2),
        (_pod(conditions=UNPREPARED_NOW, engine=_waiting("ContainerCreating")), BEGAN + UNPREPARED / 2),
        (_pod(engine=_waiting("ContainerCreating")), LATER),
        (_pod(engine=_waiting("PodInitializing")), LATER),
        (_pod(engine={"state": RUNNING}), LATER),
        (_pod(engine={"state": RUNNING, "restartCount": 1, "lastState": _ended(1)}), LATER),
        (_pod(engine={"state": RUNNING, "restartCount": 5, "started": True, "lastState": _ended(1)}), LATER),
        (_pod(engine={"state": RUNNING}, more=[{"name": "f", "state": _ended(0), "restartCount": 3}]), LATER),
        (_pod(conditions=NOT_READY, engine={"state": RUNNING, "started": True}), LATER),
        (_pod(engine=_waiting("CrashLoopBackOff", lastState=_ended(1)), leaving=True), LATER),
        (_pod(conditions={}), LATER),
    ],
)
def test_normal_life_is_no_stall(replica: Replica, now: dt.datetime) -> None:
    assert stall_of(None, [replica], now) is None


def test_a_pod_that_waits_for_one_that_leaves_is_not_stalled() -> None:
    assert stall_of(None, [_pod("new", conditions=UNPLACED), _pod("old", leaving=True)], LATER) is None


def test_what_says_the_same_at_each_look_stays_the_same() -> None:
    def said(count: int, back_off: str) -> Stall | None:
        engine = _waiting("CrashLoopBackOff", back_off, restartCount=count, lastState=_ended(1))
        return stall_of(None, [_pod(engine=engine)], LATER)

    between = stall_of(None, [_pod(engine={"state": RUNNING, "restartCount": 4, "lastState": _ended(1)})], LATER)
    assert said(3, "back-off 20s") == said(9, "back-off 5m0s") == between


def test_pods_that_cannot_even_be_made() -> None:
    message = 'pods "chat-1" is forbidden: no PriorityClass with name urgent was found'
    failure = k8s.V1DeploymentCondition(type="ReplicaFailure", status="True", reason="FailedCreate", message=message)
    deployment = k8s.V1Deployment(
        spec=k8s.V1DeploymentSpec(selector=k8s.V1LabelSelector(), template=k8s.V1PodTemplateSpec()),
        status=k8s.V1DeploymentStatus(conditions=[failure]),
    )
    assert str(stall_of(deployment, [], LATER)) == f"FailedCreate: {message}"


def test_an_engine_without_a_pod_cannot_stall_a_rollout() -> None:
    adopted = Replica("http://x", "http://x", "u", "x", None, True, url="http://x")
    assert stall_of(None, [adopted], LATER) is None
