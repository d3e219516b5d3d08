"""The chart's dashboard as a picture: its own panels, drawn from what Prometheus answered to its own queries.

No Grafana draws it. The recording is of a real run: see tests/integration/test_dashboard.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict
from xml.sax.saxutils import escape

from hack.dashboard import dashboard

CELL, ROW, GAP, EDGE, HEAD = 50, 26, 8, 12, 58
PAPER, CARD, INK, FAINT, GRID = "#f4f6f8", "#ffffff", "#1f2933", "#52606d", "#e4e7eb"
COLOURS = ("#2f6fde", "#d9822b", "#2a9d5c", "#b4418e", "#6b57d2", "#c23030", "#1f8a99", "#8a6d3b")
POINTS = 150
_LEGENDS = 7
_STEPS = (1, 2, 2.5, 5, 10)


class Asked(TypedDict):
    """A query of the dashboard, and the series that Prometheus answered with."""

    expr: str
    series: list[dict[str, Any]]


class Recording(TypedDict):
    """Answers for one stretch of time, in seconds since 1970."""

    start: float
    end: float
    step: float
    answers: list[Asked]


Point = tuple[float, float]


def window(began: float, ended: float) -> tuple[float, float, float]:
    """Start, end and step for ``query_range``: whole steps, :data:`POINTS` of them at most."""
    step = max(1.0, math.ceil((ended - began) / POINTS))
    return math.floor(began / step) * step, math.floor(ended / step) * step, step


def legend(template: str, labels: Mapping[str, str]) -> str:
    """A legend with the labels of one series in it, as Grafana fills it in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template) or "value"


def number(value: float, unit: str) -> str:
    """A value for people."""
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"
    more = {"cps": "/s", "reqps": "/s"}.get(unit, "")
    return f"{value:.3g}{more}"


def ceiling(highest: float) -> tuple[float, float]:
    """The top of an axis that begins at zero, and the distance of its lines."""
    if highest <= 0:
        return 1.0, 0.5
    size = 10 ** math.floor(math.log10(highest / 4))
    line = next(size * each for each in _STEPS if size * each * 4 >= highest * (1 - 1e-9))
    return line * math.ceil(highest / line - 1e-9), line


def svg(recording: Recording) -> str:
    """The picture."""
    board = dashboard()
    answers = {each["expr"]: each["series"] for each in recording["answers"]}
    panels = board["panels"]
    width = 24 * CELL + 2 * EDGE
    height = HEAD + EDGE + ROW * max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels)
    minutes = (recording["end"] - recording["start"]) / 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" role="img">',
        f"<title>{escape(board['title'])}</title>",
        f'<rect x="0" y="0" width="{width}" height="{height}" fill="{PAPER}"/>',
        _words(EDGE + GAP / 2, 26, board["title"], 17),
        _words(
            EDGE + GAP / 2,
            46,
            f"the dashboard's queries, as Prometheus answered them over {minutes:.1f} minutes; drawn without Grafana",
            12,
            FAINT,
        ),
    ]
    for panel in panels:
        place = panel["gridPos"]
        box = (
            EDGE + place["x"] * CELL + GAP / 2,
            HEAD + place["y"] * ROW + GAP / 2,
            place["w"] * CELL - GAP,
            place["h"] * ROW - GAP,
        )
        lines += _panel(panel, answers, recording, box)
    return "\n".join([*lines, "</svg>", ""])


def _panel(
    panel: dict[str, Any],
    answers: Mapping[str, list[dict[str, Any]]],
    recording: Recording,
    box: tuple[float, float, float, float],
) -> list[str]:
    x, y, width, height = box
    unit = panel["fieldConfig"]["defaults"]["unit"]
    drawn = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{CARD}" stroke="{GRID}"/>']
    drawn.append(_words(x + 10, y + 19, panel["title"], 12))
    series = [
        (legend(target["legendFormat"], each["metric"]), [(float(t), float(v)) for t, v in each["values"]])
        for target in panel["targets"]
        for each in answers.get(target["expr"], [])
    ]
    series = sorted(((name, _known(points)) for name, points in series), key=lambda each: each[0])
    series = [(name, points) for name, points in series if points]
    if not series:
        return [*drawn, _words(x + width / 2, y + height / 2 + 10, "no data in this run", 12, FAINT, "middle")]
    if panel["type"] == "stat":
        last = number(series[0][1][-1][1], unit)
        return [*drawn, _words(x + width / 2, y + height / 2 + 20, last, 28, COLOURS[2], "middle")]
    rows = math.ceil(min(len(series), _LEGENDS) / 3)
    inner = (x + 62, y + 32, width - 74, height - 60 - 16 * rows)
    return [*drawn, *_axes(series, recording, inner, unit), *_legends(series, (x, y, width, height), rows)]


def _known(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if not math.isnan(point[1])]


def _axes(
    series: Sequence[tuple[str, list[Point]]],
    recording: Recording,
    box: tuple[float, float, float, float],
    unit: str,
) -> list[str]:
    x, y, width, height = box
    top, line = ceiling(max(value for _, points in series for _, value in points))
    whole = recording["end"] - recording["start"]

    def across(at: float) -> float:
        return x + (at - recording["start"]) / whole * width

    def up(value: float) -> float:
        return y + height - value / top * height

    drawn = []
    for index in range(round(top / line) + 1):
        level = up(index * line)
        drawn.append(f'<path d="M{x:.1f} {level:.1f}H{x + width:.1f}" stroke="{GRID}"/>')
        drawn.append(_words(x - 6, level + 4, number(index * line, unit), 10, FAINT, "end"))
    tick = next((each for each in (5, 10, 15, 30, 60, 120, 300) if whole / each <= 8), 600)
    for index in range(int(whole / tick) + 1):
        minute, second = divmod(index * tick, 60)
        place = across(recording["start"] + index * tick)
        drawn.append(_words(place, y + height + 14, f"{minute}:{second:02d}", 10, FAINT, "middle"))
    for index, (_, points) in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        path, before = "", None
        for at, value in points:
            pen = "L" if before is not None and at - before <= 1.5 * recording["step"] else "M"
            path += f"{pen}{across(at):.1f} {up(value):.1f}"
            before = at
        drawn.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linecap="round"/>')
    return drawn


def _legends(series: Sequence[tuple[str, list[Point]]], box: tuple[float, float, float, float], rows: int) -> list[str]:
    x, y, width, height = box
    names = [name for name, _ in series[:_LEGENDS]]
    if len(series) > _LEGENDS:
        names[-1] = f"and {len(series) - _LEGENDS + 1} more"
    drawn = []
    for index, name in enumerate(names):
        left = x + 16 + (index % 3) * (width - 24) / 3
        base = y + height - 10 - 16 * (rows - 1 - index // 3)
        drawn.append(
            f'<rect x="{left:g}" y="{base - 6:g}" width="10" height="3" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        drawn.append(_words(left + 15, base, name, 11, FAINT))
    return drawn


def _words(x: float, y: float, text: str, size: int, fill: str = INK, anchor: str = "start") -> str:
    more = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{more}>{escape(text)}</text>'
