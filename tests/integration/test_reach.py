"""What a stolen token of the operator may do, with the chart's ValidatingAdmissionPolicies and without them; and that
the operator's own work passes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import yaml
from kubernetes.aio import client as k8s

from hack import chart
from moontide import labels
from moontide.kube.client import NOT_OURS, Kube
from tests.integration.stage import RESOLVING, proxied

OURS = {labels.MANAGED_BY: labels.MANAGER}
PLAIN = {"MOONTIDE_RESYNC_SECONDS": "1", "MOONTIDE_LEASE_SECONDS": "60"}
SECRET = base64.b64encode(b"a stranger's").decode()
MARK = {"metadata": {"annotations": {"mark": "x"}}}
ACCOUNT = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {
        "name": "stolen",
        "annotations": {"kubernetes.io/service-account.name": "default"},
        "labels": OURS,
    },
    "type": "kubernetes.io/service-account-token",
}
"""A Secret that the API server would fill with the token of a service account."""


def _policies(namespace: str) -> list[dict[str, Any]]:
    """All of the chart's, for an operator that lives in and serves one namespace."""
    command = ["template", "moontide", str(chart.CHART), "-n", namespace, "-s", "templates/admission.yaml"]
    values = {"watchNamespace": namespace, "admission": {"marks": "On"}}
    done = chart.helm(*command, "--values", "-", stdin=yaml.safe_dump(values))
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def _made(kind: str, name: str, **content: Any) -> dict[str, Any]:
    version = {"Deployment": "apps/v1", "PodDisruptionBudget": "policy/v1"}.get(kind, "v1")
    marks = content.pop("labels", {})
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": marks}, **content}


def _secret(name: str, **more: Any) -> dict[str, Any]:
    return _made("Secret", name, data={"token": SECRET}, **more)


def _workload(name: str, **more: Any) -> dict[str, Any]:
    pod = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "c", "image": "engine.test/none"}]}}
    spec = {"replicas": 0, "selector": {"matchLabels": {"app": name}}, "template": pod}
    return _made("Deployment", name, spec=spec, **more)


STRANGERS = [
    _secret("theirs"),
    _made("ConfigMap", "theirs", data={"a": "b"}),
    _made("Service", "theirs", spec={"ports": [{"port": 80}]}),
    _workload("theirs"),
    _made("PodDisruptionBudget", "theirs", spec={"maxUnavailable": 1, "selector": {"matchLabels": {"app": "theirs"}}}),
    _made("Pod", "theirs", spec={"containers": [{"name": "c", "image": "engine.test/none"}]}),
]


PATHS = {
    "Secret": "api/v1/{}/secrets",
    "ConfigMap": "api/v1/{}/configmaps",
    "Service": "api/v1/{}/services",
    "Pod": "api/v1/{}/pods",
    "Deployment": "apis/apps/v1/{}/deployments",
    "PodDisruptionBudget": "apis/policy/v1/{}/poddisruptionbudgets",
}


class Thief:
    """Who has the operator's token. Everything is a dry run."""

    def __init__(self, port: int, namespace: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._namespace = namespace

    def ask(self, method: str, kind: str, name: str = "", body: object = None) -> tuple[int, str]:
        """The API server's status and words."""
        path = PATHS[kind].format(f"namespaces/{self._namespace}")
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        answer = httpx.request(
            method,
            f"{self.url}/{path}{name and '/'}{name}?dryRun=All",
            content=None if body is None else json.dumps(body),
            headers={"content-type": content},
            timeout=30,
            trust_env=False,
        )
        return answer.status_code, answer.text

    def patch(self, kind: str, name: str, body: dict[str, Any]) -> tuple[int, str]:
        return self.ask("PATCH", kind, name, body)

    def create(self, body: dict[str, Any]) -> tuple[int, str]:
        return self.ask("POST", body["kind"], "", body)


@contextmanager
def thieving(kubectl: Any, kit: Any, stage: Any) -> Iterator[Thief]:
    """Who has the token of the operator in the stage's namespace."""
    stolen = type(kubectl)(kubectl.binary, kit.kubeconfig(kubectl, stage.folder, stage.namespace))
    with proxied(stolen) as api:
        yield Thief(api.port, stage.namespace)


class Place:
    """A namespace with an operator under all policies, and things that are not the operator's."""

    def __init__(self, kubectl: Any, stage: Any, operator: Any, thief: Thief) -> None:
        self.kubectl, self.stage, self.operator, self.thief = kubectl, stage, operator, thief
        self.before: dict[str, tuple[int, str]] = {}
        """What the thief was answered before there were policies."""


@pytest.fixture(scope="module", name="place")
def _place(kubectl: Any, kit: Any, make_stage: Any) -> Iterator[Place]:
    with make_stage() as (stage, make_operator), thieving(kubectl, kit, stage) as thief:
        operator = make_operator("guarded", PLAIN, RESOLVING.format(services=stage.services))
        place = Place(kubectl, stage, operator, thief)
        strangers = "\n---\n".join(json.dumps(each) for each in STRANGERS)
        kubectl("apply", "-n", stage.namespace, "-f", "-", stdin=strangers)
        place.before = {each["kind"]: thief.patch(each["kind"], "theirs", MARK) for each in STRANGERS}
        place.before["account"] = thief.create(ACCOUNT)
        policies = _policies(stage.namespace)
        kubectl.apply(*policies)
        try:
            kit.wait_for("the policy acts", lambda: thief.patch("Secret", "theirs", {})[0] == 403, 60)
            yield place
        finally:
            for each in policies:
                kubectl("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found")


@pytest.mark.parametrize("kind", [each["kind"] for each in STRANGERS])
def test_what_is_not_the_operators_cannot_be_changed_with_its_token(place: Place, kind: str) -> None:
    # RBAC alone lets it.
    status, said = place.before[kind]
    assert (status, json.loads(said)["metadata"]["annotations"]["mark"]) == (200, "x")
    for patch in (MARK, {"metadata": {"labels": OURS}}):
        status, said = place.thief.patch(kind, "theirs", patch)
        assert status == 403
        assert f"/theirs {NOT_OURS}: it lacks label app.kubernetes.io/managed-by=moontide" in said
    if kind in ("Pod", "PodDisruptionBudget"):
        status, said = place.thief.ask("DELETE", kind, "theirs")
        assert status == 403
        assert NOT_OURS in said
    mark = ("--type=merge", "-p", json.dumps(MARK))
    # Nobody else is hindered.
    place.kubectl("patch", kind, "theirs", "-n", place.stage.namespace, *mark)


def test_a_secret_of_somebody_else_cannot_be_read_by_a_patch(place: Place) -> None:
    assert SECRET in place.before["Secret"][1]
    status, said = place.thief.patch("Secret", "theirs", {})
    assert status == 403
    assert SECRET not in said


def test_what_is_made_with_its_token_is_marked_and_is_nobodys_credentials(place: Place) -> None:
    assert place.before["account"][0] == 201
    status, said = place.thief.create(ACCOUNT)
    assert status == 403
    assert "has type Opaque; another type may be somebody's credentials" in said
    service = {"ports": [{"port": 80}]}
    for each in (
        _secret("mine"),
        _workload("mine"),
        _made("ConfigMap", "mine"),
        _made("Service", "mine", spec=service),
    ):
        status, said = place.thief.create(each)
        assert status == 403
        assert "makes carries label app.kubernetes.io/managed-by=moontide" in said
    assert place.thief.create(_secret("mine", labels=OURS))[0] == 201
    assert place.thief.create(_workload("mine", labels=OURS))[0] == 201


def test_nothing_is_made_in_namespaces_of_kubernetes(place: Place) -> None:
    account = f"--as=system:serviceaccount:{place.stage.namespace}:moontide-operator"
    command = ("create", "--dry-run=server", "-n", "kube-system", "-f", "-", account, "--as-group=system:masters")
    body = json.dumps(_workload("mine", labels=OURS))
    said = place.kubectl.run(*command, stdin=body, check=False).stderr
    assert "makes nothing in namespaces of Kubernetes itself" in said


async def test_whether_a_secret_exists_is_known_whosever_it_is_and_with_no_room_for_another(
    place: Place, wait_for: Any
) -> None:
    namespace = place.stage.namespace
    async with k8s.ApiClient(k8s.Configuration(host=place.thief.url)) as api:
        kube = Kube(api)

        async def exist() -> list[bool]:
            return [await kube.secret_exists(namespace, name) for name in ("theirs", "nowhere")]

        assert await exist() == [True, False]
        quota = {"metadata": {"name": "full"}, "spec": {"hard": {"count/secrets": "1"}}}
        quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
        place.stage.api("POST", quotas, quota)
        try:
            wait_for("it is full", lambda: "exceeded quota" in place.thief.create(_secret("more", labels=OURS))[1])
            assert await exist() == [True, False]
        finally:
            place.stage.api("DELETE", f"{quotas}/full")


def test_the_operators_own_work_passes(place: Place, wait_for: Any, condition: Any) -> None:
    stage, kubectl = place.stage, place.kubectl
    place.operator.start()
    stage.pool()
    stage.fleet("chat", fences=True)
    stage.wait_current("chat", 1)
    stage.ask("chat", version="2", weights="Unchecked")
    stage.wait_current("chat", 2)

    def live(kind: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = kubectl.get(kind, "second", stage.namespace)
        return found

    def change(**spec: Any) -> None:
        stage.api("PATCH", second, {"spec": spec})

    # It looks for a Secret of somebody else.
    second = stage.path("InferenceDeployment", "second")
    source = {"source": "hf://org/model", "tokenSecretRef": {"name": "nowhere", "key": "token"}}
    stage.create("InferenceDeployment", "second", {"model": {**source, "servedName": "tiny", "version": "1"}})
    wait_for("SecretMissing", lambda: condition(stage.api("GET", second), "Progressing")[1] == "SecretMissing")
    change(model={"tokenSecretRef": {"name": "theirs"}})
    for kind in ("deployment", "service", "secret"):
        name = "second-admin" if kind == "secret" else "second"
        wait_for(f"its {kind}", lambda kind=kind, name=name: kubectl.get(kind, name, stage.namespace))
        # Somebody takes the mark off; it stays its owner's.
        kubectl("label", kind, name, "-n", stage.namespace, f"{labels.MANAGED_BY}-")
    change(replicas=3)
    wait_for("it is changed", lambda: (live("deployment") or {})["spec"]["replicas"] == 3)
    for kind in ("deployment", "service"):
        mark = wait_for("the mark", lambda kind=kind: ((live(kind) or {})["metadata"]["labels"]).get(labels.MANAGED_BY))
        assert mark == labels.MANAGER
    wait_for("its budget", lambda: live("pdb"))
    change(rollout={"disruptionBudget": "Off"})
    wait_for("no budget", lambda: live("pdb") is None)
    lines = [json.loads(line) for line in place.operator.log().splitlines()]
    assert [line for line in lines if "error" in line or "forbidden" in line["message"].lower()] == []
    assert place.operator.stop() == 0


@pytest.mark.parametrize("guarded", [True, False], ids=["with the policies", "without"])
def test_a_secret_of_somebody_else_is_said_to_be_theirs(
    kubectl: Any, kit: Any, make_stage: Any, wait_for: Any, condition: Any, guarded: bool
) -> None:
    with make_stage() as (stage, make_operator), thieving(kubectl, kit, stage) as thief:
        operator = make_operator("beside", PLAIN, RESOLVING.format(services=stage.services))
        policies = _policies(stage.namespace) if guarded else []
        secrets = f"/api/v1/namespaces/{stage.namespace}/secrets"
        stage.api("POST", secrets, _secret("chat-admin"))
        try:
            if guarded:
                kubectl.apply(*policies)
                wait_for("the policy acts", lambda: thief.patch("Secret", "chat-admin", {})[0] == 403, 60)
            operator.start()
            model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "1"}
            stage.create("InferenceDeployment", "chat", {"model": model})
            look = stage.path("InferenceDeployment", "chat")
            wait_for("NameTaken", lambda: condition(stage.api("GET", look), "Progressing") == ("False", "NameTaken"))
            conditions = {each["type"]: each for each in stage.api("GET", look)["status"]["conditions"]}
            said = f"Secret {stage.namespace}/chat-admin exists and does not belong to InferenceDeployment chat; delete"
            assert said in conditions["Progressing"]["message"]
            kept = stage.api("GET", f"{secrets}/chat-admin")
            assert kept["data"] == {"token": SECRET}
            assert "ownerReferences" not in kept["metadata"]
        finally:
            for each in policies:
                kubectl("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found")
