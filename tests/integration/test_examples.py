"""Every manifest of examples/ is one that a real API server takes as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("KVCachePool", "InferenceDeployment", "PolicyVersion")


def _objects(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if isinstance(each, dict) and "kind" in each]


FILES = [
    path
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    if any(each["kind"] in KINDS for each in _objects(path))
]


def test_examples_are_found() -> None:
    assert len([path for path in FILES if path.parent.name == "from"]) >= 4
    for name in ("demo", "cluster"):
        kinds = {each["kind"] for path in FILES if path.parent.name == name for each in _objects(path)}
        assert kinds >= set(KINDS), f"examples/{name} is no whole set"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_api_server_takes_it(kubectl: Any, namespace: str, path: Path) -> None:
    for body in _objects(path):
        body["metadata"]["namespace"] = namespace
        said = kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(body))
        assert "server dry run" in said
