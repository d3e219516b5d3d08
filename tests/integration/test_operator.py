"""The operator against a real API server: what it makes, repairs, refuses, and leaves alone."""

from __future__ import annotations

import base64
import json
import signal
import time
from typing import Any

import pytest

API = "moontide.dev/v1alpha1"

# The operator's process, and helpers, come from conftest.py.


def _pool(namespace: str, name: str = "kv", **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API, "kind": "KVCachePool", "metadata": metadata, "spec": spec}


def _fleet(namespace: str, name: str = "chat", **spec: Any) -> dict[str, Any]:
    model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata, "spec": {"model": model, **spec}}


def _policy(namespace: str, name: str = "policy", **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API, "kind": "PolicyVersion", "metadata": metadata, "spec": {"version": 7, **spec}}


CHILDREN = {
    "kvp/kv": (("deployment", "kv-master"), ("service", "kv-master"), ("secret", "kv-wiper")),
    "ifd/chat": (
        ("deployment", "chat"),
        ("service", "chat"),
        ("configmap", "chat-mooncake"),
        ("secret", "chat-admin"),
    ),
}
ALL = [child for children in CHILDREN.values() for child in children]


@pytest.fixture(name="fleet")
def _deployed(kubectl: Any, operator: Any, namespace: str, wait_for: Any) -> str:
    """A namespace with a pool, a policy and a fleet whose children all exist."""
    kubectl.apply(
        _pool(namespace),
        _policy(namespace),
        _fleet(namespace, kvCache={"poolRef": {"name": "kv"}}, policyRef={"name": "policy"}, replicas=2),
    )
    for kind, name in ALL:
        wait_for(f"{kind} {name}", lambda kind=kind, name=name: kubectl.get(kind, name, namespace))
    return namespace


def test_children_are_made_and_owned(kubectl: Any, fleet: str) -> None:
    for owner, children in CHILDREN.items():
        kind, name = owner.split("/")
        uid = kubectl.must_get(kind, name, fleet)["metadata"]["uid"]
        for child_kind, child_name in children:
            metadata = kubectl.must_get(child_kind, child_name, fleet)["metadata"]
            (reference,) = metadata["ownerReferences"]
            assert (reference["uid"], reference["controller"], reference["blockOwnerDeletion"]) == (uid, True, True)
            assert metadata["labels"]["app.kubernetes.io/managed-by"] == "moontide"
            assert (
                {each["manager"] for each in metadata["managedFields"]} >= {"moontide"}
                if ("managedFields" in metadata)
                else True
            )


def test_three_masters_an_etcd_and_a_fleet_that_asks_it(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    fleet = _fleet(namespace, kvCache={"poolRef": {"name": "three"}})
    kubectl.apply(_pool(namespace, "three", master={"replicas": 3}), fleet)
    for kind, name in (("deployment", "three-etcd"), ("service", "three-etcd"), ("deployment", "three-master")):
        wait_for(f"{kind} {name}", lambda kind=kind, name=name: kubectl.get(kind, name, namespace))
    uid = kubectl.must_get("kvp", "three", namespace)["metadata"]["uid"]
    masters = kubectl.must_get("deployment", "three-master", namespace)["spec"]
    assert masters["replicas"] == 3
    assert f"-cluster_id={uid}" in masters["template"]["spec"]["containers"][0]["command"]
    selector = kubectl.must_get("service", "three-master", namespace)["spec"]["selector"]
    assert selector["moontide.dev/leader"] == "true"
    wait_for("the fleet", lambda: kubectl.get("deployment", "chat", namespace))
    config = json.loads(kubectl.must_get("configmap", "chat-mooncake", namespace)["data"]["mooncake.json"])
    assert config["master_server_address"] == f"etcd://three-etcd.{namespace}.svc:2379"
    engine = kubectl.must_get("deployment", "chat", namespace)["spec"]["template"]["spec"]["containers"][0]
    assert {each["name"]: each.get("value") for each in engine["env"]}["MC_STORE_CLUSTER_ID"] == uid

    def said(kind: str) -> tuple[str, str]:
        found: tuple[str, str] = condition(kubectl.get("kvp", "three", namespace), kind)
        return found

    wait_for("nobody leads", lambda: said("LeaderElection") == ("False", "NoLeader"))
    assert said("Degraded") == ("True", "NoLeader")
    assert "leader" not in kubectl.must_get("kvp", "three", namespace)["status"]


def test_the_fleet_gets_what_the_spec_says(kubectl: Any, fleet: str) -> None:
    deployment = kubectl.must_get("deployment", "chat", fleet)
    assert deployment["spec"]["replicas"] == 2
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "engine.test/moontide:1"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    uid = kubectl.must_get("ifd", "chat", fleet)["metadata"]["uid"]
    assert {each["name"]: each.get("value") for each in container["env"]}["MOONTIDE_KEY_NAMESPACE"] == uid


def test_tokens_differ_and_are_hex(kubectl: Any, fleet: str) -> None:
    tokens = [
        base64.b64decode(kubectl.must_get("secret", name, fleet)["data"]["token"]).decode()
        for name in ("kv-wiper", "chat-admin")
    ]
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 and int(token, 16) >= 0 for token in tokens)


def test_status_says_what_is_there(kubectl: Any, fleet: str, wait_for: Any, condition: Any) -> None:
    wait_for("Ready", lambda: condition(kubectl.get("kvp", "kv", fleet), "Ready")[0] == "False")
    pool = kubectl.must_get("kvp", "kv", fleet)["status"]
    assert pool["endpoint"] == f"kv-master.{fleet}.svc:50051"
    assert pool["observedGeneration"] == 1
    wait_for(
        "the pool lists the fleet",
        lambda: kubectl.must_get("kvp", "kv", fleet)["status"].get("deployments") == ["chat"],
    )
    wait_for("a status", lambda: kubectl.must_get("ifd", "chat", fleet).get("status", {}).get("replicas") == 2)
    body = kubectl.must_get("ifd", "chat", fleet)
    assert body["status"]["ready"] == "0/2"
    assert body["status"]["current"] == "0/2"
    types = {each["type"] for each in body["status"]["conditions"]}
    assert types == {"Available", "Progressing", "KVCacheAttached", "PolicyCurrent", "EnginePatched"}
    assert condition(body, "Available")[0] == "False"
    assert condition(body, "Progressing") == ("True", "Updating")
    assert condition(body, "PolicyCurrent") == ("False", "Behind")
    wait_for(
        "both replicas are listed as closed",
        lambda: (
            {each["reason"] for each in kubectl.must_get("ifd", "chat", fleet)["status"].get("closed", [])}
            == {"Starting"}
        ),
    )
    columns = kubectl("get", "ifd", "chat", "-n", fleet, "--no-headers").split()
    assert columns[1:4] == ["tiny", "0/2", "0/2"]


def test_scale_subresource(kubectl: Any, fleet: str, wait_for: Any) -> None:
    kubectl("scale", "ifd", "chat", "-n", fleet, "--replicas=3")
    wait_for("three", lambda: kubectl.must_get("deployment", "chat", fleet)["spec"]["replicas"] == 3)

    def scale() -> Any:
        path = f"/apis/{API}/namespaces/{fleet}/inferencedeployments/chat/scale"
        return json.loads(kubectl("get", "--raw", path))

    wait_for("the status counts three", lambda: scale()["status"].get("replicas") == 3)
    assert scale()["spec"] == {"replicas": 3}
    pods = json.loads(kubectl("get", "pods", "-n", fleet, "-l", scale()["status"]["selector"], "-o", "json"))["items"]
    assert len(pods) == 3


def test_drift_is_repaired(kubectl: Any, fleet: str, wait_for: Any) -> None:
    kubectl("scale", "deployment", "chat", "-n", fleet, "--replicas=5")
    wait_for("replicas", lambda: kubectl.must_get("deployment", "chat", fleet)["spec"]["replicas"] == 2)
    patch = {"spec": {"selector": {"moontide.dev/deployment": "elsewhere"}}}
    kubectl("patch", "service", "chat", "-n", fleet, "--type=merge", "-p", json.dumps(patch))
    wait_for(
        "the Service's selector",
        lambda: kubectl.must_get("service", "chat", fleet)["spec"]["selector"]["moontide.dev/deployment"] == "chat",
    )
    kubectl("patch", "configmap", "chat-mooncake", "-n", fleet, "--type=merge", "-p", '{"data":{"mooncake.json":"{}"}}')
    wait_for(
        "the configuration",
        lambda: "P2PHANDSHAKE" in kubectl.must_get("configmap", "chat-mooncake", fleet)["data"]["mooncake.json"],
    )
    kubectl("patch", "secret", "chat-admin", "-n", fleet, "--type=merge", "-p", '{"data":{"token":"eA=="}}')
    wait_for(
        "the token, at the resync",
        lambda: kubectl.must_get("secret", "chat-admin", fleet)["data"]["token"] != "eA==",
    )


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_deleted_child_comes_back(kubectl: Any, fleet: str, wait_for: Any, kind: str, name: str) -> None:
    before = kubectl.must_get(kind, name, fleet)["metadata"]["uid"]
    kubectl("delete", kind, name, "-n", fleet)
    body = wait_for(f"{kind} {name} again", lambda: kubectl.get(kind, name, fleet))
    assert body["metadata"]["uid"] != before


def test_at_rest_nothing_is_written(kubectl: Any, operator: Any, fleet: str, wait_for: Any) -> None:
    def versions() -> dict[str, str]:
        kinds = "kvp,ifd,polv,deployment,service,configmap,secret,event"
        items = json.loads(kubectl("get", kinds, "-n", fleet, "-o", "json"))["items"]
        # The claim's Events are not of the operator.
        ours = [each for each in items if each.get("involvedObject", {}).get("kind") != "PersistentVolumeClaim"]
        return {f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["resourceVersion"] for each in ours}

    def owned() -> bool:
        """A Secret is created before it is applied, and its first apply says whose its fields are."""
        found = kubectl("get", "secret", "-n", fleet, "-o", "json", "--show-managed-fields")
        managed = [each["metadata"]["managedFields"] for each in json.loads(found)["items"]]
        return all(any(each["operation"] == "Apply" for each in fields) for fields in managed)

    def counted() -> bool:
        """What was made has reached every status."""
        kinds = (("ifd", "chat"), ("kvp", "kv"), ("polv", "policy"), ("deployment", "kv-master"))
        chat, pool, policy, master = (kubectl.must_get(*each, fleet).get("status") or {} for each in kinds)
        found = len(chat.get("closed", ())), pool.get("deployments"), (policy.get("replicas") or {}).get("total")
        return (*found, master.get("replicas")) == (2, ["chat"], 2, 1)

    wait_for("every status", counted)
    # Conditions move for a moment after that.
    last = versions()

    def settled() -> bool:
        nonlocal last
        time.sleep(5)
        applied = owned()
        before, last = last, versions()
        return applied and before == last

    wait_for("rest", settled, 120)
    time.sleep(6)
    assert versions() == last


def test_no_finalizer_and_no_annotation_is_written(kubectl: Any, fleet: str) -> None:
    for kind, name in (("kvp", "kv"), ("ifd", "chat"), ("polv", "policy")):
        metadata = kubectl.must_get(kind, name, fleet)["metadata"]
        assert "finalizers" not in metadata
        assert set(metadata.get("annotations", {})) <= {"kubectl.kubernetes.io/last-applied-configuration"}


def test_missing_pool_is_a_condition_and_nothing_is_started(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(_fleet(namespace, kvCache={"poolRef": {"name": "kv"}}))
    wait_for(
        "PoolNotFound",
        lambda: condition(kubectl.get("ifd", "chat", namespace), "KVCacheAttached") == ("False", "PoolNotFound"),
    )
    assert condition(kubectl.get("ifd", "chat", namespace), "Available") == ("False", "NotCreated")
    assert kubectl.get("deployment", "chat", namespace) is None

    def told() -> list[dict[str, Any]]:
        events = json.loads(kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
        return [each for each in events if each["reason"] == "PoolNotFound"]

    # The status is written first.
    warnings = wait_for("an Event", told)
    assert [(each["type"], each["involvedObject"]["name"]) for each in warnings] == [("Warning", "chat")]

    kubectl.apply(_pool(namespace))
    wait_for("the fleet starts", lambda: kubectl.get("deployment", "chat", namespace))


def test_a_pool_that_goes_changes_nothing_that_runs(kubectl: Any, fleet: str, wait_for: Any, condition: Any) -> None:
    before = kubectl.must_get("deployment", "chat", fleet)["spec"]
    kubectl("delete", "kvp", "kv", "-n", fleet)
    wait_for(
        "PoolNotFound",
        lambda: condition(kubectl.get("ifd", "chat", fleet), "KVCacheAttached") == ("False", "PoolNotFound"),
    )
    kubectl("patch", "ifd", "chat", "-n", fleet, "--type=merge", "-p", '{"spec":{"replicas":1}}')
    wait_for(
        "the new spec is seen",
        lambda: kubectl.must_get("ifd", "chat", fleet)["status"]["observedGeneration"] == 2,
    )
    assert condition(kubectl.get("ifd", "chat", fleet), "Progressing") == ("False", "WaitingForPool")
    assert kubectl.must_get("deployment", "chat", fleet)["spec"] == before
    kubectl.apply(_pool(fleet))
    wait_for("carried out", lambda: kubectl.must_get("deployment", "chat", fleet)["spec"]["replicas"] == 1)


def test_missing_policy_is_a_condition(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(_fleet(namespace, policyRef={"name": "nobody"}))
    wait_for(
        "PolicyNotFound",
        lambda: condition(kubectl.get("ifd", "chat", namespace), "PolicyCurrent") == ("False", "PolicyNotFound"),
    )
    assert kubectl.get("deployment", "chat", namespace) is not None


@pytest.mark.parametrize("kind", ["deployment", "service", "secret"])
def test_a_taken_name_is_refused_and_the_other_object_left_alone(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any, kind: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "deployment": {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "chat", "namespace": namespace},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "theirs"}},
                "template": {
                    "metadata": {"labels": {"app": "theirs"}},
                    "spec": {"containers": [{"name": "c", "image": "theirs"}]},
                },
            },
        },
        "service": {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "chat", "namespace": namespace},
            "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
        },
        "secret": {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "chat-admin", "namespace": namespace},
            "stringData": {"token": "theirs"},
        },
    }
    name = bodies[kind]["metadata"]["name"]
    kubectl.apply(bodies[kind])
    theirs = kubectl.must_get(kind, name, namespace)
    kubectl.apply(_fleet(namespace))
    wait_for(
        "NameTaken",
        lambda: condition(kubectl.get("ifd", "chat", namespace), "Progressing") == ("False", "NameTaken"),
    )
    time.sleep(1)
    now = kubectl.must_get(kind, name, namespace)
    assert "ownerReferences" not in now["metadata"]
    assert now["metadata"].get("labels") == theirs["metadata"].get("labels")
    assert now.get("spec") == theirs.get("spec")
    assert now.get("data") == theirs.get("data")
    kubectl("delete", kind, name, "-n", namespace)
    wait_for(
        "ours once the name is free",
        lambda: (kubectl.get(kind, name, namespace) or {"metadata": {}})["metadata"].get("ownerReferences"),
    )
    wait_for("it goes on", lambda: condition(kubectl.get("ifd", "chat", namespace), "Progressing")[0] == "True")


def test_two_owners_of_one_name_do_not_fight(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(_pool(namespace))
    wait_for("the master", lambda: kubectl.get("deployment", "kv-master", namespace))
    kubectl.apply(_fleet(namespace, "kv-master"))
    wait_for(
        "NameTaken",
        lambda: condition(kubectl.get("ifd", "kv-master", namespace), "Progressing") == ("False", "NameTaken"),
    )
    owners = kubectl.must_get("deployment", "kv-master", namespace)["metadata"]["ownerReferences"]
    assert [each["kind"] for each in owners] == ["KVCachePool"]


def test_what_the_api_server_refuses_is_a_condition(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(_fleet(namespace, engine={"env": [{"name": "A=B", "value": "x"}]}))
    body = wait_for(
        "RefusedByApiServer",
        lambda: (
            (body := kubectl.get("ifd", "chat", namespace))
            and condition(body, "Progressing") == ("False", "RefusedByApiServer")
            and body
        ),
    )
    (message,) = [each["message"] for each in body["status"]["conditions"] if each["type"] == "Progressing"]
    assert "A=B" in message
    kubectl.apply(_fleet(namespace, resources={"limits": {"cpu": 1, "memory": "2.5Gi"}}))
    wait_for("a good spec goes on", lambda: kubectl.get("deployment", "chat", namespace))


@pytest.mark.parametrize("running", [True, False], ids=["operator-runs", "operator-is-down"])
def test_deletion_leaves_nothing_and_does_not_hang(
    kubectl: Any, operator: Any, fleet: str, wait_for: Any, running: bool
) -> None:
    if not running:
        operator.stop()
    try:
        for kind, name in (("polv", "policy"), ("ifd", "chat"), ("kvp", "kv")):
            kubectl("delete", kind, name, "-n", fleet, "--timeout=60s")
            assert kubectl.get(kind, name, fleet) is None
        for kind, name in ALL:
            wait_for(f"{kind} {name} is gone", lambda kind=kind, name=name: kubectl.get(kind, name, fleet) is None, 120)
    finally:
        if not running:
            operator.start()
    time.sleep(2)
    assert [kubectl.get(kind, name, fleet) for kind, name in ALL] == [None] * len(ALL)


def test_a_recreated_resource_gets_new_tokens(kubectl: Any, fleet: str, wait_for: Any) -> None:
    def token() -> Any:
        secret = kubectl.get("secret", "chat-admin", fleet)
        return secret and secret["data"]["token"]

    before, body = token(), _fleet(fleet, replicas=2)
    kubectl("delete", "ifd", "chat", "-n", fleet)
    kubectl.apply(body)
    wait_for("a new token", lambda: token() not in (None, before), 120)
    wait_for("the fleet is back", lambda: kubectl.get("deployment", "chat", fleet), 120)


def test_a_killed_operator_comes_back_with_the_same_key(kubectl: Any, operator: Any, fleet: str, wait_for: Any) -> None:
    before = {name: kubectl.must_get("secret", name, fleet)["data"] for name in ("kv-wiper", "chat-admin")}
    template = kubectl.must_get("deployment", "chat", fleet)["spec"]["template"]
    operator.stop(signal.SIGKILL)
    kubectl("scale", "ifd", "chat", "-n", fleet, "--replicas=1")
    kubectl("delete", "service", "chat", "-n", fleet)
    operator.start()
    wait_for("what it missed", lambda: kubectl.must_get("deployment", "chat", fleet)["spec"]["replicas"] == 1)
    wait_for("the Service", lambda: kubectl.get("service", "chat", fleet))
    assert {name: kubectl.must_get("secret", name, fleet)["data"] for name in before} == before
    assert kubectl.must_get("deployment", "chat", fleet)["spec"]["template"] == template


def test_liveness_and_readiness(operator: Any) -> None:
    assert operator.http(operator.liveness_port, "/healthz") == 200
    assert operator.http(operator.metrics_port, "/readyz") == 200
    assert operator.http(operator.metrics_port, "/metrics") == 200


def test_the_chart_gives_every_right_that_was_needed(operator: Any) -> None:
    messages = [json.loads(line)["message"] for line in operator.log().splitlines()]
    assert len(messages) > 20
    forbidden = [text for text in messages if "forbidden" in text.lower() or " 403 " in text]
    # A namespace that is being deleted refuses new objects with 403.
    assert [text for text in forbidden if "being terminated" not in text] == []


def test_rights_are_few(kubectl: Any, operator: Any, namespace: str) -> None:
    account = "--as=system:serviceaccount:moontide-system:moontide-operator"

    def may(verb: str, what: str, where: str) -> bool:
        said: str = kubectl.run("auth", "can-i", verb, what, "-n", where, account, check=False).stdout
        return said.strip() == "yes"

    # Of which secrets, the admission policy says: test_reach.py.
    assert may("create", "secrets", namespace)
    assert may("patch", "secrets", namespace)
    assert may("get", "secrets/moontide-root-key", "moontide-system")
    for verb in ("get", "list", "watch", "delete", "update"):
        assert not may(verb, "secrets", namespace)
        assert not may(verb, "secrets", "moontide-system")
    assert not may("get", "secrets/moontide-root-key", namespace)
    assert may("update", "leases.coordination.k8s.io/moontide-operator", "moontide-system")
    assert not may("update", "leases.coordination.k8s.io/other", "moontide-system")
    assert not may("delete", "leases.coordination.k8s.io/moontide-operator", "moontide-system")
    assert not may("get", "leases.coordination.k8s.io/moontide-operator", namespace)
    for verb in ("create", "delete", "update", "patch"):
        assert not may(verb, "inferencedeployments.moontide.dev", namespace)
    assert not may("delete", "deployments.apps", namespace)
    assert not may("create", "pods", namespace)
    assert not may("create", "pods/exec", namespace)
