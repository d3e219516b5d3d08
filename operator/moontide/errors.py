"""Errors that a reconcile may end with; everything else is a fault and backs off."""

from __future__ import annotations


class Retry(Exception):
    """Something outside is not ready: look again after ``after`` seconds; ``reason`` goes into the log."""

    def __init__(self, after: float, reason: str) -> None:
        super().__init__(reason)
        self.after = after
        self.reason = reason


class InvalidSpec(Exception):
    """The spec asks what cannot be done; becomes a condition and waits for a new spec."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
