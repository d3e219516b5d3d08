"""The consistency protocol: what to do next, given what is seen. This is the one file that decides.

Promise
    When the policy changes, no replica ever serves KV that was computed with the old one.

Words
    A fleet is *salted* when every engine of it that may have served puts its epoch into its keys: what such an engine
    computed, or still puts, in one epoch cannot be found in another. Other fleets are *plain*. A plain fleet becomes
    salted with its first verified wipe, if all engines that are admitted after it can do that.

Invariants (each has a property test in tests/unit/planning)
    I1  An epoch is in ``status`` before any engine hears of it; it only ever goes up and is never used twice.
    I2  A plain fleet's keys are wiped for epoch *e* only when no engine that may have served can still write: every
        such engine is quiesced, drained and reset, or its container is gone. An engine that does not answer blocks it.
    I3  An engine of a plain fleet is admitted to *e*, and resumed in it, only when its fleet's wipe for *e* was
        verified, and only while it is clean and drained. One of a salted fleet is admitted with the salt of *e*; with
        ``onStoreFailure: Hold`` only as one of a plain fleet is.
    I4  An engine is admitted only when it reports the weights of *e* (``weights: External`` and ``Load``), and never
        while it loads some or after a load of it has failed.
    I5  ``Barrier``: none is resumed in *e* while another of its fleet may be open elsewhere, except one that did not
        answer for ``replicaTimeoutSeconds`` (``onReplicaFailure: Hold`` makes no exception; plain fleets neither).
    I6  A step counts when the engine's own status, taken after it, says so: that of a later look, or the one that comes
        with its answer; never because a call returned.
    I7  Nothing is remembered outside ``status`` and the engines: any operator can take over after any action.
    I8  Replicas that never served (newcomers) are not waited for; they stay closed until admitted.

Algorithm
    Each call of :func:`plan` looks at everything once. If an epoch must be allotted, it does that and nothing else.
    Otherwise each replica gets its own next step:

    ======================  ==========================================================================================
    plain fleet             quiesce, drain, reset; then the fleet's wipe; then admit, resume
    salted fleet, Barrier   quiesce, admit (which switches the salt), resume; old keys are collected when all is done
    both                    admit and resume are one call to an engine that can, where none may be open elsewhere
    salted fleet, Fence     fence (which switches the salt of an open engine); old keys are collected afterwards
    while preparing         Barrier: quiesce (plain: drain, reset too) and hold. Fence: fence to the transit epoch
    ``weights: Load``       before admit: load, where the engine reports other weights
    ======================  ==========================================================================================

    A load is waited for as long as it runs. One that fails is tried again; for the others it is over after
    ``replicaTimeoutSeconds``, unless nobody of the fleet serves. Its pod is replaced only if another replica has loaded
    the same source, and once: what has not served since it started is not replaced.

    The caller writes ``status``, carries the actions out, folds their results in with :func:`record` and calls again,
    until a plan has no actions. What :func:`must_precede` names is written before the actions begin; the rest tells
    people, may come beside them, and is found again by whoever takes over.

The pause is held by the engines with a time to live (``deadlineSeconds``, ``prepareDeadlineSeconds``): an operator that
never comes back leaves closed engines, never stale ones and never ones that are paused for ever.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

from moontide.api.v1alpha1 import (
    Member,
    PolicyVersionSpec,
    PolicyVersionStatus,
    Preparation,
    PreparedFleet,
    ReplicaFailure,
    Update,
)
from moontide.planning import report
from moontide.planning.model import (
    Action,
    Collect,
    Command,
    EngineStatus,
    Fleet,
    Note,
    Observed,
    Plan,
    Replace,
    Replica,
    Result,
    Step,
    Wipe,
)
from moontide.status import merge, parse_timestamp, timestamp

CALL_SECONDS = 5.0
"""Bound of one short call (fence, resume, close, admit)."""
ATTEMPT_SECONDS = 10.0
"""Bound of one attempt at drain, reset, wipe or collect; more is reached by trying again."""
QUIESCE_SECONDS = 3.0
"""The same for quiesce: the others' next steps wait for it when one engine hangs."""
LOAD_SECONDS = 2.0
"""The same for load, which goes on in the engine when the call has ended."""
RELOAD_SECONDS = 60.0
"""A load that has failed is tried again after two seconds, and each time after twice as long, up to this."""
BUSY_REQUEUE = 0.5
POLL_SECONDS = 1.0
"""Engines tell nobody when they have come up or been given weights, so they are asked."""
COLLECT_REQUEUE = 2.0
"""Keys in use have a lease of a few seconds; their collection is tried again until it has run out."""
IDLE_REQUEUE = 30.0
ADOPTED_REQUEUE = 5.0
"""No kubelet and no watch tells of an adopted engine that has restarted, so it is asked."""
MAX_ADDRESSES = 2048
LATE_SECONDS = 30.0
"""After the first collection: puts that were under way then have come or failed, so a second finds what they left."""

STILL_WAITING = "StillWaiting"
"""The result of a command whose answer the others did not wait for."""
UNDECIDED = frozenset({"Loading", STILL_WAITING})
"""Results that say nothing about a failure that was there before."""
WAITED_FOR = frozenset({"RequestsRunning", "KeysLeft"}) | UNDECIDED
"""Results that are no fault of anybody: requests run on (``runningRequests: Wait``), or hold a lease on their keys,
weights are being loaded, or an answer is not there yet. An engine that never answers is told by its status."""


# -- which epoch -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allotment:
    """A new epoch is needed: for which version, and why."""

    version: str
    why: str
    preparing: str | None = None
    """The version that a trainer is about to push: the epoch is one of transit."""
    outcome: str = ""
    """How the preparation that was under way ends."""


@dataclass(frozen=True)
class Hold:
    """A change is asked for and not begun."""

    reason: str
    message: str


def decide(
    spec: PolicyVersionSpec,
    generation: int,
    status: PolicyVersionStatus,
    replicas: list[Replica],
    now: dt.datetime,
) -> Allotment | Hold | None:
    """Whether a new epoch must be allotted.

    A jump of two generations with the same version may hide a change away and back, so it counts as one. An engine
    that knows a higher epoch than ``status`` means that ``status`` was lost.
    """
    under_way = active(status)
    if status.target_version != spec.label:
        why = f"version {spec.label} is asked for, {status.target_version or 'none'} has the epoch"
        if status.target_version is not None and spec.suspend and under_way is None:
            return Hold("Suspended", f"version {spec.label} is asked for, and spec.suspend is true")
        committed = under_way is not None and under_way.version == spec.label
        if under_way is None and _lacks_weights(spec, replicas):
            return Hold(
                "WaitingForWeights",
                f"no serving replica reports weight version {spec.label!r}, so nothing was changed; push the weights "
                "and set the engines' weight version, or set spec.weights to Unchecked",
            )
        return Allotment(spec.label, why, outcome="Committed" if committed else "Aborted")
    if status.observed_generation is not None and generation - status.observed_generation >= 2:
        why = "the spec changed more than once unseen, so the version may have changed and returned"
        return Allotment(spec.label, why, outcome="Aborted")
    highest = max((r.status.epoch for r in replicas if r.status is not None), default=0)
    if highest > status.epoch:
        why = f"an engine is in epoch {highest}, beyond this resource's {status.epoch}"
        return Allotment(spec.label, why, outcome="Aborted")
    if status.reset_nonce != spec.reset_nonce:
        if spec.suspend:
            return Hold("Suspended", "a reset is asked for, and spec.suspend is true")
        return Allotment(spec.label, "a reset is asked for", outcome="Aborted")
    if under_way is not None:
        if under_way.version != spec.preparing_label:
            return Allotment(spec.label, f"the preparation of version {under_way.version} was aborted", None, "Aborted")
        age = (now - parse_timestamp(under_way.started_at)).total_seconds()
        if age >= spec.prepare_deadline_seconds:
            why = f"the preparation of version {under_way.version} was not committed within {age:.0f} s"
            return Allotment(spec.label, why, outcome="Expired")
        return None
    wanted = spec.preparing_label
    if wanted is not None and (status.preparation is None or status.preparation.version != wanted):
        if spec.suspend:
            return Hold("Suspended", f"version {wanted} is to be prepared, and spec.suspend is true")
        return Allotment(spec.label, f"version {wanted} is being prepared", preparing=wanted)
    return None


def active(status: PolicyVersionStatus) -> Preparation | None:
    """The preparation under way."""
    found = status.preparation
    return None if found is None or found.outcome else found


def _lacks_weights(spec: PolicyVersionSpec, replicas: list[Replica]) -> bool:
    """No replica that serves reports the wanted weights: a change would close the whole fleet, so it waits."""
    serving = [r for r in replicas if not r.newcomer]
    if spec.weights != "External" or not serving:
        return False
    return all(r.status is None or r.status.weights_version != spec.label for r in serving)


def _allot(
    spec: PolicyVersionSpec,
    generation: int,
    status: PolicyVersionStatus,
    observed: Observed,
    replicas: list[Replica],
    chosen: Allotment,
) -> Plan:
    """Allot the next epoch and do nothing else, so that it is written before an engine hears of it (I1)."""
    epoch = max([status.epoch, *(r.status.epoch for r in replicas if r.status is not None)]) + 1
    now = timestamp(observed.now)
    under_way = active(status)
    preparation = status.preparation
    if chosen.preparing is not None:
        preparation = Preparation(version=chosen.preparing, epoch=epoch, started_at=now)
    elif under_way is not None:
        # One that was aborted is forgotten: if it is still asked for, it begins anew. One that expired does not.
        over = chosen.outcome in ("Committed", "Expired")
        preparation = under_way.model_copy(update={"outcome": chosen.outcome}) if over else None
    text = f"epoch {epoch} for version {chosen.version}: {chosen.why}"
    notes = [Note("EpochAllotted", text)]
    if under_way is not None and chosen.outcome in ("Aborted", "Expired"):
        notes.append(Note(f"Preparation{chosen.outcome}", chosen.why, warning=True))
    notes += _fallbacks(spec, observed)
    after = status.model_copy(
        update={
            "observed_generation": generation,
            "epoch": epoch,
            "target_version": chosen.version,
            "reset_nonce": spec.reset_nonce,
            "preparation": preparation,
            "members": _members(status, observed),
            "replicas": report.counts(replicas, epoch),
            "last_update": Update(epoch=epoch, version=chosen.preparing or chosen.version, started_at=now),
            "failures": (),
            "failures_omitted": 0,
            "conditions": merge(status.conditions, report.allotted(epoch, text), generation, observed.now),
        }
    )
    return Plan(after, (), tuple(notes), 0.0)


def _fallbacks(spec: PolicyVersionSpec, observed: Observed) -> list[Note]:
    """``Fence`` that cannot be had is said aloud: it falls back to ``Barrier``, with a wipe where keys need it."""
    if spec.strategy != "Fence":
        return []
    notes = []
    for fleet in observed.fleets:
        unable = [r for r in fleet.replicas if r.status is not None and not r.status.fence.live]
        if unable:
            engine = unable[0].status
            why = engine.fence.reason if engine is not None else ""
            more = f" and {len(unable) - 1} more" if len(unable) > 1 else ""
            text = f"{fleet.name} takes a barrier: {unable[0].name}{more} cannot fence: {why or 'no reason given'}"
            notes.append(Note("FenceUnsupported", text[:1000], warning=True))
    return notes


# -- which step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """The inputs of one look, with the derived facts that several decisions share."""

    spec: PolicyVersionSpec
    status: PolicyVersionStatus
    now: dt.datetime
    policy_uid: str = ""

    @property
    def epoch(self) -> int:
        """The highest allotted."""
        return self.status.epoch

    @property
    def elapsed(self) -> float:
        """Seconds since the change began."""
        update = self.status.last_update
        return 0.0 if update is None else (self.now - parse_timestamp(update.started_at)).total_seconds()

    @property
    def preparing(self) -> bool:
        """A trainer may be pushing weights: nothing is admitted or resumed."""
        return active(self.status) is not None

    @property
    def deadline(self) -> int:
        """Seconds that replicas may stay paused for."""
        return self.spec.prepare_deadline_seconds if self.preparing else self.spec.deadline_seconds

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least one: the time to live of a pause."""
        return max(1.0, self.deadline - self.elapsed)

    @property
    def finished(self) -> bool:
        """The change is over; what comes later are replicas that start, or come back."""
        update = self.status.last_update
        return update is not None and update.resumed_at is not None

    @property
    def late_puts_are_over(self) -> bool:
        """It is time for the last collection."""
        update = self.status.last_update
        if update is None or update.wiped_at is None:
            return False
        return (self.now - parse_timestamp(update.wiped_at)).total_seconds() >= LATE_SECONDS

    @property
    def salt(self) -> str:
        """What block hashes begin with in this epoch. With the policy's UID in it, a policy that is deleted and made
        again never meets blocks of its first life."""
        return f"{self.policy_uid}/{self.epoch}"

    def holds(self, member: Member) -> bool:
        """Whether a salted fleet takes the way of a plain one, so that nobody resumes before its old keys are proven to
        be gone: late puts too, so engines are drained. Whoever serves in the epoch already is not stopped again."""
        return self.spec.on_store_failure == "Hold" and member.wiped_epoch < self.epoch and not self.finished

    def salts(self, engine: EngineStatus) -> bool:
        """Whether the engine can be admitted with a salt."""
        return engine.fence.supported and bool(self.policy_uid)

    def weights_match(self, engine: EngineStatus) -> bool:
        """Whether the engine reports the weights of the epoch. What a failed load has left are nobody's weights."""
        if engine.loading is not None:
            return False
        return self.spec.weights == "Unchecked" or engine.weights_version == self.status.target_version

    @property
    def source(self) -> str:
        """Where engines load the weights of the epoch from; empty where they do not."""
        return self.spec.source(self.status.target_version or "")

    def load_fails(self, replica: Replica) -> bool:
        """Whether its last load of the epoch's weights failed, also while it tries again."""
        load = None if replica.status is None else replica.status.loading
        if load is None or not load.error:
            return False
        return (load.source, load.version) == (self.source, self.status.target_version)

    def failing_since(self, name: str) -> dt.datetime | None:
        """Since when a replica fails, None if it does not. What fell off the list of ten began with the change."""
        for failure in self.status.failures:
            if failure.replica == name:
                return parse_timestamp(failure.since)
        update = self.status.last_update
        return parse_timestamp(update.started_at) if self.status.failures_omitted and update is not None else None

    def overdue(self, replica: Replica) -> bool:
        """It has failed for ``replicaTimeoutSeconds``."""
        since = self.failing_since(replica.name)
        return since is not None and (self.now - since).total_seconds() >= self.spec.replica_timeout_seconds

    def given_up(self, replica: Replica) -> bool:
        """The others go on without it."""
        return self.spec.on_replica_failure != "Hold" and self.overdue(replica)

    def unproven(self, replica: Replica) -> bool:
        """Whether a replica that does not answer may be open in an older epoch. After the change, only one that did not
        answer during it; any other is the business of its liveness probe."""
        known = any(failure.replica == replica.name for failure in self.status.failures)
        return not replica.newcomer and (known or not self.finished)

    def runs_on(self, engine: EngineStatus) -> bool:
        """Requests of an older epoch still run in a paused engine, and are to end before it moves on."""
        if engine.state != "paused" or engine.epoch == self.epoch or self.spec.running_requests == "Keep":
            return False
        return bool(engine.in_flight or engine.running)

    def quiesce(self, replica: Replica, *, salted: bool = False) -> Command:
        """Hold new requests; the pause ends in ``closed`` at the deadline. To keep requests, KV must have a salt."""
        mode = self.spec.running_requests if salted or self.spec.running_requests != "Keep" else "Wait"
        return Command(
            Step.QUIESCE,
            replica,
            self.epoch,
            {
                "mode": mode.lower(),
                "requestsDuringBarrier": self.spec.requests_during_barrier,
                "ttlSeconds": round(self.remaining, 3),
            },
            timeout_seconds=min(QUIESCE_SECONDS, self.remaining),
        )

    def short(self, step: Step, replica: Replica, **body: str | int | float | bool | None) -> Command:
        """A call that the engine answers at once."""
        return Command(step, replica, self.epoch, dict(body), timeout_seconds=CALL_SECONDS)

    def long(self, step: Step, replica: Replica) -> Command:
        """A call that waits for something in the engine."""
        return Command(step, replica, self.epoch, {}, timeout_seconds=ATTEMPT_SECONDS)

    def load(self, replica: Replica, engine: EngineStatus) -> Command:
        """Load the weights of the epoch. Requests that are kept stand still meanwhile."""
        keep = self.spec.running_requests == "Keep" and self.salts(engine)
        body: dict[str, str | int | float | bool | None] = {
            "source": self.source,
            "version": self.status.target_version,
            "keep": keep,
        }
        return Command(Step.LOAD, replica, self.epoch, body, timeout_seconds=LOAD_SECONDS)

    def admit(self, replica: Replica, engine: EngineStatus, *, blocked: bool) -> Command:
        """With the salt of the epoch, where the engine can put it into its block hashes. Unless it is ``blocked``, an
        engine that can is resumed with the same call: a pause is as long as its calls."""
        salted = {"salt": self.salt} if self.salts(engine) else {}
        opens = {"resume": True} if engine.admit_resumes and not blocked else {}
        return self.short(Step.ADMIT, replica, version=self.status.target_version, **salted, **opens)

    def fence(self, replica: Replica) -> Command:
        """Switch an open engine. In transit no version is claimed: weights may be half old, half new."""
        version = None if self.preparing else self.status.target_version
        return self.short(Step.FENCE, replica, version=version, salt=self.salt)


NextStep = Command | Step | None
"""What a replica needs: a call; to be waited for, with the name of what it lacks (a bare step); nothing."""


def _current(engine: EngineStatus, epoch: int) -> bool:
    return engine.state == "open" and engine.epoch == epoch


def _salted(member: Member, fleet: Fleet) -> bool:
    """Whether late puts of this fleet's engines are harmless. An engine that holds KV without a salt says otherwise."""
    engines = [r.status for r in fleet.replicas if r.status is not None]
    return member.salted and all(engine.salt or engine.clean for engine in engines)


def _stray(replica: Replica, epoch: int) -> bool:
    """It may have written old KV after the wipe: possible only when a mark on its pod was lost."""
    engine = replica.status
    return engine is not None and engine.epoch != epoch and not engine.clean


def _plain_before_wipe(view: View, replica: Replica) -> NextStep:
    """The next step of one replica of a plain fleet that is not yet wiped."""
    if replica.newcomer:
        return None
    engine = replica.status
    if engine is None or not engine.responsive:
        return Step.QUIESCE
    if _loads(engine):
        return None if engine.drained and engine.clean else Step.LOAD
    if engine.state == "open" or (engine.state == "paused" and engine.running):
        return view.quiesce(replica)
    if not engine.drained:
        return view.long(Step.DRAIN, replica)
    if not engine.clean:
        return view.long(Step.RESET, replica)
    return None


def _plain_after_wipe(view: View, replica: Replica) -> NextStep:
    """The next step of one replica of a wiped fleet: towards open in the epoch, or closed with a reason."""
    engine = replica.status
    if engine is None or not engine.responsive or view.preparing or _current(engine, view.epoch):
        return None
    if _loads(engine):
        return Step.LOAD
    if engine.state == "open":
        return view.quiesce(replica)
    return _towards_open(view, replica, engine, emptied=True, blocked=False)


def _towards_open(view: View, replica: Replica, engine: EngineStatus, *, emptied: bool, blocked: bool) -> NextStep:
    """The next step of an engine in which nothing runs. ``emptied``: it must be drained and reset before it is
    admitted; ``blocked``: it must not be resumed yet."""
    if replica.terminating and engine.state == "closed":
        return None
    if not view.weights_match(engine):
        if view.spec.weights == "Load" and not replica.terminating:
            return _towards_weights(view, replica, engine)
        closes = engine.state == "paused"
        return view.short(Step.CLOSE, replica, reason="WaitingForWeights") if closes else Step.ADMIT
    if emptied and not engine.drained:
        return view.long(Step.DRAIN, replica)
    if emptied and not engine.clean:
        return view.long(Step.RESET, replica)
    if engine.state == "closed" or engine.epoch != view.epoch:
        return view.admit(replica, engine, blocked=blocked)
    return Step.RESUME if blocked else view.short(Step.RESUME, replica)


def _loads(engine: EngineStatus) -> bool:
    """It is busy with its weights, and can do nothing else."""
    return engine.loading is not None and engine.loading.running


def _towards_weights(view: View, replica: Replica, engine: EngineStatus) -> NextStep:
    """The next step of an engine in which nothing runs, and whose weights are not those of the epoch."""
    load = engine.loading
    if load is None or not view.load_fails(replica):
        return view.load(replica, engine)
    if engine.state == "paused" and view.given_up(replica):
        # What it holds may run elsewhere. It goes on trying.
        return view.short(Step.CLOSE, replica, reason="LoadFailed")
    pause = min(RELOAD_SECONDS, 2.0 ** min(load.attempts, 10))
    return view.load(replica, engine) if load.seconds >= pause else Step.LOAD


def _salted_step(view: View, replica: Replica, blocked: bool) -> NextStep:
    """The next step of one replica of a salted fleet; ``blocked``: another may still be open in an older epoch."""
    engine = replica.status
    if engine is None:
        return Step.QUIESCE if view.unproven(replica) else None
    if _current(engine, view.epoch) or (not engine.responsive and engine.state == "closed"):
        return None
    if engine.responsive and _loads(engine):
        return Step.LOAD
    if not engine.responsive:
        # The gate in front of a hung engine obeys: nothing new gets in, and in the end nothing gets out.
        if view.given_up(replica):
            return view.short(Step.CLOSE, replica, reason="EngineUnresponsive")
        return view.quiesce(replica, salted=True) if engine.state == "open" else Step.QUIESCE
    if engine.state == "open":
        if view.spec.strategy == "Fence" and view.salts(engine) and engine.fence.live:
            return view.fence(replica) if view.preparing or view.weights_match(engine) else Step.ADMIT
        return view.quiesce(replica, salted=True)
    if view.runs_on(engine):
        return view.quiesce(replica, salted=True)
    if view.preparing:
        return None
    return _towards_open(view, replica, engine, emptied=not view.salts(engine), blocked=blocked)


def _may_be_open_elsewhere(view: View, replica: Replica) -> bool:
    """It is not proven to serve nothing of an older epoch."""
    engine = replica.status
    if engine is None:
        return view.unproven(replica)
    return engine.epoch != view.epoch and (engine.state == "open" or view.runs_on(engine))


@dataclass(frozen=True)
class Turn:
    """One fleet in one look."""

    fleet: Fleet
    salted: bool
    pending: bool
    """An engine may still serve another epoch; of a plain fleet, the keys are not wiped yet."""
    blocked: bool
    """The same, without replicas that are not waited for any longer."""
    steps: tuple[tuple[Replica, NextStep], ...]
    loads: tuple[Replica, ...] = ()
    """Replicas whose weights the change waits for."""
    store: tuple[Action, ...] = ()
    """Its wipe or its collection."""

    @property
    def commands(self) -> list[Action]:
        """Calls to its engines."""
        return [step for _, step in self.steps if isinstance(step, Command)]

    @property
    def waits(self) -> list[tuple[Replica, Step]]:
        """Replicas that are waited for, and what they lack."""
        found = [(replica, step if isinstance(step, Step) else _closed_for(step)) for replica, step in self.steps]
        return [(replica, step) for replica, step in found if step is not None]

    @property
    def loading(self) -> list[Replica]:
        """Replicas that lack weights which they load themselves."""
        return [replica for replica, step in self.steps if _is_load(step)]


_CLOSED_FOR = {"WaitingForWeights": Step.ADMIT, "LoadFailed": Step.LOAD}


def _closed_for(step: NextStep) -> Step | None:
    """What a replica that is about to be closed lacks."""
    closes = isinstance(step, Command) and step.step is Step.CLOSE
    return _CLOSED_FOR.get(str(step.body["reason"])) if closes and isinstance(step, Command) else None


def _is_load(step: NextStep) -> bool:
    return Step.LOAD in (step, _closed_for(step)) or (isinstance(step, Command) and step.step is Step.LOAD)


def _plain_turn(view: View, fleet: Fleet, member: Member) -> Turn:
    pending = member.wiped_epoch < view.epoch or any(_stray(r, view.epoch) for r in fleet.replicas)
    if not pending:
        steps = tuple((r, _plain_after_wipe(view, r)) for r in fleet.replicas)
        return Turn(fleet, False, False, False, steps, _awaited_loads(view, fleet, steps))
    steps = tuple((r, _plain_before_wipe(view, r)) for r in fleet.replicas)
    still = all(step is None for _, step in steps)
    if view.preparing:
        return Turn(fleet, False, not still, not still, steps)
    return Turn(fleet, False, True, True, steps, store=(Wipe(fleet, ATTEMPT_SECONDS),) if still else ())


def _salted_turn(view: View, fleet: Fleet, member: Member) -> Turn:
    elsewhere = [r for r in fleet.replicas if _may_be_open_elsewhere(view, r)]
    blocked = any(not (r.silent and view.given_up(r)) for r in elsewhere)
    steps = tuple((r, _salted_step(view, r, blocked and view.spec.strategy == "Barrier")) for r in fleet.replicas)
    moving = any(isinstance(step, Command) and step.step is not Step.CLOSE for _, step in steps)
    left = member.wiped_epoch < view.epoch or (member.swept_epoch < view.epoch and view.late_puts_are_over)
    collects = left and not (blocked or moving or view.preparing)
    store: tuple[Action, ...] = (Collect(fleet, (view.salt,), ATTEMPT_SECONDS),) if collects else ()
    return Turn(fleet, True, bool(elsewhere), blocked, steps, _awaited_loads(view, fleet, steps), store)


def _ahead(view: View, turns: list[Turn]) -> tuple[Command, ...]:
    """The admissions of the engines that are told to quiesce, as they are if nothing else comes before them. They cost
    the pause the least if all but their last byte was sent by then."""
    if view.preparing:
        return ()
    return tuple(
        view.admit(replica, replica.status, blocked=False)
        for turn in turns
        for replica, step in turn.steps
        if turn.salted
        and isinstance(step, Command)
        and step.step is Step.QUIESCE
        and replica.status is not None
        and replica.status.admit_resumes
        and view.salts(replica.status)
        and view.weights_match(replica.status)
    )


def _awaited_loads(view: View, fleet: Fleet, steps: tuple[tuple[Replica, NextStep], ...]) -> tuple[Replica, ...]:
    """The replicas that load and without which the change is not finished: those that served, as long as they are not
    given up, and all if nobody serves."""
    if view.finished:
        return ()
    loading = tuple(replica for replica, step in steps if _is_load(step))
    if not any(r.status is not None and _current(r.status, view.epoch) for r in fleet.replicas):
        return loading
    return tuple(r for r in loading if r.may_have_served and not (view.load_fails(r) and view.given_up(r)))


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan(spec: PolicyVersionSpec, generation: int, status: PolicyVersionStatus, observed: Observed) -> Plan:
    """What to do next. Pure: the same inputs give the same plan."""
    replicas = [replica for fleet in observed.fleets for replica in fleet.replicas]
    chosen = decide(spec, generation, status, replicas, observed.now)
    if isinstance(chosen, Allotment):
        return _allot(spec, generation, status, observed, replicas, chosen)
    hold = chosen
    if hold is None:
        status = status.model_copy(update={"observed_generation": generation})
    if status.preparation is not None and status.preparation.outcome and spec.preparing_label is None:
        # Over, and taken note of: the next preparation, of the same version too, begins anew.
        status = status.model_copy(update={"preparation": None})
    view = View(spec, status, observed.now, observed.policy_uid)
    known = {member.uid: member for member in _members(status, observed)}
    turns: list[Turn] = []
    for fleet in observed.fleets if view.epoch > 0 else ():
        member = known[fleet.uid]
        salted = _salted(member, fleet)
        turn = (_salted_turn if salted and not view.holds(member) else _plain_turn)(view, fleet, member)
        turns.append(turn)
        known[fleet.uid] = _remember(member, turn, view, salted)

    failures = _fresh_failures(view, turns)
    replaced = _replacements(view, turns, failures)
    gone = {action.replica.pod_uid for action in replaced}
    commands = [a for turn in turns for a in turn.commands if isinstance(a, Command) and a.replica.pod_uid not in gone]
    actions: tuple[Action, ...] = (*commands, *(a for turn in turns for a in turn.store), *replaced)

    after = status.model_copy(
        update={
            "members": tuple(known.values()),
            "failures": tuple(failures[: report.LISTED_FAILURES]),
            "failures_omitted": max(0, len(failures) - report.LISTED_FAILURES),
            "replicas": report.counts(replicas, view.epoch),
        }
    )
    look = report.Look(
        spec=spec,
        now=observed.now,
        elapsed=view.elapsed,
        deadline=view.deadline,
        epoch=view.epoch,
        preparing=view.preparing,
        hold=None if hold is None else (hold.reason, hold.message),
        replicas=tuple(replicas),
        steps=tuple(c.step for c in commands),
        wiping=any(isinstance(a, Wipe) for turn in turns for a in turn.store),
        plain=any(not turn.salted for turn in turns),
        pending=any(turn.pending for turn in turns),
        blocked=any(turn.blocked for turn in turns),
        unwiped=any(member.wiped_epoch < view.epoch for member in known.values()),
        waits=tuple(wait for turn in turns for wait in turn.waits),
        loading=tuple(r.name for turn in turns for r in turn.loading),
        awaited_loads=tuple(r.name for turn in turns for r in turn.loads),
    )
    after, notes = report.timeline(look, after)
    notes += _failed_loads(status, failures)
    if view.preparing and not look.moving:
        after, more = _prepared(after, observed)
        notes += more
    after = after.model_copy(
        update={"conditions": merge(status.conditions, report.verdicts(look, after), generation, observed.now)}
    )
    ages = [(observed.now - parse_timestamp(failure.since)).total_seconds() for failure in failures]
    left = [spec.replica_timeout_seconds - age for age in ages if age < spec.replica_timeout_seconds]
    requeue = _requeue(look, replicas, bool(replaced), min(left, default=None))
    return Plan(after, actions, tuple(notes), requeue, _ahead(view, turns))


def must_precede(written: PolicyVersionStatus, status: PolicyVersionStatus) -> bool:
    """Whether ``status`` has to be there before anybody acts on it, where ``written`` is: epochs (I1), what is known of
    a fleet's keys, and what is being prepared."""
    return any(
        getattr(written, field) != getattr(status, field)
        for field in ("epoch", "target_version", "reset_nonce", "members", "preparation")
    )


def _requeue(look: report.Look, replicas: list[Replica], replaced: bool, overdue: float | None) -> float:
    """``overdue``: seconds until the first replica is waited for no longer."""
    if look.blocked and overdue is not None and overdue < BUSY_REQUEUE:
        return max(overdue, 0.01)
    if look.moving or replaced:
        return BUSY_REQUEUE
    starting = any(r.status is None and (r.container_id is not None or r.url) for r in replicas)
    if starting or look.hold is not None or look.waits or look.preparing:
        return POLL_SECONDS
    if look.unwiped:
        return COLLECT_REQUEUE
    return ADOPTED_REQUEUE if any(r.url for r in replicas) else IDLE_REQUEUE


def _prepared(status: PolicyVersionStatus, observed: Observed) -> tuple[PolicyVersionStatus, list[Note]]:
    """Tell the trainer that it may push, and where to."""
    preparation = status.preparation
    assert preparation is not None
    fleets = tuple(
        PreparedFleet(
            name=fleet.name,
            namespace=fleet.namespace or None,
            token_secret=fleet.token_secret,
            addresses=tuple(r.address for r in fleet.replicas if r.address and not r.terminating)[:MAX_ADDRESSES],
        )
        for fleet in observed.fleets
    )
    first = preparation.prepared_at is None
    at = timestamp(observed.now) if first else preparation.prepared_at
    status = status.model_copy(
        update={"preparation": preparation.model_copy(update={"prepared_at": at, "fleets": fleets})}
    )
    text = f"version {preparation.version} may be pushed; epoch {preparation.epoch} is one of transit"
    return status, [Note("Prepared", text)] if first else []


def _members(status: PolicyVersionStatus, observed: Observed) -> tuple[Member, ...]:
    known = {m.uid: m for m in status.members}
    return tuple(known.get(f.uid, Member(name=f.name, uid=f.uid)) for f in observed.fleets)


def _remember(member: Member, turn: Turn, view: View, salted: bool) -> Member:
    """What status must say of a fleet before the turn's actions are carried out."""
    changes: dict[str, object] = {}
    if not turn.salted and turn.pending and member.wiped_epoch >= view.epoch:
        changes["wiped_epoch"] = view.epoch - 1
    admitted = (c for c in turn.commands if isinstance(c, Command) and c.step is Step.ADMIT)
    if member.salted and (not salted or any("salt" not in c.body for c in admitted)):
        changes["salted"] = False
    return member.model_copy(update=changes) if changes else member


def _fresh_failures(view: View, turns: list[Turn]) -> list[ReplicaFailure]:
    """Failures that still hold: those recorded whose step is still to do, and replicas that do not answer."""
    wanted = {(a.replica.name, a.step.value) for turn in turns for a in turn.commands if isinstance(a, Command)}
    for turn in turns:
        wanted |= {(store_of(a.fleet), step_of(a).value) for a in turn.store if isinstance(a, Wipe | Collect)}
    silent = {r.name: r for turn in turns for r, step in turn.steps if r.silent and step is not None}
    kept = {f.replica: f for f in view.status.failures}
    unloaded = {r.name: r for turn in turns for r in turn.fleet.replicas if view.load_fails(r) and not r.terminating}
    fresh = [
        f
        for f in view.status.failures
        if (f.replica, f.step) in wanted and f.replica not in silent and f.replica not in unloaded
    ]
    for name, replica in unloaded.items():
        if name not in silent:
            assert replica.status is not None
            assert replica.status.loading is not None
            fresh.append(_load_failure(name, replica.status.loading.error, kept.get(name), view.now))
    for name, replica in silent.items():
        before, unlisted = kept.get(name), view.failing_since(name)
        since = before.since if before is not None else timestamp(unlisted or view.now)
        fault = replica.error if replica.status is None else replica.status.fault
        reason = "Unreachable" if replica.status is None else "EngineUnresponsive"
        fresh.append(
            ReplicaFailure(
                replica=name,
                step=Step.QUIESCE.value,
                reason="Terminating" if replica.terminating else reason,
                message=((fault or "no answer") + _instead(view, replica))[:1024],
                since=since,
            )
        )
    return fresh


def _failed_loads(status: PolicyVersionStatus, failures: list[ReplicaFailure]) -> list[Note]:
    """Loads whose failure is news. A load goes on when its call has answered, so the engine's status tells."""
    known = {failure.replica for failure in status.failures if failure.step == Step.LOAD.value}
    fresh = [each for each in failures if each.step == Step.LOAD.value and each.replica not in known]
    return [Note(each.reason, f"{each.replica}: {each.message}", warning=True) for each in fresh]


def _load_failure(name: str, error: str, before: ReplicaFailure | None, now: dt.datetime) -> ReplicaFailure:
    since = before.since if before is not None else timestamp(now)
    return ReplicaFailure(replica=name, step=Step.LOAD.value, reason="LoadFailed", message=error[:1024], since=since)


def _instead(view: View, replica: Replica) -> str:
    """What is said of a replica that cannot be replaced."""
    cannot = view.spec.on_replica_failure == "Replace" and replica.url
    return "; launched by others, so it is isolated and not replaced" if cannot else ""


def _replacements(view: View, turns: list[Turn], failures: list[ReplicaFailure]) -> list[Replace]:
    """``onReplicaFailure: Replace``: the pods of replicas that have kept a change waiting for too long."""
    if view.spec.on_replica_failure != "Replace":
        return []
    failing = {failure.replica: failure for failure in failures}
    found = []
    for turn in turns:
        for replica in turn.fleet.replicas:
            failure = failing.get(replica.name)
            if failure is None or replica.terminating or replica.url or not _own_fault(view, failure, turn.fleet):
                continue
            if not (replica.may_have_served if failure.step == Step.LOAD.value else turn.pending):
                continue
            age = (view.now - parse_timestamp(failure.since)).total_seconds()
            if age >= view.spec.replica_timeout_seconds:
                found.append(Replace(replica, f"{failure.step} failed for {age:.0f} s: {failure.reason}"))
    return found


def _own_fault(view: View, failure: ReplicaFailure, fleet: Fleet) -> bool:
    """Puts that do not end are the store's fault as long as no other replica of the fleet has ended its own, and a load
    that fails is the source's as long as no other has loaded it."""
    if failure.step == Step.LOAD.value:
        others = (r.status for r in fleet.replicas if r.name != failure.replica)
        return any(engine is not None and view.weights_match(engine) for engine in others)
    if failure.step != Step.DRAIN.value:
        return True
    others = (r.status for r in fleet.replicas if r.name != failure.replica and r.may_have_served)
    return any(engine is not None and engine.drained for engine in others)


# -- what came of it ---------------------------------------------------------------------------------------------------


def store_of(fleet: Fleet) -> str:
    """The name under which a fleet's store fails."""
    return f"store of {fleet.name}"


def step_of(action: Action) -> Step:
    """The step that an action is."""
    if isinstance(action, Command):
        return action.step
    return {Wipe: Step.WIPE, Collect: Step.COLLECT, Replace: Step.REPLACE}[type(action)]


def name_of(action: Action) -> str:
    """The replica, or the store, that an action is for."""
    return store_of(action.fleet) if isinstance(action, Wipe | Collect) else action.replica.name


def record(status: PolicyVersionStatus, results: Iterable[Result], now: dt.datetime) -> PolicyVersionStatus:
    """``status`` with the results folded in: verified wipes, keys removed, failures with the time they began."""
    members = {m.uid: m for m in status.members}
    failures = {f.replica: f for f in status.failures}
    removed = 0
    for result in results:
        action = result.action
        if isinstance(action, Replace):
            continue
        if isinstance(action, Wipe | Collect):
            removed += result.removed
            member = members.get(action.fleet.uid)
            if result.success and member is not None:
                changes: dict[str, object] = {"wiped_epoch": status.epoch}
                if isinstance(action, Wipe):
                    # Nothing of it can be left or come: what is admitted from now on decides.
                    changes |= {"salted": True, "swept_epoch": status.epoch}
                elif member.wiped_epoch == status.epoch:
                    changes = {"swept_epoch": status.epoch}
                members[action.fleet.uid] = member.model_copy(update=changes)
        name, step = name_of(action), step_of(action).value
        if result.reason in UNDECIDED or (result.success and step == Step.CLOSE.value):
            # The next look tells whether what failed still fails: being closed mends nothing.
            continue
        if result.success or result.reason in WAITED_FOR:
            failures.pop(name, None)
            continue
        before = failures.get(name)
        failures[name] = ReplicaFailure(
            replica=name,
            step=step,
            reason=result.reason or "Unknown",
            message=result.message[:1024],
            since=before.since if before is not None else timestamp(now),
        )
    listed = tuple(failures.values())
    return report.removed(status, removed).model_copy(
        update={
            "members": tuple(members.values()),
            "failures": listed[: report.LISTED_FAILURES],
            "failures_omitted": max(status.failures_omitted, len(listed) - report.LISTED_FAILURES, 0),
        }
    )
