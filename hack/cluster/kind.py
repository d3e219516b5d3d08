"""A cluster in containers through kind, for people who have Docker."""

from __future__ import annotations

import shutil
from pathlib import Path

from hack.cluster.access import KIND_CLUSTER
from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import cache_root
from hack.cluster.shell import run


def kubeconfig() -> Path:
    """The kubeconfig of the kind cluster, apart from the user's own."""
    return cache_root() / "run" / "kind.kubeconfig"


def _kind() -> str:
    found = shutil.which("kind")
    if found is None:
        raise ClusterError("kind is not installed; install it, or use --cluster local, which needs no Docker")
    return found


def exists() -> bool:
    """Whether kind has our cluster. Raises ClusterError where kind or what it runs nodes in does not answer."""
    return KIND_CLUSTER in run([_kind(), "get", "clusters"]).split()


def up(progress: Progress) -> None:
    """Make the cluster unless it is there; either way its kubeconfig is then a file of our own."""
    there = exists()
    kubeconfig().parent.mkdir(parents=True, exist_ok=True)
    if there:
        # It may be gone, or of another cluster of this name: ports change when one is made anew.
        run([_kind(), "export", "kubeconfig", f"--name={KIND_CLUSTER}", f"--kubeconfig={kubeconfig()}"])
        progress.say(f"kind cluster {KIND_CLUSTER} is there")
        return
    with progress.step("kind create cluster"):
        run(
            [_kind(), "create", "cluster", f"--name={KIND_CLUSTER}", f"--kubeconfig={kubeconfig()}", "--wait=180s"],
            timeout=900,
        )


def down(progress: Progress) -> None:
    """Delete the cluster."""
    with progress.step("kind delete cluster"):
        run([_kind(), "delete", "cluster", f"--name={KIND_CLUSTER}", f"--kubeconfig={kubeconfig()}"], timeout=300)
    kubeconfig().unlink(missing_ok=True)


def load_image(archive: Path, progress: Progress) -> None:
    """Load an image archive into its nodes."""
    with progress.step(f"loaded {archive.name}"):
        run([_kind(), "load", "image-archive", str(archive), f"--name={KIND_CLUSTER}"], timeout=1800)
