"""Bearer tokens from a file that is read again for each request, so that a rotated Secret works without a restart."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path


class TokenFile:
    """A file with one valid token a line. A missing, unreadable or empty file accepts nothing."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def accepts(self, presented: Iterable[bytes]) -> bool:
        """Whether one of the presented tokens is valid. Takes the same time for right and wrong ones."""
        try:
            valid = [line for line in (raw.strip() for raw in self._path.read_bytes().splitlines()) if line]
        except OSError:
            return False
        matches = [hmac.compare_digest(token, known) for token in presented if token for known in valid]
        return any(matches)


def bearer_tokens(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Bearer tokens of a request.

    Both ``Authorization`` and ``X-Admin-Authorization`` count: with ``--api-key`` vLLM wants the first one for itself
    on /v1.
    """
    tokens = []
    for name, value in headers:
        if name.lower() in (b"authorization", b"x-admin-authorization"):
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                tokens.append(token.strip())
    return tokens
