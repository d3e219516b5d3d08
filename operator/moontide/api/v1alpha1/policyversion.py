"""PolicyVersion: which policy the fleets that follow it serve, and the record of each change."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from moontide.api.v1alpha1.common import Api, Conditions, Timestamp, rule, validations


def _int_or_string(schema: dict[str, Any]) -> None:
    schema.clear()
    schema.update(
        {
            "x-kubernetes-int-or-string": True,
            "description": "The label of the policy, an int or a string; 7 and '7' are the same version.",
            "maxLength": 128,
            **validations(
                rule(
                    "type(self) == int ? self >= 0 : self.matches('^[A-Za-z0-9][A-Za-z0-9._:-]*$')",
                    "version must be a whole number from 0, or letters, digits, '.', '_', ':' and '-' that begin "
                    "with a letter or digit (it travels in an HTTP header); write for example 42 or step-42",
                )
            ),
        }
    )


class PolicyVersionSpec(Api):
    """What the user asks: the version, and how a change of it is carried out."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "self.replicaTimeoutSeconds < self.deadlineSeconds",
                "replicaTimeoutSeconds must be less than deadlineSeconds, so that one hung replica does not use up "
                "the whole deadline; write for example 20 and 120",
            ),
        )
    )

    version: Annotated[int | str, Field(json_schema_extra=_int_or_string)]
    weights: Literal["External", "Unchecked"] = "External"
    """``External``: a trainer pushes weights; a replica is admitted only when the weight version that it reports
    equals ``version``. ``Unchecked``: Moontide does not look at weights, only at caches."""
    running_requests: Literal["Wait", "Abort"] = "Wait"
    """What a change does to requests that run: wait until they end, or abort them."""
    requests_during_barrier: Literal["Queue", "Refuse"] = "Queue"
    """What a request that arrives during a change gets: it waits and runs in the new epoch, or 503 at once."""
    deadline_seconds: Annotated[int, Field(ge=2, le=86_400)] = 120
    """How long replicas may stay paused: after it they close (503) until the change can be finished."""
    replica_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 20
    """How long one replica may fail a step before ``onReplicaFailure`` applies."""
    on_replica_failure: Literal["Replace", "Hold"] = "Replace"
    """``Replace`` deletes the pod of a replica that does not answer in time; ``Hold`` waits for a person."""

    @property
    def label(self) -> str:
        """The version as the string that engines, headers and status carry."""
        return str(self.version)


class Member(Api):
    """An InferenceDeployment that follows the policy."""

    name: str
    uid: str
    wiped_epoch: int = -1
    """The highest epoch for which this fleet's keys were wiped and the wipe was verified."""


class ReplicaCounts(Api):
    """How many replicas are where."""

    total: int = 0
    current: int = 0
    closed: int = 0
    summary: str = "0/0"
    """Current of total, for people."""


class Update(Api):
    """The timeline of one change."""

    epoch: int
    version: str
    started_at: Timestamp
    quiesced_at: Timestamp | None = None
    drained_at: Timestamp | None = None
    invalidated_at: Timestamp | None = None
    wiped_at: Timestamp | None = None
    resumed_at: Timestamp | None = None
    pause_seconds: float | None = None
    """The longest time that any replica held requests, measured by the replicas."""
    keys_removed: int | None = None
    replicas: int | None = None
    """Replicas that the change resumed or admitted."""


class ReplicaFailure(Api):
    """What went wrong with one replica in the change at hand."""

    replica: str
    step: str
    reason: str
    message: Annotated[str, Field(max_length=1024)] = ""
    since: Timestamp


class PolicyVersionStatus(Api):
    """The protocol's memory: what must survive the operator, and what people read."""

    observed_generation: int | None = None
    conditions: Conditions = ()
    epoch: int = 0
    """The highest epoch allotted; it only ever goes up, and is written before the first call to an engine."""
    target_version: str | None = None
    """The version that ``epoch`` was allotted for."""
    version: str | None = None
    """The version of the last change that finished."""
    members: Annotated[tuple[Member, ...], Field(max_length=256)] = ()
    replicas: ReplicaCounts | None = None
    last_update: Update | None = None
    failures: Annotated[tuple[ReplicaFailure, ...], Field(max_length=10)] = ()
    failures_omitted: int = 0
    history: Annotated[tuple[Update, ...], Field(max_length=10)] = ()


class PolicyVersion(Api):
    """The version of the policy that every InferenceDeployment naming it serves."""

    spec: PolicyVersionSpec
    status: PolicyVersionStatus | None = None
