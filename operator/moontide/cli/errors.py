"""What may go wrong for a person at a terminal. Every message says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from moontide.trainer.errors import MoontideError


class CliError(MoontideError):
    """One sentence; nothing was changed."""


class Denied(CliError):
    """The user may not read something."""


class NotInstalled(CliError):
    """The cluster does not know the kind that was asked for."""


def near(name: str, known: Iterable[str]) -> str:
    """A hint at the names that are like ``name``, or at those there are; empty where there are none."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"there are: {', '.join(names[:5])}{more}"
