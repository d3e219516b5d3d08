from __future__ import annotations

import json
from pathlib import Path

import pytest

from hack.cluster import access
from hack.cluster.errors import ClusterError


@pytest.mark.parametrize(
    ("context", "server", "expected"),
    [
        ("moontide-local", "https://172.30.99.1:6443", True),
        ("moontide-local-it", "https://127.0.0.1:40001", True),
        ("kind-moontide-local", "https://127.0.0.1:38000", True),
        ("moontide-local", "https://203.0.113.9:6443", False),
        ("moontide-local", "https://api.example.com:6443", False),
        ("moontide-local", "https://localhost.example.com", False),
        ("production", "https://127.0.0.1:6443", False),
        ("moontide-localhost", "https://127.0.0.1:6443", False),
        ("", "https://127.0.0.1:6443", False),
    ],
)
def test_a_cluster_is_ours_by_name_and_by_address(context: str, server: str, expected: bool) -> None:
    assert access.is_ours(context, server) is expected


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A foreign cluster, with a kubectl that shows it as the real one would."""
    view = {
        "current-context": "production",
        "clusters": [{"name": "production", "cluster": {"server": "https://203.0.113.9:6443"}}],
    }
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(view)}\nEND\n")
    kubectl.chmod(0o755)
    monkeypatch.setattr(access, "kubectl_path", lambda: str(kubectl))
    path = tmp_path / "config"
    path.write_text(json.dumps(view))
    return path


def test_a_foreign_context_is_refused_with_the_way_out(kubeconfig: Path) -> None:
    with pytest.raises(ClusterError, match="--allow-context production"):
        access.resolve(kubeconfig)


def test_a_foreign_context_is_used_when_it_is_named(kubeconfig: Path) -> None:
    found = access.resolve(kubeconfig, "production")
    assert found.context == "production"
    assert found.kubectl[1:] == [f"--kubeconfig={kubeconfig}", "--context=production"]


def test_naming_another_context_does_not_help(kubeconfig: Path) -> None:
    with pytest.raises(ClusterError, match="'production', not 'staging'"):
        access.resolve(kubeconfig, "staging")


def test_a_missing_kubeconfig_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="there is no kubeconfig"):
        access.resolve(tmp_path / "nothing")


@pytest.fixture
def two_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubeconfig whose current context is production, with a fake kubectl that knows staging, too."""
    kubectl = tmp_path / "fake-kubectl"
    kubectl.write_text(
        """#!/bin/sh
        case "$*" in
          *get-contexts*) printf 'production\\nstaging\\n' ;;
          *jsonpath*) printf production ;;
          *--context=*) name=${*##*--context=}; name=${name%% *}
            printf '{"clusters": [{"cluster": {"server": "https://%s.test"}}]}' "$name" ;;
          *) exit 1 ;;
        esac
        """
    )
    kubectl.chmod(0o755)
    monkeypatch.setattr(access, "kubectl_path", lambda: str(kubectl))
    path = tmp_path / "config"
    path.touch()
    return path


def test_a_context_that_is_not_the_current_one_is_used_when_it_is_named(two_contexts: Path) -> None:
    found = access.named("staging", two_contexts)
    assert (found.context, found.server) == ("staging", "https://staging.test")
    assert found.kubectl[1:] == [f"--kubeconfig={two_contexts}", "--context=staging"]


def test_the_current_context_is_pinned_by_its_name(two_contexts: Path) -> None:
    found = access.named(None, two_contexts)
    assert found.context == "production"
    assert "--context=production" in found.kubectl, "whoever switches contexts meanwhile switches nothing here"


def test_a_context_that_does_not_exist_is_answered_with_those_that_do(two_contexts: Path) -> None:
    with pytest.raises(ClusterError, match="no context 'stagin'; it has: production, staging"):
        access.named("stagin", two_contexts)
