"""What is said of a pool's memory nodes: before some go, while they move their keys, and when they are gone. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from moontide.status import Verdict

CONDITION = "StoreNodesReady"
MOVES_A_SECOND = 16
"""Objects that one client of Mooncake 0.3.13 fetches to move in a second, whatever their size."""


@dataclass(frozen=True)
class Segment:
    """A segment, as the master lists it."""

    host: str
    used_bytes: int
    capacity_bytes: int
    usable: bool
    """Whether the master puts keys there."""


@dataclass(frozen=True)
class Leaving:
    """A memory node whose pod is going. ``reason`` is empty while it does not say how far it is."""

    pod: str
    reason: str = ""
    held_bytes: int = 0
    moved_keys: int = 0
    moved_bytes: int = 0
    ended: bool = False

    @property
    def dropped_bytes(self) -> int:
        """What is lost; 0 until it is known."""
        return max(0, self.held_bytes - self.moved_bytes) if self.ended else 0


def mebibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**20:.0f} MiB"


def going(
    before: int, after: int, hosts: frozenset[str], segments: tuple[Segment, ...] | None, keys: int, drain_seconds: int
) -> str:
    """The sentence that is said before memory nodes go. ``hosts``: the addresses of the nodes; ``segments``: None where
    the master does not answer."""
    first = f"memory nodes go from {before} to {after}"
    if segments is None:
        return f"{first}; the master does not answer, so what they hold is not moved"
    mine = [each for each in segments if each.host in hosts]
    held = sum(each.used_bytes for each in mine)
    leaving = held * (before - after) // max(before, 1)
    if not leaving:
        return f"{first}; they hold nothing"
    free = sum(each.capacity_bytes - each.used_bytes for each in segments if each.usable)
    free -= sum(each.capacity_bytes - each.used_bytes for each in mine) * (before - after) // max(before, 1)
    used = sum(each.used_bytes for each in segments)
    size = max(used // max(keys, 1), 1)
    moved = max(0, min(leaving, free, MOVES_A_SECOND * drain_seconds * (before - after) * size))
    dropped = leaving - moved
    text = f"{first}: those that go hold about {leaving // size} keys ({mebibytes(leaving)})"
    if not dropped:
        return f"{text}, which move to other segments"
    why = "drainSeconds is 0" if not drain_seconds else "the rest of the pool has no room"
    if moved and moved < free:
        why = f"{MOVES_A_SECOND} keys a second and node can move in drainSeconds={drain_seconds}"
    return f"{text}; about {mebibytes(moved)} move to other segments and {mebibytes(dropped)} are dropped: {why}"


def said(leaving: Leaving) -> str:
    """What becomes of the keys of a node that is going."""
    if not leaving.reason:
        return f"{leaving.pod} is going and does not say how far it is"
    if not leaving.ended:
        done = f"{mebibytes(leaving.moved_bytes)} of {mebibytes(leaving.held_bytes)}"
        return f"{leaving.pod} moves its keys: {leaving.moved_keys} so far, {done}"
    if not leaving.held_bytes:
        return f"{leaving.pod} held nothing"
    moved = f"moved {leaving.moved_keys} keys ({mebibytes(leaving.moved_bytes)})"
    if not leaving.dropped_bytes:
        return f"{leaving.pod} {moved}, all that it held"
    return f"{leaving.pod} {moved} and drops {mebibytes(leaving.dropped_bytes)}: {leaving.reason}"


def ready(wanted: int, lending: int, leaving: tuple[Leaving, ...]) -> Verdict:
    """Whether the memory nodes are as wanted."""
    if leaving:
        return Verdict(CONDITION, "False", "Draining", "; ".join(said(each) for each in leaving[:10]))
    if lending < wanted:
        return Verdict(CONDITION, "False", "Starting", f"{lending} of {wanted} memory nodes lend")
    return Verdict(CONDITION, "True", "Lending", f"{lending} of {wanted} memory nodes lend")
