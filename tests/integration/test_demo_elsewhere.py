"""The demo against a cluster on which somebody else's Moontide runs: it says so, and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hack.demo.command", *arguments]
    more = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=more, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(name="context")
def _context(kubectl: Any) -> str:
    return str(kubectl("config", "current-context").strip())


@pytest.mark.parametrize("more", [("--images-loaded",), ("--registry", "registry.test/demo"), ("--remove",)])
def test_a_cluster_with_moontide_is_left_as_it_is(kubectl: Any, context: str, more: tuple[str, ...]) -> None:
    def crds() -> str:
        versions = "jsonpath={range .items[*]}{.metadata.name}{.metadata.resourceVersion} {end}"
        return str(kubectl("get", "crd", "-o", versions))

    def namespaces() -> set[str]:
        return set(kubectl("get", "namespaces", "-o", "name").split())

    before, there = crds(), namespaces()
    done = _demo("--cluster", f"context:{context}", "--kubeconfig", str(kubectl.kubeconfig), *more)
    assert done.returncode == 1
    assert "is on this cluster already and was not made by the demo" in done.stderr
    assert f"context {context} of {kubectl.kubeconfig}, server https://127.0.0.1:" in done.stdout, (
        "which cluster is said"
    )
    assert crds() == before
    # Those of earlier tests may end meanwhile.
    assert namespaces() <= there


def test_a_context_that_is_not_there_is_answered_with_those_that_are(kubectl: Any, context: str) -> None:
    done = _demo("--cluster", "context:production", "--images-loaded", KUBECONFIG=str(kubectl.kubeconfig))
    assert done.returncode == 1
    assert f"has no context 'production'; it has: {context}" in done.stderr


def test_without_a_word_on_the_cluster_no_kubeconfig_is_looked_at(kubectl: Any) -> None:
    done = _demo("--kubeconfig", str(kubectl.kubeconfig))
    assert done.returncode == 2
    assert "go with --cluster context:NAME or current" in done.stderr
