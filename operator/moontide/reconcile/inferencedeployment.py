"""Reconciles an InferenceDeployment: applies the fleet, admits it where no policy does, and says how it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import (
    ClosedReplica,
    InferenceDeployment,
    InferenceDeploymentSpec,
    InferenceDeploymentStatus,
    KVCachePool,
    PolicyVersion,
    quantity_bytes,
)
from moontide.engines import tls
from moontide.errors import InvalidSpec, Retry
from moontide.kube.client import Child, Resource
from moontide.kube.kinds import DEPLOYMENT
from moontide.planning.model import Fleet, Replica
from moontide.planning.reattach import Reattach, fallen
from moontide.planning.stall import Stall
from moontide.reconcile import adopted, isolation, needs, reattach, tokens
from moontide.reconcile.conditions import announce
from moontide.reconcile.context import GONE_SECONDS, Context
from moontide.reconcile.fleets import observe
from moontide.reconcile.overrides import overridden
from moontide.reconcile.policyversion import UNMANAGED_EPOCH, reconcile_unmanaged
from moontide.reconcile.stalls import stall_of
from moontide.resources import admintls, disruption, engine, groups, masters, memory, podtemplate, transport
from moontide.resources.podtemplate import Overridden
from moontide.status import Verdict, merge

SETTLING_SECONDS = 2.0
SETTLED_SECONDS = 30.0
_LISTED = 10
EXPECTED = (
    "Complete",
    "NotConfigured",
    "NotCreated",
    "MinimumReplicasUnavailable",
    "Updating",
    "Behind",
    "WaitingForPool",
    "NoEndpoints",
)


@dataclass(frozen=True)
class Around:
    """What a fleet refers to, as found in the cluster."""

    pool: Resource[KVCachePool] | None = None
    policy: Resource[PolicyVersion] | None = None
    """None, too, where the fleet may not follow it: then it is as good as missing."""
    not_followed: InvalidSpec | None = None
    """Why the policy is None although it may exist."""


@dataclass(frozen=True)
class Seen:
    """One look at a fleet. ``deployment`` is None while it does not exist, or belongs to somebody else."""

    around: Around
    deployment: k8s.V1Deployment | None
    fleet: Fleet
    refusal: InvalidSpec | None = None
    """Why the children could not be applied."""
    stall: Stall | None = None
    """Which pod does not come up by itself."""
    reattach: Reattach = field(default_factory=Reattach)
    """What is done about replicas that started without their pool."""


async def reconcile(ctx: Context, namespace: str, name: str) -> float:
    """Make the fleet what its spec says, and its status what pods and engines say.

    Returns the seconds after which to look again at the latest. Raises :class:`moontide.errors.Retry` when the API
    server does not let it look or write.
    """
    resource = await ctx.kube.get_deployment(namespace, name)
    if resource is None or resource.meta.deletion_timestamp is not None:
        ctx.metrics.gone(DEPLOYMENT.kind, namespace, name)
        return GONE_SECONDS
    spec = resource.model.spec
    pool = await ctx.kube.get_pool(namespace, spec.kv_cache.pool_ref.name) if spec.kv_cache is not None else None
    around = replace(await policy_of(ctx, resource), pool=pool)
    refusal, again = None, SETTLED_SECONDS
    if spec.kv_cache is None or around.pool is not None:
        try:
            await needs.check(ctx, resource)
            await ctx.kube.apply_made_of((resource, pool), lambda: children(ctx, resource, pool))
            if spec.rollout.disruption_budget == "Off":
                await ctx.kube.delete_budget(namespace, name, resource.meta.uid)
        except InvalidSpec as error:
            refusal = error
            waits = {"WaitingForPool": SETTLING_SECONDS, **dict.fromkeys(needs.REASONS, needs.AGAIN_SECONDS)}
            again = waits.get(error.reason, again)
        except Retry as error:
            refusal = InvalidSpec("ApplyFailed", error.reason)
            again = error.after

    requeue = min(SETTLED_SECONDS, again)
    # What runs already may have more luck than its sum of memory says, or was made before its source was refused; an
    # engine that restarts must not stay closed.
    if spec.policy_ref is None and (refusal is None or refusal.reason in ("MemoryTooSmall", "SourceInvalid")):
        requeue = await reconcile_unmanaged(ctx, resource)
    live = None
    if spec.endpoints is None:
        looked = ctx.kube.get_child_deployment if spec.nodes == 1 else ctx.kube.get_group
        live = await looked(namespace, name)
    else:
        await adopted.release(ctx, resource)
    deployment, fleet = live if live is not None and _ours(live, resource) else None, await observe(ctx, resource)
    seen = Seen(
        around=around,
        deployment=deployment,
        fleet=fleet,
        refusal=refusal,
        stall=stall_of(deployment, fleet.replicas, ctx.now()),
    )
    complete = progressing(resource, seen).reason == "Complete"
    found = reattach.judge(ctx, resource, fleet, around.pool, around.policy, complete=complete)
    seen = replace(seen, reattach=found)
    rotation = await tokens.look(ctx, resource, fleet, around.policy)
    now = status_of(ctx, resource, seen).model_copy(update={"admin_token": rotation.token})
    ctx.metrics.deployment(namespace, name, spec.wanted, now, closed_replicas(seen.fleet, seen.around))
    before = resource.model.status or InferenceDeploymentStatus()
    if now != before and await ctx.kube.apply_deployment_status(namespace, name, now, uid=resource.meta.uid):
        await announce(ctx, resource, before.conditions, now.conditions, expected=EXPECTED)
        await tokens.announce(ctx, resource, rotation)
    await reattach.act(ctx, resource, found)
    still = now.current_replicas == now.ready_replicas == spec.wanted and not now.closed
    settled = (
        still
        and not tokens.under_way(rotation)
        and not any(replica.terminating for replica in seen.fleet.replicas if replica.url)
    )
    return requeue if settled else min(requeue, SETTLING_SECONDS)


async def policy_of(ctx: Context, resource: Resource[InferenceDeployment]) -> Around:
    """The policy that the fleet follows, or why it follows none."""
    ref, namespace = resource.model.spec.policy_ref, resource.meta.namespace
    if ref is None:
        return Around()
    place, served = ref.namespace or namespace, ctx.config.watch_namespace
    if served and place != served:
        text = (
            f"this operator serves namespace {served} only, so no policy of namespace {place} can be followed: remove "
            f"spec.policyRef.namespace and name a policy of {served}, or install Moontide without watchNamespace"
        )
        return Around(not_followed=InvalidSpec("PolicyOutOfReach", text))
    policy = await ctx.kube.get_policy(place, ref.name)
    if policy is not None and place != namespace and not policy.model.spec.allows(namespace):
        text = (
            f"PolicyVersion {ref.name} of namespace {place} does not allow fleets of namespace {namespace}: add "
            f"{namespace} to its spec.allowedNamespaces; until then admitted engines serve on, new ones wait"
        )
        return Around(not_followed=InvalidSpec("PolicyNotAllowed", text))
    return Around(policy=policy)


def children(
    ctx: Context, resource: Resource[InferenceDeployment], pool: Resource[KVCachePool] | None
) -> tuple[Child | Overridden, ...]:
    """The fleet's children, in the order in which they are applied. Engines of others have no Deployment and no Service
    of ours; who launches them takes the token and the store's configuration from here.

    Raises :class:`InvalidSpec` for a pool that another fleet has or whose sizes are no amounts of memory, for a release
    that has no image, for a podTemplate that changes what is Moontide's, and for pods that would be killed for their
    memory.
    """
    meta, spec, owner = resource.meta, resource.model.spec, resource.owner_reference()
    taken = isolation.refusal(pool, resource) if pool is not None else None
    if taken is not None:
        raise taken
    made: list[Child | Overridden] = [
        engine.secret(meta.name, meta.namespace, owner, tokens.secret_text(ctx, resource))
    ]
    if spec.endpoints is None:
        made.append(engine.service(meta.name, meta.namespace, owner, spec.service))
    mooncake = elected = None
    if pool is not None:
        elected = masters.election(pool.meta.name, meta.namespace, pool.meta.uid, pool.model.spec)
        try:
            mooncake = engine.mooncake_json(meta.namespace, pool.meta.name, pool.model.spec, elected)
        except ValueError as error:
            raise InvalidSpec("PoolInvalid", f"KVCachePool {pool.meta.name}: {error}") from error
        made.append(engine.config_map(meta.name, meta.namespace, owner, mooncake))
    if spec.endpoints is not None:
        return tuple(made)
    try:
        image = engine.image(spec, ctx.config.engine_image, ctx.config.engine_version)
    except ValueError as error:
        raise InvalidSpec("VersionHasNoImage", f"{error}") from error
    _check_memory(ctx, spec, pool)
    deployment = engine.deployment(
        meta.name,
        meta.namespace,
        owner,
        spec,
        engine_image=image,
        default_device=ctx.config.engine_device,
        mooncake=mooncake,
        memo=engine.memo_seconds(pool.model.spec) if pool is not None else None,
        fetch_image=ctx.config.fetch_image,
        client=pool.model.spec.client_timeouts if pool is not None else None,
        election=elected,
    )
    secret = spec.engine.admin_tls_secret_ref
    deployment = admintls.dress(deployment, admintls.ENGINE, secret.name if secret is not None else None)
    fleet = overridden(_dressed(deployment, spec, pool), spec.pod_template, podtemplate.ENGINE)
    made.append(fleet if spec.nodes == 1 else groups.group(fleet, spec.nodes))
    budget = disruption.budget(meta.name, meta.namespace, owner, spec)
    if budget is not None:
        made.append(budget)
    return tuple(made)


def _check_memory(ctx: Context, spec: InferenceDeploymentSpec, pool: Resource[KVCachePool] | None) -> None:
    """Raises :class:`InvalidSpec` where every pod would be killed for its memory."""
    device = spec.engine.device or ctx.config.engine_device
    try:
        problem = memory.too_small(spec, pool.model.spec if pool is not None else None, device)
    except ValueError as error:
        raise InvalidSpec("SizeInvalid", str(error)) from error
    if problem is not None:
        raise InvalidSpec("MemoryTooSmall", problem)


def _dressed(
    fleet: k8s.V1Deployment, spec: InferenceDeploymentSpec, pool: Resource[KVCachePool] | None
) -> k8s.V1Deployment:
    """The fleet with what the pool's transport asks of its pods."""
    if pool is None:
        return fleet
    lent = pool.model.spec.memory
    regions = (quantity_bytes(lent.per_replica), quantity_bytes(lent.local_buffer))
    count = memory.pod_ranks(spec)
    return transport.dress(fleet, naming.ENGINE_CONTAINER, pool.model.spec.transport, regions, count)


def _ours(live: k8s.V1Deployment, resource: Resource[InferenceDeployment]) -> bool:
    references = live.metadata.owner_references if live.metadata is not None else None
    return any(each.controller and each.uid == resource.meta.uid for each in references or ())


def fleet_epoch(resource: Resource[InferenceDeployment], around: Around) -> int | None:
    """The epoch the fleet has to be in; None while its policy is missing or has allotted none."""
    if resource.model.spec.policy_ref is None:
        return UNMANAGED_EPOCH
    policy = around.policy
    return policy.model.status.epoch if policy is not None and policy.model.status is not None else None


def is_current(replica: Replica, resource: Resource[InferenceDeployment], epoch: int | None) -> bool:
    """Whether the replica serves, in the fleet's epoch. Without a policy any epoch will do: nothing changes it."""
    if replica.status is None or replica.terminating or replica.status.state != "open":
        return False
    return resource.model.spec.policy_ref is None or replica.status.epoch == epoch


def closed_replicas(fleet: Fleet, around: Around) -> tuple[ClosedReplica, ...]:
    """The replicas that serve nothing, each with its reason, by name."""
    return tuple(
        ClosedReplica(name=replica.name, address=replica.address, reason=reason, message=message[:1024])
        for replica in sorted(fleet.replicas, key=lambda each: each.name)
        if (why := _why_closed(replica, around)) is not None
        for reason, message in (why,)
    )


def _why_closed(replica: Replica, around: Around) -> tuple[str, str] | None:
    if replica.terminating:
        return None
    said = replica.status
    if said is None:
        if replica.url:
            reason, _, message = replica.error.partition(": ")
            return reason, message
        if replica.container_id is None:
            reason, _, message = replica.hindrance.partition(": ")
            return reason or "Starting", message or "the engine's container does not run yet"
        reason, _, message = replica.error.partition(": ")
        return (tls.REASON, message) if reason == tls.REASON else ("NoAnswer", replica.error)
    if said.state != "closed":
        return None
    wanted = around.policy.model.spec if around.policy is not None else None
    if wanted is not None and wanted.weights == "External" and said.weights_version != wanted.label:
        return (
            "WaitingForWeights",
            f"the engine reports weights {said.weights_version!r} and the policy wants {wanted.label!r}: "
            f"push them to {replica.address}",
        )
    if said.loading is not None:
        load = said.loading
        if load.running:
            text = f"{load.source} is being loaded as version {load.version}, for {load.seconds:.0f} s so far"
            return "Loading", text
        return "LoadFailed", load.error[:1024]
    return said.reason or "Closed", "the engine waits to be admitted"


def status_of(ctx: Context, resource: Resource[InferenceDeployment], seen: Seen) -> InferenceDeploymentStatus:
    """The status that one look amounts to."""
    meta, spec = resource.meta, resource.model.spec
    before = resource.model.status or InferenceDeploymentStatus()
    counts = seen.deployment.status if seen.deployment is not None else None
    total, ready = ((counts.replicas or 0), (counts.ready_replicas or 0)) if counts is not None else (0, 0)
    if spec.endpoints is not None:
        total, ready = spec.wanted, sum(_serves(replica) for replica in seen.fleet.replicas)
    epoch = fleet_epoch(resource, seen.around)
    current = sum(is_current(replica, resource, epoch) for replica in seen.fleet.replicas)
    verdicts = [
        available(resource, seen),
        progressing(resource, seen),
        kv_cache_attached(resource, seen),
        policy_current(resource, seen, current),
        engine_patched(seen.fleet, spec.engine.version),
    ]
    policy = seen.around.policy
    return InferenceDeploymentStatus(
        observed_generation=meta.generation,
        conditions=merge(before.conditions, verdicts, meta.generation, ctx.now()),
        replicas=total,
        ready_replicas=ready,
        current_replicas=current,
        ready=f"{ready}/{spec.wanted}",
        current=f"{current}/{spec.wanted}",
        selector=labels.selector(labels.engine_labels(meta.name)) if spec.endpoints is None else None,
        version=_version(resource, policy, before),
        epoch=epoch if epoch is not None else before.epoch,
        endpoint=f"{naming.service_host(meta.name, meta.namespace)}:{engine.service_port(spec.service)}"
        if spec.endpoints is None
        else None,
        pool=spec.kv_cache.pool_ref.name if spec.kv_cache is not None else None,
        closed=closed_replicas(seen.fleet, seen.around)[:_LISTED],
        adopted=before.adopted,
    )


def _serves(replica: Replica) -> bool:
    return replica.status is not None and replica.status.state == "open" and not replica.terminating


def _version(
    resource: Resource[InferenceDeployment], policy: Resource[PolicyVersion] | None, before: InferenceDeploymentStatus
) -> str | None:
    if resource.model.spec.policy_ref is None:
        model = resource.model.spec.model
        return model.version if model is not None else None
    if policy is None:
        # Engines that were admitted serve on without their policy, and what they serve has not changed.
        return before.version
    return policy.model.status.version if policy.model.status is not None else None


def _child_condition(deployment: k8s.V1Deployment | None, type: str) -> k8s.V1DeploymentCondition | None:
    status = deployment.status if deployment is not None else None
    return next((each for each in (status.conditions if status else None) or () if each.type == type), None)


def available(resource: Resource[InferenceDeployment], seen: Seen) -> Verdict:
    """Whether enough replicas are ready, as the Deployment's controller sees it, and at least one.

    The controller calls a Deployment of one replica, which may be unavailable in a rollout, available with none.
    """
    if resource.model.spec.endpoints is not None:
        if any(_serves(replica) for replica in seen.fleet.replicas):
            return Verdict("Available", "True", "MinimumReplicasAvailable", "")
        return Verdict("Available", "False", "MinimumReplicasUnavailable", "no engine of spec.endpoints.urls serves")
    if seen.deployment is None:
        return Verdict("Available", "False", "NotCreated", "there is no Deployment of this fleet yet")
    said = _child_condition(seen.deployment, "Available")
    if said is None:
        return Verdict("Available", "False", "MinimumReplicasUnavailable", "no replica has been counted yet")
    ready = seen.deployment.status.ready_replicas if seen.deployment.status is not None else None
    if said.status == "True" and not ready and resource.model.spec.replicas > 0:
        return Verdict("Available", "False", "MinimumReplicasUnavailable", "no replica is ready")
    if said.status == "True":
        return Verdict("Available", "True", said.reason or "MinimumReplicasAvailable", said.message or "")
    return Verdict("Available", "False", said.reason or "MinimumReplicasUnavailable", said.message or "")


def progressing(resource: Resource[InferenceDeployment], seen: Seen) -> Verdict:
    """Whether pods are being made or replaced; False with a reason when it is done, or cannot go on."""
    if seen.refusal is not None:
        return Verdict("Progressing", "False", seen.refusal.reason, seen.refusal.message)
    if resource.model.spec.kv_cache is not None and seen.around.pool is None:
        return Verdict("Progressing", "False", "WaitingForPool", "nothing is changed until the pool exists")
    if resource.model.spec.endpoints is not None:
        return _adopting(resource, seen.fleet)
    deployment, wanted = seen.deployment, resource.model.spec.replicas
    counts = deployment.status if deployment is not None else None
    if deployment is None or counts is None:
        return Verdict("Progressing", "True", "Updating", "the Deployment is being made")
    generation = deployment.metadata.generation if deployment.metadata is not None else None
    done = counts.observed_generation == generation and all(
        (count or 0) == wanted for count in (counts.replicas, counts.updated_replicas, counts.available_replicas)
    )
    if done:
        return Verdict("Progressing", "False", "Complete", "every replica has the wanted template")
    if seen.stall is not None:
        return Verdict("Progressing", "False", "Stalled", f"{seen.stall}")
    said = _child_condition(deployment, "Progressing")
    if said is not None and said.reason == "ProgressDeadlineExceeded":
        return Verdict("Progressing", "False", said.reason, said.message or "")
    return Verdict("Progressing", "True", "Updating", "replicas are being made or replaced")


def _adopting(resource: Resource[InferenceDeployment], fleet: Fleet) -> Verdict:
    """Whether engines are being admitted, or are still to be closed as their URL is no longer listed."""
    name, marks = "Progressing", adopted.marks_of(resource)
    leaving = [replica for replica in fleet.replicas if replica.terminating]
    silent = [replica for replica in leaving if replica.status is None]
    if silent:
        boots = ", ".join(
            f"{replica.url} (boot id {' '.join(boot for boot, url in marks.items() if url == replica.url)})"
            for replica in silent[:_LISTED]
        )
        text = (
            f"no longer listed, and not closed as they do not answer; they may serve: {boots}; make them answer, or, "
            "when their process has ended for certain, write the boot id into spec.endpoints.gone"
        )
        return Verdict(name, "True", "Closing", text)
    if leaving:
        text = f"closing, as they are no longer listed: {', '.join(each.url for each in leaving[:_LISTED])}"
        return Verdict(name, "True", "Closing", text)
    wanted = resource.model.spec.wanted
    if not wanted:
        text = "spec.endpoints.urls is empty: add the URL of each engine's admin port"
        return Verdict(name, "False", "NoEndpoints", text)
    if sum(_serves(replica) for replica in fleet.replicas) == wanted:
        return Verdict(name, "False", "Complete", "every engine of spec.endpoints.urls serves")
    return Verdict(name, "True", "Updating", "not every engine of spec.endpoints.urls serves; status.closed says why")


def kv_cache_attached(resource: Resource[InferenceDeployment], seen: Seen) -> Verdict:
    """Whether every engine that answers has the pool attached."""
    name = "KVCacheAttached"
    kv_cache = resource.model.spec.kv_cache
    if kv_cache is None:
        return Verdict(name, "False", "NotConfigured", "spec.kvCache is absent: replicas keep local caches only")
    pool = kv_cache.pool_ref.name
    if seen.around.pool is None:
        return Verdict(
            name, "False", "PoolNotFound", f"KVCachePool {pool} does not exist; nothing that runs is changed"
        )
    answering = [replica for replica in seen.fleet.replicas if replica.status is not None and not replica.terminating]
    if not answering:
        return Verdict(name, "Unknown", "NoEngineAnswers", "no engine has said yet whether it reaches the store")
    apart = sorted(
        f"{replica.name} ({replica.status.store.reason or 'not attached'})"
        for replica in answering
        if replica.status is not None and not replica.status.store.attached
    )
    if fallen(answering):
        replica, waits = seen.reattach.replica, seen.reattach.waits
        then = f"pod {replica.pod} is made anew now" if replica is not None else waits
        text = f"without KVCachePool {pool}: {', '.join(apart[:_LISTED])}; {then}"
        return Verdict(name, "False", "Fallback", text)
    if apart:
        return Verdict(name, "False", "NotAttached", f"without KVCachePool {pool}: {', '.join(apart[:_LISTED])}")
    return Verdict(name, "True", "Attached", f"every engine that answers shares KV through KVCachePool {pool}")


def policy_current(resource: Resource[InferenceDeployment], seen: Seen, current: int) -> Verdict:
    """Whether every wanted replica serves in the fleet's epoch."""
    name, spec = "PolicyCurrent", resource.model.spec
    if seen.around.not_followed is not None:
        return Verdict(name, "False", seen.around.not_followed.reason, seen.around.not_followed.message)
    if spec.policy_ref is not None and seen.around.policy is None:
        place = naming.qualified(spec.policy_ref.name, spec.policy_ref.namespace or "", "")
        return Verdict(
            name,
            "False",
            "PolicyNotFound",
            f"PolicyVersion {place} does not exist; admitted engines serve on, new ones wait",
        )
    if current < spec.wanted:
        return Verdict(name, "False", "Behind", "not every wanted replica serves in the fleet's epoch")
    if spec.policy_ref is None:
        return Verdict(name, "True", "NoPolicy", "spec.policyRef is absent: one epoch holds for ever")
    return Verdict(name, "True", "Current", f"every wanted replica serves PolicyVersion {spec.policy_ref.name}")


def engine_patched(fleet: Fleet, version: str | None = None) -> Verdict:
    """Whether every engine that answers runs with its patch set, and on vLLM ``version`` if one is asked for."""
    name = "EnginePatched"
    found: dict[str, set[str]] = {}
    bare, versions = [], set()
    for replica in fleet.replicas:
        if replica.status is None or replica.terminating:
            continue
        if not replica.status.patches:
            bare.append(replica.name)
        if replica.status.engine_version:
            versions.add(replica.status.engine_version.partition("+")[0])
        for patch, state in replica.status.patches.items():
            found.setdefault(patch, set()).add(state)
    summary = f"vLLM {' and '.join(sorted(versions)) or '?'}; " + ", ".join(
        f"{patch}: {'/'.join(sorted(states))}" for patch, states in sorted(found.items())
    )
    if bare:
        return Verdict(name, "False", "NotPatched", f"no patch set on {', '.join(sorted(bare)[:_LISTED])}")
    if not found:
        return Verdict(name, "Unknown", "NoEngineAnswers", "no engine has said yet which patches it runs with")
    states = set().union(*found.values())
    if states - {"applied", "upstream", "not-applicable", "unverified"}:
        return Verdict(name, "False", "Refused", summary)
    if "unverified" in states:
        return Verdict(
            name, "False", "Unverified", f"engine.patches is Auto, and some do not know this vLLM: {summary}"
        )
    if version is not None and versions - {version}:
        text = f"engine.version asks for {version}: the image has another, or a rollout is under way: {summary}"
        return Verdict(name, "False", "OtherVersion", text)
    return Verdict(name, "True", "Patched", summary)
