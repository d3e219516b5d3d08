"""One look at fleets, as the operator's reconcile takes it, but with the user's rights, and without changing anything.

What could not be seen is told in :attr:`Sight.unseen`. An engine that was not asked is taken for what status says of
it (:func:`assumed`), and is named in :attr:`FleetSight.assumed`.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import (
    ClosedReplica,
    InferenceDeployment,
    InferenceDeploymentStatus,
    KVCachePool,
    PolicyVersion,
    PolicyVersionStatus,
)
from moontide.cli.cluster import REFUSED, Door, Reader, core, find, items, where
from moontide.cli.errors import CliError, Denied, near
from moontide.engines import tls
from moontide.engines.client import Unanswered
from moontide.errors import InvalidSpec
from moontide.kube.client import Resource, parse
from moontide.kube.kinds import DEPLOYMENT, POLICY, POOL, Kind, T
from moontide.planning.model import EngineStatus, FenceStatus, Fleet, Observed, Replica
from moontide.reconcile import adopted
from moontide.reconcile.fleets import owned, unasked
from moontide.trainer.policy import Object, Policy, checked_name

ENGINES = labels.selector({labels.MANAGED_BY: labels.MANAGER, labels.COMPONENT: "engine"})
NOT_ASKED = "NotAsked"


@dataclass(frozen=True)
class PolicySight:
    """A PolicyVersion: as the planner reads it, and as the API server sent it."""

    resource: Resource[PolicyVersion]
    body: Object

    @property
    def wire(self) -> Policy:
        """As trainers read it."""
        return Policy(self.body)

    @property
    def status(self) -> PolicyVersionStatus:
        return self.resource.model.status or PolicyVersionStatus()

    @property
    def full_name(self) -> str:
        return f"{self.resource.meta.namespace}/{self.resource.meta.name}"


@dataclass(frozen=True)
class FleetSight:
    """An InferenceDeployment and its engines."""

    resource: Resource[InferenceDeployment]
    body: Object
    fleet: Fleet
    """With what engines answered."""
    pods: tuple[Object, ...] = ()
    assumed: frozenset[str] = frozenset()
    """Names of replicas whose engine was not asked, or did not answer from here: they are what status says."""
    follows: tuple[str, str] | None = None
    """Namespace and name of its policy, whether or not it may follow it."""

    @property
    def status(self) -> InferenceDeploymentStatus:
        return self.resource.model.status or InferenceDeploymentStatus()

    @property
    def full_name(self) -> str:
        return f"{self.resource.meta.namespace}/{self.resource.meta.name}"


@dataclass(frozen=True)
class Sight:
    """Everything that was seen in one look."""

    policies: tuple[PolicySight, ...]
    fleets: tuple[FleetSight, ...]
    pools: tuple[Resource[KVCachePool], ...]
    now: dt.datetime
    unseen: tuple[str, ...] = ()
    """What could not be seen, a sentence each."""

    def following(self, policy: PolicySight) -> tuple[FleetSight, ...]:
        """The fleets that the operator counts to the policy."""
        meta, spec = policy.resource.meta, policy.resource.model.spec
        return tuple(
            each
            for each in self.fleets
            if each.follows == (meta.namespace, meta.name)
            and (each.resource.meta.namespace == meta.namespace or spec.allows(each.resource.meta.namespace))
        )

    def observed(self, policy: PolicySight) -> Observed:
        """What the planner would be given."""
        home = policy.resource.meta.namespace
        fleets = tuple(_called(each.fleet, home) for each in self.following(policy))
        return Observed(fleets, self.now, policy.resource.meta.uid)


@dataclass
class _Look:
    reader: Reader
    ask_engines: bool
    unseen: dict[str, None] = field(default_factory=dict)
    pods: dict[str, list[Object] | None] = field(default_factory=dict)

    def say(self, text: str) -> None:
        self.unseen.setdefault(text)

    def pods_of(self, namespace: str) -> list[Object] | None:
        """The engine pods of a namespace; None where they may not be listed."""
        if namespace not in self.pods:
            try:
                found: list[Object] | None = items(self.reader, core("pods", namespace), {"labelSelector": ENGINES})
            except Denied as error:
                self.say(f"pods of {namespace}: {error}")
                found = None
            self.pods[namespace] = found
        return self.pods[namespace]


def policies(reader: Reader, namespace: str | None, name: str | None = None) -> list[PolicySight]:
    """The policies of a namespace (None: of all), or the one. Raises CliError, with near names, where it is not."""
    if name is None:
        return [_policy(each) for each in items(reader, where("policyversions", namespace))]
    place = namespace or reader.namespace
    checked_name(name, "policy")
    found = find(reader, where("policyversions", place, name))
    if found is None:
        raise CliError(f"there is no PolicyVersion {place}/{name}; {hint(reader, place, name)}")
    return [_policy(found)]


def hint(reader: Reader, namespace: str, name: str) -> str:
    """What was perhaps meant instead of a policy that does not exist."""
    here = [each["metadata"]["name"] for each in items(reader, where("policyversions", namespace))]
    if text := near(name, here):
        return text
    try:
        everywhere = items(reader, where("policyversions", None))
    except CliError:
        everywhere = []
    elsewhere = [each for each in everywhere if each["metadata"]["name"] == name]
    if elsewhere:
        return f"there is one in namespace {elsewhere[0]['metadata']['namespace']}: name it with -n"
    return f"there is none at all in namespace {namespace}: name another with -n, or see all with: status -A"


def _policy(body: Object) -> PolicySight:
    return PolicySight(_parsed(POLICY, body), body)


def _parsed(kind: Kind[T], body: Object) -> Resource[T]:
    try:
        return parse(kind, body)
    except InvalidSpec as error:
        raise CliError(
            f"this kubectl moontide and the cluster's CRDs are of different releases: {' '.join(str(error).split())}; "
            "install the same release of both"
        ) from error


def look(reader: Reader, namespace: str | None, name: str | None = None, *, ask_engines: bool = True) -> Sight:
    """Look at a namespace (None: all), or at one policy of it and the fleets that follow it, wherever they are."""
    at = _Look(reader, ask_engines)
    found = policies(reader, namespace, name)
    bodies = _deployments(at, namespace, found[0] if name is not None else None)
    places = {each["metadata"]["namespace"] for each in bodies}
    pools = _pools(at, sorted(places) if namespace is not None else None, namespace)
    by_name = {(each.meta.namespace, each.meta.name): each for each in pools}
    status_of = {(p.resource.meta.namespace, p.resource.meta.name): p for p in found}
    fleets = tuple(_fleet(at, body, by_name, status_of) for body in bodies)
    if name is not None:
        used = {(each.resource.meta.namespace, each.fleet.pool) for each in fleets}
        pools = [each for each in pools if (each.meta.namespace, each.meta.name) in used]
    return Sight(tuple(found), fleets, tuple(pools), reader.now(), tuple(at.unseen))


def _deployments(at: _Look, namespace: str | None, policy: PolicySight | None) -> list[Object]:
    if policy is None:
        return items(at.reader, where("inferencedeployments", namespace))
    meta, spec = policy.resource.meta, policy.resource.model.spec
    places: list[str | None] = [meta.namespace, *(each for each in spec.allowed_namespaces if each != meta.namespace)]
    if "*" in places:
        places = [None]
    found: list[Object] = []
    for place in places:
        try:
            found += items(at.reader, where("inferencedeployments", place))
        except Denied as error:
            at.say(f"fleets of {place or 'all namespaces'} that may follow the policy: {error}")
            if place is None:
                found += items(at.reader, where("inferencedeployments", meta.namespace))
    mine = [each for each in found if follows(each) == (meta.namespace, meta.name)]
    return sorted(mine, key=lambda each: (each["metadata"]["namespace"], each["metadata"]["name"]))


def _pools(at: _Look, places: list[str] | None, namespace: str | None) -> list[Resource[KVCachePool]]:
    found: list[Object] = []
    for place in [None] if places is None else sorted({*places, *([namespace] if namespace else [])}):
        try:
            found += items(at.reader, where("kvcachepools", place))
        except Denied as error:
            at.say(f"pools of {place or 'all namespaces'}: {error}")
    return [_parsed(POOL, each) for each in found]


def follows(body: Object) -> tuple[str, str] | None:
    """Namespace and name of the policy that an InferenceDeployment names."""
    ref = (body.get("spec") or {}).get("policyRef")
    return None if not ref else (ref.get("namespace") or body["metadata"]["namespace"], ref["name"])


def _fleet(
    at: _Look,
    body: Object,
    pools: dict[tuple[str, str], Resource[KVCachePool]],
    known: dict[tuple[str, str], PolicySight],
) -> FleetSight:
    resource = _parsed(DEPLOYMENT, body)
    meta, spec = resource.meta, resource.model.spec
    policy = known.get(follows(body) or ("", ""))
    pods: list[Object] = []
    if spec.endpoints is None:
        mine = [
            each
            for each in at.pods_of(meta.namespace) or []
            if (each["metadata"].get("labels") or {}).get(labels.DEPLOYMENT) == meta.name
        ]
        typed = [(each, k8s.V1Pod.from_dict(each)) for each in mine]
        pods = [each for each, pod in typed if pod is not None and owned(pod)]
        replicas = [unasked(pod, meta, meta.namespace) for _, pod in typed if pod is not None and owned(pod)]
        replicas = _asked(at, resource, replicas)
    else:
        replicas = _adopted(at, resource)
    assumed_names = frozenset(each.name for each in replicas if each.error.startswith(NOT_ASKED))
    replicas = [assumed(each, resource, policy) if each.name in assumed_names else each for each in replicas]
    pool_name = spec.kv_cache.pool_ref.name if spec.kv_cache is not None else None
    pool = pools.get((meta.namespace, pool_name or ""))
    fleet = Fleet(
        name=meta.name,
        namespace=meta.namespace,
        uid=meta.uid,
        pool=pool_name,
        pool_uid=pool.meta.uid if pool is not None else None,
        token_secret=naming.admin_secret(meta.name),
        replicas=tuple(replicas),
    )
    return FleetSight(resource, body, fleet, tuple(pods), assumed_names, follows(body))


def _token(at: _Look, resource: Resource[InferenceDeployment]) -> str | None:
    """The bearer token of the fleet's admin ports, where the user may read it."""
    if not at.ask_engines:
        return None
    secret = naming.admin_secret(resource.meta.name)
    what = f"engines of {resource.meta.namespace}/{resource.meta.name}"
    try:
        found = find(at.reader, core("secrets", resource.meta.namespace, secret))
    except Denied:
        at.say(f"{what}: you may not get Secret {secret}, so they were not asked; taken as status says")
        return None
    try:
        token = base64.b64decode(str(((found or {}).get("data") or {}).get("token") or "")).decode()
    except (binascii.Error, UnicodeDecodeError):
        token = ""
    if not token:
        at.say(f"{what}: Secret {secret} is not there or has no token, so they were not asked")
        return None
    # The first line, as trainers take it.
    return token.split("\n")[0].strip()


def _asked(at: _Look, resource: Resource[InferenceDeployment], replicas: list[Replica]) -> list[Replica]:
    """The replicas with what their engines answered."""
    reachable = [each for each in replicas if each.address is not None]
    token = _token(at, resource) if reachable else None
    if token is None:
        return [
            replace(each, error=f"{NOT_ASKED}: " if each.address else "NoAddress: the pod has no address yet")
            for each in replicas
        ]
    answers = dict(
        zip(
            (each.name for each in reachable),
            at.reader.engines([Door(each.address or "", token, each.namespace, each.pod) for each in reachable]),
            strict=True,
        )
    )
    if all(isinstance(each, Unanswered) and _unreached(each) for each in answers.values()):
        first = next(iter(answers.values()))
        assert isinstance(first, Unanswered)
        at.say(_why_none(at, resource, first))
        return [replace(each, error=f"{NOT_ASKED}: " if each.name in answers else each.error) for each in replicas]
    return [_with(each, answers.get(each.name)) for each in replicas]


def _why_none(at: _Look, resource: Resource[InferenceDeployment], answer: Unanswered) -> str:
    engines = f"engines of {resource.meta.namespace}/{resource.meta.name}"
    directly = "where pods can be reached from here, write --direct"
    if answer.reason == tls.REASON:
        return f"{engines}: who signs for their admin ports is known to the operator alone; taken as status says"
    if answer.reason == REFUSED:
        # Of all fleets there the same, so it is said once.
        place = f"engines in namespace {resource.meta.namespace}"
        return f"{place}: {answer.message}, so they were not asked; taken as status says; {directly}"
    if at.reader.direct:
        return f"{engines}: none answers from here ({answer.message}); taken as status says"
    return f"{engines}: none answers through the API server ({answer.message}); taken as status says; {directly}"


def _unreached(answer: Unanswered) -> bool:
    # Authorities of the cluster's own are the operator's to know.
    return answer.reason in ("Timeout", "Unreachable", REFUSED, tls.REASON)


def _with(replica: Replica, answer: EngineStatus | Unanswered | None) -> Replica:
    if answer is None:
        return replace(replica, error="NoAddress: the pod has no address yet")
    if isinstance(answer, Unanswered):
        return replace(replica, error=f"{answer.reason}: {answer.message}")
    return replace(replica, status=answer)


def _adopted(at: _Look, resource: Resource[InferenceDeployment]) -> list[Replica]:
    endpoints, marks = resource.model.spec.endpoints, adopted.marks_of(resource)
    urls = list(dict.fromkeys([*(endpoints.urls if endpoints is not None else ()), *marks.values()]))
    if urls and at.ask_engines and not at.reader.direct:
        # No pod stands for them, so the API server has no way to them.
        engines = f"engines of {resource.meta.namespace}/{resource.meta.name}"
        at.say(
            f"{engines}: are reached at their URLs alone; taken as status says; where these lead there, write --direct"
        )
    token = _token(at, resource) if urls and at.reader.direct else None
    if token is None:
        answers: list[EngineStatus | Unanswered] = [Unanswered(NOT_ASKED, "") for _ in urls]
    else:
        answers = at.reader.engines([Door(adopted.address_of(url), token) for url in urls])
        if urls and all(isinstance(each, Unanswered) and _unreached(each) for each in answers):
            at.say(f"engines of {resource.meta.namespace}/{resource.meta.name}: none answers from here")
            answers = [Unanswered(NOT_ASKED, "") for _ in urls]
    return adopted.judge(resource, dict(zip(urls, answers, strict=True)), resource.meta.namespace).replicas


def assumed(replica: Replica, resource: Resource[InferenceDeployment], policy: PolicySight | None) -> Replica:
    """The replica with an engine as status has it. Without one where status says that it does not answer."""
    status = resource.model.status or InferenceDeploymentStatus()
    ours = _closed(replica, resource, status.closed)
    memory = policy.status if policy is not None else PolicyVersionStatus()
    epoch, version = status.epoch or memory.epoch, status.version
    if ours is not None and ours.reason in ("Starting", "NoAnswer", "Unreachable", "Timeout", tls.REASON):
        return replace(replica, error=f"{ours.reason}: {ours.message}")
    if not replica.may_have_served:
        if ours is None:
            return replace(replica, error="Starting: status says nothing of it")
        weights = None if ours.reason == "WaitingForWeights" else version
        engine = _engine("closed", 0, None, weights, reason=ours.reason, idle=True, salted=True)
        return replace(replica, status=engine, error="")
    member = next((each for each in memory.members if each.uid == resource.meta.uid), None)
    salted = member is not None and member.salted
    salt = f"{policy.resource.meta.uid}/{epoch}" if salted and policy is not None else ""
    if ours is not None:
        engine = _engine("closed", epoch, None, version, reason=ours.reason, salt=salt, salted=salted)
    else:
        engine = _engine("open", epoch, version, version, salt=salt, salted=salted)
    return replace(replica, status=engine, error="")


def _closed(
    replica: Replica, resource: Resource[InferenceDeployment], closed: Iterable[ClosedReplica]
) -> ClosedReplica | None:
    names = (replica.name, f"{resource.meta.namespace}/{replica.name}")
    return next((each for each in closed if each.name in names), None)


def _engine(
    state: str,
    epoch: int,
    version: str | None,
    weights: str | None,
    *,
    reason: str = "",
    salt: str = "",
    idle: bool = False,
    salted: bool = False,
) -> EngineStatus:
    return EngineStatus.model_validate(
        {
            "boot_id": "unknown",
            "state": state,
            "epoch": epoch,
            "version": version,
            "weights_version": weights,
            "clean": idle,
            "drained": idle,
            "running": 0,
            "reason": reason,
            "salt": salt,
            "fence": FenceStatus(supported=salted, live=salted),
        }
    )


def _called(fleet: Fleet, home: str) -> Fleet:
    """The fleet, as a policy of namespace ``home`` calls it."""
    if fleet.namespace == home:
        return fleet
    replicas = tuple(replace(each, name=naming.qualified(each.name, fleet.namespace, home)) for each in fleet.replicas)
    return replace(fleet, name=naming.qualified(fleet.name, fleet.namespace, home), replicas=replicas)
