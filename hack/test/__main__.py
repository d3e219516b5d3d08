"""Every check of the project, stage by stage: `python3 -m hack.test --help`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

from hack.cluster.settings import repository_root
from hack.setup.__main__ import main as setup
from hack.setup.steps import dev_python, engine_python

SUITES = ("unit", "component", "integration", "e2e")
STAGES = ("lint", *SUITES)
SELECTION = "MOONTIDE_TEST_STAGES"
_ENGINE_FOLDER = "engine"
_LINTED = ("operator", "engine_patches", "hack", "tests", "bench")


@dataclass
class Outcome:
    """What one stage came to. ``problems`` are what makes it fail, in words."""

    stage: str
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def ran(self) -> int:
        """Tests that ran."""
        return self.passed + self.failed

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems


def read_report(path: Path, outcome: Outcome) -> None:
    """Add a JUnit report to a stage's outcome. A skipped test is a failed one: nothing here is left out in silence.

    A test that must fail without a patch, and did, has passed (an xfail; pyproject.toml makes all of them strict).
    """
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case if child.get("type") != "pytest.xfail"}
        if kinds & {"failure", "error"}:
            outcome.failed += 1
            outcome.problems.append(f"failed: {name}")
        elif "skipped" in kinds:
            outcome.failed += 1
            outcome.problems.append(f"skipped: {name}")
        else:
            outcome.passed += 1


def run_suite(stage: str, reports: Path) -> Outcome:
    """One suite: the engine's tests in the engine's environment, all others in the development environment."""
    outcome, began = Outcome(stage), time.monotonic()
    folder = repository_root() / "tests" / stage
    parts = [("", dev_python(), [str(folder), f"--ignore={folder / _ENGINE_FOLDER}"])]
    if (folder / _ENGINE_FOLDER).is_dir():
        parts.append(("-engine", engine_python(), [str(folder / _ENGINE_FOLDER)]))
    for suffix, python, arguments in parts:
        report = reports / f"{stage}{suffix}.xml"
        report.unlink(missing_ok=True)
        before = outcome.ran
        command = [str(python), "-m", "pytest", *arguments, f"--junit-xml={report}", "--durations=5", "-o"]
        command.append(f"junit_suite_name={stage}{suffix}")
        code = _call(command)
        if report.exists():
            read_report(report, outcome)
        if outcome.ran == before:
            outcome.problems.append(f"{stage}{suffix}: no test ran (pytest ended with {code})")
        elif code != 0 and outcome.good:
            outcome.problems.append(f"{stage}{suffix}: pytest ended with {code}")
    outcome.seconds = time.monotonic() - began
    return outcome


def lint() -> Outcome:
    """ruff, mypy and the import contracts."""
    outcome, began = Outcome("lint"), time.monotonic()
    tools = dev_python().parent
    linted = [name for name in _LINTED if (repository_root() / name).is_dir()]
    for command in (
        [str(tools / "ruff"), "check", *linted],
        [str(tools / "ruff"), "format", "--check", *linted],
        [str(tools / "mypy"), "operator", "engine_patches"],
        [str(tools / "lint-imports")],
    ):
        code = _call(command)
        if code != 0:
            outcome.problems.append(f"{Path(command[0]).name} {' '.join(command[1:])} ended with {code}")
    outcome.seconds = time.monotonic() - began
    return outcome


def _call(command: list[str]) -> int:
    print(f"$ {' '.join(command)}", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(repository_root()), "PYTHONUNBUFFERED": "1"}
    return subprocess.run(
        command, cwd=repository_root(), env=environment, stdin=subprocess.DEVNULL, check=False
    ).returncode


def selected(arguments: list[str] | None = None) -> list[str]:
    """The stages that the command line or the environment names, in their order; all of them when neither does."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.test", description=__doc__)
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)} (default: ${SELECTION} or all)"
    )
    wanted = parser.parse_args(arguments).stages or os.environ.get(SELECTION, "").replace(",", " ").split() or STAGES
    unknown = sorted(set(wanted) - set(STAGES))
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}")
    return [stage for stage in STAGES if stage in wanted]


def duration(seconds: float) -> str:
    """For people: ``4 min 07 s``."""
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def closing(outcomes: list[Outcome], seconds: float) -> list[str]:
    """The last two lines: how many passed and failed, and how many of each suite ran."""
    counts = {outcome.stage: str(outcome.ran) for outcome in outcomes}
    passed, failed = sum(each.passed for each in outcomes), sum(each.failed for each in outcomes)
    suites = ", ".join(f"{stage} {counts.get(stage, 'not asked for')}" for stage in SUITES)
    return [f"{passed} passed, {failed} failed", f"{suites}; total {passed + failed} in {duration(seconds)}"]


def main(arguments: list[str] | None = None) -> int:
    """0 when every stage is good."""
    stages = selected(arguments)
    began = time.monotonic()
    if not (dev_python().exists() and engine_python().exists()) and setup([]) != 0:
        return 1
    reports = repository_root() / "artifacts" / "junit"
    reports.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for number, stage in enumerate(stages, 1):
        print(f"\n=== {stage} ({number} of {len(stages)}), {duration(time.monotonic() - began)} so far", flush=True)
        outcome = lint() if stage == "lint" else run_suite(stage, reports)
        outcomes.append(outcome)
        print(f"=== {stage}: {'good' if outcome.good else 'FAILED'} in {duration(outcome.seconds)}", flush=True)
    print()
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.stage}: {problem}")
    for line in closing(outcomes, time.monotonic() - began):
        print(line)
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
