"""The table of releases and patches, held against the package that is imported here."""

from __future__ import annotations

import corekit as kit

from moontide_engine.patches import APPLIED, RELEASES, UNVERIFIED, Registry, load_known
from moontide_engine.plugin import PATCHES


def test_this_release_is_known_by_its_functions() -> None:
    known = load_known()
    found = {check.target: check.found for check in PATCHES.check()}
    assert kit.RELEASE in RELEASES
    wrong = [target for target, digest in found.items() if kit.RELEASE not in known[target].get(digest, "").split(", ")]
    assert wrong == []


def test_the_outlook_is_what_the_table_says() -> None:
    assert kit.RELEASE in PATCHES.releases()
    assert PATCHES.outlook() == {patch.name: patch.state(kit.RELEASE) for patch in PATCHES.patches}


def test_a_vllm_with_one_changed_function_is_refused_and_auto_leaves_out_what_it_concerns() -> None:
    changed = next(patch for patch in PATCHES.patches if patch.name == "resume-safety")
    known = load_known()
    for target in changed.references:
        known[target] = {"0" * 64: kit.RELEASE}
    registry = Registry([changed], known)
    assert registry.outlook() == {"resume-safety": "refused"}
    registry.apply(auto=True)
    assert dict(registry.table) == {"resume-safety": UNVERIFIED}
    assert APPLIED not in registry.table.values()
