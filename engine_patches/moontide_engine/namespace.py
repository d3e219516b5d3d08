"""Keys of one deployment in a shared store: ``<namespace>@<what>@<hash>``.

Where engines are in an epoch (patch ``policy-epoch``), the hash begins with the epoch's tag.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container

TAG_BYTES = 8

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


def tag(epoch: str) -> bytes:
    """The first :data:`TAG_BYTES` bytes of every block hash of an epoch."""
    return hashlib.sha256(b"moontide-epoch\0" + epoch.encode()).digest()[:TAG_BYTES]


def is_of_another_epoch(key: str, namespace: str, tags: Container[str]) -> bool:
    """Whether a key is one of the namespace, and its hash begins with none of ``tags`` (hexadecimal)."""
    if not key.startswith(f"{namespace}@"):
        return False
    return key.rpartition("@")[2][: 2 * TAG_BYTES] not in tags
