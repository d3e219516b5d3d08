"""Puts a user's ``podTemplate`` over a child's pods, and refuses what Moontide owns. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kubernetes.aio import client as k8s

from moontide.api.v1alpha1 import podtemplate as api
from moontide.api.v1alpha1.inferencedeployment import MANAGED_ENV
from moontide.api.v1alpha1.podtemplate import PodTemplate
from moontide.resources.merge import DIRECTIVE, merge

MAX_BYTES = 64 * 1024
"""Largest override, as JSON. A Deployment has to fit into etcd with three of its former templates."""

Templated = k8s.V1Deployment
"""Kinds of children that have pods."""


@dataclass(frozen=True)
class Overridden:
    """A child as the builder made it, and the body that is applied in its place: it may hold fields of pods that our
    client's models do not know."""

    child: Templated
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """As of the child."""
        return str(self.child.kind)


@dataclass(frozen=True)
class Owned:
    """What of a pod is Moontide's. Volumes and mounts of the built template are, but for ``free_volumes``."""

    containers: Mapping[str, Mapping[str, str]]
    """Fields by container, with what to write instead."""
    env: tuple[str, ...] = ()
    """Variables, beside those of ``MOONTIDE_``."""
    free_volumes: tuple[str, ...] = ()


ENGINE = Owned(api.ENGINE_CONTAINERS, (*MANAGED_ENV, "VLLM_SERVER_DEV_MODE"), ("tmp", "cache"))
MASTER = Owned(api.MASTER_CONTAINERS, ("MC_RPC_CONNECT_TIMEOUT_MS", "MC_RPC_TIMEOUT_MS"), ("tmp",))


def over(child: Templated, override: PodTemplate | None, owned: Owned) -> Templated | Overridden:
    """``child`` with ``override`` merged into the template of its pods; itself where there is none.

    Raises ValueError, with what to write instead, for an override of what is owned, or that is none.
    """
    wanted = override.to_override() if override is not None else {}
    if not any(wanted.values()):
        return child
    size = len(json.dumps(wanted))
    if size > MAX_BYTES:
        raise ValueError(f"podTemplate has {size} bytes; {MAX_BYTES} are the most: put files into a ConfigMap of yours")
    body = child.model_dump(mode="json", by_alias=True, exclude_none=True)
    template = body["spec"]["template"]
    merged = merge(template, wanted)
    refuse(template, wanted, owned)
    body["spec"]["template"] = merged
    return Overridden(child, body)


def refuse(template: Mapping[str, Any], override: Mapping[str, Any], owned: Owned) -> None:
    """Raise ValueError where ``override``, which merges into ``template``, touches what is owned."""
    for part, keys in (override.get("metadata") or {}).items():
        for key in keys:
            if key.startswith(api.OWN_PREFIX) or key in api.OWN_LABELS:
                raise ValueError(f"podTemplate.metadata.{part} holds {key}, which Moontide sets itself; remove it")
    pod = override.get("spec") or {}
    for field, instead in api.POD_FIELDS.items():
        if field in pod:
            raise ValueError(f"podTemplate.spec.{field} is Moontide's: {instead}")
    for field in ("containers", "volumes"):
        if field in pod and pod[field] is None:
            raise ValueError(f"podTemplate.spec.{field} is null; name the items that should differ")
    before = template["spec"]
    for volume in pod.get("volumes") or ():
        name = volume["name"]
        if name in {each["name"] for each in before.get("volumes") or ()} - set(owned.free_volumes):
            raise ValueError(f"volume {name} is Moontide's; give yours another name")
    made = {each["name"]: each for each in before["containers"]}
    for container in pod.get("containers") or ():
        if container["name"] in owned.containers:
            _refuse_container(made[container["name"]], container, owned)


def _refuse_container(before: Mapping[str, Any], container: Mapping[str, Any], owned: Owned) -> None:
    name = container["name"]
    if DIRECTIVE in container:
        raise ValueError(f"container {name} is Moontide's and cannot be deleted")
    for field, instead in owned.containers[name].items():
        if field in container:
            raise ValueError(f"podTemplate sets {field} of container {name}, which is Moontide's: {instead}")
    for field in ("env", "ports", "volumeMounts"):
        if field in container and container[field] is None:
            raise ValueError(f"podTemplate sets {field} of container {name} to null; name the items that should differ")
    for variable in container.get("env") or ():
        if variable["name"] in owned.env or variable["name"].startswith("MOONTIDE_"):
            raise ValueError(f"podTemplate sets {variable['name']} of container {name}, which is Moontide's; remove it")
    ports = {each["containerPort"] for each in before.get("ports") or ()}
    for port in container.get("ports") or ():
        if port["containerPort"] in ports:
            raise ValueError(f"port {port['containerPort']} of container {name} is Moontide's; write spec.service.port")
    mounts = {each["mountPath"] for each in before.get("volumeMounts") or () if each["name"] not in owned.free_volumes}
    for mount in container.get("volumeMounts") or ():
        path = mount["mountPath"].rstrip("/")
        if path in mounts or f"{path}/".startswith(f"{api.OWN_FOLDER}/"):
            raise ValueError(f"podTemplate mounts over {mount['mountPath']} of container {name}; write another path")
