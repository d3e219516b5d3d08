"""The pictures in docs are those that the recording gives."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

from hack.pictures.__main__ import FOLDER, RECORDING, pictures


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
