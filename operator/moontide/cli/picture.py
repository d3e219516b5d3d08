"""A timeline as a picture: one list of shapes, written as SVG by hand, or as PNG by pillow."""

from __future__ import annotations

import importlib
import importlib.util
import io
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from moontide.cli.errors import CliError
from moontide.cli.timeline import COLOURS, OTHER, Timeline, steps_of

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 960, 190, 90, 62, 24, 16
INK, FAINT, GRID, PAPER, FAILED = "#1f2933", "#52606d", "#d9e2ec", "#ffffff", "#d00000"
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600)


@dataclass(frozen=True)
class Box:
    """A filled rectangle; ``title`` is shown under a pointer."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""
    edge: str = ""


@dataclass(frozen=True)
class Words:
    """One line of text; ``y`` is its base line. ``anchor``: start, middle or end."""

    x: float
    y: float
    text: str
    size: int = 12
    fill: str = INK
    anchor: str = "start"


Shape = Box | Words


@dataclass(frozen=True)
class Picture:
    """What is drawn, in order."""

    width: int
    height: int
    title: str
    shapes: tuple[Shape, ...]


def draw(timeline: Timeline) -> Picture:
    """A bar a replica, a step a colour, an axis in seconds."""
    total, inner = timeline.seconds, WIDTH - LEFT - RIGHT
    bottom = TOP + ROW * max(1, len(timeline.bars))
    height = bottom + 84
    shapes: list[Shape] = [Box(0, 0, WIDTH, height, PAPER), Words(16, 26, timeline.title, 15)]
    shapes.append(Words(16, 46, timeline.source, 11, FAINT))

    def at(seconds: float) -> float:
        return round(LEFT + min(max(seconds, 0.0), total) / total * inner, 2)

    step = next((each for each in _TICKS if total / each <= 8), _TICKS[-1])
    for number in range(int(total / step + 1e-9) + 1):
        x = at(number * step)
        shapes += [
            Box(x, TOP - 4, 1, bottom - TOP + 8, GRID),
            Words(x, bottom + 20, _time(number * step), 11, FAINT, "middle"),
        ]
    for index, bar in enumerate(timeline.bars):
        y = TOP + ROW * index
        shapes.append(Words(LEFT - 10, y + 13, _short(bar.name), 12, INK, "end"))
        for span in bar.spans:
            x, wide = at(span.begin), max(1.5, at(span.end) - at(span.begin))
            title = f"{bar.name}: {span.step}, {span.begin:.3f} s to {span.end:.3f} s"
            title += "" if span.ok else f", {span.said}"
            edge = "" if span.ok else FAILED
            shapes.append(Box(x, y, round(wide, 2), BAR, COLOURS.get(span.step, OTHER), title, edge))
        last = max((span.end for span in bar.spans), default=0.0)
        shapes.append(Words(WIDTH - RIGHT + 10, y + 13, f"{last:.3f} s", 11, FAINT))
    x = float(LEFT)
    for each in steps_of(timeline):
        shapes += [Box(x, bottom + 34, 12, 12, COLOURS.get(each, OTHER)), Words(x + 17, bottom + 44, each, 12)]
        x += 34 + 7.2 * len(each)
    marks = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in timeline.marks)
    shapes.append(Words(LEFT, bottom + 68, marks or "no stage is done yet", 11, FAINT))
    return Picture(WIDTH, height, timeline.title, tuple(shapes))


def _time(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if 0 < seconds < 1 else f"{seconds:g} s"


def _short(name: str) -> str:
    return name if len(name) <= 26 else f"…{name[-25:]}"


def svg(picture: Picture) -> str:
    """The picture as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width}" height="{picture.height}" '
        f'viewBox="0 0 {picture.width} {picture.height}" font-family="sans-serif" role="img">',
        f"<title>{escape(picture.title)}</title>",
    ]
    for shape in picture.shapes:
        if isinstance(shape, Box):
            edge = f' stroke="{shape.edge}" stroke-width="1.5"' if shape.edge else ""
            head = f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
            head += f" fill={quoteattr(shape.fill)}{edge}"
            lines.append(f"{head}><title>{escape(shape.title)}</title></rect>" if shape.title else f"{head}/>")
        else:
            anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
            lines.append(
                f'<text x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size}" fill="{shape.fill}"{anchor}>'
                f"{escape(shape.text)}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def png(picture: Picture, scale: int = 2) -> bytes:
    """The picture as a PNG file. Raises CliError where pillow is not installed."""
    if importlib.util.find_spec("PIL") is None:
        raise CliError("a PNG needs pillow: pip install '.[png]' from a checkout of Moontide, or write --svg")
    image_of: Any = importlib.import_module("PIL.Image")
    pen_of: Any = importlib.import_module("PIL.ImageDraw")
    fonts: Any = importlib.import_module("PIL.ImageFont")
    image = image_of.new("RGB", (picture.width * scale, picture.height * scale), PAPER)
    pen = pen_of.Draw(image)
    for shape in picture.shapes:
        if isinstance(shape, Box):
            corners = [shape.x * scale, shape.y * scale]
            corners += [(shape.x + shape.width) * scale - 1, (shape.y + shape.height) * scale - 1]
            pen.rectangle(corners, fill=shape.fill, outline=shape.edge or None, width=scale)
        else:
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
            place = (shape.x * scale, shape.y * scale)
            pen.text(place, shape.text, fill=shape.fill, font=fonts.load_default(shape.size * scale), anchor=anchor)
    made = io.BytesIO()
    image.save(made, "PNG")
    return made.getvalue()
