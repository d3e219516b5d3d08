"""The doubles take the plugin from its source tree: it is not installed beside the operator."""

from __future__ import annotations

import sys
from pathlib import Path

_SOURCE = str(Path(__file__).parents[3] / "engine_patches")
if _SOURCE not in sys.path:
    sys.path.insert(0, _SOURCE)
