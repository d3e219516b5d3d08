"""Whether a pool is worse off than it should be: segments dropped, the master restarted, the store is full. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

from moontide.api.v1alpha1 import Condition
from moontide.status import Verdict

CONDITION = "Degraded"
RESTART_SECONDS = 120.0
"""How long a restart of the master is said: by then engines have mounted their segments again."""
_MARGIN_POINTS = 5
"""Below what an eviction leaves, so that the condition does not flip with each eviction."""


@dataclass(frozen=True)
class Lender:
    """Whose segments there should be: the memory nodes, or a fleet's worker processes."""

    words: str
    segments: int


@dataclass(frozen=True)
class Seen:
    """One look at a pool whose master serves."""

    segments: int | None
    lenders: tuple[Lender, ...]
    keys: int
    allocated_bytes: int
    capacity_bytes: int
    watermark_percent: int
    eviction_percent: int
    master_age: float | None
    """Seconds since the master started; None while it is not known."""
    restarts: int


def restarted(before: dt.datetime | None, now: dt.datetime | None) -> bool:
    """Whether the master that runs is another start than the one seen before. The first one seen is none."""
    return before is not None and now is not None and now > before


def degraded(seen: Seen | None, before: Iterable[Condition]) -> Verdict:
    """The condition; ``before`` are the conditions so far. None for a master that does not serve."""
    if seen is None:
        return Verdict(CONDITION, "Unknown", "MasterNotServing", "the master does not say how the pool is")
    found = [each for each in (_restart(seen), _dropped(seen), _fill(seen, before)) if each is not None]
    if not found:
        return Verdict(CONDITION, "False", "AsExpected")
    return Verdict(CONDITION, "True", found[0][0], "; ".join(text for _, text in found))


def _restart(seen: Seen) -> tuple[str, str] | None:
    if not seen.restarts or seen.master_age is None or seen.master_age >= RESTART_SECONDS:
        return None
    return "MasterRestarted", "the master has restarted and has none of the keys of before; prefixes are computed again"


def _dropped(seen: Seen) -> tuple[str, str] | None:
    expected = sum(each.segments for each in seen.lenders)
    if seen.segments is None or seen.segments >= expected:
        return None
    whose = " and ".join(f"{each.segments} of {each.words}" for each in seen.lenders if each.segments)
    return (
        "ClientsDropped",
        f"{seen.segments} segments are mounted and {expected} are expected: {whose}; what the others held is lost",
    )


def _fill(seen: Seen, before: Iterable[Condition]) -> tuple[str, str] | None:
    if seen.capacity_bytes <= 0:
        return None
    fill = 100 * seen.allocated_bytes / seen.capacity_bytes
    was = any(each.type == CONDITION and "evicts from" in each.message for each in before)
    clear = seen.watermark_percent - seen.eviction_percent - _MARGIN_POINTS
    if fill < (clear if was else seen.watermark_percent):
        return None
    return (
        "FillAboveWatermark",
        f"the store is {fill:.0f} % full and evicts from {seen.watermark_percent} %: what goes is computed again",
    )
