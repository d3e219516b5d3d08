"""The table and the plot of bench/gpu, from results as bench/gpu/rows.py writes them."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("bench_gpu_table", ROOT / "bench" / "gpu" / "table.py")
assert _SPEC is not None
assert _SPEC.loader is not None
table: Any = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = table
_SPEC.loader.exec_module(table)

RIGHT = {
    "about": {"both": {"vllm": "1.2.3", "card": "A <card>", "driver": "5", "torch": "2"}},
    "reset": {
        "off": {
            "keys_before": 7,
            "keys_left": 7,
            "hit_after": {"external": 64.0},
            "answers": [{"status": 200, "body": "", "ms": 1}],
        },
        "on": {
            "keys_before": 7,
            "keys_left": 0,
            "hit_after": {"external": 0.0},
            "answers": [{"status": 200, "body": '{"success": true, "removed": 7}', "ms": 1}],
        },
    },
    "stale": {"off": {"error": "ReadTimeout: timed out\nmore"}, "on": None},
    "noise": {"on": {"asked": 9, "wrong": 2, "wrongs": [{"own": 6}, {"own": 0}]}},
    "pressure": {"off": {"blocks": {"twice": 3, "allocations": 50}, "failed": 1, "requests": 9, "dead": {"a": "x"}}},
}
COST = {
    "prefill 2048": {"off": {"cold": 20.0, "local": 10.0, "external": 30.0}, "on": {"cold": 21.0, "local": 11.0}},
    "prefill 32768": {"error": {"error": "ReadTimeout"}},
    "hot": {"ratio": {"tokens_s": 0.99, "first_ms": 1.01}},
    "pause Barrier 8": {"on": {"pause_ms": 40.0, "gap_ms": 100.0, "dead": {}}},
    "pause fan-out 8": {"off": {"pause_ms": 1.0, "gap_ms": 0.0, "dead": {}, "disturbed": "why"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "1.2.3-right.json").write_text(json.dumps(RIGHT))
    (tmp_path / "1.2.3-cost.json").write_text(json.dumps(COST))
    (tmp_path / "notes-other.json").write_text("{}")
    return tmp_path


def test_the_files_of_a_release_make_two_columns(folder: Path) -> None:
    head, *body = table.table(table.read(folder))
    assert head == ["", "1.2.3 off", "1.2.3 on"]
    rows = {row[0]: row[1:] for row in body}
    assert rows["keys left after both were reset, `reset_external`"] == ["7 of 7", "0 of 7"]
    assert rows["what the endpoint answers"] == ["200, empty body", "200, success: true, removed: 7"]
    assert rows["wrong answers under load, nothing changes"] == ["-", "2 of 9, 1 from the first token on"]
    assert rows["blocks given out twice + without a reference"][0] == (
        "3 + 0 of 50 allocations; 1 of 9 requests failed, 1 of 2 engines dead"
    )
    assert rows["pause with 8 running, Barrier"] == ["-", "40.0 ms, a client felt 100.0 ms"]
    assert rows["pause with 8 running, fan-out"] == ["not clean", "-"]
    assert rows["on over off, median of pairs"] == ["", "tokens/s x 0.99, first token x 1.01"]


def test_what_failed_is_said_and_what_was_not_measured_is_a_dash(folder: Path) -> None:
    rows = {row[0]: row[1:] for row in table.table(table.read(folder))[1:]}
    assert rows["wrong answers after it, nothing else running"] == ["error: ReadTimeout: timed out", "-"]
    assert rows["external hit, 2048 tokens"] == ["30.0 ms", "?"]
    assert "two ranks, one late to save: keys after the reset" not in rows
    assert not [label for label in rows if "32768" in label]


def test_the_plot_is_xml_with_a_bar_for_each_figure(folder: Path) -> None:
    found = table.read(folder)["1.2.3"]
    root = ET.fromstring(table.plot(found, f"on {found['about']['card']}"))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "on A <card>"
    assert {"20", "21", "10", "11", "30", "0"} <= set(texts)
    assert "32768 tokens, ms to the first token" not in texts


def test_the_results_of_the_repository_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([str(ROOT / "bench" / "results" / "gpu"), "--markdown"]) == 0
    said = capsys.readouterr().out
    assert "| 320 of 320 | 0 of 320 |" in said
    assert "?" not in said.replace("? ", "")


def test_a_folder_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([str(tmp_path)]) == 1
    assert "no results" in capsys.readouterr().err
