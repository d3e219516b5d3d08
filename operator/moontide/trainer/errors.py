"""What may go wrong for a trainer. Every message says what to do."""

from __future__ import annotations


class MoontideError(Exception):
    """Base of all errors of this package."""


class BadVersion(MoontideError, ValueError):
    """What was given is not a version."""


class BadName(MoontideError, ValueError):
    """What was given is not the name of a policy or namespace."""


class AccessError(MoontideError):
    """No way to an API server was found, or it cannot be used."""


class ApiError(MoontideError):
    """The API server refused. ``status`` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiUnavailable(MoontideError):
    """The API server did not answer, or not usefully, for as long as there was time."""


class PolicyNotFound(MoontideError):
    """There is no such PolicyVersion."""


class Refused(MoontideError):
    """The policy is in a state in which the command would do harm, or nothing."""


class PrepareFailed(MoontideError):
    """The fleets were not made ready for new weights. ``reason`` is one word: Busy, Suspended, Expired, ..."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{message} ({reason})")
        self.reason = reason


class PrepareTimeout(PrepareFailed):
    """The same, because it took too long; ``reason`` is that of the condition ``Current``, as it was last."""


class PreparationLost(MoontideError):
    """The preparation ended while weights were being pushed, so they were not committed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{message} ({reason})")
        self.reason = reason


class CommitTimeout(MoontideError):
    """The version was committed and is not current yet; the operator goes on trying. ``reason``: of ``Current``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{message} ({reason})")
        self.reason = reason


class Superseded(MoontideError):
    """Somebody set another version meanwhile."""
