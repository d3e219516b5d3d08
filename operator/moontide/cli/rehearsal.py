"""What the planner would do, look by look, if every call succeeded. Pure: the same planner, and engines that obey."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from moontide.api.v1alpha1 import PolicyVersionSpec, PolicyVersionStatus
from moontide.planning import protocol
from moontide.planning.model import Action, Command, EngineStatus, Note, Observed, Replace, Replica, Result, Step, Wipe

LOOKS = 40
LOOK_SECONDS = 0.05
LISTED = 6


@dataclass(frozen=True)
class Round:
    """One look: what the planner says and does."""

    epoch: int
    actions: tuple[Action, ...]
    notes: tuple[Note, ...]

    def lines(self) -> list[str]:
        """In words, a line a kind of call."""
        told = [f"{note.reason}: {note.message}" for note in self.notes if note.reason in _TOLD]
        by_step: dict[Step, list[Action]] = {}
        for action in self.actions:
            by_step.setdefault(protocol.step_of(action), []).append(action)
        return told + [f"{step.value} {_names(actions)}{_more(step, actions[0])}" for step, actions in by_step.items()]

    def wire(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "epoch": self.epoch,
            "notes": [{"reason": note.reason, "message": note.message} for note in self.notes],
            "actions": [{"step": protocol.step_of(a).value, "of": protocol.name_of(a)} for a in self.actions],
        }


_TOLD = frozenset({"EpochAllotted", "FenceUnsupported", "PreparationAborted", "PreparationExpired", "Prepared"})


def _names(actions: Iterable[Action]) -> str:
    names = sorted(protocol.name_of(each) for each in actions)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _more(step: Step, first: Action) -> str:
    body = first.body if isinstance(first, Command) else {}
    if step is Step.QUIESCE:
        wait = {"wait": "wait for requests that run", "abort": "abort requests that run", "keep": "keep requests"}
        return f" ({wait.get(str(body.get('mode')), '')})"
    if step is Step.LOAD:
        return f" ({body.get('source')})"
    if step is Step.CLOSE:
        return f" ({body.get('reason')})"
    said = ["with the epoch in the keys"] if step in (Step.ADMIT, Step.FENCE) and "salt" in body else []
    said += ["and resume"] if body.get("resume") else []
    return f" ({', '.join(said)})" if said else ""


@dataclass(frozen=True)
class Rehearsal:
    """All looks until the planner has nothing to do."""

    rounds: tuple[Round, ...]
    status: PolicyVersionStatus
    """As it would be at the end."""
    decision: str
    """What the first look decides, and why."""
    settled: bool
    """The planner came to an end; not so after :data:`LOOKS` looks."""

    @property
    def end(self) -> str:
        """The condition ``Current`` at the end."""
        found = next((each for each in self.status.conditions if each.type == "Current"), None)
        return "Current is not known" if found is None else f"Current={found.status} {found.reason}: {found.message}"

    def wire(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "decision": self.decision,
            "looks": [each.wire() for each in self.rounds],
            "end": [each.to_wire() for each in self.status.conditions],
            "settled": self.settled,
        }


def decision(spec: PolicyVersionSpec, generation: int, status: PolicyVersionStatus, observed: Observed) -> str:
    """Whether an epoch would be allotted now, and why."""
    replicas = [replica for fleet in observed.fleets for replica in fleet.replicas]
    chosen = protocol.decide(spec, generation, status, replicas, observed.now)
    if isinstance(chosen, protocol.Allotment):
        return f"begins a new epoch: {chosen.why}"
    if chosen is not None:
        return f"begins nothing, {chosen.reason}: {chosen.message}"
    return "begins no new epoch: what is asked for has one"


def rehearse(spec: PolicyVersionSpec, generation: int, status: PolicyVersionStatus, observed: Observed) -> Rehearsal:
    """Look, plan and act until there is nothing to do, as if every call succeeded at once."""
    first = decision(spec, generation, status, observed)
    rounds: list[Round] = []
    for _ in range(LOOKS):
        plan = protocol.plan(spec, generation, status, observed)
        rounds.append(Round(plan.status.epoch, plan.actions, plan.notes))
        status = plan.status
        results = [outcome(action) for action in plan.actions]
        status = protocol.record(status, results, observed.now)
        acted = any(result.success for result in results)
        if not acted and plan.requeue_after > protocol.BUSY_REQUEUE:
            return Rehearsal(_telling(rounds), status, first, True)
        observed = _after(observed, [result for result in results if result.success])
    return Rehearsal(_telling(rounds), status, first, False)


def _telling(rounds: Iterable[Round]) -> tuple[Round, ...]:
    return tuple(each for each in rounds if each.actions or each.notes)


def outcome(action: Action) -> Result:
    """What an action comes to when nothing goes wrong."""
    if isinstance(action, Command) and action.replica.status is None:
        return Result(action, False, "Unreachable", "the engine did not answer its status")
    if isinstance(action, Wipe) and action.fleet.pool is not None and action.fleet.pool_uid is None:
        return Result(action, False, "PoolNotFound", f"KVCachePool {action.fleet.pool} does not exist")
    return Result(action, True, "Done")


def _after(observed: Observed, results: Iterable[Result]) -> Observed:
    changes: dict[str, EngineStatus] = {}
    gone: set[str] = set()
    for result in results:
        action = result.action
        if isinstance(action, Replace):
            gone.add(action.replica.name)
        elif isinstance(action, Command) and action.replica.status is not None:
            before = changes.get(action.replica.name, action.replica.status)
            changes[action.replica.name] = before.model_copy(update=_effect(action))
    fleets = tuple(
        replace(fleet, replicas=tuple(_moved(each, changes) for each in fleet.replicas if each.name not in gone))
        for fleet in observed.fleets
    )
    return replace(observed, fleets=fleets, now=observed.now + dt.timedelta(seconds=LOOK_SECONDS))


def _moved(replica: Replica, changes: dict[str, EngineStatus]) -> Replica:
    engine = changes.get(replica.name)
    if engine is None:
        return replica
    return replace(replica, status=engine, may_have_served=replica.may_have_served or engine.state != "closed")


def _effect(command: Command) -> dict[str, object]:
    """What a command changes in an engine that obeys (docs/engine-admin-api.md)."""
    engine, body = command.replica.status, command.body
    assert engine is not None
    moved: dict[str, object] = {"command_epoch": command.epoch}
    if command.step is Step.QUIESCE:
        paused = {"state": "paused"} if engine.state == "open" else {}
        return {**moved, **paused, "running": 0, "in_flight": 0}
    if command.step is Step.DRAIN:
        return {**moved, "drained": True}
    if command.step is Step.RESET:
        return {**moved, "clean": True}
    if command.step is Step.LOAD:
        return {**moved, "weights_version": body.get("version"), "loading": None}
    if command.step in (Step.ADMIT, Step.FENCE):
        salt = {"salt": body["salt"]} if "salt" in body else {}
        state = "paused" if command.step is Step.ADMIT else engine.state
        moved |= {**salt, "state": state, "epoch": command.epoch, "version": body.get("version"), "reason": ""}
    if command.step is Step.RESUME or body.get("resume"):
        return {**moved, "state": "open", "clean": False, "drained": False}
    if command.step is Step.CLOSE:
        return {**moved, "state": "closed", "reason": body.get("reason"), "running": 0, "in_flight": 0}
    return moved
