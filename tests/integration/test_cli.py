"""`kubectl moontide` on a real API server and operator; engines are real gates over idle engines.

With ``MOONTIDE_RECORDING=FILE`` what the commands read is written there; docs/pictures is made from it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.pictures.recording import Recorder
from moontide import naming
from moontide.cli import doctor
from moontide.cli.app import main
from moontide.cli.cluster import REFUSED, Cluster, Door
from moontide.cli.gather import look
from moontide.engines.client import Unanswered
from moontide.planning.model import EngineStatus
from moontide.trainer.access import find
from tests.component.certificates import Authority
from tests.integration.stage import RESOLVING, ROOT, Stage

DOUBLE = Path(__file__).parent / "engine_double.py"
OPERATOR = "app.kubernetes.io%2Fname%3Dmoontide-operator"
CHAT = "moontide.dev%2Fdeployment%3Dchat"


def ready(stage: Stage, selector: str) -> int:
    """Say of pods what a kubelet would: that they are ready. Returns how many there are."""
    folder = f"/api/v1/namespaces/{stage.namespace}/pods"
    pods = stage.api("GET", f"{folder}?labelSelector={selector}")["items"]
    for pod in pods:
        now = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-28T08:00:00Z"}
        stage.api("PATCH", f"{folder}/{pod['metadata']['name']}/status", {"status": {"conditions": [now]}})
    return len(pods)


class Terminal:
    """Runs commands, and has what came of them."""

    def __init__(self, stage: Stage, kubeconfig: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.stage, self.kubeconfig, self.log = stage, kubeconfig, log
        self._capsys = capsys
        self.error = ""

    def __call__(self, *arguments: str, rc: int = 0, kubeconfig: Path | None = None) -> str:
        where = ("-n", self.stage.namespace, "--kubeconfig", str(kubeconfig or self.kubeconfig))
        self._capsys.readouterr()
        done = main([*arguments, *where])
        said = self._capsys.readouterr()
        self.error = said.err
        assert done == rc, said.out + said.err
        assert "Traceback" not in said.err
        return said.out

    def json(self, *arguments: str, rc: int = 0) -> Any:
        return json.loads(self(*arguments, "-o", "json", rc=rc))


@pytest.fixture(scope="module", name="here")
def _here(make_stage: Any, tools: Path, kubectl: Any, kit: Any) -> Iterator[tuple[Stage, Path]]:
    """A fleet of three whose keys carry no epoch, so that a change takes every step; and its operator's log."""
    with ExitStack() as stack:
        stage, make = stack.enter_context(make_stage())
        operator = make(
            "operator", {"MOONTIDE_POD_NAME": "moontide-operator-0"}, RESOLVING.format(services=stage.services)
        )
        operator.start()
        # What the chart installs. No kubelet runs: the operator is a process, and the test says that it is ready.
        command = [str(tools / "helm"), "template", "moontide", str(ROOT / "charts/moontide"), "-n", stage.namespace]
        sets = ["--set", f"watchNamespace={stage.namespace}", "-s", "templates/deployment.yaml"]
        made = subprocess.run([*command, *sets], capture_output=True, text=True, check=True).stdout
        body = next(each for each in yaml.safe_load_all(made) if each["kind"] == "Deployment")
        kubectl.apply(body)
        kit.wait_for("the operator's pod", lambda: ready(stage, OPERATOR) == 1)
        stage.pool()
        stage.fleet("chat", fences=False, replicas=3, weights="Unchecked")
        stage.wait_current("chat", 1)
        # A policy is current before its first replica has come up, too.
        kit.wait_for("three serve", lambda: stage.status("chat")["replicas"]["summary"] == "3/3")
        yield stage, stage.folder / "operator.log"


@pytest.fixture(name="term")
def _term(here: tuple[Stage, Path], kubectl: Any, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(here[0], kubectl.kubeconfig, here[1], capsys)


def saved(recorder: Recorder, stage: Stage, log: Path) -> None:
    """Write the recording where it is asked for; the namespace has a random name."""
    if target := os.environ.get("MOONTIDE_RECORDING"):
        calls = [each for each in log.read_text().splitlines() if '"step"' in each and '"replica"' in each]
        Path(target).write_text(recorder.saved(calls).replace(stage.namespace, "rl"))


def test_a_change_is_rehearsed_followed_and_drawn(term: Terminal, wait_for: Callable[..., Any], tmp_path: Path) -> None:
    stage = term.stage
    assert ready(stage, CHAT) == 3
    # Pods of these tests have addresses of this machine, to which no API server passes anything on.
    wait_for(
        "three are ready", lambda: term.json("status", "chat", "--direct")["fleets"][0]["status"]["ready"] == "3/3"
    )
    names = {pod["metadata"]["name"] for pod in stage.pods("chat")}
    with Cluster(find(term.kubeconfig), direct=True) as cluster:
        recorder = Recorder(cluster)
        recorder.begin("before")
        sight = look(recorder, stage.namespace, "chat")
        recorder.begin("doctor")
        doctor.facts(recorder, stage.namespace)

        rows = term.json("status", "chat", "--direct")["replicas"]
        assert {(row["replica"], row["state"], row["epoch"], row["source"]) for row in rows} == {
            (name, "open", 1, "engine") for name in names
        }
        assert sight.unseen == ()
        assert "3/3 replicas serve version 1 in epoch 1" in term("status")
        assert "nothing to do" in term("explain", "chat", "--direct")

        asked = term.json("bump", "chat", "2", "--dry-run", "--direct")
        assert stage.status("chat")["epoch"] == 1
        before = len(stage.journal())
        out = term("bump", "chat", "2", "--wait", "--direct")
        epoch = stage.wait_current("chat", 2)
        for name in names:
            assert f"{name}: open in epoch {epoch}, version 2\n" in out
        assert f"version 2 is current in epoch {epoch}, 3/3 replicas\n" in out
        # What was rehearsed is what engines were told, step by step.
        told: dict[str, list[str]] = {name: [] for name in names}
        for event in stage.journal()[before:]:
            if event.get("outcome") == "Done":
                # One that is slow may be told a step again.
                told[event["engine"]] += [event["step"]] if event["step"] not in told[event["engine"]] else []
        planned: dict[str, list[str]] = {name: [] for name in names}
        for each in asked["looks"]:
            for action in each["actions"]:
                if action["of"] in planned:
                    planned[action["of"]].append(action["step"])
        assert told == planned
        assert set(map(tuple, told.values())) == {("quiesce", "drain", "reset", "admit", "resume")}
        # The operator logs and leaves Events beside what it does.
        wait_for("its log", lambda: all(f"resume {name}: done" in term.log.read_text() for name in names))
        recorder.begin("after")
        look(recorder, stage.namespace, "chat")
        saved(recorder, stage, term.log)

    changes = term.json("history", "chat")["changes"]
    assert [(each["version"], each["epoch"]) for each in changes] == [("2", 2), ("1", 1)]
    assert "PolicyCurrent" in term("history", "chat", "--events")

    svg = tmp_path / "timeline.svg"
    assert term("timeline", "chat", "--log", str(term.log), "--svg", str(svg)) == ""
    assert svg.read_text().startswith("<svg ")
    bars = {each["name"]: each["steps"] for each in term.json("timeline", "chat", "--log", str(term.log))["bars"]}
    assert set(bars) == {*names, "store of chat"}
    for name in names:
        steps = dict.fromkeys(each["step"] for each in bars[name] if each["ok"])
        assert list(steps) == ["quiesce", "drain", "reset", "admit", "resume"]
        assert all(0 <= each["begin"] <= each["end"] for each in bars[name])
    # No kubelet runs, so nobody has the log of the operator's pods.
    assert "from status (the operator's log cannot be had" in term("timeline", "chat")


def test_where_the_api_server_passes_nothing_on_it_is_what_status_says(term: Terminal) -> None:
    found = term.json("status", "chat")
    assert {(row["state"], row["source"]) for row in found["replicas"]} == {("open", "status")}
    (text,) = found["unseen"]
    said = f"engines in namespace {term.stage.namespace}: the API server does not pass it on: address not allowed"
    assert text.startswith(f"{said}, so they were not asked; ")
    assert text.endswith("where pods can be reached from here, write --direct")


@pytest.fixture(name="outside", params=["http", "https"])
def _outside(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The admin address of an engine on this machine to which an API server passes things on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent.
        probe.connect(("192.0.2.1", 9))
        host = probe.getsockname()[0]
    with socket.socket() as taken:
        taken.bind((host, 0))
        port = taken.getsockname()[1]
    monkeypatch.setattr(naming, "ADMIN_PORT", port)
    (tmp_path / "token").write_text("the-engines-token\n")
    secured = request.param == "https"
    if secured:
        Authority(tmp_path).issue(tmp_path, "chat.rl.svc")
        monkeypatch.setenv("DOUBLE_TLS", str(tmp_path))
    engine = subprocess.Popen([sys.executable, str(DOUBLE), host, str(port), str(tmp_path / "token")])
    try:
        yield f"{'https://' if secured else ''}{host}:{port}"
    finally:
        engine.kill()
        engine.wait(10)


def test_through_the_api_server_an_engine_takes_its_own_token(
    kubectl: Any, namespace: str, outside: str, wait_for: Callable[..., Any]
) -> None:
    host = outside.removeprefix("https://").partition(":")[0]
    container = {"name": "engine", "image": "registry.example/engine"}
    meta = {"name": "chat-0", "namespace": namespace}
    kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [container]}})
    status = json.dumps({"status": {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}]}})
    kubectl("patch", "pod", "chat-0", "-n", namespace, "--subresource=status", "--type=merge", "-p", status)
    door = Door(outside, "the-engines-token", namespace, "chat-0")
    with Cluster(find(kubectl.kubeconfig)) as cluster:

        def answer() -> EngineStatus | None:
            (found,) = cluster.engines([door])
            return found if isinstance(found, EngineStatus) else None

        assert wait_for("the engine", answer).state == "closed"
        (found,) = cluster.engines([replace(door, token="another")])
        assert isinstance(found, Unanswered)
        assert found.reason == "Http401"


def test_the_doctor_sees_this_release_and_what_is_missing(term: Terminal) -> None:
    found = term.json("doctor", rc=1)
    said = {(each["about"], each["found"]): each["level"] for each in found["findings"]}
    for kind in ("KVCachePool", "InferenceDeployment", "PolicyVersion"):
        assert said[f"CRD {kind}", "v1alpha1 is served, with the schema of this release"] == "ok"
    name = f"operator {term.stage.namespace}/moontide-operator"
    assert said[name, f"1 of 1 pods are ready, serves {term.stage.namespace}"] == "ok"
    assert any(about == name and text.endswith(" leads") for about, text in said)
    rights = [each for each in found["findings"] if each["about"] == "rights of the operator"]
    assert [each["level"] for each in rights] == ["ok"], rights
    levels = {each["about"]: (each["level"], each["do"]) for each in found["findings"]}
    # It serves one namespace, and nobody has told the chart to make what this warns of.
    assert levels["admission"][0] == levels["network"][0] == "warn"
    assert "--set admission.marks=On" in levels["admission"][1]
    assert "--set networkPolicies.enabled=true, and" in levels["network"][1]
    assert any(about == "GPUs" and text.startswith("no ready node has") for about, text in said)
    assert found["worst"] == "fail"
    assert "→ install NVIDIA's device plugin" in term("doctor", rc=1)


@pytest.fixture(name="visitor")
def _visitor(term: Terminal, kubectl: Any, tmp_path: Path) -> Path:
    """The kubeconfig of somebody who may read policies and fleets, and nothing else."""
    place = ("-n", term.stage.namespace)
    kubectl("create", "serviceaccount", "visitor", *place)
    rules = ("--verb=get,list", "--resource=policyversions.moontide.dev,inferencedeployments.moontide.dev")
    kubectl("create", "role", "visitor", *rules, *place)
    kubectl(
        "create", "rolebinding", "visitor", "--role=visitor", f"--serviceaccount={term.stage.namespace}:visitor", *place
    )
    config = yaml.safe_load(term.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": kubectl("create", "token", "visitor", *place).strip()}
    path = tmp_path / "visitor"
    path.write_text(yaml.safe_dump(config))
    return path


def test_who_may_see_little_sees_that_and_is_told_the_rest(term: Terminal, visitor: Path) -> None:
    out = term("status", "chat", kubeconfig=visitor)
    assert "replicas serve version" in out
    assert "not seen: pods of " in out
    with Cluster(find(visitor)) as cluster:
        (engine,) = cluster.engines([Door("10.0.0.1:8001", "x", term.stage.namespace, "chat-0")])
    assert engine == Unanswered(REFUSED, f"you may not get pods/proxy in {term.stage.namespace}")
    assert "not seen: pools of " in out
    assert "cannot patch resource" in term("bump", "chat", "9", rc=1, kubeconfig=visitor) + term.error
    assert term.stage.policy("chat")["spec"]["version"] != 9
    report = term("doctor", rc=1, kubeconfig=visitor)
    assert "is served; the schema was not seen" in report
    assert "you may not patch policyversions.moontide.dev" in report
    assert "did you mean chat?" in term("explain", "caht", rc=1, kubeconfig=visitor) + term.error
    assert "did you mean chat?" in term("bump", "caht", "9", rc=1, kubeconfig=visitor) + term.error
    assert "cannot list resource" in term("status", "-A", rc=1, kubeconfig=visitor) + term.error
