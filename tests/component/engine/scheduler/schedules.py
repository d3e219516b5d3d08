"""Random things that are done with a real KVCacheManager of several cache groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import blockkit
from blockkit import BLOCK, Blocks, chunked, full, sliding, tokens
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    """Groups, blocks of the pool, and what is done: numbers that :func:`run` reads as its state allows."""

    specs: tuple[Any, ...]
    num_blocks: int
    steps: tuple[tuple[int, int, int, int], ...]


KINDS: tuple[Callable[[int], Any], ...] = (
    lambda size: full(),
    lambda size: full(),
    lambda size: full(blocks=2),
    lambda size: full(heads=2),
    lambda size: sliding(size * BLOCK),
    lambda size: sliding(size * BLOCK + 7),
    lambda size: sliding(size * BLOCK, blocks=2),
    lambda size: chunked(size * BLOCK),
)
WINDOWS = (2, 3, 4, 5, 6, 8)
STEPS = 120
CASES = 64
TEXTS = [tokens(seed, 16 * BLOCK) for seed in (1, 2, 3)]


def usable(specs: Sequence[Any], fulls: int = 1) -> bool:
    """What managers take: groups of at least two kinds, and attention in chunks with equal block sizes only.

    ``fulls``: with one kind of full attention at most, or with so many at most and two at least.
    """
    kinds = set(specs)
    found = sum(map(blockkit.is_full, kinds))
    equal = len({spec.block_size for spec in kinds}) == 1
    right = found <= 1 if fulls == 1 else 1 < found <= fulls
    return len(kinds) > 1 and right and (equal or not any(map(blockkit.is_chunked, kinds)))


def run(case: Case) -> int:
    """Do it all; gives how many requests had local and external tokens. Raises Wrong."""
    blocks = Blocks(case.specs, case.num_blocks)
    for number, (what, who, size, more) in enumerate(case.steps):
        running = sorted(blocks.held)
        waiting = sorted(blocks.preempted)
        external = more % 9 * BLOCK
        chunk = (0, 2 * BLOCK, 5, None)[more % 4] if external else (2 * BLOCK, None)[more % 2]
        if what < 4 or not (running or waiting):
            prompt = TEXTS[who % 3][: (2 + size % 14) * BLOCK] + tokens(1000 + number, 5)
            blocks.take(f"r{number}", prompt, external, chunk)
        elif waiting and (what == 4 or not running):
            blocks.resume(waiting[who % len(waiting)], external, chunk)
        elif running:
            name = running[who % len(running)]
            if what < 7 and blocks.held[name].loading:
                blocks.arrive(name)
            elif what < 7:
                if not blocks.advance(name, 1 + size * 3):
                    blocks.preempt(running[-1])
            elif what == 7 and not blocks.held[name].loading:
                blocks.preempt(name)
            else:
                blocks.finish(name)
    for name in list(blocks.held):
        blocks.finish(name)
    blockkit.must(len(blocks.queue()) == case.num_blocks - 1, "blocks were lost")
    return blocks.local_and_external


def seeded(seed: int, fulls: int = 1) -> Case:
    """Always the same one. ``fulls``: see :func:`usable`."""
    source = random.Random(seed)
    specs: tuple[Any, ...] = ()
    while not usable(specs, fulls):
        specs = tuple(source.choice(KINDS)(source.choice(WINDOWS)) for _ in range(source.choice((2, 2, 3, 3, 4))))
    steps = tuple(
        (source.randrange(10), source.randrange(16), source.randrange(16), source.randrange(72)) for _ in range(STEPS)
    )
    return Case(specs, 1 + len(specs) * source.randrange(12, 30), steps)


def cases(fulls: int = 1) -> st.SearchStrategy[Case]:
    """Any case. ``fulls``: see :func:`usable`."""
    number = st.integers(0, 15)
    step = st.tuples(st.integers(0, 9), number, number, st.integers(0, 71))
    kind = st.builds(lambda kind, size: kind(size), st.sampled_from(KINDS), st.sampled_from(WINDOWS))
    specs = st.lists(kind, min_size=2, max_size=4).map(tuple).filter(lambda specs: usable(specs, fulls))
    return st.builds(Case, specs, st.integers(25, 90), st.lists(step, min_size=10, max_size=60).map(tuple))
