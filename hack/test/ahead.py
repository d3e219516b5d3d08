"""What later stages need and a new machine has to build, built while earlier stages run.

On such a machine that is half an hour of compiling and downloading; where all is there it is a second. It runs at the
lowest priority, so that what is tested meanwhile is not in its way. A stage that needs it waits for it; one that fails
is not a failure here: the stage builds again, where its error is seen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.settings import repository_root

NEEDED: Mapping[str, tuple[str, ...]] = {
    "integration": ("hack.cluster", "bin-dir"),
    "e2e": ("hack.images", "build", "--cluster", "none"),
}
"""By stage, the command that builds what it needs."""
_HEARTBEAT_SECONDS = 30.0


@dataclass(frozen=True)
class _Build:
    process: subprocess.Popen[bytes]
    log: Path


class Ahead:
    """Builds that are under way. Use :func:`ahead`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._builds: dict[str, _Build] = {}

    def start(self, stage: str, command: Sequence[str], logs: Path) -> None:
        """Start what the stage needs."""
        log = logs / f"ahead-{stage}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["nice", "-n", "19", *command],
                cwd=repository_root(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._builds[stage] = _Build(process, log)

    def wait(self, stage: str) -> None:
        """Wait for what this stage needs, and for what was started before it."""
        while self._builds:
            name, build = next(iter(self._builds.items()))
            if list(NEEDED).index(name) > list(NEEDED).index(stage):
                return
            began = time.monotonic()
            while True:
                try:
                    code = build.process.wait(_HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    self._say(f"what {name} needs is being built, {time.monotonic() - began:.0f} s; {_last(build.log)}")
            del self._builds[name]
            if code != 0:
                self._say(f"what {name} needs was not built ahead ({code}): {_last(build.log)}")

    def end(self) -> None:
        """End those that nobody waited for."""
        for build in self._builds.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(build.process.pid, signal.SIGTERM)
            build.process.wait()
        self._builds.clear()


@contextlib.contextmanager
def ahead(stages: Sequence[str], logs: Path, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """While stages run: start what all but the first need, and give what a stage calls before it begins."""
    builds = Ahead(say)
    try:
        for stage in stages[1:]:
            if stage in NEEDED:
                builds.start(stage, [sys.executable, "-m", *NEEDED[stage]], logs)
        yield lambda stage: builds.wait(stage) if stage in NEEDED else None
    finally:
        builds.end()


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1].strip()[:200] if lines else ""
