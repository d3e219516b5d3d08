"""``python -m moontide``: the operator. Configured by environment variables (see :mod:`moontide.config`)."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys

from moontide import app, config, jsonlog

OPEN_FILES = 65536
"""A connection is one, and there is one to each replica in a change. Containers often begin with 1,024, and may have
more."""


def raise_open_files() -> None:
    """Let this process have :data:`OPEN_FILES`, or as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> int:
    """Run the operator. Returns 0 after SIGTERM, 2 for a configuration that makes no sense.

    A leader that lost its Lease ends the process with :data:`moontide.app.EXIT_LOST`.
    """
    try:
        loaded = config.load(os.environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    jsonlog.configure(loaded.log_level)
    raise_open_files()
    # What was imported stays. A change of thousands of replicas makes objects by the hundred thousand that are gone a
    # moment later: with Python's own thresholds a quarter of its time goes into looking for cycles among them.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    asyncio.run(app.run(loaded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
