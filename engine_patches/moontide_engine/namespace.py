"""Keys of one deployment in a shared store: ``<namespace>@<the rest>``."""

from __future__ import annotations

import re

_VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def is_namespace(value: object) -> bool:
    """Whether this can be a namespace. An empty one cannot: its pattern would match the keys of others."""
    return isinstance(value, str) and _VALID.fullmatch(value) is not None


def pattern(namespace: str) -> str:
    """Pattern of the store's regex dialect that matches exactly the keys of one namespace.

    The dialect rejects needless escapes, so only its special characters get one. Raises ValueError.
    """
    if not is_namespace(namespace):
        raise ValueError(f"not a namespace: {namespace!r}")
    return "^" + namespace.replace(".", r"\.") + "@"
