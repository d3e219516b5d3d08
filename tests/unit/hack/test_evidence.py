"""The page that names a test for each fault names tests that exist, and says truly how they ended."""

from __future__ import annotations

from pathlib import Path

from hack.cluster.settings import repository_root
from hack.test import evidence

TABLE = """
| fault | shown by |
| --- | --- |
| one | `tests/a/test_x.py::test_good` |
| two | `tests/a/test_x.py::test_good` `tests/a/test_x.py::test_bad` |
| three | `tests/a/test_x.py::test_other` |
| none | prose |
"""
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_x" name="test_good[1]"/>
<testcase classname="tests.a.test_x" name="test_good[2]"><skipped type="pytest.xfail"/></testcase>
<testcase classname="tests.a.test_x" name="test_bad"><failure/></testcase>
</testsuite></testsuites>"""


def test_every_test_that_is_named_exists() -> None:
    root = repository_root()
    found = evidence.rows((root / evidence.PAGE).read_text())
    assert len(found) > 30
    assert evidence.missing(found, root) == []


def test_a_test_that_is_gone_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "tests/a").mkdir(parents=True)
    (tmp_path / "tests/a/test_x.py").write_text("def test_good(): ...\nclass T:\n    async def test_bad(self): ...\n")
    assert evidence.missing(evidence.rows(TABLE), tmp_path) == ["tests/a/test_x.py::test_other"]


def test_how_the_rows_ended(tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text(REPORT)
    ended = evidence.outcomes([tmp_path / "r.xml"])
    found = evidence.rows(TABLE)
    assert [row.subject for row in found] == ["one", "two", "three"]
    assert [evidence.verdict(row, ended) for row in found] == ["passed (2)", "FAILED (1 of 3)", "not run"]
