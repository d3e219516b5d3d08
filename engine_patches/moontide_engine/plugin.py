"""Entry point. vLLM calls ``register`` in the API server, in EngineCore, in each worker and in its helper processes.

This module imports nothing of vLLM: an exception while an entry point is *imported* is swallowed by vLLM (it would
start unguarded), one that ``register`` raises stops the process.
"""

from __future__ import annotations

from moontide_engine import settings
from moontide_engine.patches import Registry, gate, probe, reset_truth

PATCHES = Registry((gate.PATCH, probe.PATCH, reset_truth.PATCH))


def register() -> None:
    """Apply all patches. Raises PatchRefused or SettingsError, and the engine does not start."""
    if not settings.enabled():
        return
    settings.load()
    PATCHES.apply()
