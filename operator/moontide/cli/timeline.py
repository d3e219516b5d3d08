"""`timeline`: when each replica did what in a change. Pure.

The times of a replica's steps are in the operator's log: one line a call, with ``began`` and ``seconds``. Status has
the times of the fleet only, as what is written there is written during the pause; so without the log there is one bar.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from moontide.api.v1alpha1 import Update
from moontide.cli.history import STAGES, after, started

COLOURS = {
    "quiesce": "#e09f3e",
    "fence": "#8d6fc4",
    "drain": "#c8553d",
    "reset": "#3d7ea6",
    "load": "#588157",
    "wipe": "#7a3b69",
    "collect": "#b59fb0",
    "admit": "#2a9d8f",
    "resume": "#7cb518",
    "close": "#6c757d",
}
"""A step a colour."""
OTHER = "#adb5bd"
_LETTERS = {"quiesce": "q", "fence": "f", "drain": "d", "reset": "r", "load": "l", "wipe": "w", "collect": "c"} | {
    "admit": "a",
    "resume": "o",
    "close": "x",
}
_STAGE_STEPS = {
    "quiesced_at": "quiesce",
    "drained_at": "drain",
    "loaded_at": "load",
    "invalidated_at": "reset",
    "wiped_at": "wipe",
    "resumed_at": "resume",
}
SLACK_SECONDS = 0.05
"""How much after the last stage of a change a step may begin and still be one of it."""
FLEET = "whole fleet"


@dataclass(frozen=True)
class Span:
    """One call to one replica, or one stage of the fleet. Seconds since the change began."""

    step: str
    begin: float
    end: float
    ok: bool = True
    said: str = ""


@dataclass(frozen=True)
class Bar:
    """One replica, or the store of a fleet."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """One change."""

    policy: str
    update: Update
    bars: tuple[Bar, ...]
    source: str
    """Where the times come from, for people."""

    @property
    def seconds(self) -> float:
        """How long it took, as far as it is drawn."""
        ends = [span.end for bar in self.bars for span in bar.spans]
        return max([*ends, *(seconds for _, seconds in self.marks), 0.001])

    @property
    def marks(self) -> tuple[tuple[str, float], ...]:
        """The fleet's stages, in the order in which they came."""
        found = [(name, seconds) for field, name in STAGES if (seconds := after(self.update, field)) is not None]
        return tuple(sorted(found, key=lambda each: each[1]))

    @property
    def title(self) -> str:
        """One line on the change."""
        update, paused = self.update, ""
        if update.pause_seconds is not None:
            paused = f", paused {update.pause_seconds:.3f} s"
        state = "" if update.resumed_at is not None else ", not finished"
        return f"{self.policy}: version {update.version}, epoch {update.epoch}{paused}{state}"

    def wire(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "policy": self.policy,
            "change": self.update.to_wire(),
            "source": self.source,
            "bars": [
                {
                    "name": bar.name,
                    "steps": [
                        {"step": s.step, "begin": round(s.begin, 4), "end": round(s.end, 4), "ok": s.ok, "said": s.said}
                        for s in bar.spans
                    ],
                }
                for bar in self.bars
            ],
        }


def of_fleet(policy: str, update: Update, why: str = "") -> Timeline:
    """One bar, of what status says: a stage lasts from the one before it."""
    stages = [(seconds, field) for field in _STAGE_STEPS if (seconds := after(update, field)) is not None]
    spans, begin, resumed = [], 0.0, after(update, "resumed_at")
    for seconds, field in sorted(stages):
        late = field == "wiped_at" and resumed is not None and seconds > resumed
        spans.append(Span("collect" if late else _STAGE_STEPS[field], begin, seconds))
        begin = seconds
    source = "times of the whole fleet, from status" + (f" ({why})" if why else "")
    return Timeline(policy, update, (Bar(FLEET, tuple(spans)),) if spans else (), source)


def of_log(policy: str, update: Update, lines: Iterable[str]) -> Timeline | None:
    """A bar a replica, from lines of the operator's log; None where they say nothing of the change."""
    found: dict[str, list[Span]] = {}
    ends = [seconds for field, _ in STAGES if (seconds := after(update, field)) is not None]
    finished = update.resumed_at is not None and update.wiped_at is not None
    last = max(ends, default=0.0) + SLACK_SECONDS if finished else float("inf")
    for line in lines:
        parsed = _call(line, f"PolicyVersion/{policy}", update)
        if parsed is None or parsed[1].begin > last or parsed[1].begin < -1.0:
            continue
        name, span = parsed
        found.setdefault(name, []).append(span)
    if not found:
        return None
    bars = tuple(
        Bar(name, tuple(sorted(spans, key=lambda span: span.begin)))
        for name, spans in sorted(found.items(), key=lambda each: (each[0].startswith("store of "), each[0]))
    )
    return Timeline(policy, update, bars, "calls to each replica, from the operator's log")


def _call(line: str, resource: str, update: Update) -> tuple[str, Span] | None:
    """Whose call a line is about, and when it was; None where it is about none of the change."""
    try:
        said = json.loads(line)
        if not isinstance(said, dict) or said.get("resource") != resource or said.get("epoch") != update.epoch:
            return None
        if "replica" not in said or "seconds" not in said:
            return None
        seconds = float(said["seconds"])
        moment = said.get("began") or said["time"]
        at = dt.datetime.fromisoformat(str(moment).replace("Z", "+00:00"))
        begin = (at - started(update)).total_seconds() - (0.0 if "began" in said else seconds)
    except (ValueError, KeyError, TypeError):
        return None
    outcome = str(said.get("message", "")).partition(": ")[2]
    return str(said["replica"]), Span(str(said["step"]), begin, begin + seconds, outcome == "done", outcome)


def steps_of(timeline: Timeline) -> list[str]:
    """The steps that occur, in the order of the colours."""
    there = {span.step for bar in timeline.bars for span in bar.spans}
    return [step for step in COLOURS if step in there] + sorted(there - set(COLOURS))


def render(timeline: Timeline, columns: int = 72) -> RenderableType:
    """For a terminal: a line a replica, a letter and a colour a step."""
    parts: list[RenderableType] = [Text(timeline.title, "bold")]
    if not timeline.bars:
        return Group(*parts, Text("no step is done yet"))
    width = max(len(bar.name) for bar in timeline.bars)
    total = timeline.seconds
    for bar in timeline.bars:
        line = Text(f"  {bar.name:<{width}}  ")
        cells: list[Span | None] = [None] * columns
        for span in bar.spans:
            first = min(columns - 1, max(0, int(span.begin / total * columns)))
            last = min(columns, max(first + 1, round(span.end / total * columns)))
            cells[first:last] = [span] * (last - first)
        for cell in cells:
            if cell is None:
                line.append("·", "dim")
            else:
                colour = COLOURS.get(cell.step, OTHER)
                line.append(_LETTERS.get(cell.step, "?") if cell.ok else "!", f"white on {colour}")
        last_end = max((span.end for span in bar.spans), default=0.0)
        line.append(f"  {last_end:.3f} s")
        parts.append(line)
    legend = Text("  " + " " * width + "  ")
    for step in steps_of(timeline):
        legend.append(_LETTERS.get(step, "?"), f"white on {COLOURS.get(step, OTHER)}")
        legend.append(f" {step}  ")
    parts.append(legend)
    told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in timeline.marks)
    parts.append(Text(f"  {told or 'no stage is done yet'}"))
    parts.append(Text(f"  {timeline.source}", "dim"))
    return Group(*parts)
