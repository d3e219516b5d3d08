"""Structured log lines of the plugin: one JSON object a line on standard error."""

from __future__ import annotations

import json
import os
import time


def log(event: str, **fields: object) -> None:
    """Write one line. Goes to the file descriptor itself: vLLM prefixes what is written through ``sys.stderr``."""
    line = json.dumps({"ts": round(time.time(), 3), "logger": "moontide", "event": event, **fields}, default=str)
    data = line.encode() + b"\n"
    try:
        os.write(2, data)
    except OSError:
        # A closed or full standard error must not stop a barrier.
        return
