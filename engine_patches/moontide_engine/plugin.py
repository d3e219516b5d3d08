"""Entry point. vLLM calls ``register`` in the API server, in EngineCore, in each worker and in its helper processes.

This module imports nothing of vLLM: an exception while an entry point is *imported* is swallowed by vLLM (it would
start unguarded), one that ``register`` raises stops the process.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from moontide_engine import cpu_build, fallback, settings, tls
from moontide_engine.patches import (
    Registry,
    bounded_transfers,
    common_hit,
    exact_drain,
    gate,
    key_namespace,
    load_retry,
    lookup_economy,
    match_lifecycle,
    policy_epoch,
    probe,
    reset_truth,
    resume_safety,
    store_reset,
    two_phase,
    weight_version,
    weights_load,
)

RECHECK_MS = 20

PATCHES = Registry(
    (
        gate.PATCH,
        probe.PATCH,
        key_namespace.PATCH,
        exact_drain.PATCH,
        store_reset.PATCH,
        weight_version.PATCH,
        reset_truth.PATCH,
        policy_epoch.PATCH,
        two_phase.PATCH,
        common_hit.PATCH,
        resume_safety.PATCH,
        load_retry.PATCH,
        bounded_transfers.PATCH,
        lookup_economy.PATCH,
        match_lifecycle.PATCH,
        weights_load.PATCH,
    )
)


def register() -> None:
    """Apply all patches. Raises PatchRefused, SettingsError or CertificateError, and the engine does not start."""
    if not settings.enabled():
        return
    loaded = settings.load()
    # Once more when it is served. Here it is known before minutes have gone into loading weights.
    tls.certificate(loaded.admin_tls)
    PATCHES.apply(auto=loaded.auto_patches)
    cpu_build.prepare(loaded.cpu_start_method)
    fallback.prepare()
    if loaded.worker_spin is not None:
        calm(loaded.worker_spin)


def calm(seconds: float) -> None:
    """Let a process that waits on vLLM's shared-memory queue sleep ``seconds`` after its last message.

    vLLM keeps the core busy for one second after each message, yielding in a loop. Where engines share few cores that
    takes all of them (docs/decisions/). A notification can get lost when two messages follow each other within about a
    millisecond; vLLM's sleeper looks again after five seconds, before 0.27 never, and ours after :data:`RECHECK_MS`.

    Raises SettingsError where this vLLM has no such wait.
    """
    module: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    original: Any = getattr(getattr(module, "SpinCondition", None), "__init__", None)
    known = original is not None and "busy_loop_s" in inspect.signature(original).parameters
    rechecks = hasattr(module, "SHM_READER_RECHECK_INTERVAL_MS")
    if not known or not (rechecks or hasattr(module.SpinCondition, "wait")):
        raise settings.SettingsError("MOONTIDE_WORKER_SPIN_SECONDS is set, and this vLLM has no wait that it changes")

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{"busy_loop_s": seconds, **kwargs})

    module.SpinCondition.__init__ = init
    if rechecks:
        module.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
        return
    wait = module.SpinCondition.wait

    def bounded(self: Any, timeout_ms: int | None = None) -> None:
        # Whoever calls it looks at the buffer, and at its own deadline, after each return.
        wait(self, RECHECK_MS if timeout_ms is None else min(timeout_ms, RECHECK_MS))

    module.SpinCondition.wait = bounded
