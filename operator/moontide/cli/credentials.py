"""Tokens that a program gives (``exec`` in a kubeconfig), as clouds do it. For people's machines: trainers run none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from moontide.trainer.errors import AccessError

SECONDS = 120.0
"""For a program that may ask a person, or open a browser."""


def token_of(where: str, section: Mapping[str, Any]) -> str:
    """The token that the program of a kubeconfig's user gives. ``where``: for people. Raises AccessError."""
    command = str(section.get("command") or "")
    if "/" in command:
        command = str(section["/folder"] / command)
    version = str(section.get("apiVersion") or "client.authentication.k8s.io/v1")
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": sys.stdin.isatty()}}
    more = {each["name"]: str(each["value"]) for each in section.get("env") or ()}
    environ = {**os.environ, **more, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    arguments = [command, *(str(each) for each in section.get("args") or ())]
    try:
        done = subprocess.run(arguments, env=environ, stdout=subprocess.PIPE, timeout=SECONDS, check=False)
    except FileNotFoundError as error:
        hint = str(section.get("installHint") or "install it, or put it on PATH").strip()
        raise AccessError(f"{where}: {command} gives the credentials and is not there; {hint}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AccessError(f"{where}: {command}, which gives the credentials, cannot be run: {error}") from error
    if done.returncode != 0:
        raise AccessError(f"{where}: {command} gave no credentials and ended with {done.returncode}; log in with it")
    try:
        token = str((json.loads(done.stdout).get("status") or {}).get("token") or "")
    except (ValueError, AttributeError) as error:
        raise AccessError(f"{where}: {command} gave no ExecCredential; does kubectl work with it?") from error
    if not token:
        raise AccessError(f"{where}: {command} gave no token (certificates are not taken); use kubectl create token")
    return token
