"""Debian packages that a full cluster and the images need."""

from __future__ import annotations

import os
import shutil
import subprocess

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.shell import run

# What each is for: the runtime, its network, certificates, and (the last line) building images without a registry.
PACKAGES = (
    *("containerd", "runc", "containernetworking-plugins"),
    *("iproute2", "iptables", "nftables", "conntrack", "ethtool", "socat", "kmod", "openssl", "ca-certificates"),
    *("buildah", "skopeo", "debootstrap", "busybox-static"),
)
# Shared libraries that the store's client and master load from the machine when they run outside a container.
ENGINE_LIBRARIES = ("libibverbs1", "librdmacm1", "libnuma1", "libcurl4")


def missing() -> list[str]:
    """Packages of both lists that dpkg does not know as installed."""
    if shutil.which("dpkg-query") is None:
        raise ClusterError(f"this machine has no dpkg; install by hand what matches: {', '.join(PACKAGES)}")
    absent = []
    for package in PACKAGES + ENGINE_LIBRARIES:
        shown = run(["dpkg-query", "--show", "--showformat=${db:Status-Status}", package], check=False)
        if shown.strip() != "installed":
            absent.append(package)
    return absent


def install(progress: Progress) -> list[str]:
    """Install what is missing through apt-get; returns what was missing."""
    absent = missing()
    if not absent:
        return []
    if os.geteuid() != 0:
        raise ClusterError(f"not root, so install these first: sudo apt-get install {' '.join(absent)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", *absent],
    ):
        with progress.step(" ".join(command[:2])):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        # A third-party list that cannot be reached does not matter if the packages come.
        if done.returncode != 0 and "install" in command:
            raise ClusterError(f"apt-get could not install {' '.join(absent)}:\n{done.stdout[-2000:]}{done.stderr}")
    return absent
