"""What a pool's transport asks of the pods that have a client: a capability, huge pages, environment. Pure."""

from __future__ import annotations

from kubernetes.aio import client as k8s

from moontide.api.v1alpha1 import quantity_bytes
from moontide.api.v1alpha1.kvcachepool import Transport

HUGE_FOLDER = "/dev/hugepages"
_PAGE_WORDS = {"2Mi": "2MB", "1Gi": "1GB"}


def device_names(transport: Transport) -> str:
    """The devices in Mooncake's spelling; empty lets it choose."""
    return ",".join(transport.devices)


def dress(
    child: k8s.V1Deployment, container: str, transport: Transport, regions: tuple[int, ...], count: int = 1
) -> k8s.V1Deployment:
    """``child`` with what the container of that name needs for ``transport``; the very same for TCP without huge pages.

    ``regions``: the sizes in bytes of what one client allocates; ``count``: clients in a pod.
    """
    template = child.spec.template.spec if child.spec is not None else None
    if template is None:
        return child
    (found,) = (each for each in template.containers if each.name == container)
    if transport.protocol == "rdma":
        capabilities = found.security_context.capabilities if found.security_context is not None else None
        if capabilities is not None:
            # Memory that is registered with a network card is locked.
            capabilities.add = [*(capabilities.add or []), "IPC_LOCK"]
    if transport.hugepages is not None:
        _huge(template, found, transport.hugepages, regions, count)
    return child


def _huge(template: k8s.V1PodSpec, container: k8s.V1Container, page: str, regions: tuple[int, ...], count: int) -> None:
    size = quantity_bytes(page)
    total = count * sum(-(-region // size) * size for region in regions)
    resource, amount = f"hugepages-{page}", str(total)
    given = container.resources or k8s.V1ResourceRequirements()
    limits, requests = given.limits or {}, given.requests or {}
    # The API server takes huge pages only beside one of these.
    beside = {} if {"cpu", "memory"} & {*limits, *requests} else {"memory": "64Mi"}
    container.resources = k8s.V1ResourceRequirements(
        limits={**limits, resource: amount}, requests={**requests, **beside, resource: amount}
    )
    container.env = [
        *(container.env or []),
        k8s.V1EnvVar(name="MC_STORE_USE_HUGEPAGE", value="1"),
        k8s.V1EnvVar(name="MC_STORE_HUGEPAGE_SIZE", value=_PAGE_WORDS[page]),
    ]
    container.volume_mounts = [
        *(container.volume_mounts or []),
        k8s.V1VolumeMount(name="hugepages", mount_path=HUGE_FOLDER),
    ]
    source = k8s.V1EmptyDirVolumeSource(medium=f"HugePages-{page}")
    template.volumes = [*(template.volumes or []), k8s.V1Volume(name="hugepages", empty_dir=source)]
