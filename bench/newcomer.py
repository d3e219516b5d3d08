"""A newcomer's path, timed: from `helm install` into an empty cluster to a bumped policy. Prints a line a step.

`.venv/bin/python -m bench.newcomer` makes the local cluster and the images first (not timed), and ends the cluster
that it made. ``--json FILE`` also writes the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.demo import install
from hack.demo.elsewhere import Choice
from hack.demo.fleet import push_weights
from hack.demo.kube import KubeError, NotInTime
from hack.demo.say import Voice
from hack.demo.story import MODELS

_BUMP_SECONDS = 150.0


def run(voice: Voice) -> list[tuple[str, float]]:
    """What a newcomer does, and the seconds each step took."""
    if install.is_up(Choice("local")):
        raise ClusterError("a cluster is up already; `make cluster-down` ends it, so that this begins with nothing")
    target = install.cluster(Choice("local"), None, voice)
    steps: list[tuple[str, float]] = []
    try:
        install.images(target, voice)
        began = time.monotonic()

        def done(text: str) -> None:
            steps.append((text, time.monotonic() - began - sum(seconds for _, seconds in steps)))

        install.operator(target, voice)
        done("kubectl apply -f crds/, helm install, and the operator is ready")
        fleet = install.examples(target, voice)
        try:
            done("kubectl apply: pool, policy, fleet")
            install.ready(fleet, "1", voice)
            done("two replicas have started and serve version 1")
            push_weights(fleet.replicas(), MODELS["policy-b"], "2")
            done("weights pushed into both")
            fleet.bump(2)
            fleet.until_current("2", _BUMP_SECONDS, lambda text: voice.say(f"  {text}"))
            done("kubectl patch polv, and it is current at version 2")
        finally:
            fleet.close()
        steps.append(("from helm install to a bumped policy", time.monotonic() - began))
    finally:
        install.end(target, voice)
    return steps


def main() -> int:
    """0 when the policy was bumped."""
    options = argparse.ArgumentParser(prog="python -m bench.newcomer", description=__doc__)
    options.add_argument("--json", type=Path, help="also write the steps to this file")
    chosen = options.parse_args()
    voice = Voice()
    try:
        steps = run(voice)
    except (ClusterError, KubeError, NotInTime) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    voice.plain()
    voice.table(("step", "seconds"), [(text, f"{seconds:.1f}") for text, seconds in steps])
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([{"step": text, "seconds": seconds} for text, seconds in steps], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
