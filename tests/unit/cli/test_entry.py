"""One script for two images: the trainer's has neither typer nor rich, and goes on as before."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

PROGRAM = """
import importlib.abc, importlib.util, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED}:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Blocked())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in {BLOCKED} else real(name, *more)
from moontide.cli.entry import main
status = main(sys.argv[1:])
ours = {name for name in sys.modules if name.startswith("moontide.")}
extra = {name for name in ours if not name.startswith(("moontide.trainer", "moontide.cli"))}
assert not extra, extra
assert "moontide.cli.app" not in ours
sys.exit(status)
"""
TRAINER = {"typer", "rich", "kopf", "kubernetes", "pydantic", "aiohttp", "prometheus_client", "yaml", "PIL"}


def run(*arguments: str, blocked: set[str] = TRAINER) -> subprocess.CompletedProcess[str]:
    code = PROGRAM.replace("{BLOCKED}", repr(blocked))
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_trainers_image_has_the_plain_commands() -> None:
    done = run("status", "policy", "--kubeconfig", "/nowhere")
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("kubectl moontide: kubeconfig /nowhere cannot be read")
    assert "bump" in run("--help").stdout


@pytest.mark.parametrize("command", ["doctor", "history", "explain", "timeline"])
def test_what_a_trainers_image_lacks_is_one_sentence(command: str) -> None:
    done = run(command, "policy")
    assert done.returncode == 2
    assert done.stderr.startswith(f"kubectl moontide {command} needs typer, rich, ")
    # Not by name: no index has the project, and whoever took the name there would be run.
    assert done.stderr.endswith(": pip install '.[cli]' from a checkout of Moontide\n")


@pytest.mark.parametrize("flag", ["--dry-run", "-A", "--output=json"])
def test_what_it_lacks_of_an_option_is_one_sentence_too(flag: str) -> None:
    done = run("bump", "policy", "4", flag)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kubectl moontide {flag.partition('=')[0]}")
    assert "needs typer" in done.stderr


def test_without_typer_alone_it_is_plain_too() -> None:
    done = run("doctor", blocked={"typer"})
    text = "kubectl moontide doctor needs typer: pip install '.[cli]' from a checkout of Moontide\n"
    assert (done.returncode, done.stderr) == (2, text)


@pytest.mark.parametrize("word", ["version", "--version"])
def test_it_knows_its_version_everywhere(word: str) -> None:
    done = run(word)
    assert (done.returncode, done.stdout) == (0, f"kubectl moontide {importlib.metadata.version('moontide')}\n")


def test_python_runs_it_as_a_module() -> None:
    command = [sys.executable, "-m", "moontide.cli", "status", "policy", "--kubeconfig", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kubectl moontide: kubeconfig /nowhere cannot be read")
