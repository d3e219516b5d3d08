"""Patches of vLLM: each with the fingerprints of what it replaces and of what it relies on, and where it is needed.

A release is told by its code, never by its version string: all functions that the patches touch must have the sources
that one and the same release has.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import ModuleType
from typing import Any

from moontide_engine import fingerprint as fp

RELEASES = ("0.22.1", "0.23.0", "0.24.0", "0.27.1", "0.32.0", "0.33.0")
"""Releases of vLLM that the patches were made for and are tested on, oldest first."""

APPLIED = "applied"
UPSTREAM = "upstream"
"""This release has by itself what the patch brings to older ones."""
NOT_APPLICABLE = "not-applicable"
"""This release lacks the very thing that the patch mends or uses."""
UNVERIFIED = "unverified"
"""Under ``Auto``: the patch does not know this vLLM, so the engine runs without it."""
REFUSED = "refused"

ABSENT = "absent"
"""In place of a fingerprint: the release has no such function."""


class PatchRefused(RuntimeError):
    """This vLLM is not one the patch knows; the engine must not start."""


@dataclass(frozen=True)
class Patch:
    """``references`` are the functions it replaces or relies on; ``install`` is called once all were found known."""

    name: str
    summary: str
    references: tuple[str, ...]
    install: Callable[[], None]
    upstream: tuple[str, ...] = ()
    """Releases that need no such patch."""
    inapplicable: Mapping[str, str] = field(default_factory=dict)
    """Releases in which it has nothing to do, each with the reason."""
    optional: bool = False
    """Whether ``Auto`` may run an engine without it."""

    def state(self, release: str) -> str:
        """What becomes of it on a release that it knows."""
        if release in self.upstream:
            return UPSTREAM
        return NOT_APPLICABLE if release in self.inapplicable else APPLIED


@dataclass(frozen=True)
class Check:
    """What was found for one reference. ``known`` are the releases that have it just so; None: no known one has."""

    patch: str
    target: str
    found: str
    known: str | None
    problem: str

    @property
    def releases(self) -> frozenset[str]:
        """Releases that have it just so."""
        return frozenset((self.known or "").split(", ")) - {""}


class Registry:
    """Patches of this process. ``table`` maps the name of each to what became of it."""

    def __init__(self, patches: Iterable[Patch], known: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._patches = tuple(patches)
        self._known = load_known() if known is None else known
        self._table: dict[str, str] = {}

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All patches, applied or not."""
        return self._patches

    @property
    def table(self) -> Mapping[str, str]:
        """State of each patch that was dealt with in this process."""
        return dict(self._table)

    def check(self) -> list[Check]:
        """Compare every reference with this vLLM, changing nothing."""
        return [self._check(patch, reference) for patch in self._patches for reference in patch.references]

    def releases(self) -> tuple[str, ...]:
        """Known releases that have every reference just as this vLLM has it, oldest first; none: an unknown vLLM."""
        return self._common(self.check())

    def outlook(self, *, auto: bool = False) -> dict[str, str]:
        """What :attr:`table` would be, or ``refused`` for each patch that would stop the engine."""
        return self._plan(self.check(), auto)[0]

    def apply(self, *, auto: bool = False) -> None:
        """Check all, then install all. Raises PatchRefused before anything is changed. A second call does nothing.

        ``auto``: on a vLLM that is not known as a whole, each optional patch that does not know it is left out.
        """
        if self._table:
            return
        plan, problems = self._plan(self.check(), auto)
        if REFUSED in plan.values():
            raise PatchRefused("\n".join([*problems, _advice()]))
        for patch in self._patches:
            if plan[patch.name] == APPLIED:
                patch.install()
        self._table.update(plan)

    def _plan(self, checks: list[Check], auto: bool) -> tuple[dict[str, str], list[str]]:
        """State of each patch, and what is wrong in words."""
        common = self._common(checks)
        if common:
            # What they do not differ in, a patch cannot differ in either; the newest is as good as any.
            return {patch.name: patch.state(common[-1]) for patch in self._patches}, []
        plan, problems = {}, [check.problem for check in checks if check.problem]
        for patch in self._patches:
            alone = self._common([check for check in checks if check.patch == patch.name])
            bad = any(check.problem for check in checks if check.patch == patch.name) or not alone
            if not bad:
                plan[patch.name] = patch.state(alone[-1])
            else:
                plan[patch.name] = UNVERIFIED if auto and patch.optional else REFUSED
        mixed = not problems
        if mixed:
            problems.append(f"moontide-engine: this vLLM has functions of different releases: {_mixture(checks)}")
            if not auto:
                plan = dict.fromkeys(plan, REFUSED)
        return plan, problems

    @staticmethod
    def _common(checks: Iterable[Check]) -> tuple[str, ...]:
        sets = [check.releases for check in checks]
        if not sets:
            return ()
        return tuple(sorted(frozenset.intersection(*sets), key=version_key))

    def _check(self, patch: Patch, target: str) -> Check:
        known = self._known.get(target, {})
        try:
            found = fp.fingerprint(fp.resolve(target)[2])
        except fp.Missing as error:
            problem = "" if ABSENT in known else f"moontide-engine, patch {patch.name!r}: {error}"
            return Check(patch.name, target, ABSENT, known.get(ABSENT), problem)
        has = known.get(found)
        problem = ""
        if has is None:
            listed = ", ".join(f"{digest} ({name})" for digest, name in known.items()) or "none"
            problem = (
                f"moontide-engine, patch {patch.name!r}: {target} of this vLLM has the unknown fingerprint {found}; "
                f"known: {listed}"
            )
        return Check(patch.name, target, found, has, problem)


def version_key(release: str) -> tuple[int, ...]:
    """To sort releases by."""
    return tuple(int(part) for part in release.split("."))


def _mixture(checks: list[Check]) -> str:
    """One example of two references that no release has together."""
    first = checks[0]
    other = next((check for check in checks if not check.releases & first.releases), checks[-1])
    return f"{first.target} is that of {first.known}, {other.target} that of {other.known}"


def _advice() -> str:
    return (
        f"moontide-engine does not start an engine it does not know; it knows vLLM {', '.join(RELEASES)}. Use one of "
        "these, or a release of moontide-engine that lists this vLLM. To add a release, see docs/engine-releases.md "
        "(`python -m moontide_engine doctor` prints all fingerprints). MOONTIDE_PATCHES=Auto (engine.patches: Auto) "
        "runs it with the patches that know it, if the gate, the probe and reset-truth do. Without MOONTIDE_ENABLED=1 "
        "it runs as it is, and nothing guards the caches."
    )


def load_known() -> dict[str, dict[str, str]]:
    """Known sources of each function: fingerprint (or ``absent``) to the vLLM releases that have it so."""
    text = resources.files(__name__).joinpath("known.json").read_text()
    known: dict[str, dict[str, str]] = json.loads(text)
    return known


def replace(target: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of a function, and of every copy of it that modules took by name."""
    owner, name, original = fp.resolve(target)
    replacement = make(original)
    functools.update_wrapper(replacement, original)
    replacement.__moontide_original__ = original
    setattr(owner, name, replacement)
    if isinstance(owner, ModuleType):
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or not _may_hold_copy(module):
                continue
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, replacement)


def _may_hold_copy(module: ModuleType) -> bool:
    return module.__name__ == "__main__" or module.__name__.partition(".")[0] == "vllm"
