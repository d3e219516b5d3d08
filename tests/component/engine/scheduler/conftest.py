"""Tests on a real EngineCore in this process; the worker is simulated (corekit)."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parent))

with warnings.catch_warnings():
    # What vLLM and torch say while they are imported is theirs.
    warnings.simplefilter("ignore")
    import corekit  # noqa: F401


@pytest.fixture(scope="session")
def tiny(models: dict[str, Path]) -> Path:
    """Folder of the tiny model: the core needs its configuration alone."""
    return models["a"]
