"""Every check of the project, stage by stage: `python3 -m hack.test --help`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hack.cluster.settings import repository_root
from hack.setup.__main__ import main as setup
from hack.setup.steps import dev_python, engine_python, further_engines, is_ready, releases
from hack.test import evidence
from hack.test.ahead import ahead
from hack.test.standstill import Watch, in_words

SUITES = ("unit", "component", "integration", "e2e")
STAGES = ("lint", *SUITES)
# Runs only when it is named: its images are 5 GB each.
ON_DEMAND = ("releases",)
SELECTION = "MOONTIDE_TEST_STAGES"
_ENGINE_FOLDER = "engine"
# Within it; these tests need no running engine, so they run on releases that have no CPU build, too.
_SCHEDULER_FOLDER = "scheduler"
# Of its tests with running engines, those that `make test-engines` runs on each further engine, too.
_SERVED = ("test_engine.py",)
# The others are for `make test-engines`.
SLICE = ("0.22.1", "0.33.0")
ALL_ENGINES = "MOONTIDE_TEST_ENGINES"
# Beyond what any run needs, so that one that hangs says so before the machine's own limit ends everything.
_CALL_SECONDS = 2400.0
_TIMED_OUT = 124
# Stages whose tests mostly wait: two workers, each with an API server of its own, file by file in the order of its
# conftest.py.
_IN_TWO = {"integration": ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]}
_LINTED = ("operator", "engine_patches", "hack", "tests", "bench", "examples")


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


@dataclass(frozen=True)
class Part:
    """One run of pytest. ``suffix`` tells it from the other runs of its suite."""

    suffix: str
    python: Path
    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def parts_of(stage: str) -> list[Part]:
    """The runs of a suite: the engine's tests in the engine's environment, all others in the development environment.

    The scheduler's tests run once more on the Python part of the vLLM releases in :data:`SLICE`. Asked for all engines,
    they run on each that requirements/vllm-releases.txt lists, and those of a fleet on each that has an environment.
    """
    folder = repository_root() / "tests" / stage
    engine = folder / _ENGINE_FOLDER
    parts = [Part("", dev_python(), [str(folder), f"--ignore={engine}", *_IN_TWO.get(stage, [])])]
    if engine.is_dir():
        parts.append(Part("-engine", engine_python(), [str(engine)]))
    if (engine / _SCHEDULER_FOLDER).is_dir():
        for version, home in releases().items():
            if version not in SLICE and not served():
                continue
            environment = {"PYTHONPATH": f"{home}{os.pathsep}{repository_root()}", "MOONTIDE_TEST_VLLM": version}
            parts.append(Part(f"-engine-{version}", engine_python(), [str(engine / _SCHEDULER_FOLDER)], environment))
    files = [str(engine / name) for name in _SERVED if (engine / name).is_file()]
    if files:
        parts += [Part(f"-served-{version}", engine_python(version), files) for version in served()]
    return parts


def served() -> tuple[str, ...]:
    """Releases other than the engine environment's that serve in these tests: each has an environment of its own."""
    return further_engines() if os.environ.get(ALL_ENGINES) == "all" else ()


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
    """All runs of one suite."""
    outcome, began = Outcome(stage), time.monotonic()
    for part in parts_of(stage):
        name = f"{stage}{part.suffix}"
        report = reports / f"{name}.xml"
        report.unlink(missing_ok=True)
        before = outcome.ran
        command = [str(part.python), "-m", "pytest", *part.arguments, f"--junit-xml={report}", "--durations=5", "-o"]
        command.append(f"junit_suite_name={name}")
        code = _call(command, part.environment)
        if report.exists():
            read_report(report, outcome)
        if outcome.ran == before:
            outcome.problems.append(f"{name}: no test ran (pytest ended with {code})")
        elif code != 0:
            # Also where tests failed: their names are the same in every run of a suite.
            outcome.problems.append(f"{name}: pytest ended with {code}")
    outcome.seconds = time.monotonic() - began
    return outcome


def lint() -> Outcome:
    """ruff, mypy, the import contracts, and the site of docs/, whose warnings are errors."""
    outcome, began = Outcome("lint"), time.monotonic()
    tools = dev_python().parent
    linted = [name for name in _LINTED if (repository_root() / name).is_dir()]
    for command in (
        [str(tools / "ruff"), "check", *linted],
        [str(tools / "ruff"), "format", "--check", *linted],
        [str(tools / "mypy"), "operator", "engine_patches"],
        [str(tools / "lint-imports")],
        # Not with --quiet: it does not count warnings then.
        [str(tools / "mkdocs"), "build", "--strict"],
    ):
        code = _call(command, {"NO_MKDOCS_2_WARNING": "true"})
        if code != 0:
            outcome.problems.append(f"{Path(command[0]).name} {' '.join(command[1:])} ended with {code}")
    outcome.seconds = time.monotonic() - began
    return outcome


def _call(command: list[str], more: Mapping[str, str] | None = None) -> int:
    """Run it with ``more`` in its environment."""
    print(f"$ {' '.join([*(f'{name}={value}' for name, value in (more or {}).items()), *command])}", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(repository_root()), "PYTHONUNBUFFERED": "1", **(more or {})}
    try:
        return subprocess.run(
            command,
            cwd=repository_root(),
            env=environment,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=_CALL_SECONDS,
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"it did not end within {duration(_CALL_SECONDS)}, so it was ended", flush=True)
        return _TIMED_OUT


def selected(arguments: list[str] | None = None) -> list[str]:
    """The stages that the command line or the environment names, in their order; all of STAGES when neither does."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.test", description=__doc__)
    parser.add_argument(
        "stages",
        nargs="*",
        metavar="STAGE",
        help=f"{', '.join(STAGES)} (default: ${SELECTION} or all of these); also {', '.join(ON_DEMAND)}",
    )
    wanted = parser.parse_args(arguments).stages or os.environ.get(SELECTION, "").replace(",", " ").split() or STAGES
    known = (*STAGES, *ON_DEMAND)
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}")
    return [stage for stage in known if stage in wanted]


def duration(seconds: float) -> str:
    """For people: ``4 min 07 s``."""
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def closing(outcomes: list[Outcome], seconds: float) -> list[str]:
    """The last two lines: how many passed and failed, and how many of each suite ran."""
    counts = {outcome.stage: str(outcome.ran) for outcome in outcomes}
    passed, failed = sum(each.passed for each in outcomes), sum(each.failed for each in outcomes)
    named = [*SUITES, *(stage for stage in ON_DEMAND if stage in counts)]
    suites = ", ".join(f"{stage} {counts.get(stage, 'not asked for')}" for stage in named)
    return [f"{passed} passed, {failed} failed", f"{suites}; total {passed + failed} in {duration(seconds)}"]


def main(arguments: list[str] | None = None) -> int:
    """0 when every stage is good."""
    stages = selected(arguments)
    began = time.monotonic()
    engines = [part for release in served() for part in ("--engine", release)]
    if not is_ready(served()) and setup(engines) != 0:
        return 1
    reports = repository_root() / "artifacts" / "junit"
    reports.mkdir(parents=True, exist_ok=True)
    outcomes = []
    watch = Watch()
    processors = sorted(os.sched_getaffinity(0))
    with ahead(stages, reports.parent, lambda text: print(text, flush=True)) as built, watch.on(processors):
        for number, stage in enumerate(stages, 1):
            print(f"\n=== {stage} ({number} of {len(stages)}), {duration(time.monotonic() - began)} so far", flush=True)
            built(stage)
            outcome = lint() if stage == "lint" else run_suite(stage, reports)
            outcomes.append(outcome)
            print(f"=== {stage}: {'good' if outcome.good else 'FAILED'} in {duration(outcome.seconds)}", flush=True)
    print()
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.stage}: {problem}")
    if set(SUITES) <= set(stages):
        print(f"evidence: {evidence.summary(evidence.verdicts())}")
    if stood := in_words(watch.found):
        print(stood)
    for line in closing(outcomes, time.monotonic() - began):
        print(line)
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
