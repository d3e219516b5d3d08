"""Objects that nobody would write, made from the CRDs: bases that are fine, with parts of them replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]
NAMES = (
    "kv",
    "chat",
    "policy",
    "nowhere",
    "a",
    "x" * 40,
    "x" * 253,
    "vllm",
    "default",
    "Chat",
    "chat.b",
    "-",
    "ünï",
    "a/b",
)
HOSTILE = (
    "",
    " ",
    "\x00",
    "$(reboot)",
    "`id`",
    "; rm -rf / #",
    "'\"\\",
    "../../../etc/passwd",
    "pvc://claim/../../etc",
    "pvc://../x",
    "hf://../..",
    "hf://o/n\n--port=1",
    "--model=/etc",
    "--port",
    "--host\t0.0.0.0",
    "{version}",
    "%s%n{}{0}",
    "\ud7ff\ufffd\U0001f600",
    "NaN",
    "1e400",
    "-1Gi",
    "0.0000001m",
    "9" * 19 + "Ti",
    "a" * 4096,
    "null",
    "true",
    "${HOME}",
    "$(MOONTIDE_ADMIN_PORT)",
    "http://169.254.169.254:80",
)
NUMBERS = (-(2**63), -1, 0, 1, 2, 3600, 2**31, 2**53 + 1, 2**63 - 1, 0.5, 1e300)
KNOWN: dict[str | None, tuple[Any, ...]] = {
    "source": ("pvc://weights/a", "hf://org/name", "pvc://c/a/b/c"),
    "urls": ([], ["http://10.0.0.7:8001"]),
    "replicas": (0, 1, 2),
    "perReplica": ("16Mi", "1Gi", "1.5Gi"),
    "localBuffer": ("16Mi", "1Gi"),
    "segmentSize": ("16Mi", "1Gi", "1.5Gi"),
    "sharedMemory": ("160Mi", "2Gi"),
    "size": ("1Gi", "100Gi"),
    "allowedNamespaces": ([], ["a", "b"], ["*"]),
    "replicaTimeoutSeconds": (1, 5, 20),
    "deadlineSeconds": (60, 120, 3600),
}
"""Values of properties that CEL has rules for."""
MOST_REPLICAS = 2
"""More pods than this would test the controllers of Kubernetes."""


@dataclass(frozen=True)
class Place:
    """A node of a schema, and the way to it: names of properties, and None for an item of a list."""

    way: tuple[str | None, ...]
    schema: Body = field(hash=False)


def places(schema: Body, way: tuple[str | None, ...] = ()) -> Iterator[Place]:
    """Every node below a schema."""
    for name, below in schema.get("properties", {}).items():
        yield Place((*way, name), below)
        yield from places(below, (*way, name))
    if isinstance(schema.get("items"), dict):
        yield Place((*way, None), schema["items"])
        yield from places(schema["items"], (*way, None))


def fitting(schema: Body, name: str | None = None) -> st.SearchStrategy[Any]:
    """Values that the schema of a property takes; where CEL asks for more, mostly those that it takes."""
    if name in KNOWN:
        return st.sampled_from(KNOWN[name])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return st.one_of(st.integers(0, 99), st.sampled_from(["7", "500m", "4Gi", "step-1", "1.5"]))
    kind = schema.get("type")
    if kind == "boolean":
        return st.booleans()
    if kind in ("integer", "number"):
        return st.integers(schema.get("minimum", 0), schema.get("maximum", 10**6))
    if kind == "string":
        most = schema.get("maxLength", 64)
        if "pattern" in schema:
            made = st.from_regex(f"(?a:{schema['pattern']})", fullmatch=True)
            return made.filter(lambda text: len(text) <= most)
        usual = st.sampled_from(["kv", "chat", "policy", "a-b", "pvc://weights/a", "hf://org/name", "x=y"])
        return st.one_of(usual, st.text(min_size=schema.get("minLength", 0), max_size=min(most, 64)))
    if kind == "array":
        return st.lists(fitting(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
    if kind == "object":
        required = set(schema.get("required", ()))
        below = {name: fitting(each, name) for name, each in schema.get("properties", {}).items()}
        if not below and isinstance(schema.get("additionalProperties"), dict):
            keys = st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "example.com/x", "no such thing", ""])
            return st.dictionaries(keys, fitting(schema["additionalProperties"]), max_size=3)
        optional = {name: each for name, each in below.items() if name not in required}
        return st.fixed_dictionaries({name: below[name] for name in below if name in required}, optional=optional)
    return st.sampled_from([{}, [], "x", 1])


def wild() -> st.SearchStrategy[Any]:
    """Values that hardly any schema takes."""
    scalars = st.one_of(
        st.sampled_from(HOSTILE), st.sampled_from(NUMBERS), st.none(), st.booleans(), st.text(max_size=40)
    )
    return st.one_of(
        scalars, st.lists(scalars, max_size=4), st.dictionaries(st.sampled_from(HOSTILE), scalars, max_size=3)
    )


def put(node: Any, way: tuple[str | None, ...], value: Any) -> Any:
    """``node`` with ``value`` at ``way``, and with what is missing on the way; what has another shape is replaced."""
    if not way:
        return value
    step, rest = way[0], way[1:]
    if step is None:
        items = list(node) if isinstance(node, list) else []
        last = items.pop() if items else None
        return [*items, put(last, rest, value)]
    fields = dict(node) if isinstance(node, dict) else {}
    return {**fields, step: put(fields.get(step), rest, value)}


def bounded(node: Any) -> Any:
    """``node`` with fewer replicas, wherever it asks for some."""
    if isinstance(node, list):
        return [bounded(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {name: bounded(each) for name, each in node.items()}
    if isinstance(found.get("replicas"), int):
        found["replicas"] = min(found["replicas"], MOST_REPLICAS)
    return found


def lacking(node: Any, schema: Body, way: tuple[str | None, ...] = ()) -> Iterator[Place]:
    """What the schema asks for below ``node`` and is not there."""
    if isinstance(node, list) and isinstance(schema.get("items"), dict):
        for each in node[-1:]:
            yield from lacking(each, schema["items"], (*way, None))
    if isinstance(node, dict):
        for name, below in schema.get("properties", {}).items():
            if name in node:
                yield from lacking(node[name], below, (*way, name))
            elif name in schema.get("required", ()):
                yield Place((*way, name), below)


OF_PODS = (
    "model",
    "engine",
    "replicas",
    "resources",
    "parallelism",
    "sharedMemory",
    "rollout",
    "startupSeconds",
    "service",
    "spread",
    "podTemplate",
)
"""What a fleet that is adopted has none of."""


REFUSED = ("restartPolicy", "enableServiceLinks", "terminationGracePeriodSeconds", "etcd", "devices")
"""Values of these are refused by themselves, whatever they are."""


def fits_beside(base: Body, place: Place) -> bool:
    """Whether a value at ``place`` can be right in an object like ``base``, which runs pods or adopts engines."""
    if set(REFUSED) & set(place.way):
        return False
    if base["kind"] != "InferenceDeployment":
        return True
    if "endpoints" in base["spec"]:
        return place.way[0] not in OF_PODS and place.way[-1] != "onPoolFailure"
    return place.way[0] != "endpoints"


@dataclass(frozen=True)
class Plan:
    """What to draw: an object like ``base`` with other values at ``ways``, each with whether it is to fit."""

    base: Body
    ways: tuple[tuple[Place, bool], ...]
    name: str | None

    @classmethod
    def draw(cls, random: Random, schemas: dict[str, Body], bases: tuple[Body, ...]) -> Plan:
        """One to three values, mostly one, and mostly such that fit."""
        base = random.choice(bases)
        there = list(places(schemas[base["kind"]]["properties"]["spec"]))
        fit = [place for place in there if fits_beside(base, place)]
        ways = []
        for _ in range(random.choice((1, 1, 1, 1, 2, 3))):
            fits = random.random() < 0.9
            ways.append((random.choice(fit if fits else there), fits))
        return cls(base, tuple(ways), random.choice(NAMES) if random.random() < 0.1 else None)


@st.composite
def bodies(draw: st.DrawFn, plan: Plan, schemas: dict[str, Body]) -> Body:
    """An object as planned."""
    body, schema = copy.deepcopy(plan.base), schemas[plan.base["kind"]]["properties"]["spec"]
    for place, fits in plan.ways:
        value = draw(fitting(place.schema, place.way[-1]) if fits else wild())
        body["spec"] = put(body["spec"], place.way, value)
        for missing in list(lacking(body["spec"], schema)) if fits else ():
            body["spec"] = put(body["spec"], missing.way, draw(fitting(missing.schema, missing.way[-1])))
    body["spec"] = bounded(body["spec"])
    if plan.name is not None:
        body["metadata"]["name"] = plan.name
    return body
