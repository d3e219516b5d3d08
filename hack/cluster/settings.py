"""Where a cluster keeps its files, and which addresses and ports it uses."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from hack.cluster.errors import ClusterError

DEFAULT_NAME = "local"
CONTEXT = "moontide-local"
NODE_NAME = "node1"
NODE_ADDRESS = "172.30.99.1"
POD_NETWORK = "10.244.0.0/16"
NODE_POD_NETWORK = "10.244.0.0/24"
SERVICE_NETWORK = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DNS_SERVICE_ADDRESS = "10.96.0.10"
CLUSTER_DOMAIN = "cluster.local"
BRIDGE = "moontide0"
GUARD_TABLE = "moontide-local"
DEFAULT_GPUS = 8

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


def repository_root() -> Path:
    """The folder that holds hack/."""
    return Path(__file__).resolve().parents[2]


def cache_root() -> Path:
    """Where heavy things are kept: $MOONTIDE_CACHE, or moontide in the user's cache folder."""
    configured = os.environ.get("MOONTIDE_CACHE")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "moontide"


@dataclass(frozen=True)
class Ports:
    """TCP ports of the control plane's processes."""

    etcd: int = 2379
    etcd_peer: int = 2380
    apiserver: int = 6443
    controller_manager: int = 10257
    scheduler: int = 10259


def free_ports() -> Ports:
    """Ports that nothing listens on at this moment."""
    sockets = [socket.socket() for _ in range(5)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return Ports(*(int(each.getsockname()[1]) for each in sockets))
    finally:
        for each in sockets:
            each.close()


@dataclass(frozen=True)
class Settings:
    """One cluster. A full one has a node, and a machine has room for one; a control plane lives on loopback alone."""

    name: str = DEFAULT_NAME
    control_plane_only: bool = False
    controller_manager: bool = True
    gpus: int = DEFAULT_GPUS
    ports: Ports = Ports()
    audit_policy: str = ""
    """Path of a policy by which the API server logs requests; empty: it logs none."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ClusterError(f"cluster name {self.name!r}: use up to 32 lower-case letters, digits and dashes")

    @property
    def address(self) -> str:
        """Address that the API server listens on."""
        return "127.0.0.1" if self.control_plane_only else NODE_ADDRESS

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{self.address}:{self.ports.apiserver}"

    @property
    def context(self) -> str:
        """Name of the kubeconfig's only context."""
        return f"{CONTEXT}-{self.name}" if self.control_plane_only else CONTEXT

    @property
    def run_dir(self) -> Path:
        """Everything that `down` removes."""
        return cache_root() / "run" / self.name

    @property
    def state_dir(self) -> Path:
        """containerd's volatile state: short, for the sockets' sake."""
        return Path("/run") / f"moontide-{self.name}"

    @property
    def image_dir(self) -> Path:
        """containerd's images; they outlive `down`."""
        return cache_root() / "containerd"

    @property
    def last_logs(self) -> Path:
        """Where `down` leaves the logs of the cluster that it ended."""
        return cache_root() / "logs" / self.name

    @property
    def last_baseline(self) -> Path:
        """Copy of what the machine looked like before the last `up`, kept for `verify-clean`."""
        return cache_root() / "logs" / f"{self.name}.baseline.json"

    @property
    def last_settings(self) -> Path:
        """Copy of these settings that outlives the cluster, kept for `verify-clean`."""
        return cache_root() / "logs" / f"{self.name}.settings.json"

    @property
    def pki_dir(self) -> Path:
        """Keys and certificates."""
        return self.run_dir / "pki"

    @property
    def log_dir(self) -> Path:
        """One log a component."""
        return self.run_dir / "log"

    @property
    def audit_log(self) -> Path:
        """Requests that `audit_policy` asks to log, as JSON, one event a line."""
        return self.log_dir / "audit.json"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, with its keys inside."""
        return self.run_dir / "kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        """containerd's API."""
        return self.state_dir / "containerd.sock"

    @property
    def settings_file(self) -> Path:
        """Where these settings are kept while the cluster exists."""
        return self.run_dir / "cluster.json"

    def save(self) -> None:
        """Write the settings where `load` finds them."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir.chmod(0o700)
        self.last_settings.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.settings_file, self.last_settings):
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def load(name: str) -> Settings | None:
    """The settings of the cluster of that name, or None where there is none."""
    return _read(Settings(name=name).settings_file)


def load_last(name: str) -> Settings | None:
    """The settings of the cluster that has, or last had, that name."""
    return _read(Settings(name=name).last_settings)


def _read(path: Path) -> Settings | None:
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return Settings(**{**stored, "ports": Ports(**stored["ports"])})
