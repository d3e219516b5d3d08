"""PolicyVersion: which policy the fleets that follow it serve, and the record of each change."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from moontide.api.v1alpha1.common import Api, Conditions, Timestamp, no_climbing, rule, validations


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


_SOURCE_RULES = (
    rule(
        "self.matches('^(/[^\\\\s]*|hf://[^/\\\\s]+/[^/\\\\s]+)$') && self.contains('{version}')",
        "weightsSource is a path or a repository, another one for each version, as a replica that restarts loads it "
        "again; write for example /models/policy-{version} or hf://ORG/NAME-{version}",
    ),
    no_climbing("self", "weightsSource"),
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
            rule(
                "!('*' in self.allowedNamespaces) || self.allowedNamespaces.size() == 1",
                "allowedNamespaces holds '*' and names beside it: write ['*'] for every namespace, or the names alone",
            ),
            rule(
                "self.strategy != 'Fence' || self.runningRequests == 'Wait'",
                "strategy Fence pauses nobody, so requests that run end in the epoch they began in: write "
                "runningRequests: Wait, or strategy: Barrier",
            ),
            rule(
                "self.strategy != 'Fence' || self.onStoreFailure == 'Detach'",
                "strategy Fence pauses nobody, so nobody can be held until old keys are removed; write onStoreFailure: "
                "Detach, or strategy: Barrier",
            ),
            rule(
                "(self.weights == 'Load') == has(self.weightsSource)",
                "weightsSource says where engines load weights from, with weights: Load and only then; write for "
                "example weights: Load and weightsSource: /models/policy-{version}, or remove it",
            ),
            rule(
                "self.weights != 'Load' || self.strategy == 'Barrier'",
                "strategy Fence pauses nobody, and weights cannot be loaded under requests that run; write strategy: "
                "Barrier, or weights: External",
            ),
            rule(
                "self.weights != 'Load' || !has(self.preparing)",
                "preparing is for a trainer that pushes weights, and with weights: Load nobody pushes any; remove it, "
                "and write the new version as version once its weights are complete",
            ),
        )
    )

    version: Annotated[int | str, Field(json_schema_extra=_int_or_string)]
    preparing: Annotated[int | str | None, Field(json_schema_extra=_int_or_string)] = None
    """A trainer is about to push the weights of this version: the fleets stand still (``Barrier``) or share with
    nobody (``Fence``) until ``version`` says the same (commit), or this is cleared (abort)."""
    strategy: Literal["Barrier", "Fence"] = "Barrier"
    """``Barrier``: replicas pause, and no two serve different versions at one time. ``Fence``: nobody pauses; each
    replica begins the new epoch when it hears of it, and requests that run end in the old one."""
    weights: Literal["External", "Load", "Unchecked"] = "External"
    """``External``: a trainer pushes weights; a replica is admitted only when the weight version that it reports
    equals ``version``. ``Load``: the same, and a replica that reports another one is told to load ``weightsSource``.
    ``Unchecked``: Moontide does not look at weights, only at caches."""
    weights_source: Annotated[str | None, Field(max_length=1024, json_schema_extra=validations(*_SOURCE_RULES))] = None
    """Where engines find the weights of a version: a folder on a volume of their pods, or ``hf://ORG/NAME``.
    ``{version}`` stands for the label."""
    running_requests: Literal["Wait", "Abort", "Keep"] = "Wait"
    """What a change does to requests that run: wait until they end, abort them, or keep them: they stop, and go on
    with new weights and KV that is computed anew."""
    requests_during_barrier: Literal["Queue", "Refuse"] = "Queue"
    """What a request that arrives during a change gets: it waits and runs in the new epoch, or 503 at once."""
    deadline_seconds: Annotated[int, Field(ge=2, le=86_400)] = 120
    """How long replicas may stay paused: after it they close (503) until the change can be finished."""
    prepare_deadline_seconds: Annotated[int, Field(ge=2, le=86_400)] = 600
    """How long ``preparing`` may last before it is aborted."""
    replica_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 20
    """How long one replica may fail a step before ``onReplicaFailure`` applies."""
    on_replica_failure: Literal["Isolate", "Replace", "Hold"] = "Replace"
    """What becomes of a replica that does not answer in time: ``Isolate`` closes it and goes on without it,
    ``Replace`` deletes its pod too, ``Hold`` waits for a person."""
    on_store_failure: Literal["Detach", "Hold"] = "Detach"
    """What a store that does not answer holds up. ``Detach``: a fleet whose keys carry the epoch serves on, and old
    keys are removed when the store is back. ``Hold``: no replica resumes before their removal was verified."""
    suspend: bool = False
    """Begin no change and no preparation; what is under way is finished, and newcomers are admitted."""
    reset_nonce: Annotated[str, Field(max_length=128)] = ""
    """Any other text than before: a new epoch of the same version, so that nothing that is cached is found again."""

    allowed_namespaces: Annotated[
        tuple[Annotated[str, Field(max_length=63, pattern=r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$")], ...],
        Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Namespaces besides this one whose InferenceDeployments may follow the policy; ``*`` alone allows all."""

    def allows(self, namespace: str) -> bool:
        """Whether fleets of another namespace than the policy's may follow it."""
        return "*" in self.allowed_namespaces or namespace in self.allowed_namespaces

    @property
    def label(self) -> str:
        """The version as the string that engines, headers and status carry."""
        return str(self.version)

    def source(self, label: str) -> str:
        """Where the weights of a version are; for ``weights: Load``."""
        return (self.weights_source or "").replace("{version}", label)

    @property
    def preparing_label(self) -> str | None:
        """The version being prepared; None where there is none, or it is the version already."""
        return None if self.preparing is None or str(self.preparing) == self.label else str(self.preparing)


class Member(Api):
    """An InferenceDeployment that follows the policy."""

    name: str
    """``namespace/name`` where it is in another namespace than the policy."""
    uid: str
    wiped_epoch: int = -1
    """The highest epoch for which this fleet's older keys were removed and the removal was verified."""
    swept_epoch: int = -1
    """The same, once more, when late puts had had their time."""
    salted: bool = False
    """Every engine of it that may have served since that began puts its epoch into its keys, so that late puts cannot
    be found in a later one."""


class PreparedFleet(Api):
    """Where a trainer finds the engines of one fleet."""

    name: str
    """As in ``members``."""
    namespace: str | None = None
    """Of the fleet and of its Secret."""
    token_secret: str
    """The Secret with the bearer token of their admin ports."""
    addresses: Annotated[tuple[str, ...], Field(max_length=2048)] = ()
    """``host:port`` of each admin port, or its URL where that is not http."""


class Preparation(Api):
    """``spec.preparing``, as far as it has come."""

    version: str
    epoch: int
    """The transit epoch: what is computed in it is found in no other."""
    started_at: Timestamp
    prepared_at: Timestamp | None = None
    """When no engine served the old version any more (``Barrier``) or shared with others (``Fence``)."""
    outcome: Literal["", "Committed", "Expired"] = ""
    """How it ended; empty while it is under way. One that is aborted is forgotten."""
    fleets: Annotated[tuple[PreparedFleet, ...], Field(max_length=1024)] = ()


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
    loaded_at: Timestamp | None = None
    """When the replicas that are waited for had loaded their weights (``weights: Load``)."""
    resumed_at: Timestamp | None = None
    pause_seconds: float | None = None
    """The longest time that any replica held requests, measured by the replicas."""
    keys_removed: int | None = None
    replicas: int | None = None
    """Replicas that the change resumed or admitted."""


class ReplicaFailure(Api):
    """What went wrong with one replica, or with a fleet's store, in the change at hand."""

    replica: str
    step: str
    reason: str
    message: Annotated[str, Field(max_length=1024)] = ""
    since: Timestamp


class PolicyVersionStatus(Api):
    """The protocol's memory: what must survive the operator, and what people read."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule("self.epoch >= oldSelf.epoch", "an epoch only goes up: this writer has not seen the last one")
        )
    )

    observed_generation: int | None = None
    conditions: Conditions = ()
    epoch: int = 0
    """The highest epoch allotted; it only ever goes up, and is written before the first call to an engine."""
    target_version: str | None = None
    """The version that ``epoch`` was allotted for."""
    version: str | None = None
    """The version of the last change that finished."""
    reset_nonce: str = ""
    """``spec.resetNonce`` that the epoch was allotted for."""
    preparation: Preparation | None = None
    members: Annotated[tuple[Member, ...], Field(max_length=1024)] = ()
    replicas: ReplicaCounts | None = None
    last_update: Update | None = None
    failures: Annotated[tuple[ReplicaFailure, ...], Field(max_length=10)] = ()
    failures_omitted: int = 0
    history: Annotated[tuple[Update, ...], Field(max_length=10)] = ()


class PolicyVersion(Api):
    """The version of the policy that every InferenceDeployment naming it serves."""

    spec: PolicyVersionSpec
    status: PolicyVersionStatus | None = None
