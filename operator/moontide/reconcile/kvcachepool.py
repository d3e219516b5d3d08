"""Reconciles a KVCachePool: applies the master, and reads its state from its own endpoints."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass

from kubernetes.aio import client as k8s
from prometheus_client.parser import text_string_to_metric_families

from moontide import naming, status
from moontide.api.v1alpha1 import InferenceDeployment, KVCachePool, KVCachePoolStatus
from moontide.engines.client import Unanswered, fetch
from moontide.engines.wire import Session
from moontide.errors import InvalidSpec, Retry
from moontide.kube.client import Child, Resource
from moontide.kube.kinds import POOL
from moontide.reconcile import isolation, leadership, needs, poolhealth, storenodes, tokens, wipers
from moontide.reconcile.conditions import announce
from moontide.reconcile.context import GONE_SECONDS, Context
from moontide.reconcile.overrides import overridden
from moontide.resources import admintls, masters, podtemplate, store
from moontide.resources.podtemplate import Overridden

MASTER_SECONDS = 2.0
"""A master that serves answers in milliseconds; one that needs longer does not serve engines either."""
STARTING_SECONDS = 1.0
SERVING_SECONDS = 5.0
READY = "Ready"


@dataclass(frozen=True)
class MasterState:
    """What the master says of itself. ``reason`` is empty when it serves."""

    reason: str = ""
    message: str = ""
    clients: int | None = None
    keys: int | None = None
    capacity_bytes: int | None = None
    allocated_bytes: int | None = None
    segments: int | None = None
    evicted_keys: int | None = None


_GAUGES = {
    "master_active_clients": "clients",
    "master_key_count": "keys",
    "master_total_capacity_bytes": "capacity_bytes",
    "master_allocated_bytes": "allocated_bytes",
}
_MORE = {"master_evicted_key_count_total": "evicted_keys"}
"""What the status can do without. The parser puts the ending to counters that lack it."""
_SEGMENT = "segment_total_capacity_bytes"
_NAMES = (*_GAUGES, *_MORE, *(name.removesuffix("_total") for name in _MORE), _SEGMENT)
_LINES = tuple(line for name in _NAMES for line in (f"{name} ", f"{name}{{", f"# TYPE {name} "))
"""How the lines begin that are read. A page has four hundred, and the parser is Python."""


async def look_at_master(http: Session, base: str) -> MasterState:
    """Ask the master at ``base`` (``http://host:port``) whether it serves, and for its gauges."""
    health = await fetch(http, f"{base}/health", MASTER_SECONDS)
    metrics = health if isinstance(health, Unanswered) else await fetch(http, f"{base}/metrics", MASTER_SECONDS)
    if isinstance(health, Unanswered) or isinstance(metrics, Unanswered):
        why = metrics.message if isinstance(metrics, Unanswered) else ""
        return MasterState("MasterUnreachable", f"{base} does not answer: {why}")
    status, text = health
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if status != 200 or not isinstance(said, dict) or said.get("service_ready") is not True:
        return MasterState("MasterNotServing", f"{base}/health answers {status}: {text[:200]}")
    status, text = metrics
    try:
        found = parse_gauges(text) if status == 200 else {}
    except ValueError as error:
        return MasterState("MasterUnreadable", f"{base}/metrics cannot be parsed: {error}")
    missing = [name for name, attribute in _GAUGES.items() if attribute not in found]
    if missing:
        return MasterState("MasterUnreadable", f"{base}/metrics answers {status} without {', '.join(missing)}")
    return MasterState(
        clients=found["clients"],
        keys=found["keys"],
        capacity_bytes=found["capacity_bytes"],
        allocated_bytes=found["allocated_bytes"],
        segments=found.get("segments"),
        evicted_keys=found.get("evicted_keys"),
    )


def parse_gauges(text: str) -> dict[str, int]:
    """The gauges of a pool's status in the master's metrics: none in text that is no metrics page. Raises ValueError
    for one of them that has no number."""
    wanted, found = {**_GAUGES, **_MORE}, {}
    read = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_LINES))
    for family in text_string_to_metric_families(read):
        for sample in family.samples:
            if sample.name in wanted:
                found[wanted[sample.name]] = int(sample.value)
            elif sample.name == _SEGMENT:
                found["segments"] = found.get("segments", 0) + (sample.value > 0)
    return found


async def reconcile(ctx: Context, namespace: str, name: str) -> float:
    """Make the pool's children what its spec says, and its status what the master says.

    Returns the seconds after which to look again at the latest. Raises :class:`moontide.errors.Retry` when the API
    server does not let it look or write.
    """
    pool = await ctx.kube.get_pool(namespace, name)
    if pool is None or pool.meta.deletion_timestamp is not None:
        ctx.metrics.gone(POOL.kind, namespace, name)
        return GONE_SECONDS
    fleets = await ctx.kube.list_deployments_of_pool(namespace, name)
    refusal = await _apply(ctx, pool)
    if refusal is not None:
        verdict, again = refusal
        await _write(ctx, pool, _status(ctx, pool, MasterState(), verdict, fleets))
        return again

    election = _election(pool)
    led = await leadership.look(ctx, pool) if election is not None else None
    host = naming.service_host(naming.master(name), namespace)
    seen = await look_at_master(ctx.http, f"http://{host}:{naming.MASTER_METRICS_PORT}")
    verdict = _verdict(seen, await ctx.kube.get_child_deployment(namespace, naming.master(name)))
    nodes = await storenodes.look(ctx, pool)
    started = await poolhealth.master_started(ctx, pool)
    now = _status(ctx, pool, seen, verdict, fleets, nodes, started, led)
    rotated = await tokens.look_at_wipers(ctx, pool)
    more = {"wiper_tls": await wipers.tls_of(ctx, pool), "wiper_token": rotated.token}
    if await _write(ctx, pool, now.model_copy(update=more)):
        await tokens.announce(ctx, pool, rotated)
    if led is not None:
        await leadership.tell(ctx, pool, led)
    if verdict.status != "True" or (nodes is not None and nodes.leaving) or tokens.under_way(rotated):
        return STARTING_SECONDS
    return SERVING_SECONDS if led is None else leadership.LOOK_SECONDS


def _election(pool: Resource[KVCachePool]) -> masters.Election | None:
    return masters.election(pool.meta.name, pool.meta.namespace, pool.meta.uid, pool.model.spec)


async def _apply(ctx: Context, pool: Resource[KVCachePool]) -> tuple[status.Verdict, float] | None:
    """Apply the children. None when it is done; else what to say, and the seconds until the next try."""
    try:
        await wipers.check(ctx, pool)
        if await storenodes.concerned(ctx, pool):
            made: list[Child | Overridden] = [*children(ctx, pool)]
            nodes = await storenodes.prepare(ctx, pool)
            await ctx.kube.apply(*made, *([nodes] if nodes is not None else []))
        else:
            await ctx.kube.apply_made_of((pool,), lambda: children(ctx, pool))
    except InvalidSpec as error:
        again = needs.AGAIN_SECONDS if error.reason in needs.REASONS else ctx.config.resync_seconds
        return status.Verdict(READY, "False", error.reason, error.message), again
    except Retry as error:
        return status.Verdict(READY, "False", "ApplyFailed", error.reason), error.after
    return None


def children(ctx: Context, pool: Resource[KVCachePool]) -> tuple[Child | Overridden, ...]:
    """The pool's children, in the order in which they are applied.

    Raises :class:`InvalidSpec` for a podTemplate that changes what is Moontide's.
    """
    name, namespace, owner, spec = pool.meta.name, pool.meta.namespace, pool.owner_reference(), pool.model.spec
    service = store.service(name, namespace, owner)
    deployment = store.deployment(name, namespace, owner, spec, ctx.config.mooncake_image)
    made: list[Child | Overridden] = [store.secret(name, namespace, owner, tokens.secret_text(ctx, pool))]
    election = _election(pool)
    if election is not None:
        if election.own:
            made.append(masters.etcd_service(name, namespace, owner))
            made.append(masters.etcd_deployment(name, namespace, owner, ctx.config.etcd_image))
        service, deployment = masters.lead(service), masters.replicate(deployment, election)
    deployment = admintls.dress(deployment, admintls.WIPER, wipers.secret_of(pool))
    return (*made, service, overridden(deployment, spec.pod_template, podtemplate.MASTER))


def _verdict(seen: MasterState, deployment: k8s.V1Deployment | None) -> status.Verdict:
    if not seen.reason:
        return status.Verdict(READY, "True", "Serving", "the master serves")
    available = deployment.status.available_replicas if deployment is not None and deployment.status else None
    if not available:
        return status.Verdict(READY, "False", "MasterStarting", f"the master's pod is not ready yet; {seen.message}")
    return status.Verdict(READY, "False", seen.reason, seen.message)


def _status(
    ctx: Context,
    pool: Resource[KVCachePool],
    seen: MasterState,
    verdict: status.Verdict,
    fleets: list[Resource[InferenceDeployment]],
    nodes: storenodes.Nodes | None = None,
    started: dt.datetime | None = None,
    led: leadership.Leadership | None = None,
) -> KVCachePoolStatus:
    before = pool.model.status or KVCachePoolStatus()
    name, namespace = pool.meta.name, pool.meta.namespace
    health = poolhealth.Health(
        segments=seen.segments,
        keys=seen.keys,
        allocated_bytes=seen.allocated_bytes,
        capacity_bytes=seen.capacity_bytes,
        nodes=nodes.lending if nodes is not None else 0,
    )
    judged = poolhealth.judge(ctx, pool, health, fleets, started, serving=not seen.reason and verdict.status == "True")
    election = _election(pool)
    elected = [] if led is None or election is None else [leadership.elected(led, election)]
    worse = leadership.worse(led) if led is not None else None
    verdicts = [verdict, worse or judged.verdict, *elected, *([nodes.verdict] if nodes is not None else [])]
    return KVCachePoolStatus(
        observed_generation=pool.meta.generation,
        conditions=status.merge(before.conditions, verdicts, pool.meta.generation, ctx.now()),
        endpoint=masters.client_address(name, namespace, election),
        leader=led.leader if led is not None else before.leader,
        leader_changes=led.changes if led is not None else before.leader_changes,
        clients=seen.clients,
        keys=seen.keys,
        capacity_bytes=seen.capacity_bytes,
        allocated_bytes=seen.allocated_bytes,
        used=used(seen.allocated_bytes, seen.capacity_bytes),
        segments=seen.segments,
        evicted_keys=seen.evicted_keys,
        master_started_at=judged.started_at,
        master_restarts=judged.restarts,
        store_nodes=nodes.status if nodes is not None else None,
        holder=isolation.holder(pool, fleets),
        wiper_tls=before.wiper_tls,
        wiper_token=before.wiper_token,
        deployments=tuple(each.meta.name for each in fleets[:256]),
    )


def used(allocated: int | None, capacity: int | None) -> str | None:
    """Fill for people; None while it is unknown."""
    if allocated is None or capacity is None:
        return None
    return f"{100 * allocated / capacity:.0f} %" if capacity > 0 else "0 %"


async def _write(ctx: Context, pool: Resource[KVCachePool], now: KVCachePoolStatus) -> bool:
    """Whether anything was written: nothing is where nothing changed, or the pool is gone."""
    ctx.metrics.pool(pool.meta.namespace, pool.meta.name, now)
    if now == pool.model.status:
        return False
    if not await ctx.kube.apply_pool_status(pool.meta.namespace, pool.meta.name, now, uid=pool.meta.uid):
        return False
    was = pool.model.status or KVCachePoolStatus()
    await poolhealth.announce_restart(ctx, pool, was, now)
    await announce(ctx, pool, was.conditions, now.conditions, expected=("MasterStarting", *storenodes.EXPECTED))
    return True
