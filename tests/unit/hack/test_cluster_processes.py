from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cluster.errors import ClusterError
from hack.cluster.processes import Daemon, start_time, wait_until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon("sleeper", tmp_path)
    yield made
    made.stop(0.1, signal.SIGKILL)


def test_a_daemon_lives_in_its_own_session_and_ends_when_told(daemon: Daemon) -> None:
    pid = daemon.start(["/bin/sh", "-c", "echo started; exec sleep 60"], os.environ)
    assert daemon.pid == pid
    assert os.getsid(pid) == pid
    assert wait_until(lambda: "started" in daemon.last_lines(), 5)
    daemon.stop()
    assert daemon.pid is None
    assert start_time(pid) is None


def test_a_daemon_that_ignores_the_signal_is_killed(daemon: Daemon) -> None:
    daemon.start(["/bin/sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1; done"], os.environ)
    assert wait_until(lambda: "deaf" in daemon.last_lines(), 5)
    daemon.stop(seconds=0.3)
    assert daemon.pid is None


def test_a_daemon_that_ended_by_itself_is_known_as_gone(daemon: Daemon) -> None:
    daemon.start(["/bin/true"], os.environ)
    assert wait_until(lambda: daemon.pid is None, 5)


def test_another_process_under_the_same_number_is_not_taken_for_it(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start(["/bin/sleep", "60"], os.environ)
    file = tmp_path / "pid" / "sleeper.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "started": stored["started"] - 1}))
    assert daemon.pid is None
    daemon.stop()
    assert start_time(stored["pid"]) is not None, "a process that is not ours must live on"
    os.kill(stored["pid"], signal.SIGKILL)
    os.waitpid(stored["pid"], 0)


def test_a_program_that_is_not_there_is_an_error(daemon: Daemon) -> None:
    with pytest.raises(ClusterError, match="cannot start sleeper"):
        daemon.start(["/no/such/program"], os.environ)
