"""`explain` and `bump --dry-run`: what the planner sees and would do next, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moontide.cli.gather import FleetSight, PolicySight, Sight
from moontide.cli.rehearsal import Rehearsal
from moontide.cli.screen import rows, trouble
from moontide.planning import protocol
from moontide.planning.model import Command

_WEIGHTS = {
    "External": "a trainer pushes weights; only who reports them is admitted",
    "Load": "engines load their weights",
    "Unchecked": "weights are not looked at",
}


def looks(rehearsal: Rehearsal) -> list[str]:
    """The looks of a rehearsal, numbered."""
    lines = [rehearsal.decision]
    for number, each in enumerate(rehearsal.rounds, 1):
        told = each.lines()
        lines += [f"  {number:>2}. {text}" if first else f"      {text}" for first, text in _first(told)]
    if not rehearsal.rounds:
        lines.append("  nothing to do")
    lines.append(
        f"then {rehearsal.end}" if rehearsal.settled else f"not at an end after so many looks; {rehearsal.end}"
    )
    return lines


def _first(texts: Iterable[str]) -> Iterable[tuple[bool, str]]:
    return ((number == 0, text) for number, text in enumerate(texts))


def policy(sight: Sight, seen: PolicySight, rehearsal: Rehearsal) -> list[str]:
    """Everything that `explain` prints of one policy."""
    spec, status = seen.resource.model.spec, seen.status
    # A change that is held back is looked at: only the conditions say so.
    looked = (status.observed_generation, *(each.observed_generation for each in status.conditions))
    fresh = seen.resource.meta.generation in looked
    lines = [
        f"{seen.full_name}: strategy {spec.strategy}, weights {spec.weights} ({_WEIGHTS[spec.weights]})",
        f"  asked for   version {spec.label}" + ("" if fresh else ", which the operator has not looked at yet"),
        f"  served      version {status.version or 'none'}, epoch {status.epoch}",
    ]
    if spec.preparing_label is not None:
        lines.append(f"  preparing   version {spec.preparing_label}")
    if spec.suspend:
        lines.append("  suspended   nothing begins until spec.suspend is false")
    lines += [
        f"  {each.type:<11} {each.status} {each.reason}: {each.message}".rstrip(": ") for each in status.conditions
    ]
    for failure in status.failures:
        what = f"{failure.replica}, {failure.step}: {failure.reason} {failure.message}".rstrip()
        lines.append(f"  failing     {what} (since {failure.since}); {_remedy(seen)}")
    followers = sight.following(seen)
    if not followers:
        lines += ["", "no fleet follows it: name it in spec.policyRef of an InferenceDeployment"]
    for each in followers:
        lines += ["", *fleet(each, seen, rehearsal)]
    lines += ["", f"the planner {looks(rehearsal)[0]}", *looks(rehearsal)[1:]]
    lines += assumptions(followers)
    lines += [f"not seen: {each}" for each in sight.unseen]
    return lines


def _remedy(seen: PolicySight) -> str:
    spec = seen.resource.model.spec
    text = {
        "Replace": "its pod is deleted",
        "Isolate": "the others go on without it",
        "Hold": "all wait for a person",
    }[spec.on_replica_failure]
    return f"after {spec.replica_timeout_seconds} s {text} (onReplicaFailure: {spec.on_replica_failure})"


def fleet(sight: FleetSight, seen: PolicySight, rehearsal: Rehearsal) -> list[str]:
    """One fleet: how it is reset, and each replica with its next step."""
    member = next((each for each in seen.status.members if each.uid == sight.resource.meta.uid), None)
    if member is not None and member.salted:
        how = "its keys carry the epoch: old ones are never found, and are collected when all is done"
    else:
        how = "its keys are wiped, and that is verified, before anybody resumes"
    lines = [f"fleet {sight.full_name}: {how}"]
    lines += [f"  {text}" for text in trouble(sight)]
    steps = _next_steps(rehearsal)
    for each in rows((sight,)):
        at = "" if each.epoch is None else f" in epoch {each.epoch}, version {each.version or 'none'}"
        said = f" ({each.reason})" if each.reason else ""
        star = " *" if each.source == "status" else ""
        names = (each.replica, f"{sight.resource.meta.namespace}/{each.replica}")
        step = next((steps[name] for name in names if name in steps), None)
        then = f"; next: {step}" if step else "; nothing to do"
        lines.append(f"  {each.replica}{star}: {each.state}{at}{said}{then}")
    return lines


def _next_steps(rehearsal: Rehearsal) -> dict[str, str]:
    """The first call to each replica."""
    found: dict[str, str] = {}
    for each in rehearsal.rounds:
        for action in each.actions:
            if isinstance(action, Command):
                found.setdefault(action.replica.name, f"{action.step.value}, in epoch {action.epoch}")
    return found


def assumptions(fleets: Iterable[FleetSight]) -> list[str]:
    """What the plan rests on that was not seen."""
    taken = sorted(name for each in fleets for name in each.assumed)
    if not taken:
        return []
    more = f" and {len(taken) - 6} more" if len(taken) > 6 else ""
    return [f"* taken as status says, not asked: {', '.join(taken[:6])}{more}"]


def wire(sight: Sight, seen: PolicySight, rehearsal: Rehearsal) -> dict[str, Any]:
    """The same as JSON."""
    observed = sight.observed(seen)
    spec, meta = seen.resource.model.spec, seen.resource.meta
    chosen = protocol.decide(
        spec, meta.generation, seen.status, [r for f in observed.fleets for r in f.replicas], observed.now
    )
    return {
        "policy": seen.full_name,
        "version": spec.label,
        "served": seen.status.version,
        "epoch": seen.status.epoch,
        "decides": type(chosen).__name__ if chosen is not None else "Nothing",
        "conditions": [each.to_wire() for each in seen.status.conditions],
        "failures": [each.to_wire() for each in seen.status.failures],
        "replicas": [each.wire() for each in rows(sight.following(seen))],
        "plan": rehearsal.wire(),
        "unseen": list(sight.unseen),
    }
