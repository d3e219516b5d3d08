"""The verbs of trainers, as the full program runs them: the same calls, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moontide.cli.app import main
from tests.unit.trainer.cluster import Cluster

Served = Callable[..., tuple[Cluster, Path]]


@pytest.fixture(name="here")
def _here(served: Served, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster, kubeconfig = served(weights="Unchecked")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    return cluster


def test_prepare_and_commit_write_what_the_plain_ones_write(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "policy", "2", "--wait", "-n", "rl"]) == 0
    assert "version 2 may be pushed" in capsys.readouterr().out
    assert main(["commit", "policy", "--wait", "-n", "rl"]) == 0
    assert "version 2 is current in epoch" in capsys.readouterr().out
    assert here.patches == [{"preparing": 2}, {"preparing": None, "version": 2}]


def test_json_is_the_policy_and_words_go_to_stderr(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bump", "policy", "3", "--wait", "-n", "rl", "-o", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["status"]["version"] == "3"
    assert "version 3 is current" in said.err
    assert main(["reset", "policy", "-n", "rl", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["resetNonce"]
    assert main(["wait", "policy", "-n", "rl", "--for", "current", "--timeout", "20s"]) == 0
    assert main(["abort", "policy", "-n", "rl"]) == 0
    assert "nothing was being prepared" in capsys.readouterr().out


def test_late_is_three_and_json_says_how_far_it_is(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.on_get = lambda: None
    assert main(["bump", "policy", "4", "--wait", "--timeout", "0.3", "-n", "rl", "-o", "json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out)["spec"]["version"] == 4
    assert "is not current in time" in said.err


def test_what_the_policy_refuses_is_refused(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "policy", "2", "-n", "rl"]) == 0
    assert main(["bump", "policy", "5", "--wait", "-n", "rl"]) == 1
    assert "version 2 of PolicyVersion rl/policy is being prepared" in capsys.readouterr().err


def test_a_hook_shows_one_policy_and_says_so(
    here: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("MOONTIDE_HOOK", "https://hook.example:8082")
    for arguments in (["status"], ["doctor"], ["explain", "policy"], ["bump", "policy", "2", "--dry-run"]):
        assert main([*arguments, "-n", "rl"]) == 1
        assert "the hook shows no more; give a kubeconfig instead" in capsys.readouterr().err
