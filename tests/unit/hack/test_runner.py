"""The test runner calls nothing good that did not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.test import __main__ as runner
from hack.test.__main__ import Outcome

REPORT = """<testsuites><testsuite name="x">
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="no"/></testcase>
<testcase classname="a" name="broken"><error message="no"/></testcase>
<testcase classname="a" name="left_out"><skipped type="pytest.skip" message="why"/></testcase>
<testcase classname="a" name="must_fail_off"><skipped type="pytest.xfail" message="stock: ..."/></testcase>
</testsuite></testsuites>"""


def test_failures_errors_and_skips_all_fail_a_stage(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    outcome = Outcome("unit")
    runner.read_report(report, outcome)
    assert (outcome.passed, outcome.failed) == (2, 3)
    assert outcome.problems == ["failed: a::bad", "failed: a::broken", "skipped: a::left_out"]


def test_a_suite_without_tests_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_call", lambda command, more: 5)
    outcome = runner.run_suite("unit", tmp_path)
    assert not outcome.good
    assert "no test ran" in outcome.problems[0]


def test_a_suite_fails_when_pytest_does_though_every_test_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(command: list[str], more: dict[str, str]) -> int:
        target = next(part.partition("=")[2] for part in command if part.startswith("--junit-xml="))
        Path(target).write_text('<testsuite><testcase classname="a" name="good"/></testsuite>')
        return 1

    monkeypatch.setattr(runner, "_call", call)
    assert not runner.run_suite("unit", tmp_path).good


def test_scheduler_tests_run_on_every_release_and_all_of_them_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, str, str]] = []

    def call(command: list[str], more: dict[str, str]) -> int:
        target = Path(next(part.partition("=")[2] for part in command if part.startswith("--junit-xml=")))
        runs.append((target.stem, more.get("MOONTIDE_TEST_VLLM", ""), more.get("PYTHONPATH", "").partition(":")[0]))
        kind = "<failure/>" if more.get("MOONTIDE_TEST_VLLM") == "0.33.0" else ""
        target.write_text(f'<testsuite><testcase classname="a" name="b">{kind}</testcase></testsuite>')
        return 1 if kind else 0

    monkeypatch.setattr(runner, "_call", call)
    monkeypatch.setattr(runner, "releases", lambda: {"0.31.0": Path("/c/31"), "0.33.0": Path("/c/33")})
    monkeypatch.setattr(runner, "further_engines", lambda: ("0.30.0",))
    monkeypatch.setattr(runner, "engine_python", lambda release="": Path(f"/e{release}/bin/python"))
    monkeypatch.setenv("MOONTIDE_TEST_ENGINES", "all")
    outcome = runner.run_suite("component", tmp_path)
    assert runs == [
        ("component", "", ""),
        ("component-engine", "", ""),
        ("component-engine-0.31.0", "0.31.0", "/c/31"),
        ("component-engine-0.33.0", "0.33.0", "/c/33"),
        ("component-served-0.30.0", "", ""),
    ]
    assert (outcome.passed, outcome.failed) == (4, 1)
    assert outcome.problems == ["failed: a::b", "component-engine-0.33.0: pytest ended with 1"]
    assert [part.suffix for part in runner.parts_of("unit")] == ["", "-engine"]
    monkeypatch.delenv("MOONTIDE_TEST_ENGINES")
    assert [part.suffix for part in runner.parts_of("component")] == ["", "-engine", "-engine-0.33.0"]


def test_further_engines_serve_only_when_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "further_engines", lambda: ("0.30.0",))
    made: list[list[str]] = []
    monkeypatch.setattr(runner, "is_ready", lambda served: not served)
    monkeypatch.setattr(runner, "setup", lambda arguments: made.append(arguments) or 1)
    monkeypatch.setattr(runner, "lint", lambda: Outcome("lint"))
    monkeypatch.delenv("MOONTIDE_TEST_ENGINES", raising=False)
    assert runner.main(["lint"]) == 0
    assert made == []
    monkeypatch.setenv("MOONTIDE_TEST_ENGINES", "all")
    assert runner.main(["lint"]) == 1, "an environment that could not be made is no success"
    assert made == [["--engine", "0.30.0"]]


def test_closing_lines() -> None:
    outcomes = [Outcome("lint"), Outcome("unit", passed=5), Outcome("e2e", passed=2, failed=1)]
    assert runner.closing(outcomes, 187.9) == [
        "7 passed, 1 failed",
        "unit 5, component not asked for, integration not asked for, e2e 3; total 8 in 3 min 07 s",
    ]
    assert "e2e 3, releases 2; total 10" in runner.closing([*outcomes, Outcome("releases", passed=2)], 1.0)[1]


def test_stages_are_selected_by_argument_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(runner.SELECTION, raising=False)
    assert runner.selected([]) == list(runner.STAGES)
    assert runner.selected(["releases", "e2e", "unit"]) == ["unit", "e2e", "releases"]
    monkeypatch.setenv(runner.SELECTION, "component,lint")
    assert runner.selected([]) == ["lint", "component"]
    with pytest.raises(SystemExit):
        runner.selected(["everything"])
