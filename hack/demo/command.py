"""From nothing to a verified change of policy on a real cluster. Every claim is checked; a false one fails the run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.demo import install, story
from hack.demo.kube import KubeError, NotInTime
from hack.demo.say import Voice

ENGINE_IMAGE = "moontide.local/engine-cpu:dev"


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python3 -m hack.demo", description=__doc__)
    options.add_argument(
        "--cluster",
        choices=("local", "kind", "current"),
        default="local",
        help="local: made here from Go modules; kind: in Docker; current: the context that kubectl uses",
    )
    options.add_argument(
        "--allow-context", help="with --cluster current: the name of that context, to say it on purpose"
    )
    options.add_argument("--keep", action="store_true", help="leave the fleet running (and the cluster up)")
    options.add_argument("--only-install", action="store_true", help="stop when the fleet serves; implies --keep")
    options.add_argument("--references", type=Path, help="also write the cold engine's answers to this file")
    return options


def main(arguments: list[str] | None = None) -> int:
    """0 when every claim held."""
    options = parser().parse_args(arguments)
    voice = Voice()
    try:
        return run(options, voice)
    except (ClusterError, KubeError, NotInTime) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace, voice: Voice) -> int:
    """Install, tell the story, clean up, and end with the summary."""
    was_up = install.is_up(options.cluster)
    voice.head("From nothing to a fleet that serves")
    target = install.cluster(options.cluster, options.allow_context, voice)
    install.images(target, voice)
    install.operator(target, voice)
    fleet = install.examples(target, voice)
    try:
        install.rewind(fleet, "1", voice)
        install.ready(fleet, "1", voice)
        voice.say("two vLLM replicas serve version 1")
        if options.only_install:
            return 0
        summary = story.tell(fleet, ENGINE_IMAGE, voice, references=options.references)
    finally:
        fleet.close()
    if options.keep:
        voice.say("the fleet stays; `make cluster-down` ends everything")
    else:
        voice.head("Cleaning up (--keep leaves everything running)")
        install.remove(target, voice)
        if not was_up:
            install.end(target, voice)
    voice.plain()
    if voice.failed:
        voice.plain(f"{len(voice.failed)} of {voice.checked} claims are FALSE:")
        for text in voice.failed:
            voice.plain(f"  {text}")
    else:
        voice.plain(f"all {voice.checked} claims hold")
    for line in summary.lines():
        voice.plain(line)
    return 1 if voice.failed else 0


if __name__ == "__main__":
    sys.exit(main())
