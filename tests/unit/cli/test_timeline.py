"""A bar a replica, from the operator's log; one of the fleet where there is none."""

from __future__ import annotations

import contextlib
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moontide.api.v1alpha1 import Update
from moontide.cli import app, picture
from moontide.cli.app import main
from moontide.cli.cluster import Reply
from moontide.cli.live import plainly
from moontide.cli.timeline import COLOURS, Span, of_fleet, of_log, render
from moontide.planning.model import Step
from tests.unit.cli.paper import PaperCluster, paper
from tests.unit.cli.test_rehearsal import world_of

UPDATE = Update(
    epoch=5,
    version="43",
    started_at="2026-11-28T12:00:00.000000Z",
    quiesced_at="2026-11-28T12:00:00.100000Z",
    drained_at="2026-11-28T12:00:00.300000Z",
    invalidated_at="2026-11-28T12:00:00.400000Z",
    wiped_at="2026-11-28T12:00:00.600000Z",
    resumed_at="2026-11-28T12:00:01.000000Z",
    pause_seconds=0.95,
    keys_removed=3,
    replicas=2,
)


def line(replica: str, step: str, began: float, seconds: float, outcome: str = "done", **more: Any) -> str:
    said = {
        "time": "2026-11-28T12:00:09.000+00:00",
        "level": "INFO",
        "message": f"{step} {replica}: {outcome}",
        "resource": "PolicyVersion/rl/policy",
        "epoch": 5,
        "replica": replica,
        "step": step,
        "began": f"2026-11-28T12:00:{began:09.6f}Z",
        "seconds": seconds,
    }
    return json.dumps({**said, **more})


LOG = [
    "not json",
    "7",
    line("b-0", "quiesce", 0.02, 0.05),
    line("a-0", "quiesce", 0.02, 0.06),
    line("a-0", "drain", 0.1, 0.15, "StoreBusy: a rank still has transfers"),
    line("store of a", "wipe", 0.4, 0.2),
    line("a-0", "resume", 0.8, 0.1),
    line("a-0", "collect", 40.0, 1.0),
    line("a-0", "quiesce", 0.02, 0.06, epoch=4),
    line("a-0", "quiesce", 0.02, 0.06, resource="PolicyVersion/rl/other"),
    json.dumps({"resource": "PolicyVersion/rl/policy", "epoch": 5, "step": "Quiesced", "message": "epoch 5"}),
]


def test_bars_are_of_the_change_alone_and_stores_come_last() -> None:
    found = of_log("rl/policy", UPDATE, LOG)
    assert found is not None
    assert [bar.name for bar in found.bars] == ["a-0", "b-0", "store of a"]
    spans = [(span.step, round(span.begin, 3), round(span.end, 3), span.ok) for span in found.bars[0].spans]
    assert spans == [("quiesce", 0.02, 0.08, True), ("drain", 0.1, 0.25, False), ("resume", 0.8, 0.9, True)]
    assert found.seconds == 1.0
    assert [name for name, _ in found.marks] == ["quiesced", "drained", "invalidated", "old keys removed", "resumed"]


def test_a_log_of_an_older_operator_says_when_a_call_ended() -> None:
    old = json.loads(line("a-0", "reset", 0, 0.2))
    del old["began"]
    found = of_log("rl/policy", UPDATE, [json.dumps({**old, "time": "2026-11-28T12:00:00.500+00:00"})])
    assert found is not None
    assert found.bars[0].spans == (Span("reset", pytest.approx(0.3), pytest.approx(0.5), True, "done"),)  # type: ignore[arg-type]


def test_a_log_that_says_nothing_gives_no_bars() -> None:
    assert of_log("rl/policy", UPDATE, []) is None
    assert of_log("rl/other-one", UPDATE, LOG) is None


def test_without_a_log_the_stages_of_the_fleet_are_one_bar() -> None:
    found = of_fleet("rl/policy", UPDATE)
    assert [(span.step, span.begin, span.end) for span in found.bars[0].spans] == [
        ("quiesce", 0.0, 0.1),
        ("drain", 0.1, 0.3),
        ("reset", 0.3, 0.4),
        ("wipe", 0.4, 0.6),
        ("resume", 0.6, 1.0),
    ]
    late = UPDATE.model_copy(update={"drained_at": None, "wiped_at": "2026-11-28T12:00:02.000000Z"})
    assert [span.step for span in of_fleet("rl/policy", late).bars[0].spans] == [
        "quiesce",
        "reset",
        "resume",
        "collect",
    ]
    begun = Update(epoch=5, version="43", started_at=UPDATE.started_at)
    assert "no step is done yet" in plainly(render(of_fleet("rl/policy", begun)))


def test_every_step_to_a_replica_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == {step.value for step in Step} - {"replace"}
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_the_terminal_shows_letters_and_failures() -> None:
    found = of_log("rl/policy", UPDATE, LOG)
    assert found is not None
    text = plainly(render(found, columns=20))
    assert "  a-0         qq!!!···········oo··  0.900 s" in text
    assert "  store of a  ········wwww········  0.600 s" in text
    assert "rl/policy: version 43, epoch 5, paused 0.950 s" in text


def test_the_picture_is_svg_with_a_box_a_step() -> None:
    found = of_log("rl/policy<&>", UPDATE, [each.replace("rl/policy", "rl/policy<&>") for each in LOG])
    assert found is not None
    root = ET.fromstring(picture.svg(picture.draw(found)))
    space = "{http://www.w3.org/2000/svg}"
    titles = [each.text for each in root.iter(f"{space}title")]
    assert titles[0] == "rl/policy<&>: version 43, epoch 5, paused 0.950 s"
    assert "a-0: drain, 0.100 s to 0.250 s, StoreBusy: a rank still has transfers" in titles
    steps = [each for each in root.iter(f"{space}rect") if each.find(f"{space}title") is not None]
    assert len(steps) == 5
    width = float(root.attrib["width"])
    assert all(float(each.attrib["x"]) + float(each.attrib["width"]) <= width for each in steps)
    assert [each.attrib["stroke"] for each in steps if "stroke" in each.attrib] == [picture.FAILED]


def test_a_png_is_one_and_without_pillow_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = picture.draw(of_fleet("rl/policy", UPDATE))
    made = picture.png(drawn, scale=1)
    assert made[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(made[16:20]) == drawn.width
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        picture.CliError, match="needs pillow: pip install '\\.\\[png\\]' from a checkout of Moontide, or "
    ):
        picture.png(drawn)


@pytest.fixture(name="cluster")
def _cluster(monkeypatch: pytest.MonkeyPatch) -> PaperCluster:
    made = paper(world_of(False, weights="Unchecked"))

    @contextlib.contextmanager
    def there(_: app.Where) -> Iterator[PaperCluster]:
        yield made

    monkeypatch.setattr(app.Where, "cluster", there)
    return made


def test_the_log_is_read_where_the_operator_runs(
    cluster: PaperCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    labels = {"app.kubernetes.io/name": "moontide-operator", "app.kubernetes.io/instance": "moontide"}
    meta = {"namespace": "moontide-system", "name": "moontide-operator", "labels": labels}
    cluster.add("/apis/apps/v1/deployments", {"metadata": meta, "spec": {"template": {"spec": {"containers": []}}}})
    pod = {"metadata": {**meta, "name": "op-1"}, "spec": {"containers": [{"name": "operator"}]}}
    cluster.add("/api/v1/namespaces/moontide-system/pods", pod)
    path = "/api/v1/namespaces/moontide-system/pods/op-1/log"
    said = json.dumps({**json.loads(line("chat-1", "admit", 0, 0.01, epoch=1)), "began": "2026-01-01T00:00:00.000000Z"})
    cluster.replies[path] = Reply(200, {}, f"{said}\n{said}\n")
    assert main(["timeline", "policy"]) == 0
    assert "calls to each replica, from the operator's log" in capsys.readouterr().out
    cluster.replies[path] = Reply(403, {"message": "pods/log is forbidden"})
    assert main(["timeline", "policy"]) == 0
    assert "from status (the operator's log cannot be had: pods/log is forbidden" in capsys.readouterr().out
    log = tmp_path / "log"
    log.write_text(said)
    svg = tmp_path / "a.svg"
    assert main(["timeline", "policy", "--log", str(log), "--svg", str(svg)]) == 0
    assert capsys.readouterr().out == ""
    assert "chat-1: admit" in svg.read_text()


def test_what_cannot_be_drawn_or_written_is_a_sentence(
    cluster: PaperCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["timeline", "policy", "--epoch", "7"]) == 1
    assert "remembers no epoch 7; it has: 1" in capsys.readouterr().err
    assert main(["timeline", "policy", "--log", str(tmp_path / "none")]) == 1
    assert "none cannot be read: " in capsys.readouterr().err
    assert main(["timeline", "policy", "--svg", str(tmp_path / "none" / "a.svg")]) == 1
    assert "a.svg cannot be written: No such file or directory; name another file" in capsys.readouterr().err
