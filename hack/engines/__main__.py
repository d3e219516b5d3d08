"""What the plugin knows of each vLLM release: `python3 -m hack.engines --help`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hack.cluster.errors import ClusterError
from hack.cluster.settings import repository_root
from hack.setup.steps import engine_python, engine_release, releases

KNOWN = "engine_patches/moontide_engine/patches/known.json"
_SECONDS = 300.0


def environment(home: Path | None) -> dict[str, str]:
    """Environment in which the engine's interpreter has the release in ``home`` and this checkout's plugin."""
    paths = [str(path) for path in (home, repository_root() / "engine_patches") if path is not None]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_TARGET_DEVICE": "cpu"}


def doctor(home: Path | None) -> dict[str, Any]:
    """What `moontide_engine doctor --json` prints of one release. Raises ClusterError."""
    command = [str(engine_python()), "-W", "ignore", "-m", "moontide_engine", "doctor", "--json"]
    # Not from the checkout: its folder `operator` would come before Python's own module.
    done = subprocess.run(
        command, env=environment(home), capture_output=True, text=True, timeout=_SECONDS, cwd=engine_python().parent
    )
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed with {done.returncode}:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def merged(found: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Contents of known.json, from the fingerprints of each release, oldest first."""
    known: dict[str, dict[str, list[str]]] = {}
    for release, fingerprints in found.items():
        for target, digest in fingerprints.items():
            known.setdefault(target, {}).setdefault(digest, []).append(release)
    return {
        target: {digest: ", ".join(names) for digest, names in sorted(digests.items())}
        for target, digests in sorted(known.items())
    }


def homes() -> dict[str, Path | None]:
    """Folder of the Python part of each release, oldest first; None is the engine environment's own."""
    found: dict[str, Path | None] = {**releases(), engine_release(): None}
    return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def main(arguments: list[str] | None = None) -> int:
    """0 when it was done; `check` gives 1 when known.json is not what the releases have."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.engines", description=__doc__)
    parser.add_argument("what", choices=("write", "check"), help="write known.json anew from the releases, or compare")
    what = parser.parse_args(arguments).what
    found = {}
    for release, home in homes().items():
        answer = doctor(home)
        if answer["vllm"].partition("+")[0] != release:
            raise ClusterError(f"vLLM {release} was to be read, and {answer['vllm']} was imported")
        found[release] = answer["fingerprints"]
        print(f"{release}: {len(answer['fingerprints'])} functions", flush=True)
    text = json.dumps(merged(found), indent=2) + "\n"
    path = repository_root() / KNOWN
    if what == "write":
        path.write_text(text)
        return 0
    same = path.read_text() == text
    print(f"{KNOWN}: {'as the releases have it' if same else 'NOT so; write it anew and read the diff'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
