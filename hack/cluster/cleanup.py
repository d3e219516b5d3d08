"""What a cluster leaves on the machine, and its removal."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from hack.cluster import network
from hack.cluster.processes import start_time, wait_until
from hack.cluster.settings import Settings
from hack.cluster.shell import run

# Folders that kubelet, the network plugins and the shims use whatever they are told.
FIXED_DIRS = (
    Path("/run/containerd"),
    Path("/var/lib/kubelet"),
    Path("/var/log/containers"),
    Path("/var/log/pods"),
    Path("/var/lib/cni"),
)
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Baseline:
    """What the machine looked like before `up` touched it."""

    sysctls: dict[str, str]
    nft_tables: list[str]
    directories: list[str]

    @staticmethod
    def take() -> Baseline:
        """Look at the machine now."""
        present = [str(path) for path in FIXED_DIRS if path.exists()]
        return Baseline(network.sysctls(), network.nft_tables(), present)

    @staticmethod
    def read(path: Path) -> Baseline | None:
        """A baseline saved earlier, None where there is none."""
        return Baseline(**json.loads(path.read_text())) if path.exists() else None

    def save(self, path: Path) -> None:
        """Write it where `read` finds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def baseline_file(settings: Settings) -> Path:
    """Where the baseline of a living cluster is kept."""
    return settings.run_dir / "baseline.json"


def processes(settings: Settings) -> dict[int, str]:
    """Processes whose command line names one of the cluster's own folders, this one and its callers left out."""
    marks = (f"{settings.run_dir}/", f"{settings.state_dir}/")
    skipped = _self_and_ancestors()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in skipped:
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        executable = command.partition(" ")[0].rpartition("/")[2]
        if executable in _PROGRAMS and any(mark in command for mark in marks) and start_time(int(entry.name)):
            found[int(entry.name)] = command.strip()[:160]
    return found


_PROGRAMS = frozenset(
    {
        "containerd",
        "containerd-shim-runc-v2",
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-proxy",
        "kube-scheduler",
        "kubelet",
        "runc",
        "python3",
    }
)


def _self_and_ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def mounts(settings: Settings) -> list[str]:
    """Mount points under the cluster's folders, innermost first."""
    prefixes = (f"{settings.run_dir}/", f"{settings.state_dir}/")
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(prefixes)), reverse=True)


def cgroups() -> list[Path]:
    """Control groups of pods, in either version of the hierarchy."""
    candidates = [_CGROUPS / "kubepods", *_CGROUPS.glob("*/kubepods")]
    return [path for path in candidates if path.is_dir()]


def container_log_links(settings: Settings) -> list[Path]:
    """kubelet's links to the logs of the cluster's containers."""
    folder = Path("/var/log/containers")
    if not folder.is_dir():
        return []
    return [
        link
        for link in folder.iterdir()
        if link.is_symlink() and str(link.readlink()).startswith(f"{settings.run_dir}/")
    ]


def kill_processes(settings: Settings) -> None:
    """End what is left of the cluster's own processes, shims among them."""
    for pid in processes(settings):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_until(lambda: not processes(settings), 10.0)


def unmount(settings: Settings) -> None:
    """Take every mount of the cluster away."""
    for point in mounts(settings):
        run(["umount", "--lazy", point], check=False)


def remove_cgroups() -> None:
    """Remove the empty control groups of pods, leaves first."""
    for top in cgroups():
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue


def leftovers(settings: Settings, baseline: Baseline | None) -> list[str]:
    """Everything of the cluster that is still on the machine, one line each; empty after a complete `down`."""
    found = [f"process {pid}: {command}" for pid, command in processes(settings).items()]
    found += [f"mount {point}" for point in mounts(settings)]
    found += [f"folder {path}" for path in (settings.run_dir, settings.state_dir) if path.exists()]
    if settings.control_plane_only:
        return found
    found += [f"control group {path}" for path in cgroups()]
    found += [f"link {link}" for link in container_log_links(settings)]
    found += network.leftovers()
    if baseline is not None:
        found += network.changes_since(baseline.sysctls, baseline.nft_tables)
        found += [
            f"folder {path} was not there before"
            for path in FIXED_DIRS
            if path.exists() and str(path) not in baseline.directories
        ]
    return found
