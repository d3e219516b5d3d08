"""A trainer's image has httpx and nothing of the operator."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"kopf", "kubernetes", "pydantic", "aiohttp", "prometheus_client", "yaml"}:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Blocked())
IMPORT
ours = {name for name in sys.modules if name.startswith("moontide.") and not name.startswith("moontide.trainer")}
assert not ours, ours
"""


@pytest.mark.parametrize(
    "statement",
    [
        "from moontide.trainer import policy_update, policy_update_async",
        "from moontide.trainer.cli import main; assert main(['status', 'x', '--kubeconfig', '/nowhere']) == 1",
    ],
)
def test_it_runs_without_the_operators_packages(statement: str) -> None:
    code = PROGRAM.replace("IMPORT", statement)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
