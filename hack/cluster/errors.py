"""The one error that people see."""

from __future__ import annotations


class ClusterError(Exception):
    """Something that the caller can act on; the message says what to do. The command line prints it without a trace."""
