"""What a reconcile needs from outside: handed in, never reached for."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field

from moontide.config import Config
from moontide.engines.client import Unanswered
from moontide.engines.wire import Session
from moontide.kube.client import Kube
from moontide.kube.tokens import Tokens
from moontide.metrics import Metrics
from moontide.planning.model import EngineStatus, Replica
from moontide.reconcile.quiet import Quiet

GONE_SECONDS = 3600.0
"""What a reconcile returns for a resource that no longer exists."""


def utc_now() -> dt.datetime:
    """The time of day, aware."""
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True)
class Context:
    """The operator's dependencies. Shared, never copied."""

    kube: Kube
    http: Session
    """For engines, masters and wipers; the API server has its own client."""
    tokens: Tokens
    term: Callable[[], int]
    """The term of this leadership, asked for right before each command. Does not return once it may be over."""
    config: Config = field(default_factory=Config)
    now: Callable[[], dt.datetime] = utc_now
    metrics: Metrics = field(default_factory=Metrics)
    needs_met: dict[str, tuple[int, dt.datetime]] = field(default_factory=dict)
    """By a fleet's or pool's uid, the generation whose Secrets and claims were all there, and when that was asked."""

    pods: dict[tuple[str, str], dict[str, tuple[str, Replica | None]]] = field(default_factory=dict)
    """By a fleet's uid and who looks: the pods of the last look, by uid, with their resource version."""
    late: dict[str, dict[str, asyncio.Task[EngineStatus | Unanswered]]] = field(default_factory=dict)
    """By a fleet's uid and a pod's: questions that looks do not wait for any longer."""
    pace: dict[str, float] = field(default_factory=dict)
    """By a pod's uid: the seconds of its last command."""
    quiet: Quiet = field(default_factory=lambda: Quiet(collects=False))
    """Of all policies: while any of them tells engines something."""

    def __copy__(self) -> Context:
        # kopf copies its memo for every handler; connections and caches must stay one.
        return self
