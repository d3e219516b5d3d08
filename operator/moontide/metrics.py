"""What the operator tells Prometheus: of its own work, of each change of policy, and of the resources it serves.

Counters begin again with each leader. Gauges of a resource are as its last reconcile saw it, and go with it. A standby
has none of either.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from moontide.api.v1alpha1 import (
    ClosedReplica,
    Condition,
    InferenceDeploymentStatus,
    KVCachePoolStatus,
    PolicyVersionStatus,
    Update,
)
from moontide.kube.client import asked_for
from moontide.planning import protocol
from moontide.planning.model import Collect, Result, Wipe
from moontide.status import parse_timestamp

_CALL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CHANGE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
STAGES = ("quiesced", "drained", "invalidated", "loaded", "wiped", "resumed")
"""Of a change; each is a time of ``status.lastUpdate``."""


@dataclass(frozen=True)
class Sample:
    """One value of a gauge."""

    name: str
    labels: dict[str, str]
    value: float


_POLICY, _DEPLOYMENT, _POOL = ("namespace", "policy"), ("namespace", "deployment"), ("namespace", "pool")
_CONDITION = ("kind", "namespace", "name", "type")
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "moontide_condition": ("1 where the condition is True, 0 where it is False or Unknown.", _CONDITION),
    "moontide_policy_epoch": ("The highest epoch that was allotted.", _POLICY),
    "moontide_policy_replicas": ("Replicas of the policy: current, closed, or other.", (*_POLICY, "state")),
    "moontide_policy_failures": ("Replicas and stores with which the change at hand fails.", _POLICY),
    "moontide_policy_change_age_seconds": ("Seconds since the change at hand began; 0 without one.", _POLICY),
    "moontide_deployment_replicas": ("Replicas of the fleet: wanted, ready, current.", (*_DEPLOYMENT, "state")),
    "moontide_deployment_closed_replicas": ("Replicas that serve nothing, by reason.", (*_DEPLOYMENT, "reason")),
    "moontide_pool_clients": ("Clients that have memory mounted.", _POOL),
    "moontide_pool_keys": ("Keys in the store.", _POOL),
    "moontide_pool_bytes": ("Memory of the pool: capacity, allocated.", (*_POOL, "kind")),
    "moontide_pool_segments": ("Segments that clients have mounted.", _POOL),
    "moontide_pool_evicted_keys": ("Keys evicted since the master started.", _POOL),
    "moontide_pool_degraded": ("1, with the reason, while the condition Degraded is True.", (*_POOL, "reason")),
    "moontide_pool_master_restarts": ("Restarts of the master that were seen; each loses every key.", _POOL),
}
"""What each gauge of a resource says, and its labels."""


@dataclass(frozen=True)
class Times:
    """How long a change took."""

    stages: dict[str, float]
    """Seconds from its beginning to each stage that it has reached."""
    pause: float | None
    """The longest pause of any replica, once it has resumed."""


def reached(before: Update | None, now: Update | None) -> Times:
    """What a change has reached since the last look."""
    if now is None:
        return Times({}, None)
    old = before if before is not None and before.epoch == now.epoch else None
    began, stages = parse_timestamp(now.started_at), {}
    for stage in STAGES:
        at = getattr(now, f"{stage}_at")
        if at is not None and (old is None or getattr(old, f"{stage}_at") is None):
            stages[stage] = max(0.0, (parse_timestamp(at) - began).total_seconds())
    return Times(stages, now.pause_seconds if "resumed" in stages else None)


class _Resources(Collector):
    """The gauges of all resources that have been reconciled."""

    def __init__(self, now: Callable[[], dt.datetime]) -> None:
        self._now = now
        self.samples: dict[tuple[str, str, str], list[Sample]] = {}
        self.changes: dict[tuple[str, str], str] = {}
        """When the change of a policy that is not finished began."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called for each scrape."""
        found: dict[str, list[Sample]] = {name: [] for name in GAUGES}
        for samples in self.samples.values():
            for sample in samples:
                found[sample.name].append(sample)
        now = self._now()
        for kind, namespace, name in self.samples:
            if kind == "PolicyVersion":
                began = self.changes.get((namespace, name))
                age = max(0.0, (now - parse_timestamp(began)).total_seconds()) if began is not None else 0.0
                labels = {"namespace": namespace, "policy": name}
                found["moontide_policy_change_age_seconds"].append(
                    Sample("moontide_policy_change_age_seconds", labels, age)
                )
        for gauge, (text, names) in GAUGES.items():
            family = GaugeMetricFamily(gauge, text, labels=names)
            for sample in found[gauge]:
                family.add_metric([sample.labels[label] for label in names], sample.value)
            yield family


@dataclass
class Metrics:
    """The registry and what is in it."""

    now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        registry = self.registry
        self.runs = Counter(
            "moontide_reconcile", "Reconciles by kind and outcome.", ["kind", "outcome"], registry=registry
        )
        self.seconds = Histogram(
            "moontide_reconcile_seconds", "How long a reconcile took.", ["kind"], registry=registry
        )
        self.loops = Gauge("moontide_resources", "Resources that have a loop.", registry=registry)
        self.woken = Gauge(
            "moontide_queue_age_seconds",
            "How long the resource that waits longest waits to be looked at.",
            registry=registry,
        )
        self.running = Gauge(
            "moontide_reconcile_age_seconds", "How long the longest reconcile at work has run.", registry=registry
        )
        self.leader = Gauge("moontide_leader", "1 while this process leads, 0 on standby.", registry=registry)
        self.hook = Counter(
            "moontide_hook_requests", "Requests to the hook by verb and status.", ["verb", "status"], registry=registry
        )
        self._asked = Counter(
            "moontide_api_requests",
            "Requests to the API server but those of the watches and the Lease, by method and resource.",
            ["method", "resource"],
            registry=registry,
        )
        self._steps = Counter(
            "moontide_steps",
            "Calls to engines and wipers: done, failed, or waited (nobody's fault: they are made again).",
            ["step", "outcome"],
            registry=registry,
        )
        self._step_seconds = Histogram(
            "moontide_step_seconds",
            "How long one call to an engine or a wiper took.",
            ["step"],
            buckets=_CALL_BUCKETS,
            registry=registry,
        )
        self._removed = Counter(
            "moontide_keys_removed",
            "Keys of older epochs that were in a store and are removed.",
            ["step"],
            registry=registry,
        )
        self._stages = Histogram(
            "moontide_change_seconds",
            "From the beginning of a change of policy to each of its stages.",
            ["stage"],
            buckets=_CHANGE_BUCKETS,
            registry=registry,
        )
        self._pauses = Histogram(
            "moontide_pause_seconds",
            "The longest pause of any replica in a change of policy.",
            buckets=_CHANGE_BUCKETS,
            registry=registry,
        )
        self._resources = _Resources(self.now)
        registry.register(self._resources)

    def asked(self, method: str, url: str) -> None:
        """Count a request to the API server."""
        self._asked.labels(*asked_for(method, url)).inc()

    def acted(self, results: Iterable[Result]) -> None:
        """Count what came of the actions of one plan."""
        for result in results:
            step = protocol.step_of(result.action).value
            waited = result.reason in protocol.WAITED_FOR
            outcome = "done" if result.success else "waited" if waited else "failed"
            self._steps.labels(step, outcome).inc()
            self._step_seconds.labels(step).observe(result.seconds)
            if isinstance(result.action, Wipe | Collect) and result.removed:
                self._removed.labels(step).inc(result.removed)

    def policy(self, namespace: str, name: str, before: PolicyVersionStatus, now: PolicyVersionStatus) -> None:
        """A look at a policy; ``before`` is the status that it replaces."""
        times = reached(before.last_update, now.last_update)
        for stage, seconds in times.stages.items():
            self._stages.labels(stage).observe(seconds)
        if times.pause is not None:
            self._pauses.observe(times.pause)
        update, counts = now.last_update, now.replicas
        if update is not None and update.resumed_at is None:
            self._resources.changes[namespace, name] = update.started_at
        else:
            self._resources.changes.pop((namespace, name), None)
        labels = {"namespace": namespace, "policy": name}
        samples = [
            Sample("moontide_policy_epoch", labels, now.epoch),
            Sample("moontide_policy_failures", labels, len(now.failures) + now.failures_omitted),
        ]
        if counts is not None:
            states = {"current": counts.current, "closed": counts.closed}
            states["other"] = max(0, counts.total - counts.current - counts.closed)
            samples += [Sample("moontide_policy_replicas", {**labels, "state": s}, n) for s, n in states.items()]
        self._keep("PolicyVersion", namespace, name, samples, now.conditions)

    def deployment(
        self,
        namespace: str,
        name: str,
        wanted: int,
        now: InferenceDeploymentStatus,
        closed: Iterable[ClosedReplica] | None = None,
    ) -> None:
        """A look at a fleet. ``closed``: all closed replicas, where status lists only the first."""
        labels = {"namespace": namespace, "deployment": name}
        states = {"wanted": wanted, "ready": now.ready_replicas, "current": now.current_replicas}
        samples = [Sample("moontide_deployment_replicas", {**labels, "state": s}, n) for s, n in states.items()]
        reasons: dict[str, int] = {}
        for replica in now.closed if closed is None else closed:
            reasons[replica.reason] = reasons.get(replica.reason, 0) + 1
        samples += [
            Sample("moontide_deployment_closed_replicas", {**labels, "reason": reason}, n)
            for reason, n in reasons.items()
        ]
        self._keep("InferenceDeployment", namespace, name, samples, now.conditions)

    def pool(self, namespace: str, name: str, now: KVCachePoolStatus) -> None:
        """A look at a pool."""
        labels = {"namespace": namespace, "pool": name}
        said = [
            ("moontide_pool_clients", labels, now.clients),
            ("moontide_pool_keys", labels, now.keys),
            ("moontide_pool_bytes", {**labels, "kind": "capacity"}, now.capacity_bytes),
            ("moontide_pool_bytes", {**labels, "kind": "allocated"}, now.allocated_bytes),
            ("moontide_pool_segments", labels, now.segments),
            ("moontide_pool_evicted_keys", labels, now.evicted_keys),
            ("moontide_pool_master_restarts", labels, now.master_restarts),
        ]
        samples = [Sample(gauge, of, value) for gauge, of, value in said if value is not None]
        samples += [
            Sample("moontide_pool_degraded", {**labels, "reason": each.reason}, 1)
            for each in now.conditions
            if each.type == "Degraded" and each.status == "True"
        ]
        self._keep("KVCachePool", namespace, name, samples, now.conditions)

    def gone(self, kind: str, namespace: str, name: str) -> None:
        """The resource does not exist any more."""
        self._resources.samples.pop((kind, namespace, name), None)
        if kind == "PolicyVersion":
            self._resources.changes.pop((namespace, name), None)

    def _keep(
        self, kind: str, namespace: str, name: str, samples: list[Sample], conditions: Iterable[Condition]
    ) -> None:
        labels = {"kind": kind, "namespace": namespace, "name": name}
        told = [
            Sample("moontide_condition", {**labels, "type": each.type}, float(each.status == "True"))
            for each in conditions
        ]
        self._resources.samples[kind, namespace, name] = samples + told
