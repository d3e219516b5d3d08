"""The script ``kubectl-moontide``: all commands where typer and rich are installed, else those that trainers need.

Imports nothing that a trainer's image may lack.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence

from moontide.trainer import cli as plain

NEEDED = ("typer", "rich", "pydantic", "kubernetes", "yaml")
MORE = ("history", "explain", "doctor", "timeline")
"""The commands that the plain program does not have."""
FLAGS = ("--dry-run", "-o", "--output", "-w", "--watch", "-A", "--all-namespaces", "--no-engines", "--direct")
"""And its options, of commands that it has."""


def missing() -> list[str]:
    """The packages that the full program needs and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def own_version() -> str:
    """The version of this program."""
    try:
        return importlib.metadata.version("moontide")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (it was not installed with pip)"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    lacking = missing()
    if not lacking:
        full: Callable[[Sequence[str]], int] = importlib.import_module("moontide.cli.app").main
        return full(given)
    if given[:1] in (["version"], ["--version"]):
        print(f"kubectl moontide {own_version()}")
        return plain.DONE
    asked = next((each for each in given if not each.startswith("-")), "")
    flag = next((each for each in given if each.partition("=")[0] in FLAGS), "")
    if asked in MORE or flag:
        what = asked if asked in MORE else flag
        text = f"kubectl moontide {what} needs {', '.join(lacking)}: pip install '.[cli]' from a checkout of Moontide"
        print(text, file=sys.stderr)
        return plain.WRONG
    return plain.main(given)


def complete() -> int:
    """The script ``kubectl_complete-moontide``, which kubectl asks for completions; there are none without typer."""
    if missing():
        return plain.DONE
    full: Callable[[Sequence[str]], int] = importlib.import_module("moontide.cli.app").complete
    return full(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
