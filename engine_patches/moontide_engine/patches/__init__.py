"""Patches of vLLM: each with the fingerprints of what it replaces and of what it relies on."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from types import ModuleType
from typing import Any

from moontide_engine import fingerprint as fp


class PatchRefused(RuntimeError):
    """This vLLM is not one the patch knows; the engine must not start."""


@dataclass(frozen=True)
class Patch:
    """``references`` are the functions it replaces or relies on; ``install`` is called once all were found known."""

    name: str
    summary: str
    references: tuple[str, ...]
    install: Callable[[], None]


@dataclass(frozen=True)
class Check:
    """What was found for one reference."""

    patch: str
    target: str
    found: str
    known: str | None
    problem: str


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
        return [self._check(patch.name, reference) for patch in self._patches for reference in patch.references]

    def outlook(self) -> dict[str, str]:
        """What :attr:`table` would be: ``applied`` for each patch whose functions are all known, ``refused`` else."""
        refused = {check.patch for check in self.check() if check.problem}
        return {patch.name: "refused" if patch.name in refused else "applied" for patch in self._patches}

    def apply(self) -> None:
        """Check all, then install all. Raises PatchRefused before anything is changed. A second call does nothing."""
        if self._table:
            return
        problems = [check.problem for check in self.check() if check.problem]
        if problems:
            raise PatchRefused("\n".join([*problems, _ADVICE]))
        for patch in self._patches:
            patch.install()
            self._table[patch.name] = "applied"

    def _check(self, patch: str, target: str) -> Check:
        try:
            found = fp.fingerprint(fp.resolve(target)[2])
        except fp.Missing as error:
            return Check(patch, target, "", None, f"moontide-engine, patch {patch!r}: {error}")
        known = self._known.get(target, {})
        release = known.get(found)
        problem = ""
        if release is None:
            listed = ", ".join(f"{digest} ({name})" for digest, name in known.items()) or "none"
            problem = (
                f"moontide-engine, patch {patch!r}: {target} of this vLLM has the unknown fingerprint {found}; "
                f"known: {listed}"
            )
        return Check(patch, target, found, release, problem)


_ADVICE = (
    "moontide-engine does not start an engine it does not know. Install a release of moontide-engine that lists this "
    "vLLM, go back to a vLLM that this one lists, or run without MOONTIDE_ENABLED=1 (then nothing guards the caches). "
    "`python -m moontide_engine doctor` prints all fingerprints."
)


def load_known() -> dict[str, dict[str, str]]:
    """Known sources of each function: fingerprint to the vLLM releases that have it."""
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
