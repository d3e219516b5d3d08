"""What the hook answers where it does not do what was asked, as the API server would: a Status with a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moontide.trainer.errors import (
    ApiError,
    ApiUnavailable,
    BadName,
    BadVersion,
    MoontideError,
    PolicyNotFound,
    PreparationLost,
    PrepareFailed,
)

BUSY_SECONDS = 1
UNAVAILABLE_SECONDS = 2


class Refusal(Exception):
    """An answer other than what was asked for."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    def body(self) -> dict[str, Any]:
        """The Status object."""
        found: dict[str, Any] = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": self.status}
        found |= {"reason": self.reason, "message": self.message}
        return found | ({"details": self.details} if self.details else {})


def bad(message: str) -> Refusal:
    """What was sent makes no sense."""
    return Refusal(400, "BadRequest", message)


def unavailable(message: str, seconds: float = UNAVAILABLE_SECONDS) -> Refusal:
    """The API server does not answer; the same may be asked again."""
    return Refusal(503, "ServiceUnavailable", message, {"Retry-After": str(max(1, round(seconds)))})


def refusal_of(error: MoontideError, name: str) -> Refusal:
    """What a trainer's error means over HTTP."""
    text = str(error)
    if isinstance(error, BadVersion | BadName):
        return bad(text)
    if isinstance(error, PolicyNotFound):
        return Refusal(404, "NotFound", text, details={"name": name, "kind": "policyversions"})
    if isinstance(error, ApiUnavailable):
        return unavailable(text)
    if isinstance(error, ApiError):
        return Refusal(error.status, "RefusedByApiServer", text)
    reason = error.reason if isinstance(error, PrepareFailed | PreparationLost) else type(error).__name__
    return Refusal(409, reason, text)
