"""What a real API server refuses, with the chart's ValidatingAdmissionPolicies, whoever asks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hack import chart
from moontide import labels

API = "moontide.dev/v1alpha1"
Objects = list[dict[str, Any]]
MARK = {"metadata": {"annotations": {labels.ADMITTED_CONTAINER: "containerd://1"}}}
STATUS = {"status": {"epoch": 7}}


def _policies(namespace: str, template: str = "admission", **given: str) -> Objects:
    """The chart's in one template, for an operator that lives in and serves one namespace."""
    command = ["template", "moontide", str(chart.CHART), "-n", namespace, "-s", f"templates/{template}.yaml"]
    values = {"watchNamespace": namespace, "admission": {"marks": "On", **given}}
    done = chart.helm(*command, "--values", "-", stdin=yaml.safe_dump(values))
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def _pod(namespace: str, name: str = "chat-1", **metadata: Any) -> dict[str, Any]:
    spec = {"containers": [{"name": "engine", "image": "engine.test/none"}]}
    made = {"name": name, "namespace": namespace, "labels": labels.engine_labels("chat"), **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": made, "spec": spec}


def _object(namespace: str, kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def _fleet(namespace: str, name: str = "chat", **spec: Any) -> dict[str, Any]:
    return _object(
        namespace, "InferenceDeployment", name, model={"source": "pvc://weights/a", "servedName": "a"}, **spec
    )


def _lease(namespace: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}


class Guarded:
    """A namespace under the policies. Everything is asked by dry run, so nothing of it stays."""

    def __init__(self, kubectl: Any, name: str, free: str) -> None:
        """``free``: another namespace with the same objects, which that operator does not serve."""
        self.kubectl = kubectl
        self.name, self.free = name, free
        # Every right, so that RBAC has no say in it.
        self.operator = (f"--as=system:serviceaccount:{name}:moontide-operator", "--as-group=system:masters")

    def try_patch(self, kind: str, name: str, patch: dict[str, Any], *more: str, namespace: str = "") -> str:
        """What the API server says when it refuses; empty when it does not."""
        where = (kind, name, "-n", namespace or self.name, "--type=merge", "--dry-run=server")
        done = self.kubectl.run("patch", *where, "-p", json.dumps(patch), *more, check=False)
        return "" if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module", name="guarded")
def _guarded(kubectl: Any, kit: Any) -> Iterator[Guarded]:
    name, free = f"t-{uuid.uuid4().hex[:10]}", f"t-{uuid.uuid4().hex[:10]}"
    policies = _policies(name)
    for each in (name, free):
        kubectl.make_namespace(each)
        kit.wait_for("a service account", lambda each=each: kubectl.get("serviceaccount", "default", each))
        kubectl.apply(
            _pod(each),
            _pod(each, "store-1", labels={**labels.store_labels("kv"), labels.LEADER: "true"}),
            _object(each, "PolicyVersion", "policy", version=1),
            _object(each, "KVCachePool", "kv", memory={"perReplica": "64Mi"}),
            _lease(each, "moontide-operator"),
            _lease(each, "other"),
        )
    kubectl.apply(*policies)
    guarded = Guarded(kubectl, name, free)
    try:
        kit.wait_for("the policies act", lambda: guarded.try_patch("pod", "chat-1", MARK), 60)
        kit.wait_for(
            "the policies act", lambda: guarded.try_patch("polv", "policy", STATUS, "--subresource=status"), 60
        )
        yield guarded
    finally:
        for policy in policies:
            kubectl("delete", policy["kind"], policy["metadata"]["name"], "--ignore-not-found")
        kubectl("delete", "namespace", name, free, "--wait=false")


def _labels(**changed: str | None) -> dict[str, Any]:
    names = {"component": labels.COMPONENT, "managed_by": labels.MANAGED_BY, "deployment": labels.DEPLOYMENT}
    names |= {"pool": labels.POOL, "leader": labels.LEADER, "app": "app"}
    return {"metadata": {"labels": {names[key]: value for key, value in changed.items()}}}


UNSEEN = "its engine would serve on, unseen by changes of policy. To be rid of it, delete the pod."


@pytest.mark.parametrize(
    ("pod", "patch", "said"),
    [
        ("chat-1", MARK, "only the operator writes it. To be rid of the engine, delete the pod."),
        ("store-1", _labels(leader=None), "To move the lead, delete the leader's pod."),
        ("chat-1", _labels(leader="true"), "label moontide.dev/leader says which master of a pool leads"),
        ("chat-1", _labels(deployment=None), UNSEEN),
        ("chat-1", _labels(deployment="other"), UNSEEN),
        ("chat-1", _labels(component="mine"), UNSEEN),
        ("chat-1", _labels(managed_by=None), UNSEEN),
        ("chat-1", _labels(managed_by=None, deployment=None, component=None), UNSEEN),
        ("store-1", _labels(pool="other"), UNSEEN),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("through", [(), ("--subresource=status",)], ids=["pod", "status"])
def test_only_the_operator_changes_what_it_knows_pods_by(
    guarded: Guarded, pod: str, patch: dict[str, Any], said: str, through: tuple[str, ...]
) -> None:
    assert said in guarded.try_patch("pod", pod, patch, *through)
    assert guarded.try_patch("pod", pod, patch, *through, namespace=guarded.free) == ""
    if not through:
        assert guarded.try_patch("pod", pod, patch, *guarded.operator) == ""


def test_what_is_not_the_operators_may_be_changed(guarded: Guarded) -> None:
    assert guarded.try_patch("pod", "chat-1", _labels(app="mine")) == ""
    assert guarded.try_patch("pod", "chat-1", {"metadata": {"annotations": {"a": "b"}}}) == ""
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert guarded.try_patch("pod", "chat-1", ready, "--subresource=status") == ""
    guarded.kubectl("delete", "pod", "chat-1", "-n", guarded.name, "--dry-run=server")


@pytest.mark.parametrize(
    "mark", [MARK["metadata"], {"labels": {**labels.store_labels("kv"), labels.LEADER: "true"}}], ids=["mark", "leader"]
)
def test_no_pod_is_born_with_a_mark(guarded: Guarded, mark: dict[str, Any]) -> None:
    assert "only the operator writes it" in guarded.kubectl.refusal(_pod(guarded.name, "forged", **mark))
    unmarked = json.dumps(_pod(guarded.name, "honest"))
    guarded.kubectl("create", "--dry-run=server", "-f", "-", stdin=unmarked)


@pytest.mark.parametrize(("kind", "name"), [("polv", "policy"), ("kvp", "kv")])
def test_only_the_operator_writes_status(guarded: Guarded, kind: str, name: str) -> None:
    status = STATUS if kind == "polv" else {"status": {"keys": 7}}
    said = guarded.try_patch(kind, name, status, "--subresource=status")
    assert f"only system:serviceaccount:{guarded.name}:moontide-operator writes it: change spec instead" in said
    assert guarded.try_patch(kind, name, status, "--subresource=status", *guarded.operator) == ""
    assert guarded.try_patch(kind, name, status, "--subresource=status", namespace=guarded.free) == ""
    assert guarded.try_patch(kind, name, _labels(app="mine")) == ""


def test_a_users_change_of_spec_is_not_the_policies_business(guarded: Guarded) -> None:
    assert guarded.try_patch("polv", "policy", {"spec": {"version": 2}}) == ""


def test_only_the_operator_writes_its_lease(guarded: Guarded) -> None:
    stolen = {"spec": {"holderIdentity": "me"}}
    assert "to move the lead, delete the pod that leads" in guarded.try_patch("lease", "moontide-operator", stolen)
    assert guarded.try_patch("lease", "moontide-operator", stolen, *guarded.operator) == ""
    assert guarded.try_patch("lease", "other", stolen) == ""
    assert guarded.try_patch("lease", "moontide-operator", stolen, namespace=guarded.free) == ""
    # As docs/uninstall.md has it.
    guarded.kubectl("delete", "lease", "moontide-operator", "-n", guarded.name, "--dry-run=server")


def _faults(kubectl: Any, wait_for: Any, policies: Objects) -> list[Any]:
    """What the API server's checker warns of."""
    found = []
    for each in policies:
        if each["kind"] == "ValidatingAdmissionPolicy":
            name = each["metadata"]["name"]

            def checked(name: str = name) -> Any:
                status = kubectl.must_get("validatingadmissionpolicy", name, "").get("status") or {}
                return status if status.get("observedGeneration") else None

            found.append(wait_for(f"{name} is checked", checked).get("typeChecking", {}))
    return found


def test_the_api_server_finds_no_fault_in_the_expressions(guarded: Guarded, wait_for: Any) -> None:
    assert _faults(guarded.kubectl, wait_for, _policies(guarded.name)) == [{}, {}, {}, {}]


class InUse:
    """A namespace with fleets that name a pool and policies."""

    def __init__(self, kubectl: Any, namespace: str, wait_for: Any, action: str) -> None:
        self.kubectl, self.namespace = kubectl, namespace
        self.policies = [each for each in _policies(namespace, inUse=action) if "in-use" in each["metadata"]["name"]]
        kubectl.apply(
            *(_object(namespace, "PolicyVersion", name, version=1) for name in ("policy", "unused", "elsewhere")),
            *(_object(namespace, "KVCachePool", name, memory={"perReplica": "64Mi"}) for name in ("kv", "unused")),
            _fleet(namespace, policyRef={"name": "policy"}, kvCache={"poolRef": {"name": "kv"}}),
            _fleet(namespace, "far", policyRef={"name": "elsewhere", "namespace": "other"}),
            *self.policies,
        )
        wait_for("the policy acts", lambda: self.delete("kvp", "kv", "--dry-run=server").stderr, 60)

    def delete(self, kind: str, name: str, *more: str) -> Any:
        return self.kubectl.run("delete", kind, name, "-n", self.namespace, "--timeout=60s", *more, check=False)

    def close(self) -> None:
        for each in self.policies:
            self.kubectl("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found")


@pytest.fixture(name="in_use")
def _in_use(kubectl: Any, namespace: str, wait_for: Any) -> Iterator[Any]:
    made: list[InUse] = []

    def make(action: str) -> InUse:
        made.append(InUse(kubectl, namespace, wait_for, action))
        return made[-1]

    yield make
    for each in made:
        each.close()


POOL_SAID = "fleet chat names this pool: without it its engines lose their store"
POLICY_SAID = "fleet chat follows this policy: without it its engines serve on, and none that starts is admitted"


def test_who_deletes_what_a_fleet_names_is_warned_and_served(in_use: Any) -> None:
    there = in_use("Warn")
    for kind, name, said in (("kvp", "kv", POOL_SAID), ("polv", "policy", POLICY_SAID)):
        done = there.delete(kind, name)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("Warning:")
        assert said in done.stderr
    for kind, name in (("kvp", "unused"), ("polv", "unused"), ("polv", "elsewhere")):
        assert there.delete(kind, name).stderr == ""


def test_deny_keeps_it_until_no_fleet_names_it(in_use: Any, wait_for: Any) -> None:
    there = in_use("Deny")
    for kind, name, said in (("kvp", "kv", POOL_SAID), ("polv", "policy", POLICY_SAID)):
        done = there.delete(kind, name)
        assert done.returncode != 0
        assert said in done.stderr
    assert there.delete("polv", "elsewhere").returncode == 0
    assert there.delete("ifd", "chat").returncode == 0
    wait_for("the pool may go", lambda: there.delete("kvp", "kv").returncode == 0)


def test_deny_does_not_hold_up_the_end_of_a_namespace(kubectl: Any, wait_for: Any) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    kubectl.make_namespace(name)
    there = InUse(kubectl, name, wait_for, "Deny")
    try:
        kubectl("delete", "namespace", name, "--timeout=60s")
    finally:
        there.close()


def _engine(**context: Any) -> dict[str, Any]:
    return {"containers": [{"name": "engine", "securityContext": context}]}


SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
NULL, NODE, STORAGE = (
    "takes away what keeps these pods",
    "ports of the node (hostNetwork",
    "storage that no claim grants",
)
MORE, ADDED, ROOT = "more than Moontide does", "adds a container that may gain privileges", "run as root: write another"
KERNEL, IDENTITY = "what the node's kernel refuses", "rights that its author may not have: remove it"
LOOSE: list[tuple[dict[str, Any], str]] = [
    ({"securityContext": None}, NULL),
    ({"containers": [{"name": "engine", "securityContext": None}]}, NULL),
    (_engine(capabilities=None), NULL),
    (_engine(seccompProfile=None), NULL),
    ({"hostNetwork": True}, NODE),
    ({"hostPID": True}, NODE),
    ({"hostIPC": True}, NODE),
    ({"containers": [{"name": "engine", "ports": [{"containerPort": 1, "hostPort": 1}]}]}, NODE),
    ({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, STORAGE),
    ({"volumes": [{"name": "tmp", "nfs": {"server": "a", "path": "/"}}]}, STORAGE),
    (_engine(privileged=True), MORE),
    (_engine(capabilities={"add": ["SYS_ADMIN"]}), MORE),
    (_engine(capabilities={"drop": []}), MORE),
    (_engine(capabilities={"drop": None}), MORE),
    (_engine(allowPrivilegeEscalation=True), MORE),
    (_engine(allowPrivilegeEscalation=None), MORE),
    ({"containers": [{"name": "mine", "image": "x"}]}, ADDED),
    ({"containers": [{"name": "master", "image": "x"}]}, ADDED),
    ({"initContainers": [{"name": "engine", "image": "x"}]}, ADDED),
    ({"initContainers": [{"name": "mine", "image": "x", "securityContext": {**SAFE, "capabilities": {}}}]}, ADDED),
    ({"securityContext": {"runAsUser": 0}}, ROOT),
    ({"securityContext": {"runAsNonRoot": None}}, ROOT),
    (_engine(runAsUser=0), ROOT),
    (_engine(runAsNonRoot=False), ROOT),
    ({"initContainers": [{"name": "mine", "image": "x", "securityContext": {**SAFE, "runAsUser": 0}}]}, ROOT),
    (_engine(seccompProfile={"type": "Unconfined"}), KERNEL),
    (_engine(procMount="Unmasked"), KERNEL),
    ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, KERNEL),
    ({"serviceAccountName": "admin"}, IDENTITY),
    ({"serviceAccount": "admin"}, IDENTITY),
    ({"automountServiceAccountToken": True}, IDENTITY),
    ({"volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}, IDENTITY),
]
TIGHT: list[dict[str, Any]] = [
    {},
    {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"operator": "Exists"}], "hostPID": False},
    {"initContainers": None},
    {"containers": [{"name": "engine", "env": [{"name": "A", "value": "b"}], "ports": [{"containerPort": 1}]}]},
    {"containers": [{"name": "mine", "image": "x", "securityContext": {**SAFE, "readOnlyRootFilesystem": True}}]},
    {"initContainers": [{"name": "mine", "image": "x", "securityContext": SAFE}]},
    {"securityContext": {"runAsUser": 7, "seccompProfile": {"type": "Localhost", "localhostProfile": "a"}}},
    _engine(readOnlyRootFilesystem=False, capabilities={"drop": ["ALL"]}),
    {
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "both", "projected": {"sources": [{"secret": {"name": "s"}}, {"configMap": {"name": "m"}}]}},
        ]
    },
]


class Restricted:
    """A namespace under the policy of podTemplates, one that is not, and a user who may write fleets and no pods."""

    def __init__(self, kubectl: Any, name: str, free: str) -> None:
        self.kubectl, self.name, self.free = kubectl, name, free

    def create(self, body: dict[str, Any], *more: str) -> str:
        """What the API server says when it refuses; empty when it does not."""
        where = ("--dry-run=server", "-f", "-")
        done = self.kubectl.run("create", *where, *more, stdin=json.dumps(body), check=False)
        return "" if done.returncode == 0 else done.stderr


RESEARCHER = "--as=researcher"


@pytest.fixture(scope="module", params=["Restricted", "PodCreators"], name="restricted")
def _restricted(request: Any, kubectl: Any, kit: Any) -> Iterator[tuple[Restricted, bool]]:
    """The namespaces, and whether who may create pods is free."""
    name, free = f"t-{uuid.uuid4().hex[:10]}", f"t-{uuid.uuid4().hex[:10]}"
    policies = _policies(name, "podtemplates", podTemplates=request.param)
    there = Restricted(kubectl, name, free)
    for each in (name, free):
        kubectl.make_namespace(each)
        rights = ("--verb=get,create,patch", "--resource=inferencedeployments.moontide.dev,kvcachepools.moontide.dev")
        kubectl("create", "role", "fleets", "-n", each, *rights)
        kubectl("create", "rolebinding", "fleets", "-n", each, "--role=fleets", "--user=researcher")
        # As one that was written before the policy came.
        kubectl.apply(_fleet(each, "old", podTemplate={"spec": {"hostPID": True}}))
    kubectl.apply(*policies)
    loose = _fleet(name, podTemplate={"spec": {"hostPID": True}})
    try:
        kit.wait_for("the policy acts", lambda: NODE in there.create(loose, RESEARCHER), 60)
        yield there, request.param == "PodCreators"
    finally:
        for policy in policies:
            kubectl("delete", policy["kind"], policy["metadata"]["name"], "--ignore-not-found")
        kubectl("delete", "namespace", name, free, "--wait=false")


@pytest.mark.parametrize(("spec", "said"), LOOSE, ids=lambda value: json.dumps(value)[:70])
def test_a_pod_template_that_reaches_for_the_node_or_an_identity_is_refused(
    restricted: tuple[Restricted, bool], spec: dict[str, Any], said: str
) -> None:
    there, creators = restricted
    refused = there.create(_fleet(there.name, podTemplate={"spec": spec}), RESEARCHER)
    assert said in refused
    assert ("or have somebody write it who may create pods in this namespace" in refused) == creators


@pytest.mark.parametrize("spec", TIGHT, ids=lambda value: json.dumps(value)[:70])
def test_any_other_pod_template_is_taken(restricted: tuple[Restricted, bool], spec: dict[str, Any]) -> None:
    there, _ = restricted
    assert there.create(_fleet(there.name, podTemplate={"spec": spec}), RESEARCHER) == ""


def test_a_pools_pod_template_too(restricted: tuple[Restricted, bool]) -> None:
    there, _ = restricted
    for spec, said in (({"hostPID": True}, NODE), (_engine(), ADDED), ({"serviceAccountName": "a"}, IDENTITY)):
        assert said in there.create(_object(there.name, "KVCachePool", "kv", podTemplate={"spec": spec}), RESEARCHER)
    kept = {"containers": [{"name": each, "securityContext": {"runAsUser": 7}} for each in ("master", "wiper")]}
    assert there.create(_object(there.name, "KVCachePool", "kv", podTemplate={"spec": kept}), RESEARCHER) == ""
    assert there.create(_object(there.name, "KVCachePool", "kv"), RESEARCHER) == ""


def test_a_namespace_of_another_operator_is_not_touched(restricted: tuple[Restricted, bool]) -> None:
    there, _ = restricted
    assert there.create(_fleet(there.free, podTemplate={"spec": {"hostPID": True}}), RESEARCHER) == ""


def test_who_may_create_pods_gains_nothing_and_is_asked_nothing(restricted: tuple[Restricted, bool]) -> None:
    there, creators = restricted
    assert (there.create(_fleet(there.name, podTemplate={"spec": {"hostPID": True}})) == "") == creators


def test_what_was_written_before_stays_and_its_fleet_may_change(restricted: tuple[Restricted, bool]) -> None:
    there, _ = restricted

    def patch(spec: dict[str, Any]) -> str:
        where = ("ifd", "old", "-n", there.name, "--type=merge", "--dry-run=server", RESEARCHER)
        done = there.kubectl.run("patch", *where, "-p", json.dumps({"spec": spec}), check=False)
        return "" if done.returncode == 0 else done.stderr

    assert patch({"replicas": 2}) == ""
    assert NODE in patch({"podTemplate": {"spec": {"hostNetwork": True}}})
    assert patch({"podTemplate": None}) == ""


def test_the_api_server_finds_no_fault_in_these_either(restricted: tuple[Restricted, bool], wait_for: Any) -> None:
    there, _ = restricted
    assert _faults(there.kubectl, wait_for, _policies(there.name, "podtemplates", podTemplates="Restricted")) == [{}]
