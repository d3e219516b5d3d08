"""A real Prometheus scrapes a real operator as the chart says, and answers what the dashboard and the alerts ask.

With ``MOONTIDE_PANELS=FILE`` the story takes five minutes and the answers are written there: docs/pictures is made
from them. Engines and master are doubles; the engines' gates are real, and there is no vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.progress import Progress
from hack.pictures.panels import Asked, window
from hack.setup import prometheus
from tests.integration.stage import RESOLVING, ROOT, Stage

RECORDING = os.environ.get("MOONTIDE_PANELS", "")
PAUSE = 45.0 if RECORDING else 3.0
SCRAPE_SECONDS = 1
RATE_SECONDS = 30 if RECORDING else 8
"""In place of Grafana's choice: four scrapes at least."""


class Prometheus:
    """One that runs, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def __call__(self, path: str, **parameters: str) -> Any:
        """The answer's data. Raises OSError while it does not serve."""
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
            return json.load(answer)["data"]

    def up(self) -> list[str]:
        """Health of each target; nothing while it does not serve."""
        try:
            return [each["health"] for each in self("targets")["activeTargets"]]
        except OSError:
            return []


def _monitors(tools: Path) -> dict[str, Any]:
    """Endpoints of the chart's PodMonitors, by their names, and the groups of its rules."""
    command = [str(tools / "helm"), "template", "moontide", str(ROOT / "charts/moontide")]
    command += ["--set", "monitoring.rules.enabled=true", "--set", "monitoring.podMonitors.enabled=true"]
    made = subprocess.run(
        [*command, "-s", "templates/monitoring.yaml"], capture_output=True, text=True, check=True
    ).stdout
    found = [each for each in yaml.safe_load_all(made) if each]
    monitors = {e["metadata"]["name"]: e["spec"]["podMetricsEndpoints"] for e in found if e["kind"] == "PodMonitor"}
    (rules,) = [each["spec"] for each in found if each["kind"] == "PrometheusRule"]
    return {**monitors, "rules": rules}


def _scrape(name: str, endpoint: dict[str, Any], targets: dict[str, str], labels: dict[str, str]) -> dict[str, Any]:
    """What the Prometheus operator makes of one endpoint of a PodMonitor. ``targets``: addresses by pod."""
    return {
        "job_name": name,
        "scrape_interval": f"{SCRAPE_SECONDS}s",
        "metrics_path": endpoint["path"],
        "honor_labels": endpoint.get("honorLabels", False),
        "static_configs": [{"targets": [where], "labels": {**labels, "pod": pod}} for pod, where in targets.items()],
    }


@contextmanager
def _running(folder: Path, port: int, scrapes: list[dict[str, Any]], rules: dict[str, Any]) -> Iterator[Prometheus]:
    (folder / "rules.json").write_text(json.dumps(rules))
    config = {"global": {"evaluation_interval": "1s"}, "rule_files": ["rules.json"], "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [str(prometheus.program("prometheus")), f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(60)


def _story(stage: Stage, wait_for: Any) -> None:
    """Three changes, and a replica that does not get its weights for a while."""
    names = sorted(stage.double("states"))
    for version in (2, 3):
        stage.double("change", names=names, weights=str(version))
        stage.ask("chat", version=version)
        stage.wait_current("chat", version)
        time.sleep(PAUSE)
    stage.double("change", names=names[1:], weights="4")
    stage.ask("chat", version=4)

    def closed() -> list[str]:
        body = stage.api("GET", stage.path("InferenceDeployment", "chat"))
        return [each["reason"] for each in (body.get("status") or {}).get("closed") or ()]

    wait_for("one is left behind", lambda: closed() == ["WaitingForWeights"], 90)
    time.sleep(PAUSE)
    stage.double("change", names=names[:1], weights="4")
    wait_for("it serves again", lambda: {state for state, _ in stage.double("states").values()} == {"open"}, 90)
    time.sleep(PAUSE)


def _without(query: str, namespace: str) -> str:
    """What Grafana asks with all namespaces chosen; but only one is this test's."""
    return query.replace("$namespace", namespace).replace("$__rate_interval", f"{RATE_SECONDS}s")


def test_prometheus_answers_every_panel(make_stage: Any, tools: Path, kit: Any, wait_for: Any, tmp_path: Path) -> None:
    prometheus.ensure(Progress(quiet=True))
    monitors = _monitors(tools)
    with make_stage() as (stage, make_operator):
        operator = make_operator("scraped", {"MOONTIDE_RESYNC_SECONDS": "2"}, RESOLVING.format(services=stage.services))
        operator.start()
        stage.pool()
        stage.double("master", host=stage.services, capacity=64 << 20, bytes_a_key=1 << 20)
        stage.fleet("chat", fences=False, replicas=3)
        stage.wait_current("chat", 1)
        pods = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in stage.pods("chat")}
        for name, host in pods.items():
            stage.double("inference", name=name, host=host)
        (own,) = monitors["moontide-operator"]
        gates = next(each for each in monitors["moontide-operator-engines"] if "moontide" in each["path"])
        targets = {"moontide-operator-5d7f9c-x2b4q": f"127.0.0.1:{operator.metrics_port}"}
        fleet = {"namespace": stage.namespace, "moontide_dev_deployment": "chat"}
        scrapes = [
            _scrape("operator", own, targets, {"namespace": "moontide-system"}),
            _scrape("gates", gates, {name: f"{host}:8000" for name, host in pods.items()}, fleet),
        ]
        with _running(tmp_path, kit.free_port(), scrapes, monitors["rules"]) as ask:
            wait_for("four targets", lambda: ask.up() == ["up"] * 4, 60)
            began = time.time()
            time.sleep(PAUSE / 2)
            _story(stage, wait_for)
            ended = time.time()

            # A resource's namespace is its own, not that of the operator that tells of it.
            seen = ask("query", query="moontide_policy_epoch")["result"]
            assert [each["metric"]["namespace"] for each in seen] == [stage.namespace]
            assert [each["metric"]["namespace"] for each in ask("query", query="moontide_leader")["result"]] == [
                "moontide-system"
            ]
            healths = [rule["health"] for group in ask("rules")["groups"] for rule in group["rules"]]
            assert healths == ["ok"] * len(healths)
            assert len(healths) > 10

            start, end, step = window(began, ended)
            answers: list[Asked] = []
            for panel in json.loads((ROOT / "charts/moontide/files/dashboard.json").read_text())["panels"]:
                for target in panel["targets"]:
                    query = _without(target["expr"], stage.namespace)
                    found = ask("query_range", query=query, start=str(start), end=str(end), step=str(step))["result"]
                    answers.append({"expr": target["expr"], "series": found})
            empty = [each["expr"] for each in answers if not each["series"]]
            # There is no vLLM, and no call to an engine fails in this story.
            assert [each for each in empty if "vllm:" not in each and 'outcome="failed"' not in each] == []
            if RECORDING:
                saved = {"start": start, "end": end, "step": step, "answers": answers}
                text = json.dumps(saved, separators=(",", ":")).replace(stage.namespace, "rl")
                Path(RECORDING).write_text(text.replace("},{", "},\n{") + "\n")


@pytest.mark.parametrize("query", ["moontide_leader", 'x{namespace=~"$namespace"}'])
def test_the_placeholders_of_grafana_are_replaced(query: str) -> None:
    assert "$" not in _without(query, "rl")
