"""The repository's shape: what must not appear, and which package may import which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_operator_folder_never_shadows_the_standard_library() -> None:
    # With an __init__.py or a loose module there, the repository's root on sys.path replaces the stdlib's `operator`.
    loose = [path.name for path in (ROOT / "operator").iterdir() if path.is_file()]
    assert loose == []
    assert (ROOT / "operator" / "moontide" / "__init__.py").is_file()


def test_standard_library_imports_from_the_root() -> None:
    code = "import operator, collections; assert 'moontide' not in (operator.__file__ or ''), operator.__file__"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_contracts() -> None:
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
