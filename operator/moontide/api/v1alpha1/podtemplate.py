"""``spec.podTemplate`` of a fleet and of a pool: what users change in pods that Moontide makes.

The pod's own schema is Kubernetes' affair: fields are kept as they are written, and the API server judges the merged
template. Declared here is only what rules have to see.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from moontide.api.v1alpha1.common import Api, rule, validations

MAX_CONTAINERS = 16
OWN_PREFIX = "moontide.dev/"
OWN_LABELS = ("app.kubernetes.io/managed-by", "app.kubernetes.io/component", "pod-template-hash")
OWN_FOLDER = "/etc/moontide"

POD_FIELDS = {
    "enableServiceLinks": "remove it: a Service of an unlucky name would break an engine",
    "restartPolicy": "remove it: the pods are restarted always",
    "terminationGracePeriodSeconds": "write spec.rollout.drainSeconds, from which it follows",
}
"""Fields of a pod spec that Moontide sets, and what to write instead."""
ENGINE_FIELDS = {
    "args": "write spec.engine.args",
    "command": "write spec.engine.args",
    "envFrom": "write env with valueFrom, one variable each",
    "image": "write spec.engine.image",
    "lifecycle": "write spec.rollout.drainSeconds",
    "livenessProbe": "write spec.startupSeconds",
    "readinessProbe": "remove it: only the gate knows when an engine may serve",
    "resources": "write spec.resources",
    "startupProbe": "write spec.startupSeconds",
}
"""Fields of the engine's container that Moontide sets, and what to write instead."""
MASTER_FIELDS = {
    "args": "remove it",
    "command": "write the fields of spec.master",
    "image": "write spec.master.image",
    "lifecycle": "remove it",
    "livenessProbe": "remove it",
    "readinessProbe": "remove it",
    "resources": "write spec.master.resources",
    "startupProbe": "remove it",
}
WIPER_FIELDS = {
    **dict.fromkeys(MASTER_FIELDS, "remove it"),
    "envFrom": "remove it",
    "image": "write spec.master.image",
    "resources": "remove it",
}
ENGINE_CONTAINERS = {"engine": ENGINE_FIELDS}
MASTER_CONTAINERS = {"master": MASTER_FIELDS, "wiper": WIPER_FIELDS}

_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_STRINGS = {"type": "array", "items": {"type": "string", "maxLength": 32768}, "maxItems": 256}
_MAP = {"type": "object", **_OPEN}
_FIELD_TYPES: dict[str, dict[str, Any]] = {
    "args": _STRINGS,
    "command": _STRINGS,
    "envFrom": {"type": "array", "items": _MAP, "maxItems": 128},
    "image": {"type": "string", "maxLength": 512},
    "lifecycle": _MAP,
    "livenessProbe": _MAP,
    "readinessProbe": _MAP,
    "resources": _MAP,
    "startupProbe": _MAP,
}


def _named(field: str, items: int, most: int = 253) -> dict[str, Any]:
    """A list of open maps that have a name-like ``field``."""
    named = {field: {"type": "string", "maxLength": most}}
    item = {"type": "object", "required": [field], "properties": named, **_OPEN}
    return {"type": "array", "maxItems": items, "items": item}


def _containers() -> dict[str, Any]:
    made = _named("name", MAX_CONTAINERS, 63)
    made["items"]["properties"] |= {
        **_FIELD_TYPES,
        "env": _named("name", 128),
        "volumeMounts": _named("mountPath", 64, 1024),
    }
    return made


def _pod_schema(schema: dict[str, Any]) -> None:
    description = schema.get("description")
    schema.clear()
    schema |= {
        "type": "object",
        "maxProperties": 64,
        **_OPEN,
        "properties": {
            "containers": _containers(),
            "enableServiceLinks": {"type": "boolean"},
            "restartPolicy": {"type": "string", "maxLength": 32},
            "terminationGracePeriodSeconds": {"type": "integer", "format": "int64"},
            "volumes": _named("name", 64, 63),
        },
    }
    if description:
        schema["description"] = description


_Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)]
_Annotations = Annotated[dict[str, Annotated[str, Field(max_length=16384)]], Field(max_length=64)]


class PodMetadata(Api):
    """Labels and annotations of the pods, beside Moontide's own."""

    labels: Annotated[_Labels, Field(default_factory=dict)]
    annotations: Annotated[_Annotations, Field(default_factory=dict)]


class PodTemplate(Api):
    """Merged into the pods' template as ``kubectl patch --type=strategic`` would: lists of containers, volumes, mounts
    and variables by name, other lists as a whole; ``null`` removes a field."""

    metadata: PodMetadata | None = None
    spec: Annotated[dict[str, Any] | None, Field(json_schema_extra=_pod_schema)] = None
    """A pod spec, or the parts of it that should differ. The API server judges the merged template; what it refuses is
    told in condition ``Progressing`` (a pool: ``Ready``), and nothing that runs is changed."""

    def to_override(self) -> dict[str, Any]:
        """What to merge into a template: without the parts that are not there."""
        made: dict[str, Any] = {}
        if self.metadata is not None:
            kept = {"labels": self.metadata.labels, "annotations": self.metadata.annotations}
            made["metadata"] = {key: value for key, value in kept.items() if value}
        if self.spec is not None:
            made["spec"] = self.spec
        return made


def _listed(values: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def template_rules(
    containers: dict[str, dict[str, str]], env: tuple[str, ...], volumes: tuple[str, ...], where: str
) -> dict[str, Any]:
    """The rules at admission. ``containers``: owned fields by container; ``env``: owned variables, beside MOONTIDE_*;
    ``volumes``: owned volumes; ``where``: what else there is to write."""
    has = "has(self.spec) && has(self.spec.containers)"
    rules = [
        *(
            rule(
                f"!has(self.metadata) || !has(self.metadata.{part}) || !self.metadata.{part}"
                f".exists(k, k.startsWith('{OWN_PREFIX}') || k in {_listed(OWN_LABELS)})",
                f"podTemplate.metadata.{part} holds a key that Moontide sets itself ({OWN_PREFIX}*, "
                + ", ".join(OWN_LABELS)
                + "); remove it",
            )
            for part in ("labels", "annotations")
        ),
        rule(
            "!has(self.spec) || !(" + " || ".join(f"has(self.spec.{field})" for field in POD_FIELDS) + ")",
            "podTemplate.spec holds a field that Moontide sets itself: "
            + "; ".join(f"{field}: {instead}" for field, instead in POD_FIELDS.items()),
        ),
        rule(
            f"!has(self.spec) || !has(self.spec.volumes) || !self.spec.volumes.exists(v, v.name in {_listed(volumes)})",
            f"podTemplate.spec.volumes holds a volume that Moontide makes itself ({', '.join(volumes)}); remove it, or "
            f"give yours another name; {where}",
        ),
        rule(
            f"!({has}) || !self.spec.containers.exists(c, c.name in {_listed(containers)} && has(c.env) && "
            f"c.env.exists(e, e.name in {_listed(env)} || e.name.startsWith('MOONTIDE_')))",
            "podTemplate sets a variable that Moontide sets itself ("
            + ", ".join((*env, "MOONTIDE_*"))
            + f") in container {' or '.join(containers)}; remove it",
        ),
        rule(
            f"!({has}) || !self.spec.containers.exists(c, c.name in {_listed(containers)} && has(c.volumeMounts) && "
            f"c.volumeMounts.exists(m, m.mountPath.startsWith('{OWN_FOLDER}')))",
            f"podTemplate mounts something into {OWN_FOLDER}, which is Moontide's; write another mountPath",
        ),
    ]
    for name, fields in containers.items():
        found = " || ".join(f"has(c.{field})" for field in fields)
        rules.append(
            rule(
                f"!({has}) || !self.spec.containers.exists(c, c.name == '{name}' && ({found}))",
                f"podTemplate holds a field of container {name} that Moontide sets itself: "
                + "; ".join(f"{field}: {instead}" for field, instead in fields.items()),
            )
        )
    return validations(*rules)
