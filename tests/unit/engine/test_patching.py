"""Fingerprints and the registry: unknown code is refused by name, before anything is changed."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest

from moontide_engine import fingerprint as fp
from moontide_engine import patches
from moontide_engine.patches import Patch, PatchRefused, Registry, replace
from moontide_engine.plugin import PATCHES

SOURCE = """
def plain():
    return 1

class Thing:
    def method(self):
        return 2
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "vllm_like.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("vllm_like")
    del sys.modules["vllm_like"]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_fingerprint_is_that_of_the_dedented_source(engine: ModuleType) -> None:
    assert fp.fingerprint(engine.plain) == digest("def plain():\n    return 1\n")
    assert fp.fingerprint(fp.resolve("vllm_like:Thing.method")[2]) == digest("def method(self):\n    return 2\n")


def test_fingerprint_of_a_replaced_function_is_that_of_the_original(engine: ModuleType) -> None:
    before = fp.fingerprint(engine.plain)
    replace("vllm_like:plain", lambda original: lambda: 3)
    assert engine.plain() == 3
    assert fp.fingerprint(engine.plain) == before


@pytest.mark.parametrize(
    "target", ["vllm_like:gone", "vllm_like:Thing.gone", "vllm_like:Gone.method", "no_such_module:x"]
)
def test_what_is_not_there_is_missing(engine: ModuleType, target: str) -> None:
    with pytest.raises(fp.Missing, match="is not there"):
        fp.resolve(target)


def test_known_code_is_patched_once(engine: ModuleType) -> None:
    installed: list[str] = []
    patch = Patch("p", "", ("vllm_like:plain",), lambda: installed.append("p"))
    registry = Registry([patch], {"vllm_like:plain": {digest("def plain():\n    return 1\n"): "1.0"}})
    assert dict(registry.table) == {}
    registry.apply()
    registry.apply()
    assert installed == ["p"]
    assert dict(registry.table) == {"p": "applied"}


def test_unknown_code_is_refused_before_anything_is_installed(engine: ModuleType) -> None:
    installed: list[str] = []
    known = {
        "vllm_like:plain": {digest("def plain():\n    return 1\n"): "1.0"},
        "vllm_like:Thing.method": {"ab": "0.9"},
    }
    good = Patch("good", "", ("vllm_like:plain",), lambda: installed.append("good"))
    bad = Patch("bad", "", ("vllm_like:Thing.method", "vllm_like:gone"), lambda: installed.append("bad"))
    registry = Registry([good, bad], known)
    with pytest.raises(PatchRefused) as caught:
        registry.apply()
    text = str(caught.value)
    assert "vllm_like:Thing.method" in text
    assert digest("def method(self):\n    return 2\n") in text
    assert "ab (0.9)" in text
    assert "vllm_like:gone" in text
    assert "Install a release of moontide-engine" in text
    assert "vllm_like:plain" not in text
    assert registry.outlook() == {"good": "applied", "bad": "refused"}
    assert installed == []
    assert dict(registry.table) == {}


def test_copies_taken_by_name_are_replaced_too(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, foreign = ModuleType("vllm.fake.copy"), ModuleType("other.fake")
    copy.plain = foreign.plain = engine.plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    monkeypatch.setitem(sys.modules, foreign.__name__, foreign)
    replace("vllm_like:plain", lambda original: lambda: original() + 10)
    assert copy.plain() == 11
    assert foreign.plain() == 1


def test_every_reference_has_a_fingerprint_and_no_fingerprint_is_left_over() -> None:
    known = json.loads(resources.files(patches).joinpath("known.json").read_text())
    references = {reference for patch in PATCHES.patches for reference in patch.references}
    assert set(known) == references
    for digests in known.values():
        assert digests
        assert all(len(digest) == 64 for digest in digests)
