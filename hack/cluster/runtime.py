"""containerd: images, and the end of everything that it runs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hack.cluster.errors import ClusterError
from hack.cluster.shell import run

NAMESPACE = "k8s.io"


class Runtime:
    """The containerd that listens on one socket."""

    def __init__(self, socket: Path) -> None:
        self._ctr = ["ctr", "--address", str(socket), "--namespace", NAMESPACE]

    def answers(self) -> bool:
        """Whether it serves."""
        try:
            run([*self._ctr, "version"], timeout=5)
        except ClusterError:
            return False
        return True

    def images(self) -> set[str]:
        """Names of the images it holds."""
        return set(run([*self._ctr, "images", "ls", "-q"]).split())

    def image_digests(self) -> dict[str, str]:
        """Digest of each image's manifest, by the image's name."""
        lines = run([*self._ctr, "images", "ls"]).splitlines()[1:]
        return {fields[0]: fields[2] for fields in (line.split() for line in lines) if len(fields) > 2}

    def tag(self, name: str, other: str) -> None:
        """Let a second name mean the same image, whatever it meant before."""
        run([*self._ctr, "images", "tag", "--force", name, other])

    def content(self) -> set[str]:
        """Digests of the blobs it holds."""
        return set(run([*self._ctr, "content", "ls", "-q"]).split())

    def remove_image(self, name: str) -> None:
        """Forget an image; its blobs and snapshots go with the next collection of garbage."""
        run([*self._ctr, "images", "rm", name], check=False)

    def import_file(self, archive: Path, timeout: float = 900.0) -> None:
        """Load an image archive."""
        run([*self._ctr, "images", "import", str(archive)], timeout=timeout)

    def import_stream(self, write: Callable[[IO[bytes]], None]) -> None:
        """Load an image archive that is written as it is read."""
        process = subprocess.Popen(
            [*self._ctr, "images", "import", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        broken = False
        try:
            with process.stdin as stream:
                write(stream)
        except BrokenPipeError:
            broken = True
        message = process.stderr.read().decode(errors="replace").strip()
        process.stderr.close()
        if process.wait() != 0 or broken:
            raise ClusterError(f"containerd did not take the image: {message}")

    def remove_containers(self) -> None:
        """Kill every task, which ends its shim, and forget every container."""
        for task in run([*self._ctr, "tasks", "ls", "-q"], check=False).split():
            run([*self._ctr, "tasks", "rm", "--force", task], check=False)
        for _ in range(3):
            containers = run([*self._ctr, "containers", "ls", "-q"], check=False).split()
            if not containers:
                return
            run([*self._ctr, "containers", "rm", *containers], check=False)
            time.sleep(0.2)
