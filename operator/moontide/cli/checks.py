"""`doctor`: verdicts on a cluster, from what was read of it. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from moontide import labels, naming
from moontide.api.v1alpha1 import GROUP, VERSION, Condition, KVCachePoolStatus
from moontide.cli.gather import FleetSight, Sight
from moontide.cli.operators import SYSTEM, Installation
from moontide.crdgen import crd
from moontide.kube.kinds import KINDS
from moontide.trainer.policy import Object

GPU = "nvidia.com/gpu"
LWS = "leaderworkersets.leaderworkerset.x-k8s.io"
GUARDS = {
    "marks": "whoever may edit pods may change the operator's marks on them",
    "writers": "whoever may write the status of its resources, or its Lease, may change what it knows",
}
"""ValidatingAdmissionPolicies of the chart, by the last word of their names, and what is so without them."""
LATE_LEASES = 2
"""A Lease that was not renewed for so many times its seconds is held by nobody alive."""


class Level(IntEnum):
    """How bad it is."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, what to do."""

    level: Level
    about: str
    text: str
    todo: str = ""

    def wire(self) -> dict[str, str]:
        """As JSON."""
        return {"level": self.level.name.lower(), "about": self.about, "found": self.text, "do": self.todo}


@dataclass(frozen=True)
class Right:
    """Something that somebody must be allowed. ``group`` "": core; ``namespace`` "": all of them."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    why: str = ""

    def __str__(self) -> str:
        kind = self.resource + (f"/{self.subresource}" if self.subresource else "")
        group = f".{self.group}" if self.group else ""
        place = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {kind}{group}{f' {self.name}' if self.name else ''}{place}"

    def attributes(self) -> Object:
        """``resourceAttributes`` of a review."""
        found = {"verb": self.verb, "group": self.group, "resource": self.resource, "namespace": self.namespace}
        return {k: v for k, v in {**found, "subresource": self.subresource, "name": self.name}.items() if v}


@dataclass(frozen=True)
class Facts:
    """What was read. A part that could not be read is None, with the reason in ``refused``."""

    now: dt.datetime
    version: str | None
    crds: Mapping[str, Object | None] | None
    """By name; None where there is none."""
    served: bool
    """Whether the API server serves our group and version."""
    lws: bool | None
    nodes: tuple[Object, ...] | None
    operators: tuple[Installation, ...] | None
    operator_rights: Mapping[str, tuple[tuple[Right, bool], ...]]
    """By the operator's user."""
    user: str
    user_rights: tuple[tuple[Right, bool], ...]
    sight: Sight | None
    refused: Mapping[str, str] = field(default_factory=dict)
    unguarded: Mapping[str, tuple[str, ...]] | None = None
    """By the operator's user: which of :data:`GUARDS` the API server does not enforce for it. None: not seen."""
    walled: frozenset[str] | None = None
    """Namespaces that have NetworkPolicies of the chart. None: not seen."""


def examine(facts: Facts) -> list[Finding]:
    """Every check, in the order in which things must be right."""
    found = [Finding(Level.OK, "cluster", f"Kubernetes {facts.version or '(version unknown)'}, user {facts.user}")]
    found += crds(facts)
    found += operators(facts)
    found += rights(facts)
    found += guards(facts)
    found += nodes(facts)
    found += fleets(facts)
    found += walls(facts)
    found += authorities(facts)
    return found


def worst(found: Iterable[Finding]) -> Level:
    """The worst level of all."""
    return max((each.level for each in found), default=Level.OK)


# -- the CRDs ----------------------------------------------------------------------------------------------------------

_APPLY = "kubectl apply -f crds/ of the release of this kubectl moontide (or helm upgrade with crds.install=true)"


def crds(facts: Facts) -> list[Finding]:
    """Present, served, and with the schema that this release knows."""
    if facts.crds is None:
        if facts.served:
            text = f"{GROUP}/{VERSION} is served; the schema was not seen: {facts.refused.get('crds', '')}"
            return [Finding(Level.WARN, "CRDs", text, "let the user get customresourcedefinitions, to compare them")]
        return [Finding(Level.FAIL, "CRDs", f"{GROUP}/{VERSION} is not served", _APPLY)]
    found = []
    for kind in KINDS:
        name = f"{kind.plural}.{GROUP}"
        live = facts.crds.get(name)
        if live is None:
            found.append(Finding(Level.FAIL, f"CRD {kind.kind}", "is not installed", _APPLY))
            continue
        found.append(_crd(kind.kind, live, crd(kind)))
    return found


def _crd(kind: str, live: Object, ours: Object) -> Finding:
    about = f"CRD {kind}"
    version = next((each for each in live["spec"]["versions"] if each["name"] == VERSION), None)
    if version is None or not version.get("served"):
        return Finding(Level.FAIL, about, f"{VERSION} is not served", _APPLY)
    conditions = {each["type"]: each for each in (live.get("status") or {}).get("conditions") or ()}
    established = conditions.get("Established") or {}
    if established.get("status") != "True":
        said = established.get("message") or "the API server has not accepted it"
        return Finding(
            Level.FAIL, about, f"is not established: {said}", f"kubectl describe crd {live['metadata']['name']}"
        )
    theirs, known = (
        fields(version["schema"]["openAPIV3Schema"]),
        fields(ours["spec"]["versions"][0]["schema"]["openAPIV3Schema"]),
    )
    lacking, unknown = sorted(set(known) - set(theirs)), sorted(set(theirs) - set(known))
    if unknown and not lacking:
        text = f"is newer than this kubectl moontide: it has {_some(unknown)}"
        return Finding(Level.WARN, about, text, "install the kubectl moontide of the operator's release")
    if lacking:
        return Finding(Level.FAIL, about, f"is of another release: it lacks {_some(lacking)}", _APPLY)
    changed = sorted(path for path, rules in known.items() if rules != theirs[path])
    if changed:
        return Finding(Level.WARN, about, f"has other rules at {_some(changed)}", _APPLY)
    return Finding(Level.OK, about, f"{VERSION} is served, with the schema of this release")


def fields(schema: Object, path: str = "") -> dict[str, str]:
    """Every field of a schema by its path, with what rules it has (texts left out)."""
    rules = [each.get("rule") for each in schema.get("x-kubernetes-validations") or ()]
    default = schema.get("default")
    if isinstance(default, dict):
        # The API server fills it up with the defaults inside.
        default = {}
    kept = {key: schema[key] for key in ("type", "enum", "pattern", "minimum", "maximum", "maxLength") if key in schema}
    found = {path or ".": repr((sorted(map(str, rules)), sorted(kept.items(), key=str), default))}
    for name, inner in (schema.get("properties") or {}).items():
        found |= fields(inner, f"{path}.{name}")
    items = schema.get("items")
    if isinstance(items, dict):
        found |= fields(items, f"{path}[]")
    return found


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return ", ".join(listed[:4]) + more


# -- the operator ------------------------------------------------------------------------------------------------------


def operators(facts: Facts) -> list[Finding]:
    """One runs for each namespace, its pods are ready, and one of them leads."""
    if facts.operators is None:
        return [Finding(Level.WARN, "operator", f"was not seen: {facts.refused.get('operators', '')}", "")]
    if not facts.operators:
        todo = (
            "build the images and push them, for no registry has them (docs/quickstart.md); then: helm install "
            f"moontide charts/moontide -n {SYSTEM} --create-namespace --set image=REGISTRY/operator "
            "--set defaults.engine.image=REGISTRY/engine --set defaults.mooncake.image=REGISTRY/mooncake"
        )
        return [Finding(Level.FAIL, "operator", "is not installed: no Deployment with its label", todo)]
    found: list[Finding] = []
    for each in facts.operators:
        found += _operator(each, facts.now)
    everywhere = [each for each in facts.operators if not each.environ.get("MOONTIDE_WATCH_NAMESPACE")]
    if len(everywhere) > 1:
        names = ", ".join(f"{each.namespace}/{each.name}" for each in everywhere)
        found.append(
            Finding(
                Level.FAIL,
                "operator",
                f"{len(everywhere)} operators serve all namespaces: {names}",
                "two must not serve one fleet: uninstall one, or give each a watchNamespace",
            )
        )
    return found


def _operator(each: Installation, now: dt.datetime) -> list[Finding]:
    about = f"operator {each.namespace}/{each.name}"
    wanted = int(each.deployment["spec"].get("replicas", 1))
    ready = int((each.deployment.get("status") or {}).get("readyReplicas") or 0)
    logs = f"kubectl logs -n {each.namespace} deployment/{each.name}; kubectl describe pods -n {each.namespace}"
    serves = each.environ.get("MOONTIDE_WATCH_NAMESPACE") or "all namespaces"
    found = []
    if wanted == 0:
        todo = f"kubectl scale -n {each.namespace} deployment/{each.name} --replicas=1"
        found.append(Finding(Level.FAIL, about, "is scaled to 0: nobody acts", todo))
    elif ready == 0:
        found.append(Finding(Level.FAIL, about, f"0 of {wanted} pods are ready", logs))
    elif ready < wanted:
        found.append(Finding(Level.WARN, about, f"{ready} of {wanted} pods are ready", logs))
    else:
        found.append(Finding(Level.OK, about, f"{ready} of {wanted} pods are ready, serves {serves}"))
    if each.lease_refused:
        found.append(Finding(Level.WARN, about, f"its Lease was not seen: {each.lease_refused}"))
        return found
    renewed, seconds = each.renewed(), int(((each.lease or {}).get("spec") or {}).get("leaseDurationSeconds") or 15)
    if each.lease is None or not each.holder or renewed is None:
        found.append(Finding(Level.FAIL, about, "nobody leads: its Lease is not held", logs))
    elif (now - renewed).total_seconds() > LATE_LEASES * seconds:
        late = f"{(now - renewed).total_seconds():.0f} s"
        text = f"nobody leads: {each.holder} renewed the Lease {late} ago"
        found.append(Finding(Level.FAIL, about, text, logs))
    else:
        found.append(Finding(Level.OK, about, f"{each.holder.split('_')[0]} leads"))
    return found


# -- rights ------------------------------------------------------------------------------------------------------------


def operator_rights(of: Installation) -> list[Right]:
    """What the chart gives the operator: where it serves, in its own namespace, and in none."""
    namespace, hook = of.environ.get("MOONTIDE_WATCH_NAMESPACE", ""), bool(of.environ.get("MOONTIDE_HOOK_PORT"))
    ours = ("kvcachepools", "inferencedeployments", "policyversions")
    table: list[tuple[str, tuple[str, ...], str, tuple[str, ...]]] = [
        (GROUP, ours, "", ("get", "list", "watch")),
        (GROUP, ours, "status", ("patch",)),
        (GROUP, ours[:2], "finalizers", ("update",)),
        ("apps", ("deployments",), "", ("get", "list", "watch", "create", "patch")),
        ("", ("services", "configmaps"), "", ("get", "list", "watch", "create", "patch")),
        ("policy", ("poddisruptionbudgets",), "", ("get", "create", "patch", "delete")),
        ("leaderworkerset.x-k8s.io", ("leaderworkersets",), "", ("get", "create", "patch")),
        ("", ("secrets",), "", ("create", "patch")),
        ("", ("persistentvolumeclaims",), "", ("get",)),
        ("", ("pods",), "", ("list", "watch", "patch", "delete")),
        ("", ("events",), "", ("create", "patch")),
    ]
    if hook:
        table.append((GROUP, ("policyversions",), "", ("patch",)))
    found = [
        Right(verb, group, resource, sub, namespace)
        for group, resources, sub, verbs in table
        for resource in resources
        for verb in verbs
    ]
    home: list[tuple[str, str, str, tuple[str, ...]]] = [
        ("", "secrets", "", ("create",)),
        ("", "secrets", "moontide-root-key", ("get",)),
        ("coordination.k8s.io", "leases", "", ("create",)),
        ("coordination.k8s.io", "leases", of.name, ("get", "update")),
    ]
    found += [
        Right(verb, group, resource, namespace=of.namespace, name=name)
        for group, resource, name, verbs in home
        for verb in verbs
    ]
    if not namespace:
        found += [Right(verb, "apiextensions.k8s.io", "customresourcedefinitions") for verb in ("list", "watch")]
    if hook:
        reviews = (("authentication.k8s.io", "tokenreviews"), ("authorization.k8s.io", "subjectaccessreviews"))
        found += [Right("create", group, resource) for group, resource in reviews]
    return found


def user_rights(namespace: str, system: str = SYSTEM) -> list[Right]:
    """What the commands need from who types them."""
    return [
        Right("list", GROUP, "policyversions", "", namespace, why="every command"),
        Right("list", GROUP, "inferencedeployments", "", namespace, why="status, explain, bump --dry-run"),
        Right("list", GROUP, "kvcachepools", "", namespace, why="status"),
        Right("patch", GROUP, "policyversions", "", namespace, why="bump, prepare, commit, abort, reset"),
        Right("list", "", "pods", "", namespace, why="status, explain, bump --wait: a line a replica"),
        Right("get", "", "secrets", "", namespace, why="asking engines (Secret NAME-admin)"),
        Right("get", "", "pods", "proxy", namespace, why="asking engines through the API server"),
        Right("list", "", "events", "", namespace, why="history --events"),
        Right("get", "", "pods", "log", system, why="timeline: a bar a replica"),
    ]


def rights(facts: Facts) -> list[Finding]:
    """Of the operator's service accounts, and of the user."""
    found = []
    for account, answers in facts.operator_rights.items():
        lacking = [str(right) for right, allowed in answers if not allowed]
        if lacking:
            text = f"{account} may not {_some(lacking)}"
            todo = "helm upgrade the chart: its rbac.yaml gives these"
            found.append(Finding(Level.FAIL, "rights of the operator", text, todo))
        else:
            found.append(Finding(Level.OK, "rights of the operator", f"{account} has all {len(answers)}"))
    if facts.operators and "operator rights" in facts.refused:
        text = f"were not seen: {facts.refused['operator rights']}"
        found.append(
            Finding(Level.WARN, "rights of the operator", text, "run it as who may review the access of others")
        )
    if "user rights" in facts.refused:
        found.append(Finding(Level.WARN, "your rights", f"were not seen: {facts.refused['user rights']}"))
    for right, allowed in facts.user_rights:
        if not allowed:
            found.append(Finding(Level.WARN, "your rights", f"you may not {right}", f"needed for: {right.why}"))
    if facts.user_rights and all(allowed for _, allowed in facts.user_rights):
        found.append(Finding(Level.OK, "your rights", f"all {len(facts.user_rights)} that the commands need"))
    return found


def guards(facts: Facts) -> list[Finding]:
    """Whether somebody else than the operator may change what it knows engines by: RBAC cannot tell."""
    found = []
    for each in facts.operators or ():
        missing = (facts.unguarded or {}).get(each.account)
        if missing is None:
            continue
        if not missing:
            text = f"only {each.account} may write its marks on pods, and the status of what it serves"
            found.append(Finding(Level.OK, "admission", text))
            continue
        names = ", ".join(guard(each, which) for which in missing)
        text = f"{', and '.join(GUARDS[which] for which in missing)}: no ValidatingAdmissionPolicy {names} is bound"
        if each.environ.get("MOONTIDE_WATCH_NAMESPACE"):
            todo = f"{_upgrade(each)} --set admission.marks=On, as who may make cluster-wide objects"
        else:
            todo = f"{_upgrade(each)} --set admission.marks=Auto"
        found.append(Finding(Level.WARN, "admission", text, f"{todo}; needs Kubernetes 1.30: docs/security.md"))
    return found


def guard(of: Installation, which: str) -> str:
    """The name that the chart gives one of :data:`GUARDS`, and its binding."""
    return f"{of.name}-{of.namespace}-{which}"


def _upgrade(of: Installation) -> str:
    """The beginning of a command that changes values of the chart."""
    return f"helm upgrade {of.release} charts/moontide -n {of.namespace} --reset-then-reuse-values"


def walls(facts: Facts) -> list[Finding]:
    """Whether the chart closes the network of each namespace with fleets or pools. It does so only where it is told."""
    if facts.sight is None or not facts.operators:
        return []
    if facts.walled is None:
        return [Finding(Level.WARN, "network", f"policies were not seen: {facts.refused.get('network', '')}")]
    metas = [*(each.resource.meta for each in facts.sight.fleets), *(each.meta for each in facts.sight.pools)]
    found, used = [], sorted({each.namespace for each in metas})
    for each in facts.operators:
        watched = each.environ.get("MOONTIDE_WATCH_NAMESPACE")
        mine = [name for name in used if watched in (None, "", name)]
        if closed := [name for name in mine if name in facts.walled]:
            found.append(Finding(Level.OK, "network", f"the chart's NetworkPolicies are in {_some(closed)}"))
        if opened := [name for name in mine if name not in facts.walled]:
            text = (
                f"the chart's NetworkPolicies are not in {_some(opened)}: unless others are, whoever reaches its pods "
                "reads and writes the store, and may try admin ports"
            )
            todo = f"{_upgrade(each)} --set networkPolicies.enabled=true"
            if not watched:
                # The value replaces the list that was there.
                todo += f" --set 'networkPolicies.namespaces={{{','.join(sorted({*facts.walled, *opened}))}}}'"
            todo += ", and networkPolicies.trainers: docs/security.md"
            found.append(Finding(Level.WARN, "network", text, todo))
    return found


# -- nodes -------------------------------------------------------------------------------------------------------------


def nodes(facts: Facts) -> list[Finding]:
    """Whether there are GPUs for the engines that ask for them."""
    if facts.nodes is None:
        return [Finding(Level.WARN, "nodes", f"were not seen: {facts.refused.get('nodes', '')}")]
    ready = [node for node in facts.nodes if _is_ready(node)]
    gpus = {node["metadata"]["name"]: _gpus(node) for node in ready}
    total, there = sum(gpus.values()), sum(number > 0 for number in gpus.values())
    found = []
    away = len(facts.nodes) - len(ready)
    if away:
        names = _some(node["metadata"]["name"] for node in facts.nodes if not _is_ready(node))
        found.append(
            Finding(
                Level.WARN, "nodes", f"{away} of {len(facts.nodes)} are not ready: {names}", "kubectl describe node"
            )
        )
    wanted = sum(_wanted_gpus(each) for each in facts.sight.fleets) if facts.sight is not None else 0
    if total:
        level = Level.OK if wanted <= total else Level.WARN
        text = f"{total} {GPU} on {there} of {len(ready)} ready nodes; fleets that were seen ask for {wanted}"
        found.append(Finding(level, "GPUs", text, "" if level is Level.OK else "add nodes, or lower spec.replicas"))
    elif wanted:
        text = f"no ready node has {GPU}, and fleets ask for {wanted}"
        todo = "install NVIDIA's device plugin and GPU nodes, or set engine.device: cpu to try things out"
        found.append(Finding(Level.FAIL, "GPUs", text, todo))
    else:
        text = f"no ready node has {GPU}; nobody asks for one"
        todo = "for engines on GPUs install NVIDIA's device plugin; engine.device: cpu needs none"
        found.append(Finding(Level.WARN, "GPUs", text, todo))
    return found


def _is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _gpus(node: Object) -> int:
    return int(((node.get("status") or {}).get("allocatable") or {}).get(GPU) or 0)


def _wanted_gpus(sight: FleetSight) -> int:
    """Of pods as they are: their templates know the operator's defaults."""
    total = 0
    for pod in sight.pods:
        for container in pod["spec"].get("containers") or ():
            total += int(((container.get("resources") or {}).get("limits") or {}).get(GPU) or 0)
    return total


# -- fleets and pools --------------------------------------------------------------------------------------------------


def fleets(facts: Facts) -> list[Finding]:
    """Conditions of pools, policies and fleets; the seeds of their engines; what a fleet of many nodes needs."""
    sight = facts.sight
    if sight is None:
        text = facts.refused.get("fleets", "")
        return [Finding(Level.WARN, "fleets", f"were not seen: {text}")] if text else []
    found = [Finding(Level.WARN, "fleets", f"not seen: {each}") for each in sight.unseen]
    for pool in sight.pools:
        about = f"pool {pool.meta.namespace}/{pool.meta.name}"
        status = pool.model.status or KVCachePoolStatus()
        todo = f"kubectl describe kvp {pool.meta.name} -n {pool.meta.namespace}; kubectl logs -n {pool.meta.namespace} "
        todo += f"deployment/{naming.master(pool.meta.name)}"
        found.append(_of(about, status.conditions, "Ready", todo))
    for policy in sight.policies:
        todo = f"kubectl moontide explain {policy.resource.meta.name} -n {policy.resource.meta.namespace}"
        about = f"policy {policy.full_name}"
        current = policy.wire.condition("Current")
        if not current.fresh:
            text = "the operator has not looked at its present spec"
            found.append(Finding(Level.FAIL, about, text, "see the lines on the operator above"))
            continue
        found.append(_of(about, policy.status.conditions, "Current", todo, bad=Level.WARN))
        degraded = next((each for each in policy.status.conditions if each.type == "Degraded"), None)
        if degraded is not None and degraded.status == "True":
            found.append(Finding(Level.FAIL, about, f"Degraded, {degraded.reason}: {degraded.message}", todo))
    for each in sight.fleets:
        found += _fleet(each, facts)
    if not sight.fleets:
        found.append(Finding(Level.OK, "fleets", "there is none yet"))
    return found


def _fleet(sight: FleetSight, facts: Facts) -> list[Finding]:
    about, meta = f"fleet {sight.full_name}", sight.resource.meta
    describe = f"kubectl describe ifd {meta.name} -n {meta.namespace}"
    conditions = sight.status.conditions
    patched = "use an engine image of a release that the patches know: docs/engine-releases.md"
    found = [
        _of(about, conditions, "EnginePatched", patched),
        _of(about, conditions, "Available", describe),
        _of(about, conditions, "PolicyCurrent", describe, bad=Level.WARN),
    ]
    attached = next((each for each in conditions if each.type == "KVCacheAttached"), None)
    if attached is None or attached.reason != "NotConfigured":
        found.append(_of(about, conditions, "KVCacheAttached", "see the pool's line, and the network between them"))
    found += seeds(sight)
    nodes_wanted = int(((sight.body["spec"].get("parallelism") or {}).get("nodes")) or 1)
    if nodes_wanted > 1:
        if facts.lws:
            found.append(Finding(Level.OK, about, f"{nodes_wanted} nodes a replica, and LeaderWorkerSet is installed"))
        else:
            what = "was not seen" if facts.lws is None else "is not installed"
            todo = "install LeaderWorkerSet: https://lws.sigs.k8s.io"
            text = f"{nodes_wanted} nodes a replica, and the CRD {LWS} {what}"
            found.append(Finding(Level.WARN if facts.lws is None else Level.FAIL, about, text, todo))
    return found


def _of(about: str, conditions: Iterable[Condition], kind: str, todo: str, bad: Level = Level.FAIL) -> Finding:
    """A condition that should be True."""
    found = next((each for each in conditions if each.type == kind), None)
    if found is None:
        text = f"{kind} is not known: the operator has not looked at it"
        return Finding(Level.WARN, about, text, "see the lines on the operator above")
    said = f"{kind} {found.reason}" + (f": {found.message}" if found.message else "")
    if found.status == "True":
        return Finding(Level.OK, about, said)
    return Finding(Level.WARN if found.status == "Unknown" else bad, about, said, todo)


def seeds(sight: FleetSight) -> list[Finding]:
    """Engines find each other's keys only if they hash with one seed."""
    about = f"fleet {sight.full_name}"
    found: dict[str, list[str]] = {}
    for pod in sight.pods:
        if pod["metadata"].get("deletionTimestamp"):
            continue
        for container in pod["spec"].get("containers") or ():
            if container["name"] == naming.ENGINE_CONTAINER:
                environ: dict[str, Any] = {each["name"]: each.get("value") for each in container.get("env") or ()}
                found.setdefault(str(environ.get("PYTHONHASHSEED")), []).append(pod["metadata"]["name"])
    if not found:
        return []
    if len(found) > 1:
        text = "PYTHONHASHSEED differs: " + "; ".join(
            f"{seed} on {_some(names)}" for seed, names in sorted(found.items())
        )
        label = f"{labels.DEPLOYMENT}={sight.resource.meta.name}"
        todo = f"no key of one is found by another: delete the pods that differ ({label})"
        return [Finding(Level.FAIL, about, text, todo)]
    (seed,) = found
    if seed in ("None", "random"):
        text = "PYTHONHASHSEED is not set: each engine hashes in its own way, and none finds another's keys"
        return [Finding(Level.FAIL, about, text, "delete the pods: the operator's template sets it")]
    return [Finding(Level.OK, about, f"PYTHONHASHSEED is {seed} on all {sum(map(len, found.values()))} pods")]


# -- TLS ---------------------------------------------------------------------------------------------------------------


def authorities(facts: Facts) -> list[Finding]:
    """Whether the operator of each namespace whose admin ports or wipers serve TLS can know who signs for them."""
    if facts.sight is None or not facts.operators:
        return []
    asked: dict[str, list[str]] = {}
    for fleet in facts.sight.fleets:
        if fleet.resource.model.spec.engine.admin_tls_secret_ref is not None:
            asked.setdefault(fleet.resource.meta.namespace, []).append(f"fleet {fleet.full_name}")
    for pool in facts.sight.pools:
        if pool.model.spec.master.wiper_tls_secret_ref is not None:
            asked.setdefault(pool.meta.namespace, []).append(f"pool {pool.meta.namespace}/{pool.meta.name}")
    found = []
    for each in facts.operators:
        served = each.environ.get("MOONTIDE_WATCH_NAMESPACE")
        who = sorted(name for namespace, names in asked.items() for name in names if served in (None, "", namespace))
        about = f"operator {each.namespace}/{each.name}"
        if who and each.environ.get("MOONTIDE_ADMIN_AUTHORITIES"):
            found.append(Finding(Level.OK, about, f"is told who signs the certificates of {_some(who)}"))
        elif who:
            text = f"knows public authorities alone, which sign for no Service, and TLS is asked for by {_some(who)}"
            todo = "write the chart's value adminTLS.caConfigMap or adminTLS.caSecret: docs/security.md"
            found.append(Finding(Level.FAIL, about, text, todo))
    return found
