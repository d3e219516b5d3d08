"""Builders of images: buildah, which needs no daemon, or Docker where its daemon runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import cache_root
from hack.cluster.shell import run

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
HEARTBEAT_SECONDS = 15.0
PUSH_SECONDS = 3600.0
RETRIES = 3
_LOOPBACK = ("localhost", "127.0.0.1")
# How lines begin that say what buildah, Docker or debootstrap is at.
_MILESTONES = ("STEP", "Step", "#", "I: ")


class Builder(Protocol):
    """What a builder does."""

    name: str

    def has(self, reference: str) -> bool:
        """Whether it holds an image of that name."""

    def from_root(self, folder: Path, reference: str) -> None:
        """Make an image of one layer from a root folder."""

    def build(self, context: Path, dockerfile: Path, reference: str, arguments: Mapping[str, str]) -> None:
        """Run a Dockerfile."""

    def tag(self, reference: str, other: str) -> None:
        """Give an image another name."""

    def remove(self, reference: str) -> None:
        """Forget an image."""

    def references(self) -> list[str]:
        """Names of all images it holds."""

    def to_layout(self, reference: str, folder: Path) -> None:
        """Write an image into a folder in OCI layout; layers that lie there already are not written again."""

    def push(self, reference: str, destination: str) -> None:
        """Send an image to a registry, as HOST/PATH:TAG; whoever is logged in there on this machine may."""


def choose(progress: Progress, wanted: str = "auto") -> Builder:
    """The builder asked for; "auto" takes Docker if its daemon answers and buildah otherwise."""
    if wanted == "docker" or (wanted == "auto" and docker_answers()):
        return Docker(progress)
    if shutil.which("buildah") is None:
        raise ClusterError("neither a Docker daemon nor buildah is there (see `python3 -m hack.cluster prerequisites`)")
    return Buildah(progress)


def docker_answers() -> bool:
    """Whether a Docker daemon can be used."""
    if shutil.which("docker") is None:
        return False
    try:
        run(["docker", "version", "--format", "{{.Server.Version}}"], timeout=10)
    except ClusterError:
        return False
    return True


class Buildah:
    """buildah with a store of its own in the cache."""

    name = "buildah"

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        store = cache_root() / "buildah"
        self._storage = f"[overlay@{store}/storage+{store}/run]"
        self._command = ["buildah", f"--root={store}/storage", f"--runroot={store}/run", "--storage-driver=overlay"]

    def has(self, reference: str) -> bool:
        return reference in self.references()

    def references(self) -> list[str]:
        listed = run([*self._command, "images", "--format", "{{.Name}}:{{.Tag}}"], check=False)
        return [line for line in listed.split() if not line.endswith("<none>")]

    def from_root(self, folder: Path, reference: str) -> None:
        container = run([*self._command, "from", "scratch"]).strip()
        try:
            run([*self._command, "copy", "--quiet", container, f"{folder}/.", "/"], timeout=600)
            path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            run([*self._command, "config", "--env", path, "--cmd", "python3", container])
            run([*self._command, "commit", "--quiet", container, reference], timeout=600)
        finally:
            run([*self._command, "rm", container])

    def build(self, context: Path, dockerfile: Path, reference: str, arguments: Mapping[str, str]) -> None:
        # Processes of the build run in a chroot: on a machine that is itself closed in, nothing more is to be had.
        command = [*self._command, "build", "--isolation=chroot", "--network=host", "--pull=never", "--layers=true"]
        command += ["--file", str(dockerfile), "--tag", reference]
        for key, value in {**arguments, **_certificate_arguments()}.items():
            command += ["--build-arg", f"{key}={value}"]
        for volume in _volumes():
            command += ["--volume", volume]
        watch([*command, str(context)], self._progress, reference)

    def tag(self, reference: str, other: str) -> None:
        run([*self._command, "tag", reference, other])

    def remove(self, reference: str) -> None:
        # Layers that newer images share stay: they are what makes the next build quick.
        run([*self._command, "rmi", reference], check=False)

    def to_layout(self, reference: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Uncompressed, a layer has in the layout the digest that it has in the store, so one that lies there is left
        # alone. buildah's own push compresses every layer each time.
        source = f"containers-storage:{self._storage}{reference}"
        command = ["skopeo", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers", source]
        run([*command, f"oci:{folder}:latest"], timeout=1800)

    def push(self, reference: str, destination: str) -> None:
        push_with_skopeo(f"containers-storage:{self._storage}{reference}", destination)


class Docker:
    """Docker's daemon."""

    name = "docker"

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def has(self, reference: str) -> bool:
        return bool(run(["docker", "images", "--quiet", reference]).strip())

    def references(self) -> list[str]:
        return run(["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"]).split()

    def from_root(self, folder: Path, reference: str) -> None:
        with subprocess.Popen(["tar", "--numeric-owner", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as tar:
            done = subprocess.run(
                ["docker", "import", "--change", "CMD python3", "-", reference],
                stdin=tar.stdout,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode != 0 or tar.returncode != 0:
            raise ClusterError(f"docker import failed: {done.stderr.strip()}")

    def build(self, context: Path, dockerfile: Path, reference: str, arguments: Mapping[str, str]) -> None:
        command = ["docker", "build", "--network=host", "--file", str(dockerfile), "--tag", reference]
        for key, value in arguments.items():
            command += ["--build-arg", f"{key}={value}"]
        watch([*command, str(context)], self._progress, reference)

    def tag(self, reference: str, other: str) -> None:
        run(["docker", "tag", reference, other])

    def remove(self, reference: str) -> None:
        run(["docker", "rmi", reference], check=False)

    def to_layout(self, reference: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        archive = folder / "saved.tar"
        run(["docker", "save", "--output", str(archive), reference], timeout=1800)
        run(["tar", "-C", str(folder), "-xf", str(archive)], timeout=600)
        archive.unlink()
        if not (folder / "index.json").exists():
            raise ClusterError("this Docker release does not save images in OCI layout (25 and later do)")

    def push(self, reference: str, destination: str) -> None:
        self.tag(reference, destination)
        try:
            run(["docker", "push", "--quiet", destination], timeout=PUSH_SECONDS)
        finally:
            self.remove(destination)


def push_with_skopeo(source: str, destination: str) -> None:
    """Copy an image, named as skopeo names it, to HOST/PATH:TAG unless it is there: a tag of ours names one content."""
    registry = destination.partition("/")[0]
    # As Docker does it: a registry on this very machine needs no TLS.
    tls = ["--tls-verify=false"] if registry.rpartition(":")[0] in _LOOPBACK else []
    target = f"docker://{destination}"
    try:
        run(["skopeo", "inspect", "--raw", *tls, target])
    except ClusterError:
        copy_tls = [f"--dest-{each.removeprefix('--')}" for each in tls]
        run(["skopeo", "copy", "--quiet", f"--retry-times={RETRIES}", *copy_tls, source, target], timeout=PUSH_SECONDS)


def _certificate_arguments() -> dict[str, str]:
    """Build arguments that make package tools trust what this machine trusts; no value stays in the image."""
    if not CERTIFICATES.exists():
        return {}
    return {"SSL_CERT_FILE": str(CERTIFICATES), "PIP_CERT": str(CERTIFICATES)}


def _volumes() -> list[str]:
    """Folders of this machine that a build sees: certificates and download caches."""
    volumes = []
    if CERTIFICATES.exists():
        volumes.append(f"{CERTIFICATES}:{CERTIFICATES}:ro")
    for tool in ("uv", "pip"):
        folder = Path(os.environ.get(f"{tool.upper()}_CACHE_DIR", Path.home() / ".cache" / tool))
        folder.mkdir(parents=True, exist_ok=True)
        volumes.append(f"{folder}:/var/cache/{tool}")
    return volumes


def watch(command: Sequence[str], progress: Progress, title: str) -> None:
    """Run a long command, with a sign of life now and then that says what it is at."""
    lines: list[str] = []
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip():
                    lines.append(line.rstrip())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        while True:
            try:
                process.wait(timeout=HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                at = next((line for line in reversed(lines) if line.startswith(_MILESTONES)), "")
                progress.say(f"  {title}: {time.monotonic() - began:.0f} s, {at[:90]}")
        reader.join()
    if process.returncode != 0:
        tail = "\n".join(lines[-40:])
        raise ClusterError(f"building {title} failed:\n{tail}")
