"""Logs as one JSON object a line, with the fields that a reconcile attaches."""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys

FIELDS = ("resource", "epoch", "replica", "step", "reason", "began", "seconds", "user", "verb")
"""What ``extra=`` may carry; other keys do not get into the log."""


class JsonFormatter(logging.Formatter):
    """One line of JSON a record: time, level, logger, message, the :data:`FIELDS` that are there, and the error."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure(level: str) -> None:
    """Send every log of the process to stderr as JSON. Libraries speak from WARNING on only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "kopf.objects", "kopf.activities", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
