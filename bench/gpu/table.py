"""The table and the plot of what bench/gpu/rows.py measured.

    python3 bench/gpu/table.py bench/results/gpu [--markdown] [--plot docs/gpu-prefill.svg]

Reads RELEASE-WHAT.json of the folder; prints one row a figure and two columns a release. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]
"""Release to row to arm to what was noted."""
ARMS = ("off", "on")
COLOURS = {"off": "#b0b7c0", "on": "#1f6f8b"}


def read(folder: Path) -> Results:
    """All results of a folder; the files of one release are taken together."""
    found: Results = {}
    for path in sorted(folder.glob("*-*.json")):
        release, _, what = path.stem.partition("-")
        if what in ("right", "cost", "ranks"):
            rows = json.loads(path.read_text())
            about = rows.pop("about", {}).get("both")
            found.setdefault(release, {}).update(rows)
            if about:
                found[release].setdefault("about", about)
    return found


def cell(value: Any, say: Callable[[Mapping[str, Any]], str]) -> str:
    """One entry for people: a dash where nothing was measured, the error where that ended with one."""
    if value is None:
        return "-"
    if "disturbed" in value:
        return "not clean"
    if "error" in value:
        return f"error: {value['error'].splitlines()[0][:60]}"
    try:
        return say(value)
    except (KeyError, IndexError, TypeError):
        return "?"


def _answer(value: Mapping[str, Any]) -> str:
    first = value["answers"][0]
    body = first["body"].strip()
    try:
        said = json.loads(body)
        body = ", ".join(f"{key}: {json.dumps(said[key])}" for key in ("success", "cleared", "removed") if key in said)
    except (ValueError, TypeError):
        body = body or "empty body"
    return f"{first['status']}, {body}"


def _lease(value: Mapping[str, Any]) -> str:
    end = (
        f"{value['status']} after {value['seconds_after']} s"
        if value["status"]
        else f"no answer in {value['seconds_after']:.0f} s"
    )
    return end + (", engine dead" if value["dead"] else "")


def _blocks(value: Mapping[str, Any]) -> str:
    blocks = value["blocks"]
    dead = f", {len(value['dead'])} of 2 engines dead" if value["dead"] else ""
    return (
        f"{blocks.get('twice', 0)} + {blocks.get('unreferenced', 0)} of {blocks.get('allocations', 0)} allocations; "
        f"{value['failed']} of {value['requests']} requests failed{dead}"
    )


def _pause(value: Mapping[str, Any]) -> str:
    gap = f", a client felt {value['gap_ms']} ms" if value["gap_ms"] else ""
    return f"{value['pause_ms']} ms{gap}{'; engine dead' if value['dead'] else ''}"


def _judged(value: Mapping[str, Any]) -> str:
    listed = value.get("wrongs", ())
    first = value.get("wrong_at_first")
    if first is None and len(listed) == value["wrong"]:
        first = sum(each["own"] == 0 for each in listed)
    said = f"{value['wrong']} of {value['asked']}"
    return said if first is None else f"{said}, {first} from the first token on"


Say = Callable[[Mapping[str, Any]], str]


def _ms(key: str) -> Say:
    return lambda value: f"{value[key]} ms"


def _left(value: Mapping[str, Any]) -> str:
    return f"{value['keys_left']} of {value['keys_before']}"


def _stale(value: Mapping[str, Any]) -> str:
    return f"{value['stale_after']} of {value['asked_after']}"


def lines(rows: Mapping[str, Any]) -> list[tuple[str, Say, str]]:
    """Label, how to say it, and the row of the results."""
    made: list[tuple[str, Say, str]] = [
        ("keys left after both were reset, `reset_external`", _left, "reset"),
        ("what the endpoint answers", _answer, "reset"),
        ("the same prompts afterwards hit in the store", lambda v: f"{v['hit_after']['external']:.0f} tokens", "reset"),
        ("wrong answers before a swap of weights", lambda v: str(v["wrong_before"]), "stale"),
        ("wrong answers after it, nothing else running", _stale, "stale"),
        ("wrong answers under load, nothing changes", _judged, "noise"),
        ("wrong answers under load, 6 swaps by fan-out", _judged, "stale_load"),
        ("wrong answers under load, 6 swaps by Barrier", _judged, "stale_load Barrier"),
        ("wrong answers under load, 6 swaps by Fence", _judged, "stale_load Fence"),
        ("blocks given out twice + without a reference", _blocks, "pressure"),
        ("keys vanish during a load, policy `recompute`", _lease, "lease recompute"),
        ("keys vanish during a load, vLLM's default policy", _lease, "lease fail"),
        ("two ranks, one late to save: keys after the reset", lambda v: str(v["keys_at_last"]), "ranks"),
        ("tokens/s, 64 requests", lambda v: f"{v['tokens_s']:.0f}", "hot"),
        ("first token, 512 tokens", _ms("first_ms"), "hot"),
    ]  # fmt: skip
    for length in sorted({int(name.split()[1]) for name in rows if name.startswith("prefill ")}):
        for key, label in (("cold", "cold prefill"), ("local", "local hit"), ("external", "external hit")):
            made.append((f"{label}, {length} tokens", _ms(key), f"prefill {length}"))
    for count in sorted({int(name.split()[2]) for name in rows if name.startswith("pause Barrier ")}):
        for way in ("fan-out", "Barrier", "Fence"):
            made.append((f"pause with {count} running, {way}", _pause, f"pause {way} {count}"))
    return made


def table(results: Results) -> list[list[str]]:
    """Head and rows; rows of which nothing was measured are left out."""
    names = [*results]
    head = ["", *(f"{name} {arm}" for name in names for arm in ARMS)]
    every: dict[str, Any] = {}
    for rows in results.values():
        every.update(rows)
    body = []
    for label, say, row in lines(every):
        cells = [cell(results[name].get(row, {}).get(arm), say) for name in names for arm in ARMS]
        if any(each != "-" for each in cells):
            body.append([label, *cells])
    ratios = [results[name].get("hot", {}).get("ratio") for name in names]
    if any(ratios):
        said = [cell(each, lambda v: f"tokens/s x {v['tokens_s']}, first token x {v['first_ms']}") for each in ratios]
        body.append(["on over off, median of pairs", *(part for each in said for part in ("", each))])
    return [head, *body]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """As a table of Markdown."""
    head, *body = rows
    made = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*made, *(f"| {' | '.join(row)} |" for row in body)])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """In columns, for a terminal."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        "  ".join(part.ljust(width) for part, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def about(results: Results) -> str:
    """Card, driver and versions, a line a release."""
    made = []
    for name, rows in results.items():
        found = rows.get("about") or {}
        more = ", ".join(
            f"{key} {found[key]}" for key in ("driver", "torch", "transformers", "mooncake") if key in found
        )
        made.append(f"vLLM {name}: {found.get('card', '?')}, {more}")
    return "\n".join(made)


def plot(rows: Mapping[str, Any], title: str) -> str:
    """Bars of one release: cold prefill, local and external hit by length, off beside on. SVG."""
    measured = [name for name in rows if name.startswith("prefill ") and set(ARMS) & set(rows[name])]
    lengths = sorted(int(name.split()[1]) for name in measured)
    kinds = (("cold", "cold"), ("local", "local hit"), ("external", "external hit"))
    panels, width, height, base = len(lengths), 230, 250, 205
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * max(panels, 1) + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="16" font-size="13">{escape(title)}</text>',
    ]
    for panel, length in enumerate(lengths):
        found = rows[f"prefill {length}"]
        left = 10 + panel * width
        values = {(arm, key): number(found.get(arm), key) for arm in ARMS for key, _ in kinds}
        most = max([*values.values(), 1.0])
        made.append(f'<text x="{left}" y="36">{length} tokens, ms to the first token</text>')
        for index, (key, label) in enumerate(kinds):
            for offset, arm in enumerate(ARMS):
                value = values[arm, key]
                tall = 140 * value / most
                x = left + index * 72 + offset * 32
                made.append(
                    f'<rect x="{x}" y="{base - tall:.1f}" width="28" height="{tall:.1f}" fill="{COLOURS[arm]}"/>'
                )
                made.append(f'<text x="{x + 14}" y="{base - tall - 4:.1f}" text-anchor="middle">{value:.0f}</text>')
            made.append(f'<text x="{left + index * 72 + 30}" y="{base + 15}" text-anchor="middle">{label}</text>')
    for index, arm in enumerate(ARMS):
        x = 10 + index * 110
        made.append(f'<rect x="{x}" y="{height - 18}" width="10" height="10" fill="{COLOURS[arm]}"/>')
        made.append(f'<text x="{x + 15}" y="{height - 9}">{"stock vLLM" if arm == "off" else "with the plugin"}</text>')
    return "\n".join([*made, "</svg>", ""])


def number(value: Any, key: str) -> float:
    """Of a row; 0 where it was not measured."""
    found = value.get(key) if isinstance(value, dict) else None
    return float(found) if isinstance(found, int | float) else 0.0


def escape(text: str) -> str:
    """For XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--plot", type=Path, help="write the prefill plot of the first release here")
    options = parser.parse_args(arguments)
    results = read(options.folder)
    if not results:
        print(f"error: no results in {options.folder}", file=sys.stderr)
        return 1
    rows = table(results)
    print(about(results))
    print(markdown(rows) if options.markdown else columns(rows))
    if options.plot is not None:
        release, found = next(iter(results.items()))
        card = (found.get("about") or {}).get("card", "?")
        options.plot.write_text(plot(found, f"vLLM {release} on {card}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
