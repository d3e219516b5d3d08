"""What the Helm chart makes of values: `make chart` writes the snapshots that a test compares.

A change of a template then shows in review as what it does to a cluster.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hack.cluster import binaries
from hack.cluster.progress import Progress
from hack.cluster.settings import repository_root

CHART = repository_root() / "charts" / "moontide"
SNAPSHOTS = repository_root() / "tests" / "integration" / "snapshots"
RELEASE, NAMESPACE = "moontide", "moontide-system"
_LABELS = {"release": "prometheus"}

SETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "one-namespace": {"watchNamespace": "rl", "crds": {"install": False}},
    "two-replicas": {
        "replicas": 2,
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [{"name": "registry"}],
        "logLevel": "DEBUG",
    },
    "placed": {
        "replicas": 2,
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}]
                }
            }
        },
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"team": "platform"},
        "podAnnotations": {"example.com/scrape": "true"},
    },
    "trainers": {
        "hook": {"enabled": True, "tlsSecret": "hook-tls"},
        "trainer": {
            "roles": [
                {"namespace": "rl", "policies": ["policy"], "fleets": ["chat", "code"]},
                {"name": "through-the-hook", "namespace": "rl", "policies": ["policy"], "via": "hook"},
            ]
        },
    },
    "one-namespace-user-roles": {"watchNamespace": "rl", "userRoles": "On"},
    "admin-tls": {"adminTLS": {"caConfigMap": "moontide-ca"}},
    "one-namespace-trainers": {"watchNamespace": "rl", "hook": {"enabled": True}},
    "one-namespace-guarded": {
        "watchNamespace": "rl",
        "admission": {"marks": "On", "inUse": "Deny", "podTemplates": "Restricted"},
    },
    "network-policies": {
        "networkPolicies": {
            "enabled": True,
            "namespaces": ["rl"],
            "trainers": [{"podSelector": {"matchLabels": {"app": "trainer"}}}],
            "engines": [{"podSelector": {"matchLabels": {"app": "rollout"}}}],
            "scrapers": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        }
    },
    "monitoring": {
        "monitoring": {
            "podMonitors": {"enabled": True, "labels": _LABELS},
            "rules": {"enabled": True, "labels": _LABELS},
            "dashboard": {"enabled": True},
        }
    },
}
"""Values by the name of their snapshot."""


def helm(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm without a cluster, whatever comes of it."""
    program = binaries.ensure(Progress(quiet=True)) / "helm"
    return subprocess.run(
        [str(program), *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60
    )


def on(command: Sequence[str], values: Mapping[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Helm on the chart with values."""
    return helm(
        *command, str(CHART), "--namespace", NAMESPACE, "--values", "-", *more, stdin=yaml.safe_dump(dict(values))
    )


def manifests(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every object that a release with these values has. Raises ValueError with Helm's words."""
    done = on(["template", RELEASE], values)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def _kept(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Objects by kind, namespace and name, without what other files say: CRDs, alerts and the dashboard."""
    found = {}
    for each in manifests(values):
        if each["kind"] == "CustomResourceDefinition":
            continue
        if each["kind"] == "PrometheusRule":
            each["spec"] = "files/alerts.yaml"
        elif "dashboard" in each["metadata"]["name"]:
            each["data"] = dict.fromkeys(each["data"], "files/dashboard.json")
        found[" ".join((each["kind"], each["metadata"].get("namespace", "-"), each["metadata"]["name"]))] = each
    return dict(sorted(found.items()))


def snapshot(values: Mapping[str, Any]) -> str:
    """The objects as text; with other values than the default ones only those that differ, and which are not made."""
    found = _kept(values)
    usual = _kept({}) if values else {}
    gone = "".join(f"# Not made: {name}\n" for name in usual if name not in found)
    shown = [each for name, each in found.items() if each != usual.get(name)]
    return gone + yaml.safe_dump_all(shown, sort_keys=False, width=120, default_flow_style=None)


def path(name: str) -> Path:
    """Where a snapshot is."""
    return SNAPSHOTS / f"{name}.yaml"


def main() -> int:
    """Write every snapshot, and delete those that no values have any more."""
    SNAPSHOTS.mkdir(exist_ok=True)
    for old in SNAPSHOTS.glob("*.yaml"):
        if old.stem not in SETS:
            old.unlink()
    for name, values in SETS.items():
        path(name).write_text(snapshot(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
