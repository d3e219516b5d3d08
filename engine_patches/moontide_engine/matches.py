"""The life of an external match: prepared, then either committed or aborted, exactly once.

A connector that finds a request's KV elsewhere may have to reserve it. Here is the book of such reservations; who asks,
and when, is in ``moontide_engine.patches.match_lifecycle``. Nothing here knows vLLM.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moontide_engine.jsonlog import log

Clock = Callable[[], float]


class Reason(enum.StrEnum):
    """Why a match was aborted."""

    ALLOCATION = "no room for its blocks"
    NOT_SCHEDULED = "not scheduled in this step"
    NOT_USED = "scheduled without it"
    EXPIRED = "held for too long"
    RANGE = "another range was asked for"
    REPLACED = "the connector gave another plan"
    NO_MATCH = "the connector has no match any more"
    CLIPPED = "fewer tokens were accepted than this step can use"
    FAILED = "commit raised an error"
    FINISHED = "the request has ended"
    PREEMPTED = "the request was preempted"
    RESET = "the cache was reset"
    SHUTDOWN = "the engine shuts down"


class ExternalMatch(NamedTuple):
    """What a connector has for a request, beyond the tokens that are computed."""

    plan: Any
    """The connector's own; it is handed back to commit or abort, and is compared by identity only."""
    tokens: int | None
    """More than 0; None: not known yet, ask again in a later step."""
    load_async: bool = False
    """Whether the load takes place between steps."""
    hold: float = 0.0
    """Seconds that it may wait for a later step if this one has no room for it; 0: it is aborted as the step ends."""


class Range(NamedTuple):
    """What a match is for. Each block hash covers all before it, so the last one stands for all."""

    computed: int
    tokens: int
    blocks: int
    last: bytes

    @staticmethod
    def of(computed: int, tokens: int, hashes: Sequence[bytes]) -> Range:
        """The range behind ``computed`` of a request with so many ``tokens`` and these block ``hashes``."""
        return Range(computed, tokens, len(hashes), hashes[-1] if hashes else b"")


@dataclass
class Counts:
    """``prepared == committed + sum(aborted.values()) + outstanding``, always."""

    prepared: int = 0
    """Plans that a connector gave."""
    reused: int = 0
    """Probes that were answered with a plan that was there."""
    committed: int = 0
    clipped: int = 0
    """Of the commits, those that accepted fewer tokens than they were asked for."""
    aborted: Counter[Reason] = field(default_factory=Counter)


@dataclass(slots=True)
class Entry:
    match: ExternalMatch
    range: Range
    since: float


class Ledger:
    """Outstanding matches of one connector, one for each request. For one thread."""

    def __init__(self, abort: Callable[[Any, str], None], clock: Clock = time.monotonic) -> None:
        """``abort`` is the connector's: it gets the plan and the reason. What it raises is logged, not passed on."""
        self._abort = abort
        self._clock = clock
        self.entries: dict[str, Entry] = {}
        """What is outstanding; to look at, not to change."""
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, request: str) -> ExternalMatch | None:
        """The outstanding match of a request."""
        entry = self.entries.get(request)
        return None if entry is None else entry.match

    def prepare(self, request: str, of: Range, ask: Callable[[], ExternalMatch | None]) -> ExternalMatch | None:
        """The match of a request for a range: the one that is there, else what ``ask`` gives. None: there is none.

        A match of unknown size is asked for again; the connector answers with the same plan, or the first one is
        aborted. A match for another range, or one held for too long, is aborted before it is asked for anew.
        """
        entry = self.entries.get(request)
        if entry is not None:
            if entry.range != of:
                self.abort(request, Reason.RANGE)
            elif self._expired(entry):
                self.abort(request, Reason.EXPIRED)
            elif entry.match.tokens is not None:
                self.counts.reused += 1
                return entry.match
        found = ask()
        if entry is not None and request in self.entries:
            if found is not None and found.plan is entry.match.plan:
                self.counts.reused += 1
                if found.tokens is not None:
                    entry.since = self._clock()
                entry.match = found
                return self._checked(request)
            self.abort(request, Reason.NO_MATCH if found is None else Reason.REPLACED)
        return None if found is None else self.begin(request, of, found)

    def begin(self, request: str, of: Range, match: ExternalMatch) -> ExternalMatch | None:
        """Enter what a connector gave for a request that has no match; what :meth:`prepare` does with it."""
        self.counts.prepared += 1
        self.entries[request] = Entry(match, of, self._clock())
        return match if match.tokens is None or match.tokens > 0 else self._checked(request)

    def commit(self, request: str, tokens: int, call: Callable[[Any, int], int], *, exact: bool = False) -> int:
        """Let ``call(plan, tokens)`` consume the match; the tokens that it accepts, 0 to ``tokens``.

        ``exact``: fewer (but not 0) are of no use now, and the plan is aborted instead; they are returned all the same.
        Raises KeyError without a match, ValueError if more are accepted than were asked for, and what ``call`` raises;
        the plan is aborted then.
        """
        plan = self.entries[request].match.plan
        try:
            accepted = call(plan, tokens)
            if not 0 <= accepted <= tokens:
                raise ValueError(f"{accepted} tokens of {tokens} were accepted for {request}")
        except BaseException:
            self.abort(request, Reason.FAILED)
            raise
        if exact and 0 < accepted < tokens:
            self.abort(request, Reason.CLIPPED)
            return accepted
        del self.entries[request]
        self.counts.committed += 1
        self.counts.clipped += accepted < tokens
        return accepted

    def abort(self, request: str, reason: Reason) -> bool:
        """Give up the match of a request; whether there was one."""
        entry = self.entries.pop(request, None)
        if entry is None:
            return False
        self.counts.aborted[reason] += 1
        try:
            self._abort(entry.match.plan, str(reason))
        except Exception as error:
            log("match-abort-failed", request=request, reason=str(reason), error=f"{type(error).__name__}: {error}")
        return True

    def drop(self, request: str, reason: Reason) -> bool:
        """The step has no use for the match: abort it, unless it may wait for a later one. Whether it was aborted."""
        entry = self.entries.get(request)
        if entry is None or self._waits(entry):
            return False
        return self.abort(request, reason)

    def step_ends(self) -> None:
        """Abort what nobody consumed in this step and what may not wait (any longer)."""
        for request, entry in list(self.entries.items()):
            if not self._waits(entry):
                self.abort(request, Reason.EXPIRED if self._expired(entry) else Reason.NOT_SCHEDULED)

    def close(self, reason: Reason) -> None:
        """Abort all."""
        for request in list(self.entries):
            self.abort(request, reason)

    def _checked(self, request: str) -> ExternalMatch | None:
        match = self.entries[request].match
        if match.tokens is not None and match.tokens <= 0:
            self.abort(request, Reason.NO_MATCH)
            return None
        return match

    def _waits(self, entry: Entry) -> bool:
        # The size of a match may take many steps to be known; it ends with its request or its range.
        return entry.match.tokens is None or self._clock() - entry.since < entry.match.hold

    def _expired(self, entry: Entry) -> bool:
        return entry.match.hold > 0 and not self._waits(entry)
