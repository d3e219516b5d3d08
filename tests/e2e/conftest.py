"""One fleet for all of these tests: the demo makes it, and what it claims is the first test.

The files run in alphabetical order: the demo first, `helm uninstall` last.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hack.cluster import access
from hack.cluster import settings as cluster_settings
from hack.cluster.settings import repository_root
from hack.demo import cold, prompts
from hack.demo.cold import References
from hack.demo.fleet import Fleet
from hack.demo.install import Target, ready
from hack.demo.kube import Kube
from hack.demo.prompts import Prompts
from hack.demo.say import Voice

DEMO_SECONDS = 1500
REUSE = "MOONTIDE_E2E_REUSE"
"""Set it to work on single tests with the fleet of a `make demo` with --keep and --references (see below).
The tests of the demo itself then fail: nothing is called good that did not run."""


@dataclass(frozen=True)
class DemoRun:
    """How `make demo` ended."""

    code: int
    lines: list[str]
    references: Path


@pytest.fixture(scope="session")
def demo() -> DemoRun:
    """The demo's own command, as a person runs it; its output is shown as it comes and kept in artifacts/demo.log."""
    artifacts = repository_root() / "artifacts"
    artifacts.mkdir(exist_ok=True)
    references = artifacts / "cold-references.json"
    if os.environ.get(REUSE):
        return DemoRun(-1, [f"{REUSE} is set: the demo did not run"], references)
    references.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hack.demo.command", "--keep", f"--references={references}"]
    lines: list[str] = []
    with (artifacts / "demo.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=repository_root(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.append(line.rstrip())
                log.write(line)
                log.flush()
        code = process.wait(timeout=DEMO_SECONDS)
    return DemoRun(code, lines, references)


@pytest.fixture(scope="session")
def target(demo: DemoRun) -> Target:
    """The cluster that the demo brought up."""
    found = cluster_settings.load(cluster_settings.DEFAULT_NAME)
    assert found is not None, "\n".join(demo.lines[-30:])
    return Target("local", access.resolve(found.kubeconfig))


@pytest.fixture(scope="session")
def kube(target: Target) -> Kube:
    """kubectl on it."""
    return target.kube


@pytest.fixture(scope="session")
def texts() -> Prompts:
    """The prompts that the cold engine was asked."""
    return prompts.make()


@pytest.fixture(scope="session")
def references(demo: DemoRun) -> References:
    """What cold engines answer, computed by the demo in this very run."""
    assert demo.references.exists(), "\n".join(demo.lines[-30:])
    return cold.load(demo.references)


@pytest.fixture(scope="session")
def session_fleet(target: Target) -> Iterator[Fleet]:
    """The demo's fleet."""
    fleet = Fleet(target.kube, target.reach(), "moontide-demo")
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(session_fleet: Fleet) -> Fleet:
    """The fleet, serving: a test that leaves it otherwise makes the next one say so."""
    policy = session_fleet.get_policy()
    ready(session_fleet, str(policy["spec"]["version"]), Voice(), seconds=120)
    return session_fleet
