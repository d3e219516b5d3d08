"""What the builders share. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

from kubernetes.aio import client as k8s

from moontide.api.v1alpha1.common import ResourceRequirements

USER_ID = 10001
TEMPLATE_HASH = "moontide.dev/config-hash"
"""On a pod template: the hash of mounted configuration that a running process does not read again."""


def metadata(name: str, namespace: str, owner: k8s.V1OwnerReference, labels: Mapping[str, str]) -> k8s.V1ObjectMeta:
    """Metadata of a child."""
    return k8s.V1ObjectMeta(name=name, namespace=namespace, labels=dict(labels), owner_references=[owner])


def token_secret(
    name: str, namespace: str, owner: k8s.V1OwnerReference, labels: Mapping[str, str], token: str
) -> k8s.V1Secret:
    """A Secret whose key ``token`` holds bearer tokens, one a line, the one to use first."""
    return k8s.V1Secret(
        api_version="v1",
        kind="Secret",
        metadata=metadata(name, namespace, owner, labels),
        type="Opaque",
        data={"token": base64.b64encode(token.encode()).decode()},
    )


def pod_security() -> k8s.V1PodSecurityContext:
    """The pod's part of the "restricted" Pod Security Standard."""
    return k8s.V1PodSecurityContext(
        run_as_non_root=True,
        run_as_user=USER_ID,
        run_as_group=USER_ID,
        fs_group=USER_ID,
        fs_group_change_policy="OnRootMismatch",
        seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
    )


def container_security() -> k8s.V1SecurityContext:
    """The container's part of the "restricted" standard, and a root file system that cannot be written."""
    return k8s.V1SecurityContext(
        allow_privilege_escalation=False,
        read_only_root_filesystem=True,
        capabilities=k8s.V1Capabilities(drop=["ALL"]),
    )


def resources(wanted: ResourceRequirements) -> k8s.V1ResourceRequirements:
    """Container resources; what is empty is left out."""

    def amounts(given: Mapping[str, int | str]) -> dict[str, str] | None:
        return {name: str(amount) for name, amount in given.items()} or None

    return k8s.V1ResourceRequirements(limits=amounts(wanted.limits), requests=amounts(wanted.requests))


def http_probe(
    port: int, path: str, *, period: int, failures: int = 3, timeout: int = 1, initial_delay: int | None = None
) -> k8s.V1Probe:
    """An HTTP probe; all times in seconds."""
    return k8s.V1Probe(
        http_get=k8s.V1HTTPGetAction(path=path, port=port),
        period_seconds=period,
        failure_threshold=failures,
        timeout_seconds=timeout,
        initial_delay_seconds=initial_delay,
    )


def env(values: Mapping[str, str]) -> list[k8s.V1EnvVar]:
    """Literal environment variables, in the order of ``values``."""
    return [k8s.V1EnvVar(name=name, value=value) for name, value in values.items()]


def field_env(name: str, path: str) -> k8s.V1EnvVar:
    """An environment variable from the downward API."""
    return k8s.V1EnvVar(name=name, value_from=k8s.V1EnvVarSource(field_ref=k8s.V1ObjectFieldSelector(field_path=path)))


def empty_dir(name: str, *, memory: str | None = None, limit: str | None = None) -> k8s.V1Volume:
    """An emptyDir; in memory, and of that size, when ``memory`` is given; on disk and at most ``limit`` otherwise."""
    if memory:
        source = k8s.V1EmptyDirVolumeSource(medium="Memory", size_limit=memory)
    else:
        source = k8s.V1EmptyDirVolumeSource(size_limit=limit)
    return k8s.V1Volume(name=name, empty_dir=source)


def digest(text: str) -> str:
    """A short hash of ``text`` for :data:`TEMPLATE_HASH`."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
