"""Upgrade and rollback of a release whose CRDs differ: what stays, what comes, and what a rollback hides.

Last, since the CRDs are deleted first: only a release that made them may change them. With ``-s`` it prints what
docs/upgrade.md shows.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack import chart
from moontide.kube.kinds import KINDS
from tests.integration.stage import CRDS

Helm = Callable[..., str]
NAMESPACE = "upgraded"
MANIFESTS = ("-f", str(chart.CHART.parents[1] / "crds"))
FIELD = "suspend"
"""What the older release does not know."""


@pytest.fixture(name="helm")
def _helm(kubectl: Any, operator: Any, tools: Path, tmp_path: Path) -> Iterator[Helm]:
    def run(*arguments: str) -> str:
        command = [str(tools / "helm"), f"--kubeconfig={kubectl.kubeconfig}", "-n", NAMESPACE, *arguments]
        environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)
        assert done.returncode == 0, done.stderr
        _tell("helm", *arguments, "-n", NAMESPACE, said=done.stdout)
        return done.stdout

    # The session's, if a test before needed it on this API server: it ends when a CRD goes.
    assert operator.stop() == 0
    kubectl("delete", *MANIFESTS, "--timeout=60s", "--ignore-not-found")
    yield run
    # As the session's other tests know it.
    kubectl("delete", *MANIFESTS, "--timeout=60s", "--ignore-not-found")
    kubectl("apply", *MANIFESTS)
    kubectl.wait_served(*CRDS)
    kubectl("delete", "namespace", NAMESPACE, "--wait=false", "--ignore-not-found")


def _tell(*command: str, said: str) -> None:
    """For people: a command, as one would write it in a checkout, and its output."""
    words = [{str(chart.CHART): "charts/moontide"}.get(each, each) for each in command]
    print(f"$ {shlex.join(Path(each).name if each.startswith('/') else each for each in words)}\n{said.strip()}\n")


@pytest.fixture(name="older")
def _older(tmp_path: Path) -> Path:
    """A chart as the release before had it: without one field, and with another number."""
    made = tmp_path / "older"
    shutil.copytree(chart.CHART, made)
    path = made / "files" / "crds" / "policyversions.yaml"
    crd = yaml.safe_load(path.read_text())
    for version in crd["spec"]["versions"]:
        del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][FIELD]
    path.write_text(yaml.safe_dump(crd))
    about = yaml.safe_load((made / "Chart.yaml").read_text())
    (made / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.9"}))
    return made


def test_an_upgrade_brings_fields_and_a_rollback_hides_them(
    kubectl: Any, helm: Helm, older: Path, namespace: str, wait_for: Any
) -> None:
    kinds = [kind.plural for kind in KINDS]

    def uids() -> dict[str, str]:
        found = json.loads(kubectl("get", ",".join(kinds), "-n", namespace, "-o", "json"))["items"]
        return {f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["uid"] for each in found}

    def knows() -> Any:
        """Whether the API server keeps the field, asked by a dry run."""
        made = {"apiVersion": "moontide.dev/v1alpha1", "kind": "PolicyVersion", "spec": {"version": 1, FIELD: True}}
        made["metadata"] = {"name": "asked", "namespace": namespace}
        command = ("create", "--dry-run=server", "--validate=false", "-o", "json", "-f", "-")
        return json.loads(kubectl(*command, stdin=json.dumps(made)))["spec"].get(FIELD) is True

    def field() -> bool:
        spec = ("get", "polv", "policy", "-n", namespace, "-o", "jsonpath={.spec}")
        _tell("kubectl", *spec, said=kubectl(*spec))
        return kubectl.must_get("polv", "policy", namespace)["spec"].get(FIELD) is True

    def guards() -> list[str]:
        """The admission policies of this release."""
        return [
            each for each in kubectl("get", "validatingadmissionpolicies", "-o", "name").split() if "-upgraded-" in each
        ]

    def write(**spec: Any) -> None:
        patch = ("patch", "polv", "policy", "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))
        _tell("kubectl", *patch, said=kubectl(*patch))

    helm("install", "moontide", str(older), "--create-namespace")
    kubectl.wait_served(*CRDS)
    assert not knows()
    about = {"apiVersion": "moontide.dev/v1alpha1", "metadata": {"name": "policy", "namespace": namespace}}
    kubectl.apply(
        {**about, "kind": "PolicyVersion", "spec": {"version": 1}},
        {**about, "kind": "KVCachePool", "spec": {"memory": {"perReplica": "64Mi"}}},
        {**about, "kind": "InferenceDeployment", "spec": {"model": {"source": "pvc://weights/a", "servedName": "a"}}},
    )
    before = uids()
    assert len(before) == len(kinds)

    notes = helm("upgrade", "moontide", str(chart.CHART))
    assert "helm rollback moontide -n upgraded" in notes
    wait_for("the new field is kept", knows)
    assert uids() == before
    write(**{FIELD: True})
    assert field()

    helm("rollback", "moontide", "1")
    wait_for("the new field is not kept", lambda: not knows())
    assert uids() == before
    # Hidden, and still stored: nothing has written the object since.
    assert not field()
    helm("rollback", "moontide", "2")
    wait_for("the new field is kept again", knows)
    assert field()

    helm("rollback", "moontide", "1")
    wait_for("the new field is not kept", lambda: not knows())
    write(version=2)
    helm("upgrade", "moontide", str(chart.CHART))
    wait_for("the new field is kept", knows)
    # A write under the older CRD is what drops it.
    assert not field()
    assert uids() == before

    helm("history", "moontide")

    # Handing the CRDs over to kubectl does not delete them, nor does the end of the release.
    helm("upgrade", "moontide", str(chart.CHART), "--set", "crds.install=false")
    assert uids() == before
    assert len(guards()) == 5
    helm("uninstall", "moontide")
    assert uids() == before
    assert guards() == []
    # And back again: a release takes over what it did not make only when told to.
    helm("install", "moontide", str(chart.CHART), "--take-ownership")
    assert uids() == before
    helm("uninstall", "moontide")
    assert uids() == before
