"""Short-running commands."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from hack.cluster.errors import ClusterError


def run(
    argv: Sequence[str],
    *,
    check: bool = True,
    stdin: str | None = None,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return its standard output; a failure raises, with what the command said."""
    try:
        done = subprocess.run(
            list(argv), input=stdin, capture_output=True, text=True, timeout=timeout, check=False, env=environment
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{argv[0]} is not installed (see `python3 -m hack.cluster prerequisites`)") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(argv)}` did not end within {timeout:g} s") from error
    if check and done.returncode != 0:
        raise ClusterError(f"`{' '.join(argv)}` failed with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
