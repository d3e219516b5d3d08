"""The doctor's verdicts, and that it reads what they need with the rights that there are."""

from __future__ import annotations

import copy
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from moontide.api.v1alpha1 import GROUP
from moontide.cli import checks, doctor
from moontide.cli.checks import Facts, Finding, Level, Right, examine, operator_rights, worst
from moontide.cli.cluster import Reply
from moontide.cli.gather import look
from moontide.cli.live import plainly
from moontide.cli.operators import SELECTOR, Installation
from moontide.crdgen import crd
from moontide.kube.kinds import KINDS
from tests.unit.cli.paper import MOONTIDE, NOW, Object, PaperCluster, paper, pod_of
from tests.unit.cli.test_rehearsal import world_of

ROOT = Path(__file__).resolve().parents[3]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GUARDS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
WALLS = "/apis/networking.k8s.io/v1/namespaces/rl/networkpolicies"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/moontide-system/leases"


def installed(kind: Any) -> Object:
    made = copy.deepcopy(crd(kind))
    made["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
    return made


def node(name: str, gpus: int = 0, ready: str = "True") -> Object:
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"nvidia.com/gpu": str(gpus)}}
    return {"metadata": {"name": name}, "status": status if gpus else {**status, "allocatable": {}}}


def operator(name: str = "moontide-operator", *, ready: int = 1, replicas: int = 1, watches: str = "") -> Object:
    release = name.removesuffix("moontide-operator").rstrip("-") or "moontide"
    labels = {"app.kubernetes.io/name": "moontide-operator", "app.kubernetes.io/instance": release}
    container = {"name": "operator", "env": [{"name": "MOONTIDE_WATCH_NAMESPACE", "value": watches}]}
    return {
        "metadata": {"name": name, "namespace": "moontide-system", "labels": labels},
        "spec": {"replicas": replicas, "template": {"spec": {"serviceAccountName": name, "containers": [container]}}},
        "status": {"readyReplicas": ready},
    }


def lease(holder: str = "op-1_uid_boot", age: float = 3.0, name: str = "moontide-operator") -> Object:
    renewed = (NOW - dt.timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "metadata": {"name": name},
        "spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15},
    }


def healthy() -> PaperCluster:
    """A cluster in which all is well."""
    made = paper(world_of(True, weights="Unchecked"))
    made.add(CRDS, *(installed(kind) for kind in KINDS))
    made.add("/apis/apps/v1/deployments", operator())
    made.add(LEASES, lease())
    names = ("moontide-operator", "b-moontide-operator")
    guards = (f"{name}-moontide-system-{which}" for name in names for which in checks.GUARDS)
    made.add(GUARDS, *({"metadata": {"name": each}} for each in guards))
    made.add(WALLS, {"metadata": {"name": "moontide-operator-engines", "namespace": "rl"}})
    made.add("/api/v1/nodes", node("a", 8), node("b"))
    return made


def facts(cluster: PaperCluster) -> Facts:
    return doctor.facts(cluster, "rl")


def bad(cluster: PaperCluster) -> list[Finding]:
    return [each for each in examine(facts(cluster)) if each.level is not Level.OK]


def one(cluster: PaperCluster, about: str) -> Finding:
    """The only finding that is not ok; it is about this, and says what to do."""
    (found,) = bad(cluster)
    assert found.about == about, found
    assert found.todo
    return found


def test_all_is_well() -> None:
    found = examine(facts(healthy()))
    assert [each for each in found if each.level is not Level.OK] == []
    about = {each.about for each in found}
    assert {"cluster", "CRD PolicyVersion", "GPUs", "fleet rl/chat", "pool rl/kv", "policy rl/policy"} <= about
    assert {"operator moontide-system/moontide-operator", "rights of the operator", "your rights"} <= about
    assert "op-1 leads" in [each.text for each in found]
    assert "PYTHONHASHSEED is 0 on all 2 pods" in [each.text for each in found]


def test_tls_without_authorities_is_found() -> None:
    cluster = healthy()
    (fleet,) = cluster.lists[f"{MOONTIDE}/namespaces/rl/inferencedeployments"]
    fleet["spec"]["engine"] = {"adminTlsSecretRef": {"name": "chat-tls"}}
    (pool,) = cluster.lists[f"{MOONTIDE}/namespaces/rl/kvcachepools"]
    pool["spec"]["master"] = {"wiperTlsSecretRef": {"name": "kv-tls"}}
    found = one(cluster, "operator moontide-system/moontide-operator")
    assert found.level is Level.FAIL
    assert found.text.endswith("TLS is asked for by fleet rl/chat, pool rl/kv")
    told = operator()
    variable = {"name": "MOONTIDE_ADMIN_AUTHORITIES", "value": "/etc/moontide/admin-ca/ca.crt"}
    told["spec"]["template"]["spec"]["containers"][0]["env"].append(variable)
    cluster.lists["/apis/apps/v1/deployments"] = [told]
    assert bad(cluster) == []
    said = [each.text for each in examine(facts(cluster))]
    assert "is told who signs the certificates of fleet rl/chat, pool rl/kv" in said


def test_before_an_install_it_says_what_to_install() -> None:
    cluster = PaperCluster(installed=False)
    cluster.add(CRDS)
    cluster.add("/apis/apps/v1/deployments")
    cluster.add("/api/v1/nodes", node("a"))
    found = bad(cluster)
    assert [(each.level, each.about) for each in found] == [
        (Level.FAIL, "CRD KVCachePool"),
        (Level.FAIL, "CRD InferenceDeployment"),
        (Level.FAIL, "CRD PolicyVersion"),
        (Level.FAIL, "operator"),
        (Level.WARN, "GPUs"),
    ]
    assert "kubectl apply -f crds/" in found[0].todo
    assert found[3].todo.startswith("build the images and push them, for no registry has them")
    assert "helm install moontide charts/moontide -n moontide-system" in found[3].todo
    assert "--set image=REGISTRY/operator" in found[3].todo


def test_who_may_see_little_is_told_what_was_not_seen() -> None:
    cluster = healthy()
    cluster.denied |= {CRDS, "/apis/apps", "/api/v1/nodes", "/apis/authorization.k8s.io/v1/subjectaccessreviews"}
    cluster.rights = False
    found = bad(cluster)
    assert worst(found) is Level.WARN
    text = [f"{each.about} {each.text}" for each in found]
    assert any(
        each.startswith("CRDs moontide.dev/v1alpha1 is served; the schema was not seen: user cannot") for each in text
    )
    assert any(each.startswith("operator was not seen") for each in text)
    assert any(each.startswith("nodes were not seen") for each in text)
    assert "your rights you may not patch policyversions.moontide.dev in rl" in text


def test_an_older_crd_fails_and_a_newer_one_warns() -> None:
    cluster = healthy()
    live = cluster.lists[CRDS][2]
    spec = live["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    removed = spec["properties"].pop("onStoreFailure")
    found = one(cluster, "CRD PolicyVersion")
    assert (found.level, found.text) == (Level.FAIL, "is of another release: it lacks .spec.onStoreFailure")
    spec["properties"] |= {"onStoreFailure": removed, "later": {"type": "string"}}
    found = one(cluster, "CRD PolicyVersion")
    assert found.level is Level.WARN
    assert "newer than this kubectl moontide: it has .spec.later" in found.text
    del spec["properties"]["later"]
    spec["x-kubernetes-validations"].pop()
    assert one(cluster, "CRD PolicyVersion").text == "has other rules at .spec"


def test_a_crd_that_is_not_served_or_not_established_fails() -> None:
    cluster = healthy()
    cluster.lists[CRDS][0]["spec"]["versions"][0]["served"] = False
    assert one(cluster, "CRD KVCachePool").text == "v1alpha1 is not served"
    cluster.lists[CRDS][0] = {**crd(KINDS[0]), "status": {"conditions": []}}
    assert "not established" in one(cluster, "CRD KVCachePool").text


def test_texts_and_defaults_that_the_api_server_fills_up_are_no_difference() -> None:
    schema = {
        "type": "object",
        "description": "a",
        "default": {},
        "properties": {"x": {"type": "integer", "default": 1}},
    }
    assert checks.fields(schema) == checks.fields({**schema, "description": "b", "default": {"x": 1}})
    assert checks.fields(schema) != checks.fields({**schema, "type": "array"})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ready": 0}, "0 of 1 pods are ready"),
        ({"replicas": 0, "ready": 0}, "is scaled to 0: nobody acts"),
    ],
)
def test_an_operator_that_does_not_run_fails(change: dict[str, int], text: str) -> None:
    cluster = healthy()
    cluster.lists["/apis/apps/v1/deployments"] = [operator(**change)]  # type: ignore[arg-type]
    assert one(cluster, "operator moontide-system/moontide-operator").text == text


def test_half_an_operator_warns() -> None:
    cluster = healthy()
    cluster.lists["/apis/apps/v1/deployments"] = [operator(replicas=2)]
    assert one(cluster, "operator moontide-system/moontide-operator").level is Level.WARN


def test_a_lease_that_nobody_holds_fails() -> None:
    cluster = healthy()
    about = "operator moontide-system/moontide-operator"
    for held in ([], [lease(holder="")]):
        cluster.lists[LEASES] = held
        assert one(cluster, about).text == "nobody leads: its Lease is not held"
    cluster.lists[LEASES] = [lease(age=31)]
    found = one(cluster, about)
    assert (found.level, found.text) == (Level.FAIL, "nobody leads: op-1_uid_boot renewed the Lease 31 s ago")
    cluster.lists[LEASES] = [lease(age=29)]
    assert bad(cluster) == []


def test_two_operators_of_all_namespaces_fail() -> None:
    cluster = healthy()
    cluster.lists["/apis/apps/v1/deployments"].append(operator("b-moontide-operator"))
    cluster.lists[LEASES].append(lease(name="b-moontide-operator"))
    assert "2 operators serve all namespaces" in one(cluster, "operator").text
    cluster.lists["/apis/apps/v1/deployments"][1] = operator("b-moontide-operator", watches="other")
    assert bad(cluster) == []


def test_marks_that_anybody_may_change_warn_with_the_command_that_guards_them() -> None:
    cluster = healthy()
    account = "system:serviceaccount:moontide-system:moontide-operator"
    assert f"only {account} may write its marks on pods, and the status of what it serves" in [
        each.text for each in examine(facts(cluster))
    ]
    guards = cluster.lists[GUARDS]
    cluster.lists[GUARDS] = [each for each in guards if not each["metadata"]["name"].endswith("-writers")]
    found = one(cluster, "admission")
    assert found.level is Level.WARN
    assert found.text.endswith(": no ValidatingAdmissionPolicy moontide-operator-moontide-system-writers is bound")
    cluster.lists[GUARDS] = []
    found = one(cluster, "admission")
    assert found.text.startswith("whoever may edit pods may change the operator's marks on them, and whoever may write")
    upgrade = (
        "helm upgrade moontide charts/moontide -n moontide-system --reset-then-reuse-values --set admission.marks="
    )
    assert found.todo.startswith(f"{upgrade}Auto;")
    cluster.lists["/apis/apps/v1/deployments"] = [operator(watches="rl")]
    assert one(cluster, "admission").todo.startswith(f"{upgrade}On, as who may make cluster-wide objects;")
    cluster.replies[GUARDS] = Reply(404, {}, "404 page not found")
    assert "needs Kubernetes 1.30" in one(cluster, "admission").todo
    del cluster.replies[GUARDS]
    cluster.denied |= {"/apis/admissionregistration.k8s.io"}
    assert bad(cluster) == []


def test_a_namespace_without_the_charts_network_policies_warns_with_the_values() -> None:
    cluster = healthy()
    assert "the chart's NetworkPolicies are in rl" in [each.text for each in examine(facts(cluster))]
    cluster.lists[WALLS] = []
    found = one(cluster, "network")
    assert found.level is Level.WARN
    assert found.text.startswith("the chart's NetworkPolicies are not in rl: ")
    enabled = "--reset-then-reuse-values --set networkPolicies.enabled=true"
    assert f"{enabled} --set 'networkPolicies.namespaces={{rl}}', and" in found.todo
    cluster.add(WALLS.replace("/rl/", "/lab/"), {"metadata": {"name": "x-engines", "namespace": "lab"}})
    (found,) = [each for each in examine(doctor.facts(cluster, None)) if each.about == "network"]
    assert "networkPolicies.namespaces={lab,rl}'" in found.todo
    cluster.lists["/apis/apps/v1/deployments"] = [operator(watches="rl")]
    assert f"{enabled}, and" in one(cluster, "network").todo
    cluster.lists["/apis/apps/v1/deployments"] = [operator(watches="lab")]
    assert bad(cluster) == []
    cluster.lists["/apis/apps/v1/deployments"] = [operator()]
    cluster.denied |= {WALLS}
    (found,) = bad(cluster)
    assert found.text.startswith("policies were not seen: user cannot read")


def made_by_the_chart(name: str) -> list[Object]:
    """Every object of a snapshot: one that is not the default's has what differs from it."""
    found: dict[tuple[str, str, str], Object] = {}
    for each in ("default", name):
        text = (ROOT / f"tests/integration/snapshots/{each}.yaml").read_text()
        for line in text.splitlines():
            if line.startswith("# Not made: "):
                kind, namespace, called = line.removeprefix("# Not made: ").split()
                del found[kind, namespace, called]
        for body in yaml.safe_load_all(text):
            meta = body["metadata"]
            found[body["kind"], meta.get("namespace", "-"), meta["name"]] = body
    return list(found.values())


def installed_as(name: str) -> Installation:
    (deployment,) = [each for each in made_by_the_chart(name) if each["kind"] == "Deployment"]
    return Installation(deployment, (), None)


@pytest.mark.parametrize("name", ["default", "one-namespace-guarded"])
def test_the_names_of_the_guards_are_the_charts(name: str) -> None:
    made = [each for each in made_by_the_chart(name) if each["kind"] == "ValidatingAdmissionPolicyBinding"]
    names = {each["metadata"]["name"] for each in made}
    assert {checks.guard(installed_as(name), which) for which in checks.GUARDS} <= names


def test_the_charts_network_policies_have_the_label_that_they_are_looked_for_by() -> None:
    made = [each for each in made_by_the_chart("network-policies") if each["kind"] == "NetworkPolicy"]
    assert {each["metadata"]["namespace"] for each in made} == {"rl"}
    key, _, value = SELECTOR.partition("=")
    assert {each["metadata"]["labels"][key] for each in made} == {value}


@pytest.mark.parametrize("name", ["default", "one-namespace", "trainers", "one-namespace-trainers"])
def test_the_operators_rights_are_those_of_the_chart(name: str) -> None:
    made, of = made_by_the_chart(name), installed_as(name)
    roles = {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each["rules"]
        for each in made
        if each["kind"] in ("Role", "ClusterRole")
    }
    chart = set()
    for binding in made:
        subjects = binding.get("subjects") or ()
        accounts = {f"system:serviceaccount:{each['namespace']}:{each['name']}" for each in subjects}
        if of.account not in accounts:
            continue
        place = binding["metadata"].get("namespace", "")
        for rule in roles[binding["roleRef"]["kind"], place, binding["roleRef"]["name"]]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    kind, _, sub = resource.partition("/")
                    for named in rule.get("resourceNames") or [""]:
                        chart |= {str(Right(verb, group, kind, sub, place, named)) for verb in rule["verbs"]}
    rights = [str(right) for right in operator_rights(of)]
    assert chart == set(rights)
    assert len(rights) == len(chart)


def test_an_operator_without_a_right_fails() -> None:
    cluster = healthy()
    seen = facts(cluster)
    (account,) = seen.operator_rights
    assert account == "system:serviceaccount:moontide-system:moontide-operator"
    answers = tuple((right, right.resource != "pods") for right, _ in seen.operator_rights[account])
    found = checks.rights(Facts(**{**vars(seen), "operator_rights": {account: answers}}))
    assert found[0].level is Level.FAIL
    assert found[0].text == f"{account} may not list pods, watch pods, patch pods, delete pods"


def test_the_rights_of_the_hook_are_looked_at_where_it_is_on() -> None:
    cluster = healthy()
    deployment = operator()
    assert "create tokenreviews.authentication.k8s.io" not in [str(r) for r in operator_rights(installed_as("default"))]
    deployment["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "MOONTIDE_HOOK_PORT", "value": "1"})
    cluster.lists["/apis/apps/v1/deployments"] = [deployment]
    (answers,) = facts(cluster).operator_rights.values()
    assert {
        "create tokenreviews.authentication.k8s.io",
        "create subjectaccessreviews.authorization.k8s.io",
        "patch policyversions.moontide.dev",
        "create leases.coordination.k8s.io in moontide-system",
        "list customresourcedefinitions.apiextensions.k8s.io",
    } <= {str(right) for right, _ in answers}


def test_gpus_that_nobody_has_fail_where_a_fleet_wants_them() -> None:
    cluster = healthy()
    cluster.lists["/api/v1/nodes"] = [node("a"), node("b", 8, ready="False")]
    found = {each.about: each for each in bad(cluster)}
    assert found["nodes"].text == "1 of 2 are not ready: b"
    assert (found["GPUs"].level, found["GPUs"].text) == (
        Level.WARN,
        "no ready node has nvidia.com/gpu; nobody asks for one",
    )
    for pod in cluster.lists["/api/v1/namespaces/rl/pods"]:
        pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "4"}}
    assert {each.about: each.level for each in bad(cluster)}["GPUs"] is Level.FAIL
    cluster.lists["/api/v1/nodes"] = [node("a", 4)]
    found = {each.about: each for each in bad(cluster)}
    assert found["GPUs"].text == "4 nvidia.com/gpu on 1 of 1 ready nodes; fleets that were seen ask for 8"
    assert found["GPUs"].level is Level.WARN


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        (("0", "1"), "PYTHONHASHSEED differs: 0 on chat-1; 1 on chat-2"),
        (("0", None), "PYTHONHASHSEED differs: 0 on chat-1; None on chat-2"),
        ((None, None), "PYTHONHASHSEED is not set"),
        (("random", "random"), "PYTHONHASHSEED is not set"),
    ],
)
def test_seeds_that_differ_fail(seeds: tuple[str | None, ...], text: str) -> None:
    cluster = healthy()
    path = "/api/v1/namespaces/rl/pods"
    cluster.lists[path] = [
        pod_of(f"chat-{number}", "chat", f"10.0.0.{number}", f"uid-{number}", "c", "c", seed)
        for number, seed in enumerate(seeds, 1)
    ]
    found = one(cluster, "fleet rl/chat")
    assert found.level is Level.FAIL
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    ("kind", "reason", "level"),
    [
        ("EnginePatched", "NotPatched", Level.FAIL),
        ("KVCacheAttached", "NotAttached", Level.FAIL),
        ("Available", "MinimumReplicasUnavailable", Level.FAIL),
        ("PolicyCurrent", "Behind", Level.WARN),
    ],
)
def test_conditions_of_a_fleet_are_judged(kind: str, reason: str, level: Level) -> None:
    cluster = healthy()
    fleet = cluster.lists[f"/apis/{GROUP}/v1alpha1/namespaces/rl/inferencedeployments"][0]
    condition = next(each for each in fleet["status"]["conditions"] if each["type"] == kind)
    condition |= {"status": "False", "reason": reason, "message": "so it is"}
    found = one(cluster, "fleet rl/chat")
    assert (found.level, found.text) == (level, f"{kind} {reason}: so it is")
    condition["status"] = "Unknown"
    assert one(cluster, "fleet rl/chat").level is Level.WARN
    fleet["status"]["conditions"].remove(condition)
    assert "the operator has not looked at it" in one(cluster, "fleet rl/chat").text


def test_a_pool_that_does_not_serve_fails_and_a_fleet_without_one_does_not() -> None:
    cluster = healthy()
    pool = cluster.lists[f"/apis/{GROUP}/v1alpha1/namespaces/rl/kvcachepools"][0]
    pool["status"]["conditions"][0] |= {"status": "False", "reason": "MasterSilent"}
    assert "deployment/kv-master" in one(cluster, "pool rl/kv").todo
    cluster.lists[f"/apis/{GROUP}/v1alpha1/namespaces/rl/kvcachepools"] = []
    fleet = cluster.lists[f"/apis/{GROUP}/v1alpha1/namespaces/rl/inferencedeployments"][0]
    del fleet["spec"]["kvCache"]
    attached = next(each for each in fleet["status"]["conditions"] if each["type"] == "KVCacheAttached")
    attached |= {"status": "False", "reason": "NotConfigured"}
    assert bad(cluster) == []


def test_a_policy_that_the_operator_does_not_look_at_fails() -> None:
    cluster = healthy()
    cluster.lists[f"/apis/{GROUP}/v1alpha1/namespaces/rl/policyversions"][0]["metadata"]["generation"] = 9
    assert "has not looked at its present spec" in one(cluster, "policy rl/policy").text


def test_a_fleet_of_many_nodes_needs_leader_worker_sets() -> None:
    cluster = healthy()
    fleet = cluster.lists[f"/apis/{GROUP}/v1alpha1/namespaces/rl/inferencedeployments"][0]
    fleet["spec"]["parallelism"] = {"nodes": 2}
    found = one(cluster, "fleet rl/chat")
    assert found.level is Level.FAIL
    assert "leaderworkersets.leaderworkerset.x-k8s.io is not installed" in found.text
    cluster.add(CRDS, {"metadata": {"name": checks.LWS}})
    assert bad(cluster) == []


def test_the_report_says_what_to_do_and_json_has_the_same() -> None:
    found = [Finding(Level.OK, "cluster", "fine"), Finding(Level.FAIL, "GPUs", "none", "buy some")]
    text = plainly(doctor.render(found))
    assert text == "ok    cluster  fine\nFAIL  GPUs     none\n               → buy some"
    assert json.dumps(found[1].wire()) == '{"level": "fail", "about": "GPUs", "found": "none", "do": "buy some"}'
    assert worst([]) is Level.OK


def test_it_asks_no_engine() -> None:
    cluster = healthy()
    examine(facts(cluster))
    assert not [path for path in cluster.asked if "/secrets/" in path]
    assert look(cluster, "rl").unseen == ()
