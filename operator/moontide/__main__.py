"""``python -m moontide``: the operator. Configured by environment variables (see :mod:`moontide.config`)."""

from __future__ import annotations

import asyncio
import os
import sys

from moontide import app, config, jsonlog


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
    asyncio.run(app.run(loaded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
