"""Long-running processes that outlive the command that started them, remembered by pid and start time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hack.cluster.errors import ClusterError

POLL_SECONDS = 0.05


def start_time(pid: int) -> int | None:
    """Kernel ticks at which a process started; None for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB, 0 for one that is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0.0


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition until it holds or the time is over; tells which."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


class Daemon:
    """One process, its pid file and its log."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.name = name
        self.log = run_dir / "log" / f"{name}.log"
        self._file = run_dir / "pid" / f"{name}.json"

    @property
    def pid(self) -> int | None:
        """Its process id while it lives."""
        try:
            stored = json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        pid = int(stored["pid"])
        _reap(pid)
        started = start_time(pid)
        # One that ended before its start could be written down has no start time, then as now.
        return pid if started is not None and started == stored["started"] else None

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start it in a session of its own, with its output appended to its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            pid = os.posix_spawn(
                argv[0],
                list(argv),
                dict(environment),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, nothing, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setsid=True,
            )
        except OSError as error:
            raise ClusterError(f"cannot start {self.name}: {error}") from error
        finally:
            os.close(output)
            os.close(nothing)
        self._file.write_text(json.dumps({"pid": pid, "started": start_time(pid)}) + "\n")
        return pid

    def stop(self, seconds: float = 10.0, first: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait until it is gone: the signal asked for, and SIGKILL after the time given."""
        pid = self.pid
        if pid is not None:
            _send(pid, first)
            if not wait_until(lambda: self.pid is None, seconds):
                _send(pid, signal.SIGKILL)
                wait_until(lambda: self.pid is None, 10.0)
        self._file.unlink(missing_ok=True)

    def last_lines(self, count: int = 15) -> str:
        """The end of its log."""
        try:
            return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-count:])
        except FileNotFoundError:
            return ""


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap(pid: int) -> None:
    """Where the starter still lives, the ended child is a zombie until it is waited for."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
