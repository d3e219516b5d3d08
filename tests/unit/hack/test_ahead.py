"""What later stages need is built while earlier ones run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hack.test import ahead
from hack.test.ahead import Ahead

FOREVER = "import time; time.sleep(600)"


def _python(code: str) -> Sequence[str]:
    return [sys.executable, "-c", code]


def test_a_stage_waits_for_what_it_needs_and_for_nothing_later(tmp_path: Path) -> None:
    builds = Ahead(pytest.fail)
    made = tmp_path / "made"
    builds.start("integration", _python(f"import time; time.sleep(0.5); open({str(made)!r}, 'w')"), tmp_path)
    builds.start("e2e", _python(FOREVER), tmp_path)
    try:
        builds.wait("integration")
        assert made.exists()
        builds.wait("integration")
    finally:
        builds.end()


def test_the_last_stage_waits_for_all(tmp_path: Path) -> None:
    builds = Ahead(pytest.fail)
    made = {stage: tmp_path / stage for stage in ("integration", "e2e")}
    for stage, file in made.items():
        builds.start(stage, _python(f"import time; time.sleep(0.3); open({str(file)!r}, 'w')"), tmp_path)
    builds.wait("e2e")
    assert all(file.exists() for file in made.values())


def test_a_build_that_fails_is_told_with_its_last_line_and_fails_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    builds = Ahead(told.append)
    builds.start("integration", _python("print('first'); raise SystemExit('no such module')"), tmp_path)
    builds.wait("integration")
    assert told == ["what integration needs was not built ahead (1): no such module"]
    builds.wait("integration")


def test_who_waits_is_told_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_HEARTBEAT_SECONDS", 0.2)
    told: list[str] = []
    builds = Ahead(told.append)
    builds.start("e2e", _python("import time; print('step 3', flush=True); time.sleep(1)"), tmp_path)
    builds.wait("e2e")
    assert any("what e2e needs is being built, 0 s" in each for each in told)
    assert told[-1].endswith("step 3")


def test_nothing_outlives_the_stages(tmp_path: Path) -> None:
    builds = Ahead(pytest.fail)
    pid = tmp_path / "pid"
    # A child of the command, as a compiler is.
    code = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}]); "
        f"open({str(pid)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    builds.start("e2e", _python(code), tmp_path)
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    builds.end()
    ends = time.monotonic() + 10
    while (folder := Path("/proc") / pid.read_text()).exists() and " Z " not in (folder / "stat").read_text():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("stages", "started"),
    [
        (("lint", "unit", "component", "integration", "e2e"), ["integration", "e2e"]),
        # The first stage shows its own progress.
        (("integration", "e2e"), ["e2e"]),
        (("e2e",), []),
        (("unit", "component"), []),
    ],
)
def test_what_is_started_for_which_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: tuple[str, ...], started: list[str]
) -> None:
    asked: list[tuple[str, Sequence[str]]] = []
    monkeypatch.setattr(Ahead, "start", lambda self, stage, command, logs: asked.append((stage, command)))
    with ahead.ahead(stages, tmp_path, pytest.fail) as built:
        for stage in stages:
            built(stage)
    assert [stage for stage, _ in asked] == started
    for stage, command in asked:
        assert list(command) == [sys.executable, "-m", *ahead.NEEDED[stage]]


def test_it_runs_at_the_lowest_priority(tmp_path: Path) -> None:
    builds = Ahead(pytest.fail)
    builds.start("e2e", _python("import os; print(os.nice(0))"), tmp_path)
    builds.wait("e2e")
    assert (tmp_path / "ahead-e2e.log").read_text().strip() == str(max(os.nice(0), 19))
