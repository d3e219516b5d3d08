"""Which replica that fell back is to start again, now that its pool is there. Pure.

An engine joins its pool at its start alone. A restart costs what the replica serves, so there is one only where it is
likely to help, one at a time, and never beside another change.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from moontide.api.v1alpha1 import PolicyVersionSpec, PolicyVersionStatus
from moontide.planning import protocol
from moontide.planning.model import Replica

READY_SECONDS = 60.0
"""How long a pool has been ready before engines are restarted for it: one that comes and goes is left alone."""
AGAIN_SECONDS = 3600.0
"""A replica that fell back while the pool was ready is tried again after this: there is something between the two,
and a restart every minute would not mend it."""


@dataclass(frozen=True)
class Look:
    """What the decision depends on."""

    replicas: Sequence[Replica]
    """All pods of the fleet, terminating ones included."""
    wanted: int
    max_unavailable: int
    ready_since: dt.datetime | None
    """Since when the pool is ready; None while it is not."""
    complete: bool
    """No pod is being made or replaced."""
    settled: bool
    """No policy change is under way, or about to be."""
    comes_with: str | None
    """The version of the weights that a new pod comes with; None where it loads those of the policy by itself."""
    now: dt.datetime


@dataclass(frozen=True)
class Reattach:
    """What is to be done: ``replica`` is to start again, or nothing, as ``waits`` says."""

    replica: Replica | None = None
    waits: str = ""
    """Why a replica that fell back is left as it is, for people; holds nothing that changes by itself."""


def is_settled(spec: PolicyVersionSpec, generation: int | None, status: PolicyVersionStatus | None) -> bool:
    """Whether the policy's last change is over, and no other is asked for."""
    if status is None or status.last_update is None or protocol.active(status) is not None:
        return False
    asked = (spec.label, generation, spec.reset_nonce)
    done = (status.target_version, status.observed_generation, status.reset_nonce)
    return asked == done and status.last_update.resumed_at is not None and not status.failures


def fallen(replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas that run without their pool since their start, by name."""
    found = [r for r in replicas if r.status is not None and r.status.store.fell_back and not r.terminating]
    return sorted(found, key=lambda replica: replica.name)


def decide(look: Look) -> Reattach:
    """At most one replica to restart."""
    candidates = fallen(look.replicas)
    if not candidates:
        return Reattach()
    if any(replica.url for replica in candidates):
        return Reattach(waits="launched by others: start it again when the pool is ready")
    if look.ready_since is None:
        return Reattach(waits="its pod is made anew when the pool has been ready for a minute")
    if look.max_unavailable < 1:
        return Reattach(waits="rollout.maxUnavailable is 0, so no pod is deleted for it: roll the fleet out yourself")
    if (look.now - look.ready_since).total_seconds() < READY_SECONDS:
        return Reattach(waits="its pod is made anew when the pool has been ready for a minute")
    if not look.settled:
        return Reattach(waits="its pod is made anew after the change of the policy")
    serving = [r for r in look.replicas if not r.terminating and r.status is not None and r.status.state == "open"]
    if not look.complete or len(serving) < look.wanted or len(look.replicas) != len(serving):
        return Reattach(waits="its pod is made anew when every replica serves")
    kept = [replica for replica in candidates if _brings_its_weights(replica, look.comes_with)]
    if not kept:
        return Reattach(waits="a new pod would lack the weights that were pushed to it: delete it and push them again")
    for replica in kept:
        if _may_help(replica, look.ready_since, look.now):
            return Reattach(replica)
    return Reattach(
        waits="the pool was ready when it started, so something is between the two: look at NetworkPolicies and the "
        "engine's log; it is tried again after an hour"
    )


def _brings_its_weights(replica: Replica, comes_with: str | None) -> bool:
    return comes_with is None or (replica.status is not None and replica.status.weights_version == comes_with)


def _may_help(replica: Replica, ready_since: dt.datetime, now: dt.datetime) -> bool:
    started = replica.container_started
    if started is None:
        return False
    return started < ready_since or (now - started).total_seconds() >= AGAIN_SECONDS
