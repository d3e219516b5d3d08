"""Who leads a pool of three masters: asks each, labels the leader's pod, and tells of elections."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import dataclass

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import KVCachePool, KVCachePoolStatus
from moontide.engines.client import Unanswered, fan_out, fetch
from moontide.engines.wire import Session
from moontide.kube.client import Resource
from moontide.reconcile.context import Context
from moontide.resources.masters import Election
from moontide.status import Verdict, parse_timestamp, timestamp

ASK_SECONDS = 2.0
LOOK_SECONDS = 2.0
"""Between two looks: nobody tells of an election."""
FLAPPING_WINDOW = dt.timedelta(minutes=10)
FLAPPING = 3
"""Changes of the leader within the window that are more than bad luck."""
KEPT = 10
LEADER_ELECTION = "LeaderElection"
DEGRADED = "Degraded"


@dataclass(frozen=True)
class Master:
    """One pod of the pool's masters, and what its master said."""

    pod: str
    uid: str
    labelled: bool
    serves: bool = False
    view: int = -1
    """Of the election that it knows; a later one is higher."""


@dataclass(frozen=True)
class Leadership:
    """What one look found. ``leader`` is a pod's name."""

    masters: int
    leader: str | None
    changes: tuple[str, ...] = ()
    """When the last leaders were seen for the first time, oldest first."""
    before: str | None = None
    """Who led at the last look at which somebody did."""


def choose(masters: Sequence[Master]) -> Master | None:
    """The leader: of those that say so, the one of the last election. One that was frozen does not know it is over."""
    serving = [each for each in masters if each.serves]
    return max(serving, key=lambda each: each.view, default=None)


def follow(before: KVCachePoolStatus, masters: Sequence[Master], now: dt.datetime) -> Leadership:
    """The new look, on top of what status says of the last ones."""
    found = choose(masters)
    changes = tuple(each for each in before.leader_changes if now - parse_timestamp(each) < FLAPPING_WINDOW)
    if found is not None and found.pod != before.leader:
        changes = (*changes, timestamp(now))[-KEPT:]
    return Leadership(len(masters), found.pod if found is not None else None, changes, before.leader)


def elected(found: Leadership, election: Election) -> Verdict:
    """The condition ``LeaderElection`` of the pool."""
    where = "the pool's own etcd" if election.own else "the etcd of spec.master.etcd"
    why = f"through {where}, as the released Mooncake has no Kubernetes backend"
    if found.leader is None:
        return Verdict(LEADER_ELECTION, "False", "NoLeader", f"none of {found.masters} masters leads, elected {why}")
    return Verdict(LEADER_ELECTION, "True", "Etcd", f"{found.leader} leads, elected {why}")


def worse(found: Leadership) -> Verdict | None:
    """The condition ``Degraded`` where the masters are not as they should be: it goes before what the store says."""
    trouble = degraded(found)
    return Verdict(DEGRADED, "True", *trouble) if trouble is not None else None


def degraded(found: Leadership) -> tuple[str, str] | None:
    """Reason and message where the masters are not as they should be."""
    if found.leader is None:
        return "NoLeader", "no master leads: engines serve without the pool until one does"
    changes = len(found.changes)
    if changes > FLAPPING:
        minutes = FLAPPING_WINDOW.total_seconds() / 60
        text = (
            f"{changes} masters led within {minutes:g} minutes; each change costs some ten seconds without the pool: "
            "give masters and etcd more CPU (spec.master.resources)"
        )
        return "LeaderFlapping", text
    if found.masters < 3:
        return "FewMasters", f"{found.masters} of 3 masters answer"
    return None


async def look(ctx: Context, pool: Resource[KVCachePool]) -> Leadership:
    """Ask every master, and move the label that the pool's Service follows to the leader's pod.

    Raises :class:`moontide.errors.Retry` when the API server does not let it look or write.
    """
    namespace, name = pool.meta.namespace, pool.meta.name
    pods = await ctx.kube.list_pods(namespace, labels.selector(labels.store_labels(name)))
    masters: list[Master] = await fan_out([each for each in pods if _lives(each)], lambda pod: _ask(ctx.http, pod))
    found = follow(pool.model.status or KVCachePoolStatus(), [each for each in masters if each.view >= 0], ctx.now())
    if found.leader is not None:
        for each in masters:
            leads = each.pod == found.leader
            if leads != each.labelled:
                value = "true" if leads else None
                await ctx.kube.label_pod(namespace, each.pod, each.uid, labels.LEADER, value)
    return found


async def tell(ctx: Context, pool: Resource[KVCachePool], found: Leadership) -> None:
    """An Event for a leader that is new; one that flaps is told by the condition as well."""
    if found.leader is None or found.leader == found.before:
        return
    text = f"{found.leader} leads" + (f", after {found.before}" if found.before else "")
    trouble = degraded(found)
    await ctx.kube.event(pool, "LeaderChanged", text)
    if trouble is not None and trouble[0] == "LeaderFlapping":
        await ctx.kube.event(pool, *trouble, "Warning")


def _lives(pod: k8s.V1Pod) -> bool:
    phase = pod.status.phase if pod.status is not None else None
    return phase not in ("Succeeded", "Failed") and pod.metadata is not None and pod.metadata.deletion_timestamp is None


async def _ask(http: Session, pod: k8s.V1Pod) -> Master:
    metadata = pod.metadata
    if metadata is None or not metadata.name or not metadata.uid:
        raise ValueError("a pod without a name or uid was never stored by an API server")
    silent = Master(metadata.name, metadata.uid, labels.LEADER in (metadata.labels or {}))
    address = pod.status.pod_ip if pod.status is not None else None
    if not address:
        return silent
    answer = await fetch(http, f"http://{address}:{naming.MASTER_METRICS_PORT}/health", ASK_SECONDS)
    try:
        return silent if isinstance(answer, Unanswered) else heard(silent, json.loads(answer[1]))
    except ValueError:
        return silent


def heard(master: Master, said: object) -> Master:
    """``master`` with the body of its ``/health``; one that says something else did not answer."""
    if not isinstance(said, dict):
        return master
    view = said.get("view_version")
    return Master(
        master.pod,
        master.uid,
        master.labelled,
        serves=said.get("service_ready") is True,
        view=view if isinstance(view, int) else 0,
    )
