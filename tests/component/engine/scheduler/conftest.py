"""Tests on a real EngineCore in this process; the worker is simulated (corekit)."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Each fault with and without its patch, in this very run."""
    stock: dict[str, tuple[int, str]] = {}
    patched: dict[str, list[int]] = {}
    for outcome in ("xfailed", "passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            name, _, parameters = report.nodeid.rpartition("::")[2].partition("[")
            options = parameters.rstrip("]").split("-")
            if "off" in options and outcome == "xfailed":
                reason = str(report.wasxfail).removeprefix("reason: ").removeprefix("stock vLLM: ")
                stock[name] = (stock.get(name, (0, ""))[0] + 1, reason)
            elif "on" in options and outcome != "xfailed":
                patched.setdefault(name, [0, 0])[outcome == "failed"] += 1
    if not stock:
        return
    terminalreporter.section(f"vllm {vllm.__version__}: stock and patched")
    for name, (count, reason) in stock.items():
        right, wrong = patched.get(name, (0, 0))
        text = f"{right} right" + (f", {wrong} WRONG" if wrong else "")
        terminalreporter.line(f"{name.removeprefix('test_')}\n    stock: {count} wrong: {reason}\n    patched: {text}")


@pytest.fixture(scope="session")
def tiny(models: dict[str, Path]) -> Path:
    """Folder of the tiny model: the core needs its configuration alone."""
    return models["a"]
