"""Admin ports and wipers that serve TLS: what it adds to their pods, and what a pod says of it. Pure.

Whether a peer is spoken to over TLS is decided by the template that its pod was made from, never by the spec: during a
rollout there are pods of both kinds. A running pod's environment cannot be changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kubernetes.aio import client as k8s

from moontide import naming
from moontide.resources import common
from moontide.resources.store import WIPER_CONTAINER

VOLUME = "admin-tls"
FOLDER = "/etc/moontide/admin-tls"


@dataclass(frozen=True)
class Served:
    """One kind of peer: its container, the variable that names the folder of its certificate, and its port."""

    container: str
    variable: str
    port: int


ENGINE = Served(naming.ENGINE_CONTAINER, "MOONTIDE_ADMIN_TLS", naming.ADMIN_PORT)
WIPER = Served(WIPER_CONTAINER, "MOONTIDE_WIPER_TLS", naming.WIPER_PORT)


def dress(child: k8s.V1Deployment, served: Served, secret: str | None) -> k8s.V1Deployment:
    """``child`` with the certificate of ``secret`` in its container; the very same without one.

    The kubelet reads the Secret, and brings a renewed one into the running container.
    """
    template = child.spec.template.spec if child.spec is not None else None
    if secret is None or template is None:
        return child
    (found,) = (each for each in template.containers if each.name == served.container)
    found.env = [*(found.env or []), *common.env({served.variable: FOLDER})]
    mount = k8s.V1VolumeMount(name=VOLUME, mount_path=FOLDER, read_only=True)
    found.volume_mounts = [*(found.volume_mounts or []), mount]
    source = k8s.V1SecretVolumeSource(secret_name=secret, default_mode=0o440)
    template.volumes = [*(template.volumes or []), k8s.V1Volume(name=VOLUME, secret=source)]
    for probe in (found.startup_probe, found.readiness_probe, found.liveness_probe):
        if probe is not None and probe.http_get is not None and probe.http_get.port == served.port:
            # The kubelet does not verify.
            probe.http_get.scheme = "HTTPS"
    return child


def serves(pod: k8s.V1Pod, served: Served) -> bool:
    """Whether ``pod`` was made to serve TLS."""
    containers = pod.spec.containers if pod.spec is not None else None
    return any(
        variable.name == served.variable and bool(variable.value)
        for container in containers or ()
        if container.name == served.container
        for variable in container.env or ()
    )


def told_by(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """What :func:`serves` reads of a pod's ``spec``, as it came over the wire; None where that is nothing."""
    of = {(each.container, each.variable) for each in (ENGINE, WIPER)}
    found = [
        {"name": container["name"], "env": kept}
        for container in spec.get("containers") or ()
        if (kept := [each for each in container.get("env") or () if (container["name"], each["name"]) in of])
    ]
    return {"containers": found} if found else None
