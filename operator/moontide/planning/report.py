"""What status says of a change: counts, the timeline, conditions. Pure; decides nothing that is done."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from moontide.api.v1alpha1 import PolicyVersionSpec, PolicyVersionStatus, ReplicaCounts, ReplicaFailure, Update
from moontide.planning.model import Note, Replica, Step
from moontide.status import Verdict, timestamp

LISTED_FAILURES = 10
LISTED_HISTORY = 10
STORE_STEPS = frozenset({Step.WIPE.value, Step.COLLECT.value})


@dataclass(frozen=True)
class Look:
    """One look of the planner, as far as people are told of it."""

    spec: PolicyVersionSpec
    now: dt.datetime
    elapsed: float
    """Seconds since the change began."""
    deadline: int
    """Seconds it may take."""
    epoch: int
    preparing: bool
    hold: tuple[str, str] | None
    """Reason and message of a change that is asked for and not begun."""
    replicas: tuple[Replica, ...]
    steps: tuple[Step, ...]
    """Of the calls that are about to be made to engines."""
    wiping: bool
    plain: bool
    """A fleet takes part that needs its keys wiped before it resumes."""
    pending: bool
    """An engine may still serve another epoch, or a plain fleet's keys are not wiped yet."""
    blocked: bool
    """The same, without replicas that are not waited for any longer."""
    unwiped: bool
    """Keys of older epochs may be in a store."""
    waits: tuple[tuple[Replica, Step], ...]
    """Replicas that lack something, and what."""
    loading: tuple[str, ...] = ()
    """Replicas whose next step is to load weights, or to go on with that."""
    awaited_loads: tuple[str, ...] = ()
    """Those of them without which the change is not finished."""

    @property
    def moving(self) -> bool:
        """Something is being done, or waited for, before the epoch is current."""
        return self.blocked or bool(self.steps) or self.wiping or bool(self.awaited_loads)


def counts(replicas: list[Replica], epoch: int) -> ReplicaCounts:
    """How many replicas are where; those on their way out are not counted."""
    alive = [r for r in replicas if not r.terminating]
    current = sum(_current(r, epoch) for r in alive)
    closed = sum(r.status is None or r.status.state == "closed" for r in alive)
    return ReplicaCounts(total=len(alive), current=current, closed=closed, summary=f"{current}/{len(alive)}")


def _current(replica: Replica, epoch: int) -> bool:
    engine = replica.status
    return engine is not None and engine.state == "open" and engine.epoch == epoch


def allotted(epoch: int, text: str) -> tuple[Verdict, ...]:
    """The conditions at the moment in which an epoch is allotted."""
    return (
        Verdict("Current", "False", "Quiescing", text),
        Verdict("Progressing", "True", "Quiescing", f"moving to epoch {epoch}"),
        Verdict("Degraded", "False", "AsExpected"),
    )


def removed(status: PolicyVersionStatus, keys: int) -> PolicyVersionStatus:
    """Count keys that were removed, in the change at hand and where it stands in the history."""
    update = status.last_update
    if update is None or not keys:
        return status
    return _written(status, update.model_copy(update={"keys_removed": (update.keys_removed or 0) + keys}))


def _written(status: PolicyVersionStatus, update: Update) -> PolicyVersionStatus:
    history = tuple(update if each.epoch == update.epoch else each for each in status.history)
    return status.model_copy(update={"last_update": update, "history": history})


def timeline(look: Look, status: PolicyVersionStatus) -> tuple[PolicyVersionStatus, list[Note]]:
    """The change's times: that of a step is when the first look found it done everywhere."""
    update = status.last_update
    if update is None or (update.resumed_at is not None and update.wiped_at is not None):
        return status, []
    left = set(look.steps)
    if any(step is Step.QUIESCE for _, step in look.waits) and look.blocked:
        left.add(Step.QUIESCE)
    still = not left & {Step.QUIESCE, Step.FENCE}
    loaded = not look.awaited_loads
    drained = still and Step.DRAIN not in left
    invalidated = drained and not left & {Step.RESET, *(() if look.plain else (Step.ADMIT,))}
    resumed = not look.moving and not look.preparing and look.hold is None
    stages: list[tuple[str, str, bool]] = [("quiesced_at", "Quiesced", still)]
    if look.plain:
        stages.append(("drained_at", "Drained", drained))
    loads = [("loaded_at", "Loaded", loaded)] if look.spec.weights == "Load" else []
    stages += [] if look.plain else loads
    stages.append(("invalidated_at", "Invalidated", invalidated and not (look.preparing and not look.plain)))
    ends = [("resumed_at", "Resumed", resumed), ("wiped_at", "Wiped", not look.unwiped and not look.preparing)]
    stages += [ends[1], *loads, ends[0]] if look.plain else ends
    changes: dict[str, object] = {}
    notes: list[Note] = []
    for field, reason, done in stages:
        if not done:
            break
        if getattr(update, field) is None:
            changes[field] = timestamp(look.now)
            notes.append(Note(reason, f"epoch {look.epoch}, version {update.version}"))
    if not changes:
        return status, []
    update = update.model_copy(update=changes)
    if "wiped_at" in changes:
        update = update.model_copy(update={"keys_removed": update.keys_removed or 0})
        text = f"epoch {look.epoch}: {update.keys_removed} keys of older epochs were removed"
        notes = [Note(note.reason, text) if note.reason == "Wiped" else note for note in notes]
    if "resumed_at" in changes:
        update, said = _finished(look, update)
        notes = [said if note.reason == "Resumed" else note for note in notes]
        history = (update, *status.history)[:LISTED_HISTORY]
        status = status.model_copy(update={"version": update.version, "history": history})
    return _written(status, update), notes


def _finished(look: Look, update: Update) -> tuple[Update, Note]:
    serving = [r.status for r in look.replicas if r.status is not None and _current(r, look.epoch)]
    pauses = [e.last_pause_seconds for e in serving if e.last_pause_seconds is not None]
    if look.spec.strategy == "Fence" and not look.plain:
        pauses = []
    update = update.model_copy(
        update={"pause_seconds": round(max(pauses), 6) if pauses else None, "replicas": len(serving)}
    )
    return update, Note(
        "PolicyCurrent",
        f"version {update.version} is current in epoch {look.epoch}: {len(serving)} replicas, "
        f"paused {update.pause_seconds or 0:.3f} s",
    )


def verdicts(look: Look, status: PolicyVersionStatus) -> tuple[Verdict, ...]:
    """The conditions of this look."""
    current = _is_current(look, status)
    late = look.moving and look.elapsed > look.deadline and current.status == "False"
    if late:
        text = f"not finished after {look.elapsed:.0f} s (deadline {look.deadline} s); still trying"
        progressing = Verdict("Progressing", "False", "DeadlineExceeded", text)
    elif (look.moving or look.preparing) and current.status == "False":
        progressing = Verdict("Progressing", "True", current.reason, f"epoch {look.epoch}")
    else:
        progressing = Verdict("Progressing", "False", "Idle")
    found = (current, progressing, _is_degraded(look, status, progressing if late else None))
    preparation = status.preparation
    if preparation is None:
        return found
    if preparation.outcome:
        prepared = Verdict("Prepared", "False", preparation.outcome, f"version {preparation.version}")
    elif preparation.prepared_at is None:
        prepared = Verdict("Prepared", "False", "Quiescing", f"version {preparation.version} must not be pushed yet")
    else:
        prepared = Verdict("Prepared", "True", "Prepared", f"version {preparation.version} may be pushed now")
    return (*found, prepared)


def _is_current(look: Look, status: PolicyVersionStatus) -> Verdict:
    tally = status.replicas or ReplicaCounts()
    store = next((f for f in status.failures if f.step == Step.WIPE.value), None)
    failing = next((f for f in status.failures if f.step not in STORE_STEPS), None)
    unweighed = [r.name for r, step in look.waits if step is Step.ADMIT and _open_elsewhere(r, look.epoch)]
    if look.hold is not None:
        return Verdict("Current", "False", *look.hold)
    if look.preparing and status.preparation is not None and status.preparation.prepared_at is not None:
        text = f"version {status.preparation.version} is being pushed; nothing is admitted until it is committed"
        return Verdict("Current", "False", "Preparing", text)
    if look.pending and store is not None:
        return _is_held_by_store(look, store)
    if look.pending and failing is not None:
        silent = failing.reason in ("Unreachable", "Terminating", "EngineUnresponsive")
        text = f"{failing.replica}, {failing.step}: {failing.reason}: {failing.message}"
        return Verdict("Current", "False", "ReplicaUnreachable" if silent else "ReplicaFailing", text)
    if look.pending and unweighed:
        text = f"serving an older epoch until they report weight version {status.target_version!r}: "
        return Verdict("Current", "False", "WaitingForWeights", text + ", ".join(unweighed[:10]))
    if look.pending:
        doing = next((name for step, name in _DOING if step in look.steps), "Wiping" if look.wiping else "Quiescing")
        busy = [r.name for r in look.replicas if _runs_on(r, look.epoch)]
        said = f"; requests of an older epoch run on {', '.join(busy[:10])}" if busy else ""
        return Verdict("Current", "False", doing, f"{doing.lower()} for epoch {look.epoch}{said}")
    loading = look.awaited_loads or (() if tally.current else look.loading)
    if loading:
        return _is_loading(status, loading)
    lacking = [r.name for r, step in look.waits if step is Step.ADMIT]
    if lacking and not tally.current:
        text = f"nobody serves: closed until they report weight version {status.target_version!r}: "
        return Verdict("Current", "False", "WaitingForWeights", text + ", ".join(lacking[:10]))
    unfinished = status.last_update is not None and status.last_update.resumed_at is None
    if Step.RESUME in look.steps or (Step.ADMIT in look.steps and unfinished):
        return Verdict("Current", "False", "Resuming", f"resuming in epoch {look.epoch}")
    if any(_open_elsewhere(r, look.epoch) for r in look.replicas):
        return Verdict("Current", "False", "Quiescing", f"a replica is open outside epoch {look.epoch}")
    text = f"{tally.summary} replicas serve version {status.target_version} in epoch {look.epoch}"
    return Verdict("Current", "True", "Current", text + (f"; {tally.closed} closed" if tally.closed else ""))


def _is_held_by_store(look: Look, store: ReplicaFailure) -> Verdict:
    text = f"{store.replica}: {store.reason}: {store.message}"
    if look.spec.on_store_failure == "Detach":
        text += "; with onStoreFailure Detach, too, a fleet waits whose keys do not all carry their epoch yet"
    return Verdict("Current", "False", "StoreUnavailable", text)


def _is_loading(status: PolicyVersionStatus, loading: tuple[str, ...]) -> Verdict:
    failed = [f for f in status.failures if f.step == Step.LOAD.value and f.replica in loading]
    if failed:
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return Verdict("Current", "False", "LoadFailed", f"{failed[0].replica}{more}: {failed[0].message}")
    text = f"loading the weights of version {status.target_version}: "
    return Verdict("Current", "False", "Loading", text + ", ".join(loading[:10]))


def _open_elsewhere(replica: Replica, epoch: int) -> bool:
    return replica.status is not None and replica.status.state == "open" and replica.status.epoch != epoch


def _runs_on(replica: Replica, epoch: int) -> bool:
    engine = replica.status
    return engine is not None and engine.state == "paused" and engine.epoch != epoch and engine.in_flight > 0


def _is_degraded(look: Look, status: PolicyVersionStatus, late: Verdict | None) -> Verdict:
    unweighed = [r.name for r, step in look.waits if step is Step.ADMIT]
    if status.failures:
        first = status.failures[0]
        more = len(status.failures) + status.failures_omitted - 1
        text = f"{first.replica}, {first.step}: {first.reason}" + (f", and {more} more" if more else "")
        reason = "StoreUnavailable" if first.step == Step.COLLECT.value else "StepFailing"
        return Verdict("Degraded", "True", reason, text)
    if unweighed:
        text = f"waiting until they report weight version {status.target_version!r}: {', '.join(unweighed[:10])}"
        return Verdict("Degraded", "True", "WaitingForWeights", text)
    if late is not None:
        return Verdict("Degraded", "True", "DeadlineExceeded", late.message)
    return Verdict("Degraded", "False", "AsExpected")


_DOING = (
    (Step.QUIESCE, "Quiescing"),
    (Step.FENCE, "Fencing"),
    (Step.DRAIN, "Draining"),
    (Step.RESET, "Invalidating"),
    (Step.LOAD, "Loading"),
)
