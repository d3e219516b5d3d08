"""EngineCore's half of ``reset-truth``: what is reset, in which order, and what the caller is told."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moontide_engine import settings as settings_module
from moontide_engine.fallback import fell_back
from moontide_engine.jsonlog import log
from moontide_engine.patches.probe import STORE
from moontide_engine.patches.reset_truth_store import JOBS, Outcome

_T = TypeVar("_T")
_POLL = 0.02
"""Seconds between two looks at the saves of all ranks."""


@dataclass(frozen=True)
class Report:
    """What one reset did. ``cleared`` has ``local``, ``external``; ``removed`` is a number of keys, None: not known."""

    success: bool
    cleared: tuple[str, ...] = ()
    removed: int | None = None
    reason: str = ""
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        """As EngineCore's utility answers it."""
        return {
            "success": self.success,
            "cleared": list(self.cleared),
            "removed": self.removed,
            "reason": self.reason,
            "message": self.message,
        }


@dataclass
class _Wiped:
    """External caches that answered; ``jobs`` are the wipes that still run."""

    said: bool | None = None
    message: str = ""
    jobs: list[Future[Outcome]] = field(default_factory=list)


def start(core: Any, reset_running_requests: bool, reset_connector: bool) -> Future[Report]:
    """Reset the local cache now and start to wipe the external one, if that is asked for. Never raises.

    The future is done within the store timeout and a second. Only for the thread of EngineCore.
    """
    refused = _reset_local(core, reset_running_requests, reset_connector)
    if refused is not None:
        # The admin plane asks for a local reset many times a second until blocks are free.
        return _resolved(_told(refused) if reset_connector else refused)
    if not reset_connector:
        return _resolved(Report(True, ("local",)))
    wiped = _reset_external(core.scheduler)
    return _gather(wiped.jobs, lambda outcomes: _told(_conclude(wiped, outcomes)))


def _reset_local(core: Any, running: bool, external: bool) -> Report | None:
    """None, or why it was refused. The store must not be touched then: it would be filled again behind the wipe."""
    try:
        return _try_local(core, running, external)
    except Exception as error:
        # vLLM raises when blocks are still held after it has preempted everything.
        reason = "BlocksHeld" if isinstance(error, RuntimeError) else "EngineFault"
        return Report(False, (), None, reason, f"{type(error).__name__}: {error}")


def _try_local(core: Any, running: bool, external: bool) -> Report | None:
    scheduler = core.scheduler
    loading = sum(1 for request in scheduler.requests.values() if request.status.name == "WAITING_FOR_REMOTE_KVS")
    if loading and (running or external):
        return Report(False, (), None, "LoadPending", f"{loading} requests wait for blocks from an external cache")
    # A save is pending until every rank has reported its end, and holds its blocks as long.
    if external and scheduler.connector is not None and (_pushing(scheduler.connector) or _saving(core)):
        return Report(False, (), None, "StoreBusy", "saves to an external cache have not ended on every rank")
    if not scheduler.reset_prefix_cache(running, False):
        return Report(False, (), None, "BlocksHeld", "blocks of the local prefix cache are still held")
    return None


def _pushing(connector: Any) -> bool:
    # The scheduler's connectors of 0.22 and 0.23 have no such question.
    pending = getattr(connector, "has_pending_push_work", None)
    return pending is not None and bool(pending())


def _saving(core: Any) -> bool:
    """Whether a rank still saves to a Mooncake store, on releases whose scheduler does not know that by itself.

    It knows of requests that have ended, but not of those that it has preempted. Each rank answers after all steps it
    was given before; one that does not answer would not take another step, either.
    """
    half: Any = importlib.import_module(f"{STORE}.scheduler").MooncakeStoreScheduler
    connector = core.scheduler.connector
    children = getattr(connector, "_connectors", None) or [connector]
    if hasattr(half, "has_pending_push_work") or not any(
        isinstance(getattr(child, "connector_scheduler", None), half) for child in children
    ):
        return False
    return any(answer["left"] for answer in core.model_executor.collective_rpc("moontide_store_queue"))


def _reset_external(scheduler: Any) -> _Wiped:
    wiped = _Wiped()
    if scheduler.connector is None:
        if why := fell_back():
            # Others may share the store, and it keeps what it has.
            wiped.jobs.append(_resolved(Outcome(False, None, "StoreNotAttached", f"runs without its store: {why}")))
            return wiped
        # True, with a debug line.
        scheduler.reset_connector_cache()
        return wiped
    token = JOBS.set(wiped.jobs)
    try:
        wiped.said = scheduler.connector.reset_cache()
    except Exception as error:
        wiped.said, wiped.message = False, f"{type(error).__name__}: {error}"
    finally:
        JOBS.reset(token)
    if wiped.said is not False and scheduler.log_stats:
        scheduler.connector_prefix_cache_stats.reset = True
    return wiped


def _conclude(wiped: _Wiped, outcomes: list[Outcome]) -> Report:
    counts = [outcome.removed for outcome in outcomes if outcome.removed is not None]
    removed = sum(counts) if counts else None
    bad = next((outcome for outcome in outcomes if not outcome.ok), None)
    if bad is not None:
        return Report(False, ("local",), removed, bad.reason, bad.message)
    if wiped.said is False:
        return Report(False, ("local",), removed, "ConnectorFailed", wiped.message or "a connector was not reset")
    # A connector without a cache of its own (None) has nothing to fail at, as in stock vLLM, and cleared nothing.
    return Report(True, ("local",) if wiped.said is None else ("local", "external"), removed)


def _told(report: Report) -> Report:
    if not report.success:
        log("reset-failed", cleared=report.cleared, reason=report.reason, message=report.message)
    return report


def _resolved(value: _T) -> Future[_T]:
    future: Future[_T] = Future()
    future.set_result(value)
    return future


def _gather(futures: list[Future[Outcome]], conclude: Callable[[list[Outcome]], _T]) -> Future[_T]:
    """Future of ``conclude`` of all results; a chain, not a wait. The futures must not raise."""
    answer: Future[_T] = Future()

    def go_on(outcomes: list[Outcome]) -> None:
        if len(outcomes) == len(futures):
            answer.set_result(conclude(outcomes))
            return
        futures[len(outcomes)].add_done_callback(lambda future: go_on([*outcomes, future.result()]))

    go_on([])
    return answer


def _deferred(core: Any, future: Future[Report], show: Callable[[Report], Any]) -> Any:
    """What a utility of EngineCore returns: a future where vLLM's loop waits for it, else the value itself."""
    proc = importlib.import_module("vllm.v1.engine.core").EngineCoreProc
    if future.done() or not isinstance(core, proc):
        return show(future.result())
    shown: Future[Any] = Future()
    future.add_done_callback(lambda done: shown.set_result(show(done.result())))
    return shown


def core_reset(original: Any) -> Any:
    """``EngineCore.reset_prefix_cache``: the truth, at once or in a future."""

    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> Any:
        return _deferred(self, start(self, reset_running_requests, reset_connector), lambda report: report.success)

    return reset_prefix_cache


def moontide_reset(self: Any, reset_running_requests: bool, reset_connector: bool) -> Any:
    """Utility of EngineCore: the same reset, answered with all that is known about it."""
    return _deferred(self, start(self, reset_running_requests, reset_connector), Report.as_json)


def moontide_reset_local(self: Any, reset_running_requests: bool) -> dict[str, Any]:
    """Utility of EngineCore: what ``moontide_reset`` does before it turns to the store, with all its refusals."""
    refused = _reset_local(self, reset_running_requests, True)
    return (Report(True, ("local",)) if refused is None else _told(refused)).as_json()


def core_reset_caches(original: Any) -> Any:
    """``EngineCore._reset_caches``, the end of a pause or sleep. It waits: nothing runs then. Raises RuntimeError."""

    def _reset_caches(self: Any, reset_running_requests: bool = True, reset_connector: bool = True) -> None:
        end = time.monotonic() + settings_module.load().store_timeout
        while reset_connector and _saving(self) and time.monotonic() < end:
            time.sleep(_POLL)
        report = start(self, reset_running_requests, reset_connector).result()
        if not report.success:
            raise RuntimeError(f"the caches were not reset: {report.reason}: {report.message}")
        self.reset_mm_cache()
        self.reset_encoder_cache()

    return _reset_caches


def core_pause(original: Any) -> Any:
    """``EngineCoreProc.pause_scheduler``: a reset that fails after the last request has ended fails the pause.

    Until 0.31 the error is raised in EngineCore's loop, and ends it.
    """

    def pause_scheduler(self: Any, mode: str = "abort", clear_cache: bool = True) -> Any:
        future = original(self, mode, clear_cache)
        if future is not None:
            self._idle_state_callbacks[-1] = functools.partial(
                _finish_pause, callback=self._idle_state_callbacks[-1], future=future
            )
        return future

    return pause_scheduler


def _finish_pause(core: Any, callback: Callable[[Any], None], future: Future[Any]) -> None:
    try:
        callback(core)
    except Exception as error:
        future.set_exception(error)


def multi_reset(original: Any) -> Any:
    """``MultiConnector.reset_cache``: every connector is asked; None when none of them has a cache to reset."""

    def reset_cache(self: Any) -> bool | None:
        answers: list[bool] = []
        for connector in self._connectors:
            try:
                answer = connector.reset_cache()
            except Exception as error:
                name = type(connector).__name__
                log("connector-reset-failed", connector=name, error=f"{type(error).__name__}: {error}")
                answer = False
            if answer is not None:
                answers.append(bool(answer))
        return all(answers) if answers else None

    return reset_cache
