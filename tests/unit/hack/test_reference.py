"""docs/reference is what the models, the CLI and the chart say."""

from __future__ import annotations

import inspect
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from hack.reference import __main__ as reference
from hack.reference import protocol
from moontide import config
from moontide.crdgen import schema
from moontide.kube.kinds import KINDS, POLICY

VALUES = """# What it is.
a: 1
b:
  # Of two
  # lines.
  c: [x]
  d: {}
"""


def test_the_pages_are_up_to_date() -> None:
    assert reference.drift() == [], "run: python -m hack.reference"


def test_drift_is_seen(tmp_path: Path) -> None:
    for name, text in reference.pages().items():
        (tmp_path / name).write_text(text)
    assert reference.drift(tmp_path) == []
    (tmp_path / "cli.md").write_text("old")
    (tmp_path / "left-over.md").write_text("")
    assert reference.drift(tmp_path) == ["cli.md", "left-over.md"]


def test_every_field_of_every_kind_has_a_row() -> None:
    for kind in KINDS:
        page = reference.kind_page(kind)
        for name in schema(kind.model)["properties"]["spec"]["properties"]:
            assert f"| `{name}` |" in page
    assert "| `deadlineSeconds` | integer, 2 to 86400 | `120` |" in reference.kind_page(POLICY)


def test_commands_have_all_their_names_and_arguments() -> None:
    page = reference.cli_page()
    assert "kubectl moontide bump NAME VERSION" in page
    assert "| `-A, --all-namespaces` |" in page
    assert "| `-n, --namespace NAMESPACE` | of the policy" in page


def test_values_have_the_comments_over_them() -> None:
    page = reference.values_page(VALUES)
    rows = ["| `a` | `1` | What it is. |", "| `b.c` | `[x]` | Of two lines. |", "| `b.d` | `{}` |  |"]
    assert all(row in page for row in rows)


def test_the_operator_reads_every_variable_that_is_listed() -> None:
    source = inspect.getsource(config)
    listed = [re.sub("`", "", name) for name, _ in reference.environment()]
    assert [name for name in listed if f'"{name}"' not in source] == []


def test_the_picture_is_of_changes_that_end_and_shows_every_step_of_them() -> None:
    assert ET.fromstring(protocol.picture()).tag == "{http://www.w3.org/2000/svg}svg"
    for _, salted, more in protocol.WAYS:
        found = protocol.change(salted, more)
        assert found.settled
        assert found.end.startswith("Current=True Current: 2/2 replicas serve version 2 in epoch 2")
    barrier, fence, plain = (
        [set(c.values()) for c in protocol.columns(protocol.change(s, m))] for _, s, m in protocol.WAYS
    )
    assert barrier == [{"epoch 2"}, {"quiesce"}, {"admit, resume"}, {"collect"}]
    assert fence == [{"epoch 2"}, {"fence"}, {"collect"}]
    assert plain == [{"epoch 2"}, {"quiesce"}, {"drain"}, {"reset"}, {"wipe"}, {"admit, resume"}]
