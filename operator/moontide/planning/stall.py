"""Why a rollout does not go on, told from pods, long before a Deployment's own deadline. Pure, and reads no clock.

Reasons are Kubernetes' own words where it has one. A sentence holds nothing that changes from one look to the next (no
counts, no back-off times): a condition that says the same stays the same.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

UNSCHEDULABLE = dt.timedelta(seconds=30)
"""A scheduler's no before this age is normal life: the pod that leaves still holds its GPU."""
UNPREPARED = dt.timedelta(seconds=60)
"""Volumes and network of a pod are there within seconds; an image's pull is not counted."""
CRASHES = 2
"""A container that was restarted so often and has not started since is in a loop, also while it runs."""

_PULLING = {"ErrImagePull", "ImagePullBackOff"}
_AT_ONCE = {
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "PreCreateHookError",
    "PreStartHookError",
    "PostStartHookError",
}
_MESSAGE = 400


@dataclass(frozen=True)
class Container:
    """What the kubelet says of one container."""

    name: str
    image: str = ""
    waiting: str = ""
    """Reason for which it waits; empty when it does not."""
    message: str = ""
    started: bool = False
    ready: bool = False
    restarts: int = 0
    ended: str = ""
    """How it ended last, in words; empty when it never did."""


@dataclass(frozen=True)
class Pod:
    """What there is to know of one pod that is wanted."""

    name: str
    created: dt.datetime
    terminating: bool = False
    unscheduled: str = ""
    """The scheduler's reason for not placing it; empty when it is placed, or was not looked at."""
    unscheduled_message: str = ""
    unscheduled_since: dt.datetime | None = None
    unprepared_since: dt.datetime | None = None
    """Since when it has a node and its volumes or its network are not there; None when they are."""
    containers: tuple[Container, ...] = ()


@dataclass(frozen=True)
class Stall:
    """Whom a rollout waits for, and why it will go on waiting."""

    pod: str
    """Empty where no pod could be made at all."""
    reason: str
    message: str

    def __str__(self) -> str:
        text = f"{self.reason}: {self.message}" if self.message else self.reason
        return f"pod {self.pod}: {text}" if self.pod else text


def stalled(pods: Iterable[Pod], now: dt.datetime) -> Stall | None:
    """The first pod, by age and name, that does not come up by itself; None while all may."""
    ordered = sorted(pods, key=lambda pod: (pod.created, pod.name))
    leaving = any(pod.terminating for pod in ordered)
    for pod in ordered:
        if pod.terminating:
            continue
        found = _of(pod, now, leaving)
        if found is not None:
            return found
    return None


def _of(pod: Pod, now: dt.datetime, leaving: bool) -> Stall | None:
    if pod.unscheduled:
        # What leaves makes room.
        if leaving or pod.unscheduled_since is None or now - pod.unscheduled_since < UNSCHEDULABLE:
            return None
        return Stall(pod.name, pod.unscheduled, _short(pod.unscheduled_message))
    for container in pod.containers:
        found = _of_container(container)
        if found is not None:
            return Stall(pod.name, *found)
    if pod.unprepared_since is not None and now - pod.unprepared_since >= UNPREPARED:
        text = f"its volumes or its network are not there; kubectl describe pod {pod.name} says which"
        return Stall(pod.name, "NotPrepared", text)
    return None


def _of_container(container: Container) -> tuple[str, str] | None:
    name = f"container {container.name}"
    if container.waiting in _PULLING:
        # Both reasons follow one another, with the registry's answer in the message of either.
        said = container.message.rpartition("ErrImagePull: ")[2]
        return "ImagePullBackOff", _short(f"{name} has image {container.image}: {said}")
    if container.waiting in _AT_ONCE:
        return container.waiting, _short(f"{name}: {container.message}")
    looping = container.restarts >= CRASHES and not container.started and bool(container.ended)
    if container.waiting == "CrashLoopBackOff" or looping:
        return "CrashLoopBackOff", _short(f"{name} ended last with {container.ended or 'an unknown status'}")
    return None


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= _MESSAGE else one[: _MESSAGE - 1] + "…"
