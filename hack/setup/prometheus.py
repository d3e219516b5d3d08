"""Prometheus and promtool, unpacked from Debian's package into the cache: nothing is installed, and no service runs."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import cache_root

PACKAGE = "prometheus"
PROGRAMS = ("prometheus", "promtool")


def program(name: str) -> Path:
    """One of :data:`PROGRAMS`; it may not exist yet."""
    return cache_root() / PACKAGE / name


def is_ready() -> bool:
    """Whether all are there."""
    return all(program(name).exists() for name in PROGRAMS)


def ensure(progress: Progress) -> None:
    """Get what is missing. Raises ClusterError where apt-get does not have it."""
    if is_ready():
        progress.say("Prometheus: there")
        return
    with progress.step("Prometheus unpacked"), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        got = _try("apt-get", "download", "-q", PACKAGE, cwd=folder)
        if got and os.geteuid() == 0:
            # The lists of a new machine are empty, or name a file that was replaced since.
            _try("apt-get", "update", "-q", cwd=folder)
            got = _try("apt-get", "download", "-q", PACKAGE, cwd=folder)
        if got:
            raise ClusterError(f"apt-get cannot download {PACKAGE}: {got}")
        (package,) = folder.glob("*.deb")
        if got := _try("dpkg-deb", "--extract", str(package), "made", cwd=folder):
            raise ClusterError(f"{package.name} cannot be unpacked: {got}")
        for name in PROGRAMS:
            target = program(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            made = target.with_name(f"{name}.new")
            made.write_bytes((folder / "made" / "usr" / "bin" / name).read_bytes())
            made.chmod(0o755)
            made.replace(target)


def _try(*command: str, cwd: Path) -> str:
    """Run it; what it says when it fails, and nothing when it does not."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"there is no {command[0]}"
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-1000:] or str(done.returncode)
