"""Make docs/reference from the models, the CLI, the planner and the chart: ``python -m hack.reference [--check]``."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import yaml

from hack.reference import protocol
from moontide.cli.app import PROGRAM, app
from moontide.config import Config
from moontide.crdgen import schema
from moontide.kube.kinds import KINDS, Kind

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
VALUES = "charts/moontide/values.yaml"
_MADE = "<!-- Made by `python -m hack.reference`; change {source}, not this file. -->\n\n"
_STANDARD = {"conditions": "the conditions, as in every resource of Kubernetes"}
"""What every reader of Kubernetes knows is not told field by field."""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _code(value: object) -> str:
    return f"`{json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(_cell(each) for each in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


# -- kinds -------------------------------------------------------------------------------------------------------------


def _kind_of(node: dict[str, Any]) -> str:
    """What one writes there."""
    if "enum" in node:
        return ", ".join(_code(each) for each in node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = str(node.get("type", "any"))
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f"{kind}, {low} to {high}"
    if low is not None or high is not None:
        return f"{kind}, {'at least' if high is None else 'at most'} {low if high is None else high}"
    if kind == "array":
        return f"list of {_kind_of(node['items']).replace('object', 'objects')}"
    if kind == "object" and "properties" not in node:
        return "map" if "additionalProperties" in node else "object"
    return kind


def _default(node: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = node.get("default")
    # Each field of an object says its own.
    return "" if default in (None, "", [], {}) or isinstance(default, dict) else _code(default)


def _walk(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every field below ``node``: its path, its schema, and whether it must be there."""
    for name, child in node.get("properties", {}).items():
        here = f"{path}{name}"
        yield here, child, name in node.get("required", ())
        if name in _STANDARD:
            continue
        yield from _walk(child, f"{here}.")
        for below, sign in (("items", "[]"), ("additionalProperties", ".*")):
            if isinstance(child.get(below), dict):
                yield from _walk(child[below], f"{here}{sign}.")


def _rules(node: dict[str, Any]) -> list[str]:
    """What the API server says of specs that it refuses; each sentence once, in order."""
    found: list[str] = []
    if isinstance(node, dict):
        found += [rule["message"] for rule in node.get("x-kubernetes-validations", []) if "message" in rule]
        for below in (*node.get("properties", {}).values(), node.get("items"), node.get("additionalProperties")):
            found += _rules(below) if isinstance(below, dict) else []
    return list(dict.fromkeys(found))


def kind_page(kind: Kind[Any]) -> str:
    """The fields of one kind."""
    made = schema(kind.model)
    spec, status = made["properties"]["spec"], made["properties"]["status"]
    rows = [
        (f"`{path}`", _kind_of(node), _default(node, required), node.get("description", ""))
        for path, node, required in _walk(spec)
    ]
    seen = [
        (f"`{path}`", _kind_of(node), node.get("description", _STANDARD.get(path, "")))
        for path, node, _ in _walk(status)
    ]
    columns = [(column.name, f"`{column.path}`", column.description) for column in kind.columns]
    parts = [
        _MADE.format(source="operator/moontide/api"),
        f"# {kind.kind}\n\n{made.get('description', '')}\n\n",
        f"`kubectl get {kind.short}`; in a cluster: `kubectl explain {kind.singular}.spec --recursive`.\n\n",
        "## spec\n\n",
        _table(("field", "what one writes", "default", "what it means"), rows),
    ]
    if rules := _rules(spec):
        parts += ["\n## What is refused\n\nThe API server says, and changes nothing:\n\n"]
        parts += [f"- {_cell(rule)}\n" for rule in rules]
    parts += ["\n## status\n\n", _table(("field", "type", "what it means"), seen)]
    parts += ["\n## Columns\n\n", _table(("column", "from", "what it means"), columns)]
    return "".join(parts)


# -- commands ----------------------------------------------------------------------------------------------------------


def _options(callback: Any) -> list[tuple[str, str, bool, inspect.Parameter, Any]]:
    """Of a command: how each parameter is written, its placeholder, whether it is shared, and what typer knows."""
    found = []
    for each in inspect.signature(callback).parameters.values():
        info = next(note for note in get_args(each.annotation) if hasattr(note, "param_decls"))
        option = type(info).__name__ == "OptionInfo"
        # In Annotated, typer keeps the first name as the default until it makes the command.
        names = [name for name in (info.default, *(info.param_decls or ())) if str(name).startswith("-")]
        written = ", ".join(sorted(names, key=len)) or f"--{each.name.replace('_', '-')}"
        flag = bool in (get_args(each.annotation) or (None,))[:1]
        hole = info.metavar or ("" if flag or not option else each.name.upper())
        found.append((written if option else "", hole, info.rich_help_panel == "Which cluster", each, info))
    return found


def _shown_default(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    return "" if value in (None, False, "", inspect.Parameter.empty) else _code(value)


def cli_page() -> str:
    """Every command of ``kubectl moontide``, and the operator's own environment."""
    parts = [_MADE.format(source="operator/moontide/cli/app.py")]
    parts += [f"# {PROGRAM}\n\n{app.info.help}\n\nThe same in a terminal: `{PROGRAM} COMMAND --help`. How it looks: "]
    parts += ["[see, rehearse and check](../cli.md).\n"]
    shared: list[tuple[str, str]] = []
    for command in app.registered_commands:
        callback = command.callback
        assert callback is not None
        options = _options(callback)
        shared = [(f"`{written} {hole}`", info.help) for written, hole, common, _, info in options if common]
        arguments = [
            (hole if each.default is inspect.Parameter.empty else f"[{hole}]")
            for written, hole, _, each, _ in options
            if not written
        ]
        parts += [f"\n## {command.name}\n\n{inspect.getdoc(callback)}\n\n"]
        parts += [f"```sh\n{' '.join([PROGRAM, str(command.name), *arguments])}\n```\n\n"]
        rows = [
            (f"`{f'{written} {hole}'.strip()}`", _shown_default(each.default), info.help or "")
            for written, hole, common, each, info in options
            if not common
        ]
        parts += [_table(("argument", "default", "what it means"), rows)]
    parts += ["\n## Options that every command has\n\n", _table(("option", "what it means"), shared)]
    parts += [f"\n{app.info.epilog[0].upper()}{app.info.epilog[1:]}.\n"] if isinstance(app.info.epilog, str) else []
    return "".join(parts)


# -- values ------------------------------------------------------------------------------------------------------------


def _values(node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Paths of the values that have no values below them, or are empty."""
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        here = f"{path}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield here, key, value
            yield from _values(value, f"{here}.")
        else:
            yield here, key, value


def environment() -> list[tuple[str, str]]:
    """The variables that the operator reads, and their defaults."""
    return [(f"`MOONTIDE_{each.name.upper()}`", _shown_default(each.default)) for each in fields(Config)]


def values_page(text: str) -> str:
    """The chart's values, with the comments that are over them."""
    lines = text.splitlines()
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert node is not None
    rows = []
    for path, key, value in _values(node, ""):
        comment: list[str] = []
        for line in reversed(lines[: key.start_mark.line]):
            if not line.lstrip().startswith("#"):
                break
            comment.insert(0, line.lstrip(" #"))
        below = isinstance(value, yaml.MappingNode) and bool(value.value)
        default = "" if below else text[value.start_mark.index : value.end_mark.index]
        if not below or comment:
            rows.append((f"`{path}`", f"`{default}`" if default else "", " ".join(comment)))
    return "".join(
        (
            _MADE.format(source=VALUES),
            "# Values of the Helm chart\n\n`helm show values charts/moontide` prints the same; a value that makes no "
            "sense is refused (`values.schema.json`).\n\n",
            _table(("value", "default", "what it means"), rows),
            "\n## Environment of the operator\n\nThe chart sets what it needs of these; `python -m moontide` reads "
            "them without a chart, too.\n\n",
            _table(("variable", "default"), environment()),
        )
    )


def pages() -> dict[str, str]:
    """Every page and picture, by its name."""
    made = {f"{kind.singular}.md": kind_page(kind) for kind in KINDS}
    made |= {"cli.md": cli_page(), "values.md": values_page((ROOT / VALUES).read_text())}
    return {**made, "protocol.svg": protocol.picture()}


def drift(folder: Path = FOLDER) -> list[str]:
    """Pages that are missing, differ, or no longer belong."""
    made = pages()
    wrong = [
        name for name, text in made.items() if not (folder / name).is_file() or (folder / name).read_text() != text
    ]
    return wrong + sorted(each.name for each in folder.glob("*.md") if each.name not in made)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hack.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    if parser.parse_args(arguments).check:
        wrong = drift()
        for name in wrong:
            print(f"docs/reference/{name} is out of date: run python -m hack.reference", file=sys.stderr)
        return 1 if wrong else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
        print(f"docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
