"""The three kinds as the API server knows them; the CRDs and every request read this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from moontide.api.v1alpha1 import Api, InferenceDeployment, KVCachePool, PolicyVersion

T = TypeVar("T", bound=Api)


@dataclass(frozen=True)
class Column:
    """A printer column of ``kubectl get``."""

    name: str
    path: str
    type: str = "string"
    description: str = ""


@dataclass(frozen=True)
class Kind(Generic[T]):
    """One custom resource definition."""

    kind: str
    plural: str
    singular: str
    short: str
    model: type[T]
    columns: tuple[Column, ...]
    scale: bool = False
    selectable: tuple[str, ...] = ()
    """Paths that field selectors may name."""


_AGE = Column("Age", ".metadata.creationTimestamp", "date")

POOL = Kind(
    kind="KVCachePool",
    plural="kvcachepools",
    singular="kvcachepool",
    short="kvp",
    model=KVCachePool,
    columns=(
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status', description="Whether the master serves"),
        Column("Leader", ".status.leader", description="Pod of the master that leads, of three"),
        Column("Clients", ".status.clients", "integer", "Clients that lend memory"),
        Column("Keys", ".status.keys", "integer", "Keys in the store"),
        Column("Used", ".status.used", description="Fill of the lent memory"),
        _AGE,
    ),
)

DEPLOYMENT = Kind(
    kind="InferenceDeployment",
    plural="inferencedeployments",
    singular="inferencedeployment",
    short="ifd",
    model=InferenceDeployment,
    columns=(
        Column("Model", ".spec.model.servedName", description="The model name that clients send"),
        Column("Ready", ".status.ready", description="Ready of wanted replicas"),
        Column("Current", ".status.current", description="Replicas open in the fleet's epoch, of wanted"),
        Column("Version", ".status.version", description="The policy version served"),
        Column("Pool", ".spec.kvCache.poolRef.name", description="The pool the replicas share KV through"),
        _AGE,
    ),
    scale=True,
    selectable=(".spec.policyRef.name",),
)

POLICY = Kind(
    kind="PolicyVersion",
    plural="policyversions",
    singular="policyversion",
    short="polv",
    model=PolicyVersion,
    columns=(
        Column("Version", ".spec.version", description="The version asked for"),
        Column("State", '.status.conditions[?(@.type=="Current")].reason', description="Where the fleet stands"),
        Column("Replicas", ".status.replicas.summary", description="Current of all replicas"),
        Column("Paused", ".status.lastUpdate.pauseSeconds", "number", "Longest pause of the last change, in seconds"),
        _AGE,
    ),
)

KINDS: tuple[Kind[KVCachePool] | Kind[InferenceDeployment] | Kind[PolicyVersion], ...] = (POOL, DEPLOYMENT, POLICY)
