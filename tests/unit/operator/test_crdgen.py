"""Generated files are those the models make, and in the dialect of the API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moontide import crdgen
from moontide.kube.kinds import KINDS, Kind

ROOT = Path(__file__).resolve().parents[3]


def test_no_drift() -> None:
    assert crdgen.drift(ROOT) == [], "run python -m moontide.crdgen"


def test_drift_is_seen(tmp_path: Path) -> None:
    (tmp_path / "operator" / "moontide").mkdir(parents=True)
    assert crdgen.main(["--check", "--root", str(tmp_path)]) == 1
    assert crdgen.main(["--root", str(tmp_path)]) == 0
    assert crdgen.main(["--check", "--root", str(tmp_path)]) == 0
    changed = tmp_path / "crds" / "kvcachepools.yaml"
    changed.write_text(changed.read_text() + "# more\n")
    (tmp_path / "crds" / "left-over.yaml").write_text("")
    assert crdgen.drift(tmp_path) == [Path("crds/kvcachepools.yaml"), Path("crds/left-over.yaml")]
    assert crdgen.main(["--check", "--root", str(tmp_path)]) == 1


def test_refuses_another_folder(tmp_path: Path) -> None:
    assert crdgen.main(["--root", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from _nodes(value)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_structural(kind: Kind[Any]) -> None:
    made = crdgen.schema(kind.model)
    for node in _nodes(made):
        assert not {"$ref", "$defs", "anyOf", "const", "nullable", "prefixItems"} & set(node), node
        assert node.get("additionalProperties") is not False
        assert node.get("type") != "null"
        assert not isinstance(node.get("exclusiveMinimum"), (int, float)) or isinstance(node["exclusiveMinimum"], bool)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_status_has_no_defaults_and_is_optional(kind: Kind[Any]) -> None:
    made = crdgen.schema(kind.model)
    assert all("default" not in node for node in _nodes(made["properties"]["status"]))
    assert "status" not in made.get("required", [])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_rule_says_what_to_write(kind: Kind[Any]) -> None:
    rules = [rule for node in _nodes(crdgen.schema(kind.model)) for rule in node.get("x-kubernetes-validations", [])]
    assert rules
    for rule in rules:
        assert "write" in rule["message"] or "remove it" in rule["message"], rule["message"]


def test_chart_copies_stay_when_the_chart_goes() -> None:
    for kind in KINDS:
        plain = yaml.safe_load((ROOT / "crds" / f"{kind.plural}.yaml").read_text())
        chart = yaml.safe_load((ROOT / "charts/moontide/files/crds" / f"{kind.plural}.yaml").read_text())
        assert chart["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert chart == plain
