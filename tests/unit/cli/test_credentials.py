"""A kubeconfig whose credentials a program gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moontide.cli.credentials import token_of
from moontide.trainer.access import find
from moontide.trainer.errors import AccessError

GIVES = """#!/bin/sh
case "$KUBERNETES_EXEC_INFO" in *'"kind": "ExecCredential"'*) ;; *) exit 9;; esac
echo "{\\"status\\": {\\"token\\": \\"$1-$EXTRA\\"}}"
"""


def kubeconfig(folder: Path, program: str | None, **more: Any) -> Path:
    if program is not None:
        (folder / "login").write_text(program)
        (folder / "login").chmod(0o755)
    user = {"exec": {"command": "./login", "args": ["a"], "env": [{"name": "EXTRA", "value": "b"}], **more}}
    body = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://cluster.example"}}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "config"
    path.write_text(json.dumps(body))
    return path


def test_the_programs_token_is_used(tmp_path: Path) -> None:
    access = find(kubeconfig(tmp_path, GIVES), by_program=token_of)
    assert access.headers() == {"authorization": "Bearer a-b"}


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (None, "login gives the credentials and is not there; get it from us"),
        ("#!/bin/sh\nexit 3\n", "gave no credentials and ended with 3; log in with it"),
        ("#!/bin/sh\necho hello\n", "gave no ExecCredential"),
        ("#!/bin/sh\necho '{}'\n", "gave no token"),
    ],
)
def test_what_goes_wrong_is_a_sentence(tmp_path: Path, program: str | None, text: str) -> None:
    with pytest.raises(AccessError, match=text):
        find(kubeconfig(tmp_path, program, installHint="get it from us"), by_program=token_of)


def test_trainers_run_no_program(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="`exec`"):
        find(kubeconfig(tmp_path, GIVES))
