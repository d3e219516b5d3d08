"""Make docs/pictures/*.svg from the recordings beside them: ``python -m hack.pictures [--check]``.

The recordings are of real runs:
MOONTIDE_RECORDING=docs/pictures/recording.json pytest tests/integration/test_cli.py
MOONTIDE_PANELS=docs/pictures/panels.json pytest tests/integration/test_dashboard.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from hack.pictures import panels
from hack.pictures.recording import Replay
from moontide.cli import doctor, explain, history, live, picture, screen
from moontide.cli.checks import examine
from moontide.cli.gather import look
from moontide.cli.rehearsal import rehearse
from moontide.cli.timeline import render

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
RECORDING, PANELS = "recording.json", "panels.json"
COLUMNS = 118
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; \
line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>\
</clipPath>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#14181d"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def terminal(name: str, typed: str, shown: RenderableType) -> str:
    """What a terminal shows after a command, as SVG."""
    console = Console(record=True, width=COLUMNS, force_terminal=True, color_system="truecolor", file=_Nowhere())
    console.print(Group(Text.assemble(("$ ", "bold green"), (typed, "bold")), shown))
    made = console.export_svg(title="", code_format=_SVG, unique_id=name)
    return "\n".join(line.rstrip() for line in made.splitlines()) + "\n"


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing to do."""


def pictures(recording: dict[str, Any]) -> dict[str, str]:
    """Every picture by the name of its file."""
    scenes, log = recording["scenes"], recording["log"]
    before, after = (look(Replay(scenes[name]), "rl", "chat") for name in ("before", "after"))
    found = examine(doctor.facts(Replay(scenes["doctor"]), "rl"))
    seen = before.policies[0]
    spec = seen.resource.model.spec.model_copy(update={"version": 2})
    dry = rehearse(spec, seen.resource.meta.generation + 1, seen.status, before.observed(seen))
    told = explain.looks(dry)
    lines = Text("\n".join([f"rl/chat: version 2 (dry run, nothing is changed)\nthe planner {told[0]}", *told[1:]]))
    drawn = live.drawn(Replay(scenes["after"]), after.policies[0], log=log)
    return {
        "status.svg": terminal("status", "kubectl moontide status chat -n rl", screen.render(before)),
        "dry-run.svg": terminal("dry", "kubectl moontide bump chat 2 -n rl --dry-run", lines),
        "history.svg": terminal(
            "history", "kubectl moontide history chat -n rl", history.render(after.policies[0], [])
        ),
        "doctor.svg": terminal("doctor", "kubectl moontide doctor -n rl", doctor.render(found)),
        "timeline-terminal.svg": terminal("bars", "kubectl moontide timeline chat -n rl", render(drawn)),
        "timeline.svg": picture.svg(picture.draw(drawn)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where --check finds a picture out of date."""
    parser = argparse.ArgumentParser(prog="python -m hack.pictures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a picture is out of date")
    options = parser.parse_args(arguments)
    made = pictures(json.loads((FOLDER / RECORDING).read_text()))
    made["dashboard.svg"] = panels.svg(json.loads((FOLDER / PANELS).read_text()))
    wrong = [name for name, text in made.items() if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text]
    for name in wrong:
        if options.check:
            print(f"docs/pictures/{name} is out of date: run python -m hack.pictures", file=sys.stderr)
        else:
            (FOLDER / name).write_text(made[name])
            print(f"docs/pictures/{name}")
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
