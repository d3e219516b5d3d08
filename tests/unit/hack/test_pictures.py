"""The pictures in docs are those that the recording gives."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from hack.dashboard import PANELS as OF_DASHBOARD
from hack.pictures import panels
from hack.pictures.__main__ import FOLDER, PANELS, RECORDING, pictures


def test_pictures_are_up_to_date() -> None:
    made = pictures(json.loads((FOLDER / RECORDING).read_text()))
    # How many rights and fields there are to check is no news for a picture.
    del made["doctor.svg"]
    old = [name for name, text in made.items() if (FOLDER / name).read_text() != text]
    assert old == [], "run: python -m hack.pictures"


def test_every_picture_is_svg_and_no_other_host_is_asked_for_fonts() -> None:
    made = pictures(json.loads((FOLDER / RECORDING).read_text()))
    for name, text in made.items():
        root = ET.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg", name
        assert "url(http" not in text
        assert f"pictures/{name}" in (FOLDER.parent / "cli.md").read_text()


def test_the_recording_holds_no_token() -> None:
    scenes = json.loads((FOLDER / RECORDING).read_text())["scenes"]
    secrets = [
        reply["body"] for scene in scenes.values() for path, reply in scene["replies"].items() if "/secrets/" in path
    ]
    assert secrets
    assert all(body == {"data": {"token": "eA=="}} for body in secrets)


def test_the_dashboard_s_picture_is_of_its_queries_and_up_to_date() -> None:
    recording = json.loads((FOLDER / PANELS).read_text())
    asked = {each["expr"] for each in recording["answers"]}
    assert asked == {query for panel in OF_DASHBOARD for query, _ in panel.queries}, "record it again"
    made = panels.svg(recording)
    assert made == (FOLDER / "dashboard.svg").read_text(), "run: python -m hack.pictures"
    ET.fromstring(made)
    assert all(panel.title in made for panel in OF_DASHBOARD)
    assert "pictures/dashboard.svg" in (FOLDER.parent / "runbook.md").read_text()


@pytest.mark.parametrize(
    ("highest", "top", "line"),
    [(0.0, 1.0, 0.5), (1.0, 1.0, 0.25), (3, 3, 1), (4.1, 6, 2), (97, 100, 25), (0.03, 0.03, 0.01)],
)
def test_an_axis_is_of_round_numbers(highest: float, top: float, line: float) -> None:
    assert panels.ceiling(highest) == pytest.approx((top, line))


def test_a_series_is_named_and_its_values_have_units() -> None:
    assert panels.legend("{{namespace}}/{{policy}}", {"namespace": "rl", "policy": "chat"}) == "rl/chat"
    assert panels.legend("", {"a": "b"}) == "value"
    said = [panels.number(value, unit) for value, unit in ((0.25, "percentunit"), (0.02, "s"), (3, "s"), (2, "cps"))]
    assert said == ["25 %", "20 ms", "3 s", "2/s"]


def test_a_gap_in_a_series_is_a_gap_in_its_line() -> None:
    query, _ = OF_DASHBOARD[6].queries[0]
    values = [[0, "1"], [1, "1"], [5, "2"], [6, "NaN"], [7, "3"]]
    series = [{"metric": {"namespace": "rl", "policy": "chat"}, "values": values}]
    made = panels.svg({"start": 0, "end": 8, "step": 1, "answers": [{"expr": query, "series": series}]})
    (path,) = [line for line in made.splitlines() if 'stroke-linecap="round"' in line]
    assert path.count("M") == 3
    assert path.count("L") == 1
    assert made.count("no data in this run") == len(OF_DASHBOARD) - 1
