"""The base image, made of Debian packages where no registry can be reached."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import cache_root, repository_root
from hack.images.builder import Builder, watch
from hack.images.catalogue import PREFIX

SUITE = "bookworm"
# What a container never reads, and what would make it differ from one build to the next.
_UNUSED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
    "debootstrap",
)


def packages() -> list[str]:
    """Names in images/base/packages.txt."""
    lines = (repository_root() / "images" / "base" / "packages.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def key() -> str:
    """Hash of what the base image is made of."""
    return hashlib.sha256(repr((SUITE, packages(), _UNUSED)).encode()).hexdigest()[:16]


def reference() -> str:
    """The base image's name."""
    return f"{PREFIX}/base:{key()}"


def ensure(builder: Builder, progress: Progress) -> str:
    """Make the base image unless it is there; returns its name."""
    if not builder.has(reference()):
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            instead = "where a registry can be reached, give --base-image python:3.11-slim-bookworm instead"
            raise ClusterError(f"the base image is made by debootstrap, as root; {instead}")
        cache_root().mkdir(parents=True, exist_ok=True)
        # Not under /tmp: that may be mounted without devices.
        folder = Path(tempfile.mkdtemp(prefix="debootstrap-", dir=cache_root()))
        try:
            _bootstrap(folder, progress)
            with progress.step("base image"):
                builder.from_root(folder, reference())
        finally:
            shutil.rmtree(folder)
    return reference()


def _bootstrap(folder: Path, progress: Progress) -> None:
    progress.say(f"making a base image of Debian {SUITE} packages (a minute or two)")
    include = f"--include={','.join(packages())}"
    watch(["debootstrap", "--variant=minbase", include, SUITE, str(folder)], progress, f"debootstrap {SUITE}")
    for unused in _UNUSED:
        place = folder / unused
        shutil.rmtree(place, ignore_errors=True)
        if unused != "debootstrap":
            place.mkdir()
    # apt needs its folders, and Debian puts licences into doc: they stay with their packages' names elsewhere.
    (folder / "var/cache/apt/archives/partial").mkdir(parents=True)
    (folder / "var/lib/apt/lists/partial").mkdir(parents=True)
    (folder / "etc/resolv.conf").unlink(missing_ok=True)
    (folder / "etc/hostname").unlink(missing_ok=True)
