"""`python3 -m hack.demo --help`. Prepares the machine with plain Python, then runs in the development environment."""

from __future__ import annotations

import os
import sys

from hack.cluster.settings import repository_root
from hack.setup.__main__ import main as setup
from hack.setup.steps import dev_python


def main() -> int:
    """Set up, then become the demo; returns only when the set-up failed."""
    asked_for_help = any(argument in ("-h", "--help") for argument in sys.argv[1:])
    if not (asked_for_help and dev_python().exists()) and setup([]) != 0:
        return 1
    os.chdir(repository_root())
    os.execv(str(dev_python()), [str(dev_python()), "-m", "hack.demo.command", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
