"""Which fault is shown by which test, and how that test ended: `python3 -m hack.test.evidence`.

The rows are those of docs/evidence.md: in each, tests are named as `tests/FOLDER/FILE.py::NAME`. How they ended is read
from the reports that `make test` leaves in artifacts/junit.
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.settings import repository_root

PAGE = "docs/evidence.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_BAD = frozenset({"failure", "error", "skipped"})


@dataclass(frozen=True)
class Row:
    """One line of the page: what it is about, and the tests that show it."""

    subject: str
    tests: tuple[tuple[str, str], ...]
    """File, relative to the repository, and name."""


def rows(text: str) -> list[Row]:
    """The rows of all tables that name tests."""
    found = []
    for line in text.splitlines():
        named = tuple((path, name) for path, name in _TEST.findall(line))
        if line.startswith("|") and named:
            found.append(Row(line.strip("| ").split("|")[0].strip(), named))
    return found


def missing(found: Iterable[Row], root: Path) -> list[str]:
    """Tests that are named and do not exist."""
    absent = []
    for row in found:
        for path, name in row.tests:
            file = root / path
            defined = _functions(file) if file.is_file() else frozenset()
            if name not in defined:
                absent.append(f"{path}::{name}")
    return sorted(set(absent))


def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(each.name for each in ast.walk(tree) if isinstance(each, kinds))


def outcomes(reports: Iterable[Path]) -> dict[tuple[str, str], list[bool]]:
    """By file and name of a test: whether each of its runs (parameters, releases) was good."""
    found: dict[tuple[str, str], list[bool]] = {}
    for report in reports:
        for case in ET.parse(report).getroot().iter("testcase"):
            path = f"{(case.get('classname') or '').replace('.', '/')}.py"
            name = (case.get("name") or "").partition("[")[0]
            bad = {child.tag for child in case if child.get("type") != "pytest.xfail"} & _BAD
            found.setdefault((path, name), []).append(not bad)
    return found


def verdict(row: Row, ended: dict[tuple[str, str], list[bool]]) -> str:
    """``passed``, ``FAILED`` or ``not run``, with how many runs that is."""
    runs = [good for test in row.tests for good in ended.get(test, [])]
    if not all(runs):
        return f"FAILED ({runs.count(False)} of {len(runs)})"
    if any(test not in ended for test in row.tests):
        return "not run"
    return f"passed ({len(runs)})"


def verdicts() -> list[tuple[Row, str]]:
    """Every row of the page, and how it ended by the reports that there are."""
    root = repository_root()
    ended = outcomes(sorted((root / "artifacts" / "junit").glob("*.xml")))
    return [(row, verdict(row, ended)) for row in rows((root / PAGE).read_text())]


def summary(found: list[tuple[Row, str]]) -> str:
    """One line for people."""
    counts = {kind: sum(said.startswith(kind) for _, said in found) for kind in ("passed", "FAILED", "not run")}
    return f"{', '.join(f'{count} {kind}' for kind, count in counts.items())} of {len(found)} rows of {PAGE}"


def main() -> int:
    """0 when every row that ran is good."""
    found = verdicts()
    for row, said in found:
        print(f"{said:14} {row.subject}")
        for path, name in row.tests:
            print(f"{'':14}   {path}::{name}")
    print(summary(found))
    return 1 if any(said.startswith("FAILED") for _, said in found) else 0


if __name__ == "__main__":
    sys.exit(main())
