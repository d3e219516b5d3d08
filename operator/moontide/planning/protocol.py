"""The consistency protocol: what to do next, given what is seen. This is the one file that decides.

Promise
    When the policy changes, no replica ever serves KV that was computed with the old one.

Invariants (each has a property test in tests/unit/planning)
    I1  An epoch is in ``status`` before any engine hears of it; it only ever goes up and is never used twice.
    I2  A fleet's keys are wiped for epoch *e* only when no engine that may have served can still write: every such
        engine is quiesced, drained and reset, or its container is gone. An engine that does not answer blocks it.
    I3  An engine is admitted to *e*, and resumed in it, only when its fleet's wipe for *e* was verified, and only
        while it is clean and drained, and (``weights: External``) reports the weights of *e*.
    I4  A step counts when a later look at the engine says so; never because a call returned.
    I5  Nothing is remembered outside ``status`` and the engines: any operator can take over after any action.
    I6  Replicas that never served (newcomers) are not waited for; they stay closed until admitted.

Algorithm
    Each call of :func:`plan` looks at everything once. If the version asked for has no epoch yet, it allots one and
    does nothing else. Otherwise each replica of a fleet whose keys are not yet wiped for the epoch gets its own next
    step (quiesce, drain, reset). A fleet with nothing left to do is wiped. A wiped fleet's replicas are admitted, then
    resumed. The caller writes ``status`` first, carries the actions out, folds their results in with :func:`record`
    and calls again, until a plan has no actions.

The pause is held by the engines with a time to live (``deadlineSeconds``): an operator that never comes back leaves
closed engines, never stale ones and never ones that are paused for ever.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

from moontide.api.v1alpha1 import (
    Member,
    PolicyVersionSpec,
    PolicyVersionStatus,
    ReplicaCounts,
    ReplicaFailure,
    Update,
)
from moontide.planning.model import (
    Action,
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
from moontide.status import Verdict, merge, parse_timestamp, timestamp

LISTED_FAILURES = 10
LISTED_HISTORY = 10

CALL_SECONDS = 5.0
"""Bound of one short call (admit, resume, close)."""
ATTEMPT_SECONDS = 10.0
"""Bound of one attempt at quiesce, drain, reset or wipe; more is reached by trying again."""
BUSY_REQUEUE = 0.5
POLL_SECONDS = 1.0
"""Engines tell nobody when they have come up or been given weights, so they are asked."""
IDLE_REQUEUE = 30.0

WAITED_FOR = frozenset({"RequestsRunning"})
"""Answers that are no fault of the replica: it waits for requests, as ``runningRequests: Wait`` asks."""


def needs_epoch(
    spec: PolicyVersionSpec, generation: int, status: PolicyVersionStatus, replicas: Iterable[Replica]
) -> str | None:
    """Why a new epoch must be allotted, or None.

    A jump of two generations with the same version may hide a change away and back, so it counts as one. An engine
    that knows a higher epoch than ``status`` means that ``status`` was lost.
    """
    if status.target_version != spec.label:
        return f"version {spec.label} is asked for, {status.target_version or 'none'} has the epoch"
    if status.observed_generation is not None and generation - status.observed_generation >= 2:
        return "the spec changed more than once unseen, so the version may have changed and returned"
    highest = max((r.status.epoch for r in replicas if r.status is not None), default=0)
    if highest > status.epoch:
        return f"an engine is in epoch {highest}, beyond this resource's {status.epoch}"
    return None


def _holds_for_weights(spec: PolicyVersionSpec, replicas: list[Replica]) -> bool:
    """No replica that serves reports the wanted weights: a change would close the whole fleet, so it waits."""
    serving = [r for r in replicas if not r.newcomer]
    if spec.weights == "Unchecked" or not serving:
        return False
    return all(r.status is None or r.status.weights_version != spec.label for r in serving)


@dataclass(frozen=True)
class _View:
    """The inputs of one look, with the derived facts that several decisions share."""

    spec: PolicyVersionSpec
    status: PolicyVersionStatus
    now: dt.datetime
    policy_uid: str = ""

    @property
    def epoch(self) -> int:
        return self.status.epoch

    @property
    def elapsed(self) -> float:
        update = self.status.last_update
        return 0.0 if update is None else (self.now - parse_timestamp(update.started_at)).total_seconds()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least one: the time to live of a pause."""
        return max(1.0, self.spec.deadline_seconds - self.elapsed)

    def weights_match(self, engine: EngineStatus) -> bool:
        return self.spec.weights == "Unchecked" or engine.weights_version == self.status.target_version

    def quiesce(self, replica: Replica) -> Command:
        return Command(
            Step.QUIESCE,
            replica,
            self.epoch,
            {
                "mode": self.spec.running_requests.lower(),
                "requestsDuringBarrier": self.spec.requests_during_barrier,
                "ttlSeconds": round(self.remaining, 3),
            },
            timeout_seconds=min(ATTEMPT_SECONDS, self.remaining),
        )

    def short(self, step: Step, replica: Replica, **body: str | int | float | bool | None) -> Command:
        return Command(step, replica, self.epoch, dict(body), timeout_seconds=CALL_SECONDS)

    def admit(self, replica: Replica, engine: EngineStatus) -> Command:
        """With the salt of the epoch, where the engine can put it into its block hashes.

        The policy's UID is in it, so a policy deleted and made again never meets blocks of its first life.
        """
        salted = {"salt": f"{self.policy_uid}/{self.epoch}"} if engine.fence.supported and self.policy_uid else {}
        return self.short(Step.ADMIT, replica, version=self.status.target_version, **salted)

    def long(self, step: Step, replica: Replica) -> Command:
        return Command(step, replica, self.epoch, {}, timeout_seconds=ATTEMPT_SECONDS)


def _current(engine: EngineStatus, epoch: int) -> bool:
    return engine.state == "open" and engine.epoch == epoch


def _stray(replica: Replica, epoch: int) -> bool:
    """It may have written old KV after the wipe: possible only when a mark on its pod was lost."""
    engine = replica.status
    return engine is not None and engine.epoch != epoch and not engine.clean


def _next_before_wipe(view: _View, replica: Replica) -> Command | Step | None:
    """The next step of one replica of a fleet that is not yet wiped; a bare Step is one it is only waited for."""
    if replica.newcomer:
        return None
    engine = replica.status
    if engine is None:
        return Step.QUIESCE
    if engine.state == "open" or (engine.state == "paused" and engine.running > 0):
        return view.quiesce(replica)
    if not engine.drained:
        return view.long(Step.DRAIN, replica)
    if not engine.clean:
        return view.long(Step.RESET, replica)
    return None


def _next_after_wipe(view: _View, replica: Replica) -> Command | Step | None:
    """The next step of one replica of a wiped fleet: towards open in the epoch, or closed with a reason."""
    engine = replica.status
    if engine is None or _current(engine, view.epoch):
        return None
    if engine.state == "open":
        return view.quiesce(replica)
    if replica.terminating and engine.state == "closed":
        return None
    if not view.weights_match(engine):
        if engine.state == "paused":
            return view.short(Step.CLOSE, replica, reason="WaitingForWeights")
        return Step.ADMIT
    if not engine.drained:
        return view.long(Step.DRAIN, replica)
    if not engine.clean:
        return view.long(Step.RESET, replica)
    if engine.state == "closed" or engine.epoch != view.epoch:
        return view.admit(replica, engine)
    return view.short(Step.RESUME, replica)


def plan(spec: PolicyVersionSpec, generation: int, status: PolicyVersionStatus, observed: Observed) -> Plan:
    """What to do next. Pure: the same inputs give the same plan."""
    replicas = [replica for fleet in observed.fleets for replica in fleet.replicas]
    why = needs_epoch(spec, generation, status, replicas)
    waiting_for_weights = why is not None and _holds_for_weights(spec, replicas)
    if why is not None and not waiting_for_weights:
        return _allot(spec, generation, status, observed, replicas, why)
    status = status if waiting_for_weights else status.model_copy(update={"observed_generation": generation})
    view = _View(spec, status, observed.now, observed.policy_uid)
    members = _members(status, observed)
    wiped: dict[str, int] = {m.uid: m.wiped_epoch for m in members}
    pending = [
        f for f in observed.fleets if wiped[f.uid] < view.epoch or any(_stray(r, view.epoch) for r in f.replicas)
    ]
    settled = [f for f in observed.fleets if f not in pending]
    members = tuple(m if m.uid not in {f.uid for f in pending} else _unwiped(m, view.epoch) for m in members)

    actions: list[Action] = []
    waits: list[tuple[Replica, Step]] = []
    if view.epoch > 0:
        for fleet in pending:
            steps = [(r, _next_before_wipe(view, r)) for r in fleet.replicas]
            actions += [s for _, s in steps if isinstance(s, Command)]
            waits += [(r, s) for r, s in steps if isinstance(s, Step)]
            if all(s is None for _, s in steps):
                actions.append(Wipe(fleet, ATTEMPT_SECONDS))
        for fleet in settled:
            steps = [(r, _next_after_wipe(view, r)) for r in fleet.replicas]
            actions += [s for _, s in steps if isinstance(s, Command)]
            waits += [(r, s) for r, s in steps if isinstance(s, Step)]

    failures = _fresh_failures(status, view, pending, replicas, actions, waits)
    replaced: list[Action] = []
    if spec.on_replica_failure == "Replace":
        failing = {failure.replica: failure for failure in failures}
        for fleet in pending:
            for replica in fleet.replicas:
                failure = failing.get(replica.name)
                if failure is None or replica.terminating or not _own_fault(failure, fleet):
                    continue
                age = (observed.now - parse_timestamp(failure.since)).total_seconds()
                if age >= spec.replica_timeout_seconds:
                    replaced.append(Replace(replica, f"{failure.step} failed for {age:.0f} s: {failure.reason}"))
    gone = {a.replica.pod_uid for a in replaced if isinstance(a, Replace)}
    actions = [a for a in actions if not (isinstance(a, Command) and a.replica.pod_uid in gone)] + replaced

    after = status.model_copy(
        update={
            "members": members,
            "failures": tuple(failures[:LISTED_FAILURES]),
            "failures_omitted": max(0, len(failures) - LISTED_FAILURES),
            "replicas": _counts(replicas, view.epoch),
        }
    )
    after, notes = _stamp(view, after, pending, replicas, actions)
    verdicts = _verdicts(view, after, pending, replicas, actions, waits, waiting_for_weights)
    after = after.model_copy(update={"conditions": merge(status.conditions, verdicts, generation, observed.now)})
    busy = bool(actions or pending)
    starting = any(r.status is None and r.container_id is not None for r in replicas)
    poll = starting or waiting_for_weights or any(step is Step.ADMIT for _, step in waits)
    requeue = BUSY_REQUEUE if busy else POLL_SECONDS if poll else IDLE_REQUEUE
    return Plan(after, tuple(actions), tuple(notes), requeue)


def _own_fault(failure: ReplicaFailure, fleet: Fleet) -> bool:
    """Puts that do not end are the store's fault as long as no other replica of the fleet has ended its own."""
    if failure.step != Step.DRAIN.value:
        return True
    others = (r.status for r in fleet.replicas if r.name != failure.replica and r.may_have_served)
    return any(engine is not None and engine.drained for engine in others)


def _members(status: PolicyVersionStatus, observed: Observed) -> tuple[Member, ...]:
    known = {m.uid: m for m in status.members}
    return tuple(known.get(f.uid, Member(name=f.name, uid=f.uid)) for f in observed.fleets)


def _unwiped(member: Member, epoch: int) -> Member:
    return member if member.wiped_epoch < epoch else member.model_copy(update={"wiped_epoch": epoch - 1})


def _allot(
    spec: PolicyVersionSpec,
    generation: int,
    status: PolicyVersionStatus,
    observed: Observed,
    replicas: list[Replica],
    why: str,
) -> Plan:
    """Allot the next epoch and do nothing else, so that it is written before an engine hears of it (I1)."""
    epoch = max([status.epoch, *(r.status.epoch for r in replicas if r.status is not None)]) + 1
    update = Update(epoch=epoch, version=spec.label, started_at=timestamp(observed.now))
    verdicts = (
        Verdict("Current", "False", "Quiescing", f"epoch {epoch} for version {spec.label}: {why}"),
        Verdict("Progressing", "True", "Quiescing", f"moving to epoch {epoch}"),
        Verdict("Degraded", "False", "AsExpected"),
    )
    after = status.model_copy(
        update={
            "observed_generation": generation,
            "epoch": epoch,
            "target_version": spec.label,
            "members": _members(status, observed),
            "replicas": _counts(replicas, epoch),
            "last_update": update,
            "failures": (),
            "failures_omitted": 0,
            "conditions": merge(status.conditions, verdicts, generation, observed.now),
        }
    )
    return Plan(after, (), (Note("EpochAllotted", f"epoch {epoch} for version {spec.label}: {why}"),), 0.0)


def _fresh_failures(
    status: PolicyVersionStatus,
    view: _View,
    pending: list[Fleet],
    replicas: list[Replica],
    actions: list[Action],
    waits: list[tuple[Replica, Step]],
) -> list[ReplicaFailure]:
    """Failures that still hold: those recorded whose step is still to do, and replicas that do not answer."""
    wanted = {(a.replica.name, a.step.value) for a in actions if isinstance(a, Command)}
    wanted |= {(f"store of {a.fleet.name}", Step.WIPE.value) for a in actions if isinstance(a, Wipe)}
    unreachable = {r.name: r for r, step in waits if step is Step.QUIESCE}
    kept = {f.replica: f for f in status.failures}
    fresh = [f for f in status.failures if (f.replica, f.step) in wanted and f.replica not in unreachable]
    # What fell off the list of ten began at the latest when the change did.
    unlisted = view.status.last_update.started_at if status.failures_omitted and view.status.last_update else None
    for name, replica in unreachable.items():
        before = kept.get(name)
        since = before.since if before is not None else unlisted or timestamp(view.now)
        fresh.append(
            ReplicaFailure(
                replica=name,
                step=Step.QUIESCE.value,
                reason="Terminating" if replica.terminating else "Unreachable",
                message=(replica.error or "no answer")[:1024],
                since=since,
            )
        )
    return fresh


def record(status: PolicyVersionStatus, results: Iterable[Result], now: dt.datetime) -> PolicyVersionStatus:
    """``status`` with the results folded in: verified wipes, keys removed, failures with the time they began."""
    members = {m.uid: m for m in status.members}
    failures = {f.replica: f for f in status.failures}
    update = status.last_update
    for result in results:
        action = result.action
        if isinstance(action, Wipe):
            name, step = f"store of {action.fleet.name}", Step.WIPE.value
            if result.success and action.fleet.uid in members:
                wiped = {"wiped_epoch": status.epoch}
                members[action.fleet.uid] = members[action.fleet.uid].model_copy(update=wiped)
            if update is not None and result.removed:
                update = update.model_copy(update={"keys_removed": (update.keys_removed or 0) + result.removed})
        elif isinstance(action, Command):
            name, step = action.replica.name, action.step.value
        else:
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
    return status.model_copy(
        update={
            "members": tuple(members.values()),
            "failures": listed[:LISTED_FAILURES],
            "failures_omitted": max(status.failures_omitted, len(listed) - LISTED_FAILURES, 0),
            "last_update": update,
        }
    )


def _counts(replicas: list[Replica], epoch: int) -> ReplicaCounts:
    alive = [r for r in replicas if not r.terminating]
    current = sum(r.status is not None and _current(r.status, epoch) for r in alive)
    closed = sum(r.status is None or r.status.state == "closed" for r in alive)
    return ReplicaCounts(total=len(alive), current=current, closed=closed, summary=f"{current}/{len(alive)}")


def _stamp(
    view: _View,
    status: PolicyVersionStatus,
    pending: list[Fleet],
    replicas: list[Replica],
    actions: list[Action],
) -> tuple[PolicyVersionStatus, list[Note]]:
    """The timeline: a step's time is when the first look found it done everywhere."""
    update = status.last_update
    if update is None or update.resumed_at is not None:
        return status, []
    left = {a.step for a in actions if isinstance(a, Command)}
    if any(r.status is None and not r.newcomer for f in pending for r in f.replicas):
        left.add(Step.QUIESCE)
    now = timestamp(view.now)
    stages: list[tuple[str, str, bool]] = [
        ("quiesced_at", "Quiesced", Step.QUIESCE not in left),
        ("drained_at", "Drained", not left & {Step.QUIESCE, Step.DRAIN}),
        ("invalidated_at", "Invalidated", not left & {Step.QUIESCE, Step.DRAIN, Step.RESET}),
        ("wiped_at", "Wiped", not pending),
        ("resumed_at", "Resumed", not pending and not actions),
    ]
    changes: dict[str, object] = {}
    notes: list[Note] = []
    for field, reason, done in stages:
        if not done:
            break
        if getattr(update, field) is None:
            changes[field] = now
            notes.append(Note(reason, f"epoch {view.epoch}, version {update.version}"))
    if not changes:
        return status, []
    update = update.model_copy(update=changes)
    finished = "resumed_at" in changes
    if finished:
        serving = [r.status for r in replicas if r.status is not None and _current(r.status, view.epoch)]
        pauses = [e.last_pause_seconds for e in serving if e.last_pause_seconds is not None]
        update = update.model_copy(
            update={
                "pause_seconds": round(max(pauses), 6) if pauses else None,
                "replicas": len(serving),
                "keys_removed": update.keys_removed or 0,
            }
        )
        notes[-1] = Note(
            "PolicyCurrent",
            f"version {update.version} is current in epoch {view.epoch}: {len(serving)} replicas, "
            f"{update.keys_removed} keys removed, paused {update.pause_seconds or 0:.3f} s",
        )
        status = status.model_copy(
            update={"version": update.version, "history": (update, *status.history)[:LISTED_HISTORY]}
        )
    return status.model_copy(update={"last_update": update}), notes


def _verdicts(
    view: _View,
    status: PolicyVersionStatus,
    pending: list[Fleet],
    replicas: list[Replica],
    actions: list[Action],
    waits: list[tuple[Replica, Step]],
    waiting_for_weights: bool,
) -> tuple[Verdict, Verdict, Verdict]:
    counts = status.replicas or ReplicaCounts()
    steps = [a.step for a in actions if isinstance(a, Command)]
    store = next((f for f in status.failures if f.step == Step.WIPE.value), None)
    failing = next((f for f in status.failures if f.step != Step.WIPE.value), None)
    unweighed = [r.name for r, step in waits if step is Step.ADMIT]

    if waiting_for_weights:
        current = Verdict(
            "Current",
            "False",
            "WaitingForWeights",
            f"no serving replica reports weight version {view.spec.label!r}, so nothing was changed; push the weights "
            "and set the engines' weight version, or set spec.weights to Unchecked",
        )
    elif pending and store is not None:
        current = Verdict("Current", "False", "StoreUnavailable", f"{store.replica}: {store.reason}: {store.message}")
    elif pending and failing is not None:
        reason = "ReplicaUnreachable" if failing.reason in ("Unreachable", "Terminating") else "ReplicaFailing"
        text = f"{failing.replica}, {failing.step}: {failing.reason}: {failing.message}"
        current = Verdict("Current", "False", reason, text)
    elif pending:
        doing = next(
            (name for step, name in _DOING if step in steps),
            "Wiping" if any(isinstance(a, Wipe) for a in actions) else "Quiescing",
        )
        current = Verdict("Current", "False", doing, f"{doing.lower()} for epoch {view.epoch}")
    elif Step.RESUME in steps or (Step.ADMIT in steps and status.last_update and not status.last_update.resumed_at):
        current = Verdict("Current", "False", "Resuming", f"resuming in epoch {view.epoch}")
    elif any(
        r.status is not None and r.status.state == "open" and not _current(r.status, view.epoch) for r in replicas
    ):
        current = Verdict("Current", "False", "Quiescing", f"a replica is open outside epoch {view.epoch}")
    else:
        text = f"{counts.summary} replicas serve version {status.target_version} in epoch {view.epoch}"
        current = Verdict("Current", "True", "Current", text + (f"; {counts.closed} closed" if counts.closed else ""))

    moving = bool(pending or actions)
    late = moving and view.elapsed > view.spec.deadline_seconds and current.status == "False"
    if late:
        text = f"not finished after {view.elapsed:.0f} s (deadlineSeconds {view.spec.deadline_seconds}); still trying"
        progressing = Verdict("Progressing", "False", "DeadlineExceeded", text)
    elif moving and current.status == "False":
        progressing = Verdict("Progressing", "True", current.reason, f"epoch {view.epoch}")
    else:
        progressing = Verdict("Progressing", "False", "Idle")

    if status.failures:
        first = status.failures[0]
        more = len(status.failures) + status.failures_omitted - 1
        text = f"{first.replica}, {first.step}: {first.reason}" + (f", and {more} more" if more else "")
        degraded = Verdict("Degraded", "True", "StepFailing", text)
    elif unweighed:
        text = f"closed until they report weight version {status.target_version!r}: {', '.join(unweighed[:10])}"
        degraded = Verdict("Degraded", "True", "WaitingForWeights", text)
    elif late:
        degraded = Verdict("Degraded", "True", "DeadlineExceeded", progressing.message)
    else:
        degraded = Verdict("Degraded", "False", "AsExpected")
    return current, progressing, degraded


_DOING = (
    (Step.QUIESCE, "Quiescing"),
    (Step.DRAIN, "Draining"),
    (Step.RESET, "Invalidating"),
)
