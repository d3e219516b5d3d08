"""A real HorizontalPodAutoscaler sets the replicas of a fleet: the operator keeps them, and all of them change."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stage import RESOLVING, ROOT

SERVICE = "queue-metrics-double"
API_SERVICE = "v1beta1.external.metrics.k8s.io"


@pytest.fixture(name="queue")
def _queue(kubectl: Any, tmp_path: Path) -> Iterator[Path]:
    """A file whose number is what the cluster's external metric ``queue`` says."""
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    request += ["-keyout", str(tmp_path / "tls.key"), "-out", str(tmp_path / "tls.crt")]
    subprocess.run(request, check=True, capture_output=True)
    value = tmp_path / "queue"
    value.write_text("20")
    command = [sys.executable, "-m", "tests.integration.metrics_double", str(tmp_path)]
    double = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert double.stdout is not None
        port = int(double.stdout.readline())
        # No node, so no kube-proxy: the aggregator follows an external name.
        service = {"name": SERVICE, "namespace": "default"}
        kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": service,
                "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": API_SERVICE},
                "spec": {
                    "group": "external.metrics.k8s.io",
                    "version": "v1beta1",
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": {**service, "port": port},
                },
            },
        )
        kubectl("wait", "--for=condition=Available", f"apiservice/{API_SERVICE}", "--timeout=60s")
        yield value
    finally:
        kubectl("delete", "apiservice", API_SERVICE, "--ignore-not-found")
        kubectl("delete", "service", SERVICE, "-n", "default", "--ignore-not-found")
        double.kill()
        double.communicate(timeout=60)


def _autoscaler(namespace: str, fleet: str) -> dict[str, Any]:
    target = {"apiVersion": "moontide.dev/v1alpha1", "kind": "InferenceDeployment", "name": fleet}
    external = {"metric": {"name": "queue"}, "target": {"type": "AverageValue", "averageValue": "10"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": fleet, "namespace": namespace},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": [{"type": "External", "external": external}],
        },
    }


def test_an_autoscaler_s_replicas_stay_and_are_all_in_the_next_barrier(
    make_stage: Any, kubectl: Any, queue: Path, wait_for: Any
) -> None:
    with make_stage() as (stage, make_operator):
        code = RESOLVING.format(services=stage.services)
        operator = make_operator("scaled", {"MOONTIDE_RESYNC_SECONDS": "4"}, code)
        operator.start()
        stage.pool()
        stage.fleet("chat", fences=False, replicas=2)
        stage.wait_current("chat", 1)
        uid = stage.api("GET", stage.path("InferenceDeployment", "chat"))["metadata"]["uid"]

        def replicas() -> tuple[int, int, int]:
            ifd = kubectl.must_get("ifd", "chat", stage.namespace)
            child = kubectl.must_get("deployment", "chat", stage.namespace)
            return ifd["spec"]["replicas"], child["spec"]["replicas"], ifd["status"].get("replicas", 0)

        kubectl.apply(_autoscaler(stage.namespace, "chat"))
        queue.write_text("40")
        wait_for("the autoscaler asks for four", lambda: replicas()[0] == 4, 180)
        wait_for("there are four", lambda: replicas() == (4, 4, 4), 60)
        names = wait_for("four pods", lambda: _four(stage.start_pods("chat", uid, False, "1")), 60)
        # Long enough for three resyncs of the operator: it fights nobody.
        began = dt.datetime.now(dt.UTC)
        while dt.datetime.now(dt.UTC) - began < dt.timedelta(seconds=13):
            assert replicas() == (4, 4, 4)
        epoch = stage.wait_current("chat", 1)
        wait_for("all four serve", lambda: _open_in(stage, epoch) >= names, 60)

        stage.double("change", names=sorted(names), weights="2")
        stage.ask("chat", version=2)
        after = stage.wait_current("chat", 2)
        assert after > epoch
        # One that did not answer for a moment is not waited for.
        wait_for("all four serve the next", lambda: _open_in(stage, after) == names)
        assert stage.status("chat")["replicas"]["total"] == 4

        # Zero is the user's word: it switches the autoscaler off, and nothing is left to wait for.
        kubectl("scale", "ifd", "chat", "-n", stage.namespace, "--replicas=0")
        wait_for("none", lambda: replicas() == (0, 0, 0) and not stage.pods("chat"), 120)
        for name in sorted(names):
            stage.double("kill", name=name)
        kubectl("scale", "ifd", "chat", "-n", stage.namespace, "--replicas=1")
        back = wait_for("one again", lambda: stage.start_pods("chat", uid, False, "2"), 120)
        wait_for("it serves in the same epoch", lambda: _open_in(stage, after) >= back, 120)


def _four(names: set[str]) -> set[str] | None:
    return names if len(names) == 4 else None


def _open_in(stage: Any, epoch: int) -> set[str]:
    return {name for name, seen in stage.double("states").items() if tuple(seen) == ("open", epoch)}
