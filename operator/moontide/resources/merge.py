"""Strategic merge of pod templates, as Kubernetes does it for its own objects. Pure, and knows no Moontide.

Maps merge key by key; ``null`` removes a key. Lists that have a merge key merge item by item: an item that the template
has is merged where it stands, another one is appended, and one with ``$patch: delete`` is removed. Every other list is
replaced. A volume keeps of its former self only the keys that the override names: a claim takes the place of an
``emptyDir``, it does not join it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

Json = Any
Path = tuple[str, ...]

DIRECTIVE = "$patch"

_CONTAINER_KEYS: dict[str, tuple[str, ...]] = {
    "env": ("name",),
    "ports": ("containerPort",),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
}
_POD_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumes": ("name",),
}
KEYS: dict[Path, tuple[str, ...]] = {
    **{("spec", field): keys for field, keys in _POD_KEYS.items()},
    **{
        ("spec", containers, field): keys
        for containers in ("containers", "initContainers")
        for field, keys in _CONTAINER_KEYS.items()
    },
}
"""Lists of a pod template that merge, by path without indices, and what tells their items apart."""
_REPLACED_ITEMS = {("spec", "volumes"), ("spec", "resourceClaims")}
"""Items of these keep only the keys that the override names."""


def merge(template: Mapping[str, Json], override: Mapping[str, Json]) -> dict[str, Json]:
    """``template`` (a pod template) with ``override`` merged into it; both are left as they are.

    Raises ValueError, with the path in its words, for an override that is no override of a pod template: another type
    than the template has there, a list item without its merge key or twice, or an unknown ``$`` directive.
    """
    return _maps(template, override, ())


def _maps(base: Mapping[str, Json], over: Mapping[str, Json], path: Path) -> dict[str, Json]:
    made = dict(copy.deepcopy(base))
    for field, value in over.items():
        here = (*path, field)
        if field.startswith("$"):
            raise ValueError(f"{_dotted(here)}: write a list item with {DIRECTIVE}: delete, or null to remove a field")
        if value is None:
            made.pop(field, None)
            continue
        before = made.get(field)
        if here in KEYS:
            made[field] = _lists(before if before is not None else [], value, here)
        elif isinstance(before, Mapping):
            if not isinstance(value, Mapping):
                raise ValueError(f"{_dotted(here)} has to be a map")
            made[field] = _maps(before, value, here)
        else:
            made[field] = _clean(value, here)
    return made


def _lists(base: Sequence[Json], over: Json, path: Path) -> list[Json]:
    keys = KEYS[path]
    made = {_identity(item, keys, path): item for item in base}
    seen = set()
    for item in _items(over, path):
        identity = _identity(item, keys, path)
        if identity in seen:
            raise ValueError(f"{_dotted(path)} names {', '.join(map(str, identity))} twice")
        seen.add(identity)
        if DIRECTIVE in item:
            if item[DIRECTIVE] != "delete":
                raise ValueError(f"{_dotted(path)}: {DIRECTIVE} is {item[DIRECTIVE]!r}; write delete")
            made.pop(identity, None)
            continue
        before = made.get(identity, {})
        if path in _REPLACED_ITEMS:
            before = {field: value for field, value in before.items() if field in item}
        made[identity] = _maps(before, item, path)
    return list(made.values())


def _items(found: Json, path: Path) -> list[Mapping[str, Json]]:
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise ValueError(f"{_dotted(path)} has to be a list of maps")
    return found


def _identity(item: Mapping[str, Json], keys: tuple[str, ...], path: Path) -> tuple[Json, ...]:
    missing = [key for key in keys if not isinstance(item.get(key), str | int)]
    if missing:
        raise ValueError(f"an item of {_dotted(path)} has no {' and no '.join(missing)}")
    return tuple(item[key] for key in keys)


def _clean(value: Json, path: Path) -> Json:
    """``value`` where the template has nothing: as it is, but for what only has a meaning for a merge."""
    if isinstance(value, Mapping):
        return _maps({}, value, path)
    return copy.deepcopy(value)


def _dotted(path: Path) -> str:
    return ".".join(path)
