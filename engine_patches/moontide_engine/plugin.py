"""Entry point. vLLM calls ``register`` in the API server, in EngineCore, in each worker and in its helper processes.

This module imports nothing of vLLM: an exception while an entry point is *imported* is swallowed by vLLM (it would
start unguarded), one that ``register`` raises stops the process.
"""

from __future__ import annotations

import importlib
import logging

from moontide_engine import settings
from moontide_engine.patches import Registry, gate, probe, reset_truth

PATCHES = Registry((gate.PATCH, probe.PATCH, reset_truth.PATCH))


def register() -> None:
    """Apply all patches. Raises PatchRefused or SettingsError, and the engine does not start."""
    if not settings.enabled():
        return
    settings.load()
    PATCHES.apply()
    _ask_for_amx()


def _ask_for_amx() -> None:
    """Ask the kernel for the AMX tiles that vLLM's CPU attention uses.

    vLLM leaves that to the first large matrix product. When the first request is short there was none yet, and the
    worker dies of an illegal instruction (seen on 0.32.0's CPU build). A GPU build is not touched by it.
    """
    torch = importlib.import_module("torch")
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logging.getLogger("moontide").warning("the kernel refuses AMX tiles; a short first request may end the worker")
