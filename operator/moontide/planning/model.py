"""What the planner sees, what it asks for, and what came of it. Plain data, no I/O."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from moontide.api.v1alpha1 import PolicyVersionStatus
from moontide.planning.stall import Pod


class StoreStatus(BaseModel):
    """The engine's view of the external store."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    configured: bool = False
    attached: bool = False
    reason: str = ""

    @property
    def fell_back(self) -> bool:
        """The engine could not reach its pool when it started, and runs without it until it starts again."""
        return self.configured and not self.attached and self.reason.startswith("Fallback:")


class FenceStatus(BaseModel):
    """Whether the engine's block hashes can carry an epoch."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    supported: bool = False
    live: bool = False
    """And whether that epoch can change while requests run."""
    reason: str = ""
    """Why not."""


class LoadStatus(BaseModel):
    """A load of weights that is under way, or has failed."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    source: str
    version: str
    running: bool
    seconds: float = 0.0
    """Since it began; since it failed."""
    attempts: int = 1
    error: str = ""
    """Of the last attempt that is over."""


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
    loading: LoadStatus | None = None
    """``weights_version`` is None as long as this is there."""
    drained: bool
    """Nothing runs, and every rank's queue of puts to the store is empty."""
    running: int | None
    """Requests in vLLM's schedulers; None when the engine behind the gate did not answer."""
    waiting: int | None = 0
    in_flight: int = 0
    """Requests that passed the gate and have not ended."""
    responsive: bool = True
    """Whether the engine behind the gate answered. If not, the gate still obeys ``close``."""
    fault: str = ""
    command_epoch: int = 0
    """The highest epoch of a command that it accepted; it refuses lower ones."""
    key_namespace: str = ""
    """What its keys in a store begin with."""
    salt: str = ""
    """What its block hashes begin with; empty before an admission that named one."""
    held: int = 0
    last_pause_seconds: float | None = None
    reason: str = ""
    engine_version: str = ""
    patches: dict[str, str] = {}
    ranks: int = 1
    admit_resumes: bool = False
    """It takes an admission and the resume that follows it as one command."""
    store: StoreStatus = StoreStatus()
    fence: FenceStatus = FenceStatus()


@dataclass(frozen=True)
class Replica:
    """One engine: a pod, or a URL that others gave it, and what the engine answered."""

    name: str
    """As status calls it: with the namespace in front where that is not the policy's."""
    pod_uid: str
    """Of an adopted engine: its URL."""
    fleet: str
    """UID of the InferenceDeployment."""
    address: str | None
    """``host:port`` of the admin plane, or its URL where that is not http; None while the pod has no address."""
    container_id: str | None
    """The engine container that the kubelet says runs; None when none runs."""
    may_have_served: bool
    """The running container is the one that was marked before an admission: its engine may hold and write KV."""
    terminating: bool = False
    """On its way out: its pod is being deleted, or its URL is no longer listed."""
    status: EngineStatus | None = None
    error: str = ""
    """Why ``status`` is None, for people."""
    namespace: str = ""
    pod: str = ""
    """Name of the pod."""
    url: str = ""
    """Of an engine that others launched and the fleet adopted: it has no pod."""
    fleet_name: str = ""
    """Name of the InferenceDeployment, in ``namespace``."""
    pod_state: Pod | None = None
    """What scheduler and kubelet say of its pod."""
    container_started: dt.datetime | None = None
    """When the container that runs started."""
    tokens: tuple[str, ...] = ("",)
    """The rotations of the admin tokens that its engine may take, in the order in which they are tried."""
    server_name: str = ""
    """Whom its certificate must be for, where that is not the host of ``address``."""
    hindrance: str = ""
    """Why its container does not run, for people: ``REASON: message``; empty while nothing is wrong."""

    @property
    def silent(self) -> bool:
        """Nothing can be said of the engine now: no answer, or only one of the gate in front of it."""
        return self.status is None or not self.status.responsive

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
    """As status calls it: ``namespace/name`` where that is not the policy's namespace."""
    uid: str
    pool: str | None = None
    """Name of the pool it shares KV through; None when it keeps local caches only."""
    pool_uid: str | None = None
    """None while the pool is missing."""
    replicas: tuple[Replica, ...] = ()
    token_secret: str = ""
    """Name of the Secret with the bearer token of its admin ports."""
    namespace: str = ""
    """Of its pods, its pool and its Secret."""
    wiper_tls: bool = False
    """The pool's wiper may serve TLS: its pod says whether it does."""
    wiper_tokens: tuple[str, ...] = ("",)
    """The rotations of the tokens that the pool's wiper may take, in the order in which they are tried."""


@dataclass(frozen=True)
class Observed:
    """One look at the world."""

    fleets: tuple[Fleet, ...]
    now: dt.datetime
    policy_uid: str = ""


class Step(StrEnum):
    """The steps of a change; those of one replica have the names of the engine's routes."""

    QUIESCE = "quiesce"
    DRAIN = "drain"
    RESET = "reset"
    WIPE = "wipe"
    COLLECT = "collect"
    FENCE = "fence"
    LOAD = "load"
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
class Collect:
    """Remove a fleet's keys of all epochs but ``keep`` (salts), beside its load, then verify with a second look."""

    fleet: Fleet
    keep: tuple[str, ...]
    timeout_seconds: float = 10.0


@dataclass(frozen=True)
class Replace:
    """Delete the pod of a replica that failed for too long."""

    replica: Replica
    message: str


Action = Command | Wipe | Collect | Replace


@dataclass(frozen=True)
class Result:
    """What came of one action. Success is only what the body of the answer says."""

    action: Action
    success: bool
    reason: str = ""
    message: str = ""
    removed: int = 0
    """Wipe, Collect: keys that the first removal took."""
    seconds: float = 0.0
    status: EngineStatus | None = None
    """What the engine said of itself when the step was done; None where it did not say."""


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
    ahead: tuple[Command, ...] = ()
    """What engines that are told something now are probably told next. Not to be carried out: the next look decides."""
