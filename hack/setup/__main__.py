"""Prepare this machine: `python3 -m hack.setup --help`. Needs Python 3.11 alone and, for Debian packages, root."""

from __future__ import annotations

import argparse
import sys

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.setup import steps


def main(arguments: list[str] | None = None) -> int:
    """Run every step that has not run yet; 0 is success."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.setup", description=__doc__)
    parser.add_argument("--no-packages", action="store_true", help="leave Debian packages alone")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        choices=steps.further_engines(),
        help="an environment in which this vLLM release serves, too (6 GB)",
    )
    options = parser.parse_args(arguments)
    progress = Progress()
    try:
        if not options.no_packages:
            steps.packages(progress)
        steps.dev_environment(progress)
        steps.engine_environment(progress)
        for release in options.engine:
            steps.engine_environment(progress, release)
        steps.engine_releases(progress)
        steps.tiny_models(progress)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    progress.say("this machine is ready: `make demo` and `make test` work now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
