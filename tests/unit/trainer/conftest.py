"""A fake cluster for each test, and waits that are short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moontide.trainer import steps
from tests.unit.trainer.cluster import Cluster, Server


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "POLL_SECONDS", 0.002)
    monkeypatch.setattr(steps, "FIRST_PAUSE", 0.002)
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "MOONTIDE_HOOK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(name="served")
def _served(tmp_path: Path) -> Iterator[Callable[..., tuple[Cluster, Path]]]:
    """Makes a cluster that serves version 1, with the path of a kubeconfig for it."""
    servers: list[Server] = []

    def make(**spec: object) -> tuple[Cluster, Path]:
        cluster = Cluster(**spec)  # type: ignore[arg-type]
        servers.append(Server(cluster, tmp_path))
        return cluster, servers[-1].kubeconfig

    yield make
    for server in servers:
        server.close()
