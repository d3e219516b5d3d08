"""Reads what :mod:`moontide.planning.stall` decides by out of pods and the Deployment."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

from kubernetes.aio import client as k8s

from moontide.planning.model import Replica
from moontide.planning.stall import Container, Pod, Stall, stalled

_KILLED = (137, 143)
"""What a container ends with after SIGKILL and SIGTERM."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def stall_of(deployment: k8s.V1Deployment | None, replicas: Iterable[Replica], now: dt.datetime) -> Stall | None:
    """Why the rollout of ``deployment`` does not go on."""
    status = deployment.status if deployment is not None else None
    for each in (status.conditions if status is not None else None) or ():
        if each.type == "ReplicaFailure" and each.status == "True":
            return Stall("", each.reason or "FailedCreate", (each.message or "")[:1000])
    return stalled([each.pod_state for each in replicas if each.pod_state is not None], now)


def facts(pod: k8s.V1Pod) -> Pod:
    """What counts of a pod."""
    metadata, status = pod.metadata, pod.status
    name = (metadata.name if metadata is not None else None) or ""
    conditions = {each.type: each for each in (status.conditions if status is not None else None) or ()}
    scheduled = conditions.get("PodScheduled")
    waits = scheduled is not None and scheduled.status == "False"
    prepared = _false_since(conditions.get("PodReadyToStartContainers"))
    statuses = (
        [*(status.init_container_statuses or ()), *(status.container_statuses or ())] if status is not None else []
    )
    return Pod(
        name=name,
        created=(metadata.creation_timestamp if metadata is not None else None) or _EPOCH,
        terminating=metadata is not None and metadata.deletion_timestamp is not None,
        unscheduled=(scheduled.reason or "Unschedulable") if waits and scheduled is not None else "",
        unscheduled_message=(scheduled.message or "") if scheduled is not None else "",
        unscheduled_since=scheduled.last_transition_time if scheduled is not None else None,
        unprepared_since=prepared if scheduled is not None and not waits else None,
        containers=tuple(_container(each) for each in statuses),
    )


def _false_since(condition: k8s.V1PodCondition | None) -> dt.datetime | None:
    return condition.last_transition_time if condition is not None and condition.status == "False" else None


def _container(status: k8s.V1ContainerStatus) -> Container:
    state, last = status.state, status.last_state
    waiting = state.waiting if state is not None else None
    done = state is not None and state.terminated is not None and state.terminated.exit_code == 0
    ended = (state.terminated if state is not None else None) or (last.terminated if last is not None else None)
    return Container(
        name=status.name,
        image=status.image or "",
        waiting=(waiting.reason or "") if waiting is not None else "",
        message=(waiting.message or "") if waiting is not None else "",
        started=bool(status.started) or done,
        ready=bool(status.ready),
        restarts=status.restart_count or 0,
        ended=_ended(ended) if ended is not None else "",
    )


def _ended(ended: k8s.V1ContainerStateTerminated) -> str:
    text = f"exit status {ended.exit_code}"
    if ended.signal:
        text = f"signal {ended.signal}"
    if ended.reason and ended.reason != "Error":
        text += f" ({ended.reason})"
    elif ended.exit_code in _KILLED:
        text += " (it was killed, perhaps as a probe failed: see spec.startupSeconds)"
    # A container's last words: /dev/termination-log.
    return f"{text}: {ended.message.strip()[-300:]}" if ended.message else text
