"""What the three kinds share: the base model, conditions, references and quantities.

The pydantic models of this package are the one source of the CRDs (see ``moontide.crdgen``). A model's
``json_schema_extra`` may carry ``x-kubernetes-*`` keys; they pass into the structural schema unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "moontide.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

ConditionStatus = Literal["True", "False", "Unknown"]


class Api(BaseModel):
    """Base of every API object: camelCase on the wire, immutable in memory, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    def to_wire(self) -> dict[str, Any]:
        """The JSON form the API server takes: camelCase keys, absent instead of null."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def rule(expression: str, message: str, **more: Any) -> dict[str, Any]:
    """One CEL validation rule; ``message`` says what to write instead."""
    return {"rule": expression, "message": message, **more}


CLIMBS = "has a segment '..', which may lead out of the place that it names; write the path that you mean, without it"


def no_climbing(value: str, field: str) -> dict[str, Any]:
    """A rule for the path or URL ``value`` (CEL): no segment of it is ``..``. ``field``: what the message calls it."""
    return rule(f"!{value}.matches('(^|/)[.][.](/|$)')", f"{field} {CLIMBS}")


def validations(*rules: dict[str, Any]) -> dict[str, Any]:
    """The schema key that carries CEL rules."""
    return {"x-kubernetes-validations": list(rules)}


def list_map(*keys: str) -> dict[str, Any]:
    """A list that server-side apply merges by ``keys``."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


class Condition(Api):
    """A condition in the sense of the Kubernetes API conventions."""

    type: Annotated[str, Field(max_length=316)]
    status: ConditionStatus
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """One CamelCase word a program can match on."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """A sentence for a person."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When ``status`` last changed; a new reason alone does not move it."""
    observed_generation: int | None = None


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=list_map("type"))]

Timestamp = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]


class AdminToken(Api):
    """Which token a fleet's admin ports, or a pool's wipers, take.

    Tokens are called by their rotation: the annotation's value and a time.
    """

    rotation: Annotated[str, Field(max_length=128)] = ""
    """Of the token in use; empty: the first one."""
    other: Annotated[str | None, Field(max_length=128)] = None
    """Of the token that is coming (``Introducing``) or going."""
    phase: Literal["Current", "Introducing", "Overlapping", "Retiring"] = "Current"
    since: Timestamp | None = None
    """When the phase began."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """What the rotation waits for."""


Quantity = Annotated[
    str, Field(max_length=20, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$", json_schema_extra={})
]
"""A Kubernetes quantity, always as a string ("256Mi")."""

_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity_bytes(quantity: str) -> int:
    """Bytes that ``quantity`` ("256Mi", "1.5Gi", "1000") names, rounded down.

    Raises ValueError for a unit that makes no sense for memory.
    """
    number = quantity.rstrip("kMGTim")
    unit = quantity[len(number) :]
    if unit not in _FACTORS:
        raise ValueError(f"{quantity!r} is not an amount of memory; write for example 512Mi or 4Gi")
    return int(float(number) * _FACTORS[unit])


Name = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        json_schema_extra=validations(
            rule(
                "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",
                "no object can have this name; write lower-case letters, digits, - and . alone, for example tiny-1",
            )
        ),
    ),
]
"""The name of an object. Only the schema refuses what is none: an object that is stored already is still read."""


class ObjectName(Api):
    """Names another object in the same namespace."""

    name: Name


NamespaceName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


def _amount(schema: dict[str, Any]) -> None:
    schema.clear()
    schema.update(
        {
            "x-kubernetes-int-or-string": True,
            "maxLength": 20,
            **validations(
                rule(
                    "type(self) == int ? self >= 0 : self.matches('^[0-9]+(\\\\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$')",
                    "an amount of a resource is a number with or without a unit; write for example 1, 500m or 4Gi",
                )
            ),
        }
    )


Amounts = dict[str, Annotated[int | str, Field(json_schema_extra=_amount)]]


class ResourceRequirements(Api):
    """Container resources, as in a pod spec."""

    limits: Annotated[Amounts, Field(default_factory=dict, max_length=32)]
    requests: Annotated[Amounts, Field(default_factory=dict, max_length=32)]


class EnvVar(Api):
    """A literal environment variable."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    value: Annotated[str, Field(max_length=32768)] = ""
