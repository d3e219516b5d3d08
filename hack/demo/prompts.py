"""The prompts: fixed text, so that a cold engine can be asked the very same."""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = (
    "hello",
    "world",
    "this",
    "is",
    "a",
    "tiny",
    "model",
    "used",
    "to",
    "test",
    "fleet",
    "the",
    "tide",
    "sand",
    "cache",
)
PREFIX_WORDS = 300
SUFFIX_WORDS = 12


@dataclass(frozen=True)
class Prompts:
    """``load`` is what clients ask all the time; ``kept`` is asked only by the steps that look at single answers.

    Prompts of one group share long prefixes; no prompt of ``kept`` shares its first block with one of ``load``.
    """

    kept: tuple[str, ...]
    load: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Both groups; the index in it is a prompt's number."""
        return self.kept + self.load


def make(kept: int = 8, prefixes: int = 4, suffixes: int = 4, seed: int = 20261128) -> Prompts:
    """``kept`` prompts of their own, and ``prefixes`` x ``suffixes`` prompts for the load; one seed, one set."""
    source = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(source.choices(_WORDS, k=count))

    own = tuple(words(PREFIX_WORDS + SUFFIX_WORDS) for _ in range(kept))
    shared = [words(PREFIX_WORDS) for _ in range(prefixes)]
    return Prompts(own, tuple(f"{prefix} {words(SUFFIX_WORDS)}" for prefix in shared for _ in range(suffixes)))
