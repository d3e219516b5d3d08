"""Rollouts and pod shape against a real API server and its controllers: overrides, stalls, autoscaling."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

API = "moontide.dev/v1alpha1"
MODEL = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}


def _pool(namespace: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "kv", "namespace": namespace}
    return {"apiVersion": API, "kind": "KVCachePool", "metadata": metadata, "spec": spec}


def _fleet(namespace: str, name: str = "chat", **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata, "spec": {"model": MODEL, **spec}}


def _container(name: str, **fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": name, **fields}]}}


def test_overrides_reach_the_pods_and_can_be_taken_back(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any
) -> None:
    over: dict[str, Any] = {
        "metadata": {"labels": {"team": "rl"}, "annotations": {"note": "x"}},
        "spec": {
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
            "imagePullSecrets": [{"name": "registry"}],
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub"]}],
            "runtimeClassName": "nvidia",
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                },
                {"name": "logs", "image": "logs:1"},
            ],
            "initContainers": [{"name": "fetch", "image": "fetch:1"}],
            "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}}],
        },
    }
    more = {"metadata": {"labels": {"team": "rl"}}, "spec": {"nodeSelector": {"cpu": "big"}}}
    kubectl.apply(_pool(namespace, podTemplate=more), _fleet(namespace, kvCache={"poolRef": {"name": "kv"}}))
    before = wait_for("the fleet", lambda: kubectl.get("deployment", "chat", namespace))["spec"]["template"]
    kubectl.apply(_fleet(namespace, kvCache={"poolRef": {"name": "kv"}}, podTemplate=over))

    def overridden() -> Any:
        template = kubectl.must_get("deployment", "chat", namespace)["spec"]["template"]
        return template if template["metadata"]["labels"].get("team") == "rl" else None

    template = wait_for("the override", overridden)
    pod = template["spec"]
    assert template["metadata"]["labels"]["moontide.dev/deployment"] == "chat"
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert (pod["runtimeClassName"], pod["imagePullSecrets"]) == ("nvidia", [{"name": "registry"}])
    assert [each["name"] for each in pod["containers"]] == ["engine", "logs"]
    engine = pod["containers"][0]
    assert engine["command"] == before["spec"]["containers"][0]["command"]
    assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["cache"] == {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}}
    assert {"HF_TOKEN", "MOONTIDE_ENABLED"} <= {each["name"] for each in engine["env"]}
    # The pool's own reconcile makes it.
    master = wait_for("the master", lambda: kubectl.get("deployment", "kv-master", namespace))
    store = master["spec"]["template"]
    assert (store["metadata"]["labels"]["team"], store["spec"]["nodeSelector"]) == ("rl", {"cpu": "big"})

    kubectl.apply(_fleet(namespace, kvCache={"poolRef": {"name": "kv"}}))
    wait_for(
        "no trace of it is left",
        lambda: kubectl.must_get("deployment", "chat", namespace)["spec"]["template"] == before,
    )


@pytest.mark.parametrize(
    ("over", "reason", "said"),
    [
        ({"spec": {"nodeSelektor": {"a": "b"}}}, "RefusedByApiServer", "nodeSelektor"),
        (_container("logs", image="x", commnd=["x"]), "RefusedByApiServer", "commnd"),
        ({"spec": {"tolerations": {"key": "x"}}}, "RefusedByApiServer", "tolerations"),
        (_container("logs"), "RefusedByApiServer", "image"),
        ({"spec": {"priority": "high"}}, "RefusedByApiServer", "priority"),
        (_container("engine", ports=[{"containerPort": 8000, "hostPort": 80}]), "PodTemplateRefused", "spec.service"),
        ({"spec": {"topologySpreadConstraints": [{"topologyKey": "x"}]}}, "PodTemplateRefused", "whenUnsatisfiable"),
        ({"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}, "PodTemplateRefused", "cannot be deleted"),
    ],
)
def test_a_bad_override_is_told_and_changes_nothing_that_runs(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, over: dict[str, Any], reason: str, said: str
) -> None:
    kubectl.apply(_fleet(namespace))
    before = wait_for("the fleet", lambda: kubectl.get("deployment", "chat", namespace))["spec"]
    kubectl.apply(_fleet(namespace, podTemplate=over, replicas=2))

    def told() -> Any:
        body = kubectl.must_get("ifd", "chat", namespace)
        found = {each["type"]: each for each in body.get("status", {}).get("conditions", [])}.get("Progressing", {})
        # An API server that did not answer in time is asked again.
        last = found.get("observedGeneration") == body["metadata"]["generation"] and found["reason"] != "ApplyFailed"
        return found if last else None

    found = wait_for("a word on it", told)
    assert (found["status"], found["reason"]) == ("False", reason), found
    assert said in found["message"]
    assert kubectl.must_get("deployment", "chat", namespace)["spec"] == before


def test_the_service_is_what_was_asked_for_and_back(kubectl: Any, operator: Any, namespace: str, wait_for: Any) -> None:
    def seen() -> tuple[str, int, str | None, str | None]:
        body = kubectl.get("service", "chat", namespace)
        endpoint = (kubectl.must_get("ifd", "chat", namespace).get("status") or {}).get("endpoint")
        if body is None:
            return "", 0, None, endpoint
        spec, notes = body["spec"], body["metadata"].get("annotations", {})
        return spec["type"], spec["ports"][0]["port"], notes.get("lb"), endpoint

    kubectl.apply(_fleet(namespace, replicas=0))
    plain = ("ClusterIP", 8000, None, f"chat.{namespace}.svc:8000")
    wait_for("a Service", lambda: seen() == plain)
    kubectl.apply(_fleet(namespace, replicas=0, service={"type": "NodePort", "port": 80, "annotations": {"lb": "x"}}))
    wait_for("another one", lambda: seen() == ("NodePort", 80, "x", f"chat.{namespace}.svc:80"))
    kubectl.apply(_fleet(namespace, replicas=0))
    wait_for("the first again", lambda: seen() == plain)


def test_a_budget_that_lets_a_drain_go_on_and_goes_when_it_is_not_wanted(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(_fleet(namespace, replicas=2))
    made = wait_for("a budget", lambda: kubectl.get("pdb", "chat", namespace))
    assert (made["spec"]["maxUnavailable"], made["spec"]["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    # The disruption controller has understood whose pods these are.
    wait_for("a count", lambda: kubectl.must_get("pdb", "chat", namespace).get("status", {}).get("expectedPods") == 2)
    pods = json.loads(kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    name = pods[0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    kubectl(
        "create", "--raw", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", "-f", "-", stdin=json.dumps(eviction)
    )
    wait_for("an engine that is not ready goes", lambda: kubectl.get("pod", name, namespace) is None)

    kubectl.apply(_fleet(namespace, replicas=2, rollout={"disruptionBudget": "Off"}))
    wait_for("no budget", lambda: kubectl.get("pdb", "chat", namespace) is None)
    theirs = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "chat", "namespace": namespace},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"moontide.dev/deployment": "chat"}}},
    }
    kubectl.apply(theirs)
    kubectl.apply(_fleet(namespace, replicas=1, rollout={"disruptionBudget": "Off"}))
    wait_for("the next reconcile", lambda: kubectl.must_get("deployment", "chat", namespace)["spec"]["replicas"] == 1)
    assert kubectl.must_get("pdb", "chat", namespace)["spec"]["minAvailable"] == 1
    kubectl.apply(_fleet(namespace, replicas=1))
    wait_for(
        "their budget is told of, and left alone",
        lambda: condition(kubectl.get("ifd", "chat", namespace), "Progressing") == ("False", "NameTaken"),
    )
    assert kubectl.must_get("pdb", "chat", namespace)["spec"]["minAvailable"] == 1


def test_a_stalled_rollout_names_the_pod_and_the_reason(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    def progressing() -> tuple[str, str, str]:
        body = kubectl.must_get("ifd", "chat", namespace)
        for each in body.get("status", {}).get("conditions", ()):
            if each["type"] == "Progressing":
                return each["status"], each["reason"], each["message"]
        return "", "", ""

    def say(pod: str, **status: Any) -> None:
        """Be the kubelet and the scheduler."""
        patch = json.dumps({"status": status})
        kubectl("patch", "pod", pod, "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)

    # A pod that cannot even be made.
    kubectl.apply(_fleet(namespace, podTemplate={"spec": {"priorityClassName": "no-such-class"}}))
    wait_for("FailedCreate", lambda: progressing()[1] == "Stalled" and "no-such-class" in progressing()[2])
    kubectl.apply(_fleet(namespace))
    pods = wait_for("a pod", lambda: json.loads(kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"], 120)
    name = pods[0]["metadata"]["name"]
    wait_for("life goes on", lambda: progressing()[:2] == ("True", "Updating"))
    # No node: since a minute ago, the scheduler says.
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no GPU left"}
    say(name, conditions=[{**full, "lastTransitionTime": "2026-01-01T00:00:00Z"}])
    want = ("False", "Stalled", f"pod {name}: Unschedulable: 0/1 nodes: no GPU left")
    wait_for("Unschedulable", lambda: progressing() == want)
    # A node, and an engine that ends again and again.
    base = {"name": "engine", "image": "e:1", "imageID": "", "ready": False, "started": False, "restartCount": 3}
    waits = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}}
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no patch set for vLLM 0.1"}}
    scheduled = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    say(name, conditions=scheduled, containerStatuses=[{**base, "state": waits, "lastState": ended}])
    text = "container engine ended last with exit status 1: no patch set for vLLM 0.1"
    want = ("False", "Stalled", f"pod {name}: CrashLoopBackOff: {text}")
    wait_for("CrashLoopBackOff", lambda: progressing() == want)
    said = json.loads(kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
    told = [each for each in said if each["reason"] == "Stalled"]
    assert {each["type"] for each in told} == {"Warning"}
    assert any(f"pod {name}: Unschedulable" in each["message"] for each in told)


def _sorted_lists(node: Any) -> Any:
    """Lists of maps in an order of their own: what a strategic merge puts first is no subject."""
    if isinstance(node, dict):
        return {key: _sorted_lists(value) for key, value in node.items()}
    if isinstance(node, list) and all(isinstance(each, dict) for each in node):
        return sorted((_sorted_lists(each) for each in node), key=lambda each: json.dumps(each, sort_keys=True))
    return node


def test_the_merge_is_kubectl_s(kubectl: Any) -> None:
    from moontide.resources.merge import merge

    template: dict[str, Any] = {
        "metadata": {"labels": {"app": "x"}},
        "spec": {
            "securityContext": {"runAsUser": 1, "fsGroup": 1},
            "containers": [
                {
                    "name": "engine",
                    "image": "e",
                    "command": ["a", "b"],
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "tmp", "mountPath": "/cache"}],
                    "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
                    "securityContext": {"capabilities": {"drop": ["ALL"]}},
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}],
            "tolerations": [{"key": "old"}],
            "imagePullSecrets": [{"name": "one"}],
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
        },
    }
    override: dict[str, Any] = {
        "metadata": {"labels": {"team": "y"}, "annotations": {"a": "b"}},
        "spec": {
            "securityContext": {"fsGroup": None, "supplementalGroups": [1, 2]},
            "containers": [
                {
                    "name": "engine",
                    "command": ["c"],
                    "env": [
                        {"name": "A", "$patch": "delete"},
                        {"name": "B", "value": "3"},
                        {"name": "C", "value": "4"},
                    ],
                    "volumeMounts": [{"name": "big", "mountPath": "/cache", "readOnly": True}],
                    "ports": [{"containerPort": 8000, "hostPort": 80}, {"containerPort": 9, "name": "more"}],
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                },
                {"name": "side", "image": "s"},
            ],
            "initContainers": [{"name": "first", "image": "f"}],
            "volumes": [{"name": "big", "hostPath": {"path": "/x"}}, {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
            "tolerations": [{"key": "new", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "two"}],
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["b"]}, {"ip": "10.0.0.2", "hostnames": ["c"]}],
            "nodeSelector": {"a": "b"},
        },
    }
    whole = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "x"},
        "spec": {"selector": {"matchLabels": {"app": "x"}}, "template": template},
    }
    # kubectl's own merge keeps an emptyDir's former keys; ours keeps of a volume what the override names. So here
    # the override says what kubectl apply would say of the volume, too.
    patch = copy.deepcopy(override)
    patch["spec"]["volumes"][1]["emptyDir"]["medium"] = "Memory"
    arguments = ("patch", "--local", "-f", "-", "--type=strategic", "-o", "json")
    done = kubectl(*arguments, "-p", json.dumps({"spec": {"template": patch}}), stdin=json.dumps(whole))
    theirs = json.loads(done)["spec"]["template"]
    ours = merge(template, override)
    for made in (theirs, ours):
        made["metadata"].pop("creationTimestamp", None)
        made["spec"]["containers"] = [{k: v for k, v in c.items() if v != {}} for c in made["spec"]["containers"]]
        made["spec"]["initContainers"] = [
            {k: v for k, v in c.items() if v != {}} for c in made["spec"]["initContainers"]
        ]
    assert _sorted_lists(ours) == _sorted_lists(theirs)
