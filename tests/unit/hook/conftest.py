"""A hook for each test, and waits that are short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moontide.config import Config
from moontide.hook import carrier
from moontide.trainer import steps
from tests.unit.hook.hookkit import HookCluster, Made, Make, Reviews, Running
from tests.unit.trainer.cluster import Server


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (steps, carrier):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.002)
    monkeypatch.setattr(steps, "FIRST_PAUSE", 0.002)
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "MOONTIDE_HOOK", "MOONTIDE_HOOK_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(name="make")
def _make(tmp_path: Path) -> Iterator[Make]:
    """Makes a cluster that serves version 1, and a hook before it."""
    made: list[Any] = []

    def make(watch_namespace: str = "", **spec: object) -> Made:
        cluster = HookCluster(**spec)  # type: ignore[arg-type]
        server = Server(cluster, tmp_path)
        made.append(server)
        hook = Running(server.url, Reviews(), Config(namespace="rl", watch_namespace=watch_namespace))
        made.append(hook)
        return cluster, hook

    yield make
    for each in reversed(made):
        each.close()
