"""Patch ``external-match-lifecycle``: what a connector reserved for a match is used or given back, always.

Stock vLLM takes a positive ``get_num_new_matched_tokens`` for a reservation and has no word for "not needed after all".
A connector may have three more methods (``docs/external-match.md``); one without them is left exactly as it is:

- ``prepare_external_match(request, num_computed_tokens)`` gives an ``ExternalMatch`` or None, and is called in place of
  ``get_num_new_matched_tokens``;
- ``commit_external_match(plan, request, blocks, num_tokens)`` gives how many of these tokens it will load;
- ``abort_external_match(plan, reason)`` ends a plan that was not committed.

A match is committed as its blocks are allocated, before ``update_state_after_alloc``, which is told of the tokens that
were accepted. Whatever is left when ``schedule`` returns is aborted, unless its connector lets it wait (``hold``).

*Fewer tokens than promised.* By the time the blocks are there the scheduler has counted on the promise. Two ways out:

- In place, where every layer has full attention: the blocks stay, the request merely starts earlier. A load between
  steps: ``num_computed_tokens`` is what was accepted, and only that is cached when the load has ended. A load within
  the step: the step computes as many tokens as it was going to, so its budget holds, from where the load ends; the rest
  of the prompt is an ordinary next chunk. The blocks are cached once that is known; stock would cache what it was
  promised.
- Otherwise (sliding windows, state-space layers, inputs of an encoder, drafts, no chunks, nothing at all to load
  between steps) the blocks are given back and the plan is aborted; the request is looked up again in the next step, and
  no more is promised then than was accepted.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moontide_engine.matches import Counts, ExternalMatch, Ledger, Range, Reason
from moontide_engine.patches import Patch, replace
from moontide_engine.patches.lookup_economy import load
from moontide_engine.patches.probe import SCHEDULER, STORE

METHODS = ("prepare_external_match", "commit_external_match", "abort_external_match")
HALF_LEASE = 2.5
"""Seconds; half of what the store's master gives by default."""

_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
_CONNECTOR = f"{STORE}.connector:MooncakeStoreConnector"
_STORE_SCHEDULER = f"{STORE}.scheduler:MooncakeStoreScheduler"
# Their blocks are all kept from the first token on, so a request may start at any of them.
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


def supports(connector: Any) -> bool:
    """Whether a connector has the three methods."""
    return all(callable(getattr(connector, name, None)) for name in METHODS)


@dataclass(frozen=True)
class _Clip:
    """A request of this step that gets fewer tokens than it was promised."""

    request: Any
    local: int
    accepted: int
    scheduled: int

    @property
    def start(self) -> int:
        return self.local + self.accepted


class _Place:
    """The place of a method of one object, for the steps that need it: most calls are of what needs nothing of us."""

    def __init__(self, owner: Any, name: str, make: Callable[[_Place], Any]) -> None:
        self._owner = owner
        self._name = name
        self._ours = make(self)
        self.original: Any = None
        """What was there; None: the place is not taken."""

    def take(self) -> None:
        """Until :meth:`leave`."""
        if self.original is None:
            self.original = getattr(self._owner, self._name)
            setattr(self._owner, self._name, self._ours)

    def leave(self) -> None:
        """Put back what was there."""
        original, self.original = self.original, None
        if original is not None:
            delattr(self._owner, self._name)
            if getattr(self._owner, self._name, None) != original:
                # It was the object's own already.
                setattr(self._owner, self._name, original)


class Lifecycle:
    """Matches of one scheduler. It takes the place of some methods of the scheduler, its connector and its manager."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._connector = scheduler.connector
        self._manager = scheduler.kv_cache_manager
        children = getattr(self._connector, "_connectors", None) or [self._connector]
        # By place among the children; those without the methods have none.
        self.ledgers = {
            index: Ledger(child.abort_external_match) for index, child in enumerate(children) if supports(child)
        }
        self._children = children
        self._books = tuple(self.ledgers.values())
        self._several = bool(getattr(self._connector, "_connectors", None))
        # Taken once a step has a match.
        self._slots = _Place(self._manager, "allocate_slots", self._allocate)
        # Once one of them is clipped.
        self._after = _Place(self._connector, "update_state_after_alloc", self._allocated)
        self._meta = _Place(self._connector, "build_connector_meta", self._build)
        self._clips: dict[str, _Clip] = {}
        self._caps: dict[str, int] = {}
        """Requests of which fewer tokens were accepted than could be used: the most that is promised from then on."""
        self._in_place = self._may_start_earlier()

    def install(self) -> None:
        """Take the places."""
        scheduler = self._scheduler
        for index in self.ledgers:
            self._children[index].get_num_new_matched_tokens = self._lookup(index)
        scheduler.schedule = self._schedule(scheduler.schedule)
        scheduler._free_request = self._ends(scheduler._free_request, Reason.FINISHED)
        scheduler._preempt_request = self._ends(scheduler._preempt_request, Reason.PREEMPTED)
        scheduler.reset_prefix_cache = self._closes(scheduler.reset_prefix_cache, Reason.RESET)
        scheduler.reset_connector_cache = self._closes(scheduler.reset_connector_cache, Reason.RESET)
        scheduler.shutdown = self._closes(scheduler.shutdown, Reason.SHUTDOWN)

    def outstanding(self) -> int:
        """Matches that are neither committed nor aborted."""
        return sum(len(ledger) for ledger in self.ledgers.values())

    def counts(self) -> Counts:
        """Of all connectors together."""
        total = Counts()
        for ledger in self.ledgers.values():
            total.prepared += ledger.counts.prepared
            total.reused += ledger.counts.reused
            total.committed += ledger.counts.committed
            total.clipped += ledger.counts.clipped
            total.aborted += ledger.counts.aborted
        return total

    # -- in the place of vLLM's methods ----------------------------------------------------------------------------

    def _lookup(self, index: int) -> Any:
        child, ledger, caps = self._children[index], self.ledgers[index], self._caps

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            name = request.request_id
            cap = caps.get(name)
            if cap == 0:
                return 0, False
            if name in ledger.entries:
                of = Range.of(num_computed_tokens, request.num_tokens, request.block_hashes)
                ask = functools.partial(child.prepare_external_match, request, num_computed_tokens)
                match = ledger.prepare(name, of, ask)
            else:
                match = child.prepare_external_match(request, num_computed_tokens)
                if match is not None:
                    of = Range.of(num_computed_tokens, request.num_tokens, request.block_hashes)
                    match = ledger.begin(name, of, match)
            if match is None:
                return 0, False
            if match.tokens is None:
                return None, False
            self._slots.take()
            return match.tokens if cap is None else min(match.tokens, cap), match.load_async

        return get_num_new_matched_tokens

    def _allocate(self, place: _Place) -> Any:
        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            name = request.request_id
            wanted = kwargs.get("num_external_computed_tokens", 0)
            index = self._holder(name) if wanted else None
            if index is None:
                blocks = place.original(request, num_new_tokens, *args, **kwargs)
                if blocks is not None:
                    self._not_used(name)
                return blocks
            between_steps = kwargs.get("delay_cache_blocks", False)
            kwargs["delay_cache_blocks"] = True
            blocks = place.original(request, num_new_tokens, *args, **kwargs)
            if blocks is None:
                self._drop(name)
                return None
            local = kwargs.get("num_new_computed_tokens", 0)
            accepted = self._commit(index, request, wanted)
            if accepted < wanted:
                if not self._usable(request, accepted, between_steps):
                    self._manager.free(request)
                    self._caps[name] = accepted
                    return None
                self._clips[name] = _Clip(request, local, accepted, num_new_tokens)
                self._after.take()
                self._meta.take()
            if self._several:
                self._not_used(name)
            if not between_steps:
                self._manager.cache_blocks(request, min(local + accepted + num_new_tokens, request.num_tokens))
            return blocks

        return allocate_slots

    def _not_used(self, name: str) -> None:
        for ledger in self._books:
            if name in ledger.entries:
                ledger.abort(name, Reason.NOT_USED)

    def _allocated(self, place: _Place) -> Any:
        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            clip = self._clips.get(request.request_id)
            return place.original(request, blocks, num_external_tokens if clip is None else clip.accepted)

        return update_state_after_alloc

    def _build(self, place: _Place) -> Any:
        def build_connector_meta(scheduler_output: Any) -> Any:
            # The first call after the scheduler has set what each request has; the connector must see it right.
            for name, clip in self._clips.items():
                self._start_earlier(name, clip, scheduler_output)
            self._clips.clear()
            return place.original(scheduler_output)

        return build_connector_meta

    def _schedule(self, original: Any) -> Any:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                if self._slots.original is not None:
                    self._step_had_matches()
                for ledger in self._books:
                    if ledger.entries:
                        ledger.step_ends()

        return schedule

    def _step_had_matches(self) -> None:
        self._slots.leave()
        if self._meta.original is not None:
            self._after.leave()
            self._meta.leave()
            self._clips.clear()

    def _ends(self, original: Any, reason: Reason) -> Any:
        def end(request: Any, *args: Any, **kwargs: Any) -> Any:
            if self._caps:
                self._caps.pop(request.request_id, None)
            for ledger in self._books:
                if ledger.entries:
                    ledger.abort(request.request_id, reason)
            return original(request, *args, **kwargs)

        return end

    def _closes(self, original: Any, reason: Reason) -> Any:
        def close(*args: Any, **kwargs: Any) -> Any:
            for ledger in self._books:
                ledger.close(reason)
            return original(*args, **kwargs)

        return close

    # -- parts -----------------------------------------------------------------------------------------------------

    def _holder(self, name: str) -> int | None:
        """Place of the connector whose match the scheduler is about to use; None: it has none of these methods."""
        chosen = self._connector._requests_to_connector.get(name, -1) if self._several else 0
        ledger = self.ledgers.get(chosen)
        return None if ledger is None or name not in ledger.entries else chosen

    def _drop(self, name: str) -> None:
        for ledger in self.ledgers.values():
            ledger.drop(name, Reason.ALLOCATION)

    def _commit(self, index: int, request: Any, wanted: int) -> int:
        child = self._children[index]

        def call(plan: Any, tokens: int) -> int:
            blocks = self._manager.get_blocks(request.request_id)
            accepted: int = child.commit_external_match(plan, request, blocks, tokens)
            return accepted

        exact = not self._in_place or request.has_encoder_inputs
        return self.ledgers[index].commit(request.request_id, wanted, call, exact=exact)

    def _usable(self, request: Any, accepted: int, between_steps: bool) -> bool:
        # A request that waits for a load of nothing would wait for ever.
        return self._startable(request) and (accepted > 0 or not between_steps)

    def _startable(self, request: Any) -> bool:
        return self._in_place and not request.has_encoder_inputs

    def _may_start_earlier(self) -> bool:
        scheduler = self._scheduler
        groups = scheduler.kv_cache_config.kv_cache_groups
        return (
            all(type(group.kv_cache_spec).__name__ in _FULL for group in groups)
            and scheduler.scheduler_config.enable_chunked_prefill
            and not scheduler.num_spec_tokens
            # Of some releases only: layers that recompute the end of a hit; blocks that must be zero before use.
            and not getattr(scheduler, "prefix_replay_tokens", 0)
            and not getattr(scheduler, "needs_kv_cache_zeroing", False)
        )

    def _start_earlier(self, name: str, clip: _Clip, output: Any) -> None:
        request = clip.request
        request.num_computed_tokens = clip.start
        if request.prefill_stats is not None and request.num_preemptions <= 0:
            request.prefill_stats.set(request.num_prompt_tokens, clip.local, clip.accepted)
        if name not in output.num_scheduled_tokens:
            return
        for new in output.scheduled_new_reqs:
            if new.req_id == name:
                new.num_computed_tokens = clip.start
        cached = output.scheduled_cached_reqs
        for index, other in enumerate(cached.req_ids):
            if other == name:
                cached.num_computed_tokens[index] = clip.start
        # Of some releases only: prefills that have not ended, whose blocks no load may take.
        prefills = getattr(self._scheduler, "_inflight_prefills", None)
        if prefills is not None and clip.start + clip.scheduled < request.num_tokens:
            prefills.add(request)


# -- the Mooncake store's connector --------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class StorePlan:
    """A lookup: the keys it found are leased by the store from ``asked`` (monotonic seconds) on."""

    request: str
    computed: int
    asked: float
    empty: bool = False
    """It found nothing: there is nothing to let go of, and the answer may be remembered."""


class _Matches:
    """State of one connector. Settings are read once: from the environment, they cost more than all the rest."""

    def __init__(self) -> None:
        self.memo = load().memo
        self.plans: dict[str, StorePlan] = {}


def _matches(connector: Any) -> _Matches:
    try:
        found: _Matches = connector.moontide_matches
    except AttributeError:
        found = connector.moontide_matches = _Matches()
    return found


def prepare_external_match(self: Any, request: Any, num_computed_tokens: int) -> ExternalMatch | None:
    """Look the request up in the store. The match may wait for half the store's lease."""
    try:
        matches = self.moontide_matches
    except AttributeError:
        matches = _matches(self)
    name, now = request.request_id, time.monotonic()
    plan = matches.plans.get(name)
    tokens, load_async = self.connector_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
    if tokens == 0:
        if plan is not None:
            plan.empty = True
            del matches.plans[name]
        return None
    if plan is None:
        plan = matches.plans[name] = StorePlan(name, num_computed_tokens, now)
    hold = 0.0 if tokens is None else max(plan.asked + matches.memo - time.monotonic(), 0.0)
    return ExternalMatch(plan, tokens, load_async, hold)


def commit_external_match(self: Any, plan: StorePlan, request: Any, blocks: Any, num_tokens: int) -> int:
    """Take the lookup's word, or if half the lease is over that of another one, if it is less."""
    matches, store = _matches(self), self.connector_scheduler
    matches.plans.pop(plan.request, None)
    spec = store.load_specs.get(plan.request)
    if spec is None:
        return 0
    if time.monotonic() - plan.asked >= (matches.memo or HALF_LEASE):
        again = _look_again(store, plan, request)
        if again == 0:
            store.load_specs.pop(plan.request, None)
            return 0
        if again < num_tokens:
            return again
        store.load_specs[plan.request] = spec
    if num_tokens < spec.kvpool_cached_tokens - plan.computed:
        # The scheduler wants less than was found. Whole blocks have keys of their own; a part of one may not.
        num_tokens -= (plan.computed + num_tokens) % store._block_size
        if num_tokens <= 0:
            store.load_specs.pop(plan.request, None)
            return 0
        spec.kvpool_cached_tokens = plan.computed + num_tokens
        if hasattr(spec, "tail_key_boundaries"):
            spec.tail_key_boundaries = ()
    return num_tokens


def _look_again(store: Any, plan: StorePlan, request: Any) -> int:
    _discard(store, plan.request)
    beside = getattr(store, "lookup_async", None)
    if beside:
        # This answer cannot wait for another step.
        store.lookup_async = False
    try:
        tokens, _ = store.get_num_new_matched_tokens(request, plan.computed)
    finally:
        if beside:
            store.lookup_async = beside
    return tokens or 0


def abort_external_match(self: Any, plan: StorePlan, reason: str) -> None:
    """Drop what the lookup recorded. The lease ends by itself."""
    if plan.empty:
        return
    _matches(self).plans.pop(plan.request, None)
    self.connector_scheduler.load_specs.pop(plan.request, None)
    _discard(self.connector_scheduler, plan.request)


def _discard(store: Any, request: str) -> None:
    # vLLM 0.22 remembers no lookups.
    discard = getattr(store.client, "discard", None)
    if discard is not None:
        discard(request)


def _init(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.moontide_matches = None
        if self.connector is None:
            return
        lifecycle = Lifecycle(self)
        if lifecycle.ledgers:
            lifecycle.install()
            self.moontide_matches = lifecycle

    return init


def _install() -> None:
    # A bad value stops the engine at once, not with the first request.
    load()
    replace(f"{SCHEDULER}.__init__", _init)
    connector = importlib.import_module(f"{STORE}.connector").MooncakeStoreConnector
    connector.prepare_external_match = prepare_external_match
    connector.commit_external_match = commit_external_match
    connector.abort_external_match = abort_external_match


PATCH = Patch(
    name="external-match-lifecycle",
    summary="what a connector reserved for a match is used or given back",
    references=(
        f"{SCHEDULER}.__init__",
        f"{SCHEDULER}.schedule",
        f"{SCHEDULER}._free_request",
        f"{SCHEDULER}._preempt_request",
        f"{SCHEDULER}._build_kv_connector_meta",
        f"{SCHEDULER}._update_after_schedule",
        f"{SCHEDULER}._update_waiting_for_remote_kv",
        f"{SCHEDULER}.reset_prefix_cache",
        f"{SCHEDULER}.reset_connector_cache",
        f"{SCHEDULER}.shutdown",
        f"{_MANAGER}.allocate_slots",
        f"{_MANAGER}.cache_blocks",
        f"{_MANAGER}.free",
        f"{_MULTI}.get_num_new_matched_tokens",
        f"{_MULTI}.update_state_after_alloc",
        f"{_CONNECTOR}.get_num_new_matched_tokens",
        f"{_STORE_SCHEDULER}.get_num_new_matched_tokens",
        f"{_STORE_SCHEDULER}.update_state_after_alloc",
        f"{_STORE_SCHEDULER}.build_connector_meta",
    ),
    install=_install,
    optional=True,
)
