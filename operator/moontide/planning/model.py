"""What the planner sees, what it asks for, and what came of it. Plain data, no I/O."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from moontide.api.v1alpha1 import PolicyVersionStatus


class StoreStatus(BaseModel):
    """The engine's view of the external store."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    configured: bool = False
    attached: bool = False
    reason: str = ""


class FenceStatus(BaseModel):
    """Whether the engine's block hashes can carry an epoch."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    supported: bool = False


class EngineStatus(BaseModel):
    """What an engine says of itself: ``GET /moontide/v1/status`` (docs/engine-admin-api.md).

    The fields that decide something have no default: an answer without them is not a status.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    boot_id: str
    state: Literal["closed", "open", "paused"]
    epoch: int
    version: str | None
    weights_version: str | None
    clean: bool
    """No KV of any request can be in the local caches."""
    drained: bool
    """Nothing runs, and every rank's queue of puts to the store is empty."""
    running: int
    waiting: int = 0
    held: int = 0
    last_pause_seconds: float | None = None
    reason: str = ""
    engine_version: str = ""
    patches: dict[str, str] = {}
    ranks: int = 1
    store: StoreStatus = StoreStatus()
    fence: FenceStatus = FenceStatus()


@dataclass(frozen=True)
class Replica:
    """One engine: a pod, and what its engine answered."""

    name: str
    pod_uid: str
    fleet: str
    """UID of the InferenceDeployment."""
    address: str | None
    """``host:port`` of the admin plane; None while the pod has no address."""
    container_id: str | None
    """The engine container that the kubelet says runs; None when none runs."""
    may_have_served: bool
    """The running container is the one that was marked before an admission: its engine may hold and write KV."""
    terminating: bool = False
    status: EngineStatus | None = None
    error: str = ""
    """Why ``status`` is None, for people."""

    @property
    def newcomer(self) -> bool:
        """It never served, so it holds no KV and writes none: it need not be waited for."""
        if self.status is None:
            return not self.may_have_served
        return self.status.state == "closed" and self.status.clean and self.status.drained


@dataclass(frozen=True)
class Fleet:
    """An InferenceDeployment that follows the policy."""

    name: str
    uid: str
    pool: str | None = None
    """Name of the pool it shares KV through; None when it keeps local caches only."""
    pool_uid: str | None = None
    """None while the pool is missing."""
    replicas: tuple[Replica, ...] = ()


@dataclass(frozen=True)
class Observed:
    """One look at the world."""

    fleets: tuple[Fleet, ...]
    now: dt.datetime
    policy_uid: str = ""


class Step(StrEnum):
    """The steps of a barrier, in order; the values are the engine's routes."""

    QUIESCE = "quiesce"
    DRAIN = "drain"
    RESET = "reset"
    WIPE = "wipe"
    ADMIT = "admit"
    RESUME = "resume"
    CLOSE = "close"
    REPLACE = "replace"


@dataclass(frozen=True)
class Command:
    """One call to one replica's engine."""

    step: Step
    replica: Replica
    epoch: int
    body: dict[str, str | int | float | bool | None] = field(default_factory=dict, hash=False)
    """What the step needs beyond term, epoch and boot id."""
    timeout_seconds: float = 10.0


@dataclass(frozen=True)
class Wipe:
    """Remove a fleet's keys from the store, then verify with a second removal."""

    fleet: Fleet
    timeout_seconds: float = 10.0


@dataclass(frozen=True)
class Replace:
    """Delete the pod of a replica that failed for too long."""

    replica: Replica
    message: str


Action = Command | Wipe | Replace


@dataclass(frozen=True)
class Result:
    """What came of one action. Success is only what the body of the answer says."""

    action: Action
    success: bool
    reason: str = ""
    message: str = ""
    removed: int = 0
    """Wipe: keys that the first removal took."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Note:
    """An Event to leave on the PolicyVersion."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Plan:
    """Write ``status``, then carry out ``actions`` together, then look again."""

    status: PolicyVersionStatus
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
    requeue_after: float = 30.0
    """Seconds until the world should be looked at again when nothing wakes the loop."""
