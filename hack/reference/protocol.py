"""The picture of a change of policy: what the planner asks for, look by look, drawn from the planner itself."""

from __future__ import annotations

import datetime as dt
from html import escape

from moontide.api.v1alpha1 import Member, PolicyVersionSpec, PolicyVersionStatus, Update
from moontide.cli.rehearsal import Rehearsal, rehearse
from moontide.planning.model import Action, Command, EngineStatus, FenceStatus, Fleet, Observed, Replica, Step
from moontide.planning.protocol import name_of, step_of

_NOW = dt.datetime(2026, 11, 28, tzinfo=dt.UTC)
_AT = "2026-11-28T00:00:00Z"
_REPLICAS = ("chat-0", "chat-1")
_STORE = "store of chat"
_LANES = ("status", *_REPLICAS, _STORE)
WAYS = (
    ("A salted fleet, strategy Barrier", True, {}),
    ("A salted fleet, strategy Fence: nobody pauses", True, {"strategy": "Fence"}),
    ("A plain fleet, or onStoreFailure: Hold: nobody resumes before the wipe is verified", False, {}),
)
_ADMIT_AND_RESUME = f"{Step.ADMIT.value}, {Step.RESUME.value}"
_OPENS = (_ADMIT_AND_RESUME, Step.RESUME.value, Step.FENCE.value)
_COLOURS = {"old": "#c7d2e0", "paused": "#f2c14e", "new": "#7fc97f", "store": "#eceff3", "act": "#8fa9d0"}
_LEFT, _CELL, _GAP, _LANE, _TITLE = 130, 96, 4, 26, 44


def change(salted: bool, more: dict[str, str]) -> Rehearsal:
    """Version 1 is served by two replicas, and 2 is asked for; every call succeeds at once."""
    spec = PolicyVersionSpec.model_validate({"version": 2, "weights": "Unchecked", **more})
    salt = "u/1" if salted else ""
    replicas = tuple(
        Replica(
            name=name,
            pod_uid=name,
            fleet="f",
            address="10.0.0.1:8001",
            container_id=name,
            may_have_served=True,
            status=EngineStatus(
                boot_id=name,
                state="open",
                epoch=1,
                version="1",
                weights_version="1",
                clean=False,
                drained=False,
                running=1,
                salt=salt,
                admit_resumes=True,
                fence=FenceStatus(supported=salted, live=salted),
            ),
        )
        for name in _REPLICAS
    )
    status = PolicyVersionStatus(
        observed_generation=1,
        epoch=1,
        target_version="1",
        version="1",
        members=(Member(name="chat", uid="f", wiped_epoch=1, swept_epoch=1, salted=salted),),
        last_update=Update(epoch=1, version="1", started_at=_AT, resumed_at=_AT, wiped_at=_AT),
    )
    fleet = Fleet(name="chat", uid="f", pool="kv", pool_uid="p", replicas=replicas)
    return rehearse(spec, 2, status, Observed((fleet,), _NOW, policy_uid="u"))


def _said(action: Action) -> str:
    opens = isinstance(action, Command) and bool(action.body.get("resume"))
    return _ADMIT_AND_RESUME if opens else step_of(action).value


def columns(rehearsal: Rehearsal) -> list[dict[str, str]]:
    """Look by look: what is asked of whom, by lane."""
    found = []
    for each in rehearsal.rounds:
        column = {name_of(action): _said(action) for action in each.actions}
        if any(note.reason == "EpochAllotted" for note in each.notes):
            column["status"] = f"epoch {each.epoch}"
        if column:
            found.append(column)
    return found


def _colour(lane: str, step: str, before: str) -> str:
    if lane in ("status", _STORE):
        return "act" if step else "store"
    if step in _OPENS:
        return "new"
    return "paused" if step else before


def _box(x: int, y: int, width: int, colour: str, text: str) -> str:
    shown = f'<text x="{x + width / 2:g}" y="{y + 17}" text-anchor="middle">{escape(text)}</text>' if text else ""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{_LANE - 4}" rx="3" fill="{_COLOURS[colour]}"/>{shown}'


def _panel(title: str, found: list[dict[str, str]], top: int) -> list[str]:
    made = [f'<text x="12" y="{top + 22}" font-weight="bold">{escape(title)}</text>']
    for row, lane in enumerate(_LANES):
        y, colour = top + _TITLE - 10 + row * _LANE, "old"
        made.append(f'<text x="12" y="{y + 17}">{escape(lane)}</text>')
        for number, column in enumerate(found):
            step = column.get(lane, "")
            colour = _colour(lane, step, colour)
            made.append(_box(_LEFT + number * (_CELL + _GAP), y, _CELL, colour, step))
    return made


def picture() -> str:
    """The SVG of all :data:`WAYS`."""
    panels = [(title, columns(change(salted, more))) for title, salted, more in WAYS]
    height = _TITLE + len(_LANES) * _LANE
    width = _LEFT + max(len(found) for _, found in panels) * (_CELL + _GAP) + 8
    total = height * len(panels) + 40
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1b2430">',
        "<title>A change of policy, look by look: what the planner asks of each replica and of the store</title>",
        f'<rect width="{width}" height="{total}" rx="8" fill="#ffffff"/>',
    ]
    for number, (title, found) in enumerate(panels):
        made += _panel(title, found, number * height)
    x, y = 12, height * len(panels) + 8
    for colour, text in (("old", "serves the old epoch"), ("paused", "paused"), ("new", "serves the new epoch")):
        made.append(_box(x, y, 160, colour, text))
        x += 168
    return "\n".join([*made, "</svg>"]) + "\n"
