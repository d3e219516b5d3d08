"""Runs as `python3 -m hack.images` from the repository's root, and as `python3 hack/images` from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # Run by its path: the interpreter put this folder first, where our modules must not be taken for top-level ones.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hack.images.cli import main

sys.exit(main())
