"""`python3 -m hack.demo --help`. Prepares the machine with plain Python, then runs in the development environment."""

from __future__ import annotations

import argparse
import os
import sys

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import repository_root
from hack.images.builder import docker_answers
from hack.setup import steps
from hack.setup.__main__ import main as setup
from hack.setup.steps import dev_python


def main() -> int:
    """Set up, then become the demo; returns only when the set-up failed."""
    asked_for_help = any(argument in ("-h", "--help") for argument in sys.argv[1:])
    if not (asked_for_help and dev_python().exists()) and _prepare(sys.argv[1:]) != 0:
        return 1
    os.chdir(repository_root())
    os.execv(str(dev_python()), [str(dev_python()), "-m", "hack.demo.command", *sys.argv[1:]])


def _prepare(arguments: list[str]) -> int:
    """Everything, for the local cluster; for others, whose engines and weights are in images, what builds and calls."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cluster", default="local")
    for name in ("--images-loaded", "--remove"):
        parser.add_argument(name, action="store_true")
    options, _ = parser.parse_known_args(arguments)
    if options.cluster == "local":
        return setup([])
    progress = Progress()
    try:
        if not (options.images_loaded or options.remove or docker_answers()):
            steps.packages(progress)
        steps.dev_environment(progress)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
