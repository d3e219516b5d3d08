"""What bench/gpu/rows.py judges and notes, without an engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("bench_gpu_rows", ROOT / "bench" / "gpu" / "rows.py")
assert _SPEC is not None
assert _SPEC.loader is not None
rows: Any = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = rows
_SPEC.loader.exec_module(rows)


def test_every_entry_is_in_the_file_at_once_and_a_failure_is_one(tmp_path: Path) -> None:
    book = rows.Book(tmp_path / "1-right.json")
    book.put("first", "off", {"a": 1})
    assert json.loads(book.path.read_text()) == {"first": {"off": {"a": 1}}}

    def fails() -> None:
        raise httpx.ReadTimeout("late")

    assert book.attempt("second", "on", fails) is None
    assert book.attempt("third", "on", lambda: 3) == 3
    found = json.loads(book.path.read_text())
    assert found["second"]["on"] == {"error": "ReadTimeout: late"}
    assert found["third"] == {"on": 3}


@pytest.mark.parametrize(("other", "length"), [([1, 2, 3], 3), ([1, 2, 4], 2), ([9], 0), ([1], 1), ([], 0)])
def test_tokens_that_two_answers_begin_with(other: list[int], length: int) -> None:
    assert rows.common([1, 2, 3], other) == length


def test_a_wrong_answer_says_whose_it_looks_like() -> None:
    right = {"a": [[1, 2, 3]], "b": [[7, 8, 9]]}
    headers = {"x-moontide-epoch": "4", "x-moontide-version": "a-2"}
    judged, answer = rows.Judged(), httpx.Response(200, headers=headers)
    rows.note_wrong(judged, [7, 8, 1], right, "a", 0, answer)
    rows.note_wrong(judged, [1, 2, 5], right, "a", 0, answer)
    assert (judged.wrong, judged.wrong_at_first, judged.wrong_of_other) == (2, 1, 1)
    assert judged.wrongs[0] == {"own": 0, "other": 2, "prompt": 0, "epoch": "4", "version": "a-2"}


def test_the_longest_gap_reaches_over_the_ends_of_the_stretch() -> None:
    running = rows.Running([], 0, 10)
    running.came = [[1.0, 1.1, 1.9, 2.0], [0.5, 1.5, 2.5]]
    assert running.gap(1.2, 1.4) == 1000.0
    running.came = running.came[:1]
    assert running.gap(1.2, 1.4) == 800.0
    assert running.gap(1.95, 1.99) == 100.0
