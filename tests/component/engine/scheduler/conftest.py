"""Tests on a real EngineCore in this process; the worker is simulated (corekit)."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# A release that is there as its Python part alone (hack/setup/releases.py) takes itself for a CUDA build.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

with warnings.catch_warnings():
    # What vLLM and torch say while they are imported is theirs.
    warnings.simplefilter("ignore")
    import corekit  # noqa: F401
    import vllm

_WANTED = os.environ.get("MOONTIDE_TEST_VLLM", vllm.__version__)
if vllm.__version__.partition("+")[0] != _WANTED.partition("+")[0]:
    raise RuntimeError(f"vLLM {_WANTED} is to be tested, and vLLM {vllm.__version__} was imported ({vllm.__file__})")


def pytest_report_header() -> str:
    """Which release the tests ran on."""
    return f"vllm {vllm.__version__}: {Path(vllm.__file__).parent}"


@pytest.fixture(scope="session")
def tiny(models: dict[str, Path]) -> Path:
    """Folder of the tiny model: the core needs its configuration alone."""
    return models["a"]
