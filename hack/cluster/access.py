"""Which cluster a command may talk to: ours, or another one only when its context is named on purpose."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hack.cluster import binaries
from hack.cluster import settings as defaults
from hack.cluster.errors import ClusterError
from hack.cluster.shell import run

KIND_CLUSTER = "moontide-local"


@dataclass(frozen=True)
class Access:
    """A kubeconfig and the one context of it that may be used. `images` tells how images reach its nodes."""

    kubeconfig: Path
    context: str
    server: str

    @property
    def kubectl(self) -> list[str]:
        """The beginning of a kubectl command that talks to this cluster and no other."""
        return [kubectl_path(), f"--kubeconfig={self.kubeconfig}", f"--context={self.context}"]


def kubectl_path() -> str:
    """Our kubectl if it is built, otherwise the machine's."""
    own = binaries.bin_dir() / "kubectl"
    found = str(own) if own.exists() else shutil.which("kubectl")
    if found is None:
        raise ClusterError("no kubectl: bring the local cluster up once, or install one")
    return found


def resolve(kubeconfig: Path | None = None, allow_context: str | None = None) -> Access:
    """The current context of a kubeconfig ($KUBECONFIG or kubectl's default where none is given), if it may be used.

    It may if it is a local cluster of this project on this machine, or if `allow_context` is its very name.
    """
    path = kubeconfig or _default_kubeconfig()
    if not path.exists():
        raise ClusterError(f"there is no kubeconfig {path}: bring a cluster up, or set KUBECONFIG")
    view = json.loads(run([kubectl_path(), f"--kubeconfig={path}", "config", "view", "--minify", "-o", "json"]))
    context = str(view.get("current-context", ""))
    server = str(view["clusters"][0]["cluster"]["server"])
    if allow_context is not None and context != allow_context:
        raise ClusterError(f"the current context is {context!r}, not {allow_context!r}")
    if allow_context is None and not is_ours(context, server):
        raise ClusterError(
            f"the current context is {context!r} at {server}, no cluster of this project; "
            f"to use it all the same pass --allow-context {context}"
        )
    return Access(path, context, server)


def named(context: str | None, kubeconfig: Path | None = None) -> Access:
    """The context of that name, or with None the current one: for who has said on purpose which cluster is meant."""
    path = kubeconfig or _default_kubeconfig()
    if not path.exists():
        raise ClusterError(f"there is no kubeconfig {path}: set KUBECONFIG, or give --kubeconfig")
    kubectl = [kubectl_path(), f"--kubeconfig={path}", "config"]
    chosen = context or run([*kubectl, "view", "--output=jsonpath={.current-context}"]).strip()
    if not chosen:
        raise ClusterError(f"{path} has no current context; name one")
    known = run([*kubectl, "get-contexts", "--output=name"]).split()
    if chosen not in known:
        raise ClusterError(f"{path} has no context {chosen!r}; it has: {', '.join(known) or 'none'}")
    view = json.loads(run([*kubectl, "view", "--minify", f"--context={chosen}", "--output=json"]))
    return Access(path, chosen, str(view["clusters"][0]["cluster"]["server"]))


def is_ours(context: str, server: str) -> bool:
    """Whether a context's name and address are both those of a local cluster made here."""
    named = context in (defaults.CONTEXT, f"kind-{KIND_CLUSTER}") or context.startswith(f"{defaults.CONTEXT}-")
    host = urlsplit(server).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return named and (address.is_loopback or host == defaults.NODE_ADDRESS)


def _default_kubeconfig() -> Path:
    configured = os.environ.get("KUBECONFIG", "")
    if ":" in configured:
        raise ClusterError("KUBECONFIG names several files; name one")
    return Path(configured) if configured else Path.home() / ".kube" / "config"
