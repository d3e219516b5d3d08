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
from typing import Any

import pytest

from moontide_engine import fingerprint as fp
from moontide_engine import patches
from moontide_engine.__main__ import table
from moontide_engine.patches import ABSENT, RELEASES, Patch, PatchRefused, Registry, replace
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
    assert "To add a release, see docs/engine-releases.md" in text
    assert "engine.patches: Auto" in text
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
    for target, digests in known.items():
        assert all(digest == ABSENT or len(digest) == 64 for digest in digests)
        named = sorted(release for releases in digests.values() for release in releases.split(", "))
        assert named == sorted(RELEASES), f"{target}: each release once"


def test_the_table_names_only_releases_that_are_known() -> None:
    for patch in PATCHES.patches:
        named = {*patch.upstream, *patch.inapplicable}
        assert named <= set(RELEASES), patch.name
        assert not set(patch.upstream) & set(patch.inapplicable)
        assert all(patch.inapplicable.values())


def test_the_page_has_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engine-releases.md").read_text()
    assert table() in page, "paste what `python -m moontide_engine table` prints"


PLAIN = digest("def plain():\n    return 1\n")
METHOD = digest("def method(self):\n    return 2\n")


def two(known_method: dict[str, str], **options: Any) -> tuple[Registry, list[str]]:
    """Two patches, of which the second is ``optional`` or not, and what gets installed."""
    done: list[str] = []
    first = Patch("first", "", ("vllm_like:plain",), lambda: done.append("first"))
    second = Patch("second", "", ("vllm_like:Thing.method",), lambda: done.append("second"), **options)
    return Registry(
        [first, second], {"vllm_like:plain": {PLAIN: "1.9, 1.10"}, "vllm_like:Thing.method": known_method}
    ), done


def test_a_release_is_told_by_all_its_functions(engine: ModuleType) -> None:
    registry, done = two({METHOD: "1.10"})
    assert registry.releases() == ("1.10",)
    registry.apply()
    assert done == ["first", "second"]
    assert two({METHOD: "1.9, 1.10"})[0].releases() == ("1.9", "1.10"), "as numbers, not as text"


def test_functions_of_different_releases_are_no_release(engine: ModuleType) -> None:
    registry, done = two({METHOD: "1.8"})
    assert registry.releases() == ()
    with pytest.raises(PatchRefused, match=r"functions of different releases: .*plain is that of 1\.9, 1\.10, .*1\.8"):
        registry.apply()
    assert registry.outlook() == {"first": "refused", "second": "refused"}
    assert done == []


@pytest.mark.parametrize(
    ("options", "state"),
    [({"upstream": ("1.10",)}, "upstream"), ({"inapplicable": {"1.10": "no such thing"}}, "not-applicable")],
)
def test_what_a_release_does_not_need_is_not_installed(engine: ModuleType, options: Any, state: str) -> None:
    registry, done = two({METHOD: "1.10"}, **options)
    registry.apply()
    assert dict(registry.table) == {"first": "applied", "second": state}
    assert done == ["first"]


def test_a_function_that_is_known_to_be_absent_is_no_problem(engine: ModuleType) -> None:
    patch = Patch("p", "", ("vllm_like:gone", "vllm_like:plain"), lambda: None)
    known = {"vllm_like:gone": {ABSENT: "1.9", "ab": "1.10"}, "vllm_like:plain": {PLAIN: "1.9, 1.10"}}
    assert Registry([patch], known).releases() == ("1.9",)


def test_auto_leaves_out_what_is_optional_and_unknown(engine: ModuleType) -> None:
    registry, done = two({"ab": "1.10"}, optional=True)
    with pytest.raises(PatchRefused, match="unknown fingerprint"):
        registry.apply()
    registry.apply(auto=True)
    assert dict(registry.table) == {"first": "applied", "second": "unverified"}
    assert done == ["first"]


def test_auto_does_not_run_without_what_is_not_optional(engine: ModuleType) -> None:
    registry, done = two({"ab": "1.10"})
    with pytest.raises(PatchRefused, match="unknown fingerprint"):
        registry.apply(auto=True)
    assert done == []
