"""From nothing to a verified change of policy on a real cluster. Every claim is checked; a false one fails the run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.demo import elsewhere, install, story
from hack.demo.install import Source, Target
from hack.demo.kube import KubeError, NotInTime
from hack.demo.say import Voice
from hack.demo.story import Summary


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python3 -m hack.demo", description=__doc__)
    options.add_argument(
        "--cluster",
        type=elsewhere.choice,
        default="local",
        help="local: made here from Go modules; kind: made here in Docker; context:NAME: any cluster of a kubeconfig; "
        "current: the one that kubectl uses now",
    )
    other = options.add_argument_group("with context:NAME or current")
    other.add_argument("--kubeconfig", type=Path, help="where the context is (default: $KUBECONFIG, or kubectl's own)")
    how = other.add_mutually_exclusive_group()
    how.add_argument("--registry", metavar="HOST/PATH", help="push the images there; nodes pull them without a secret")
    how.add_argument("--images-loaded", action="store_true", help="the nodes have them (see `python3 -m hack.images`)")
    other.add_argument("--remove", action="store_true", help="only take away what a demo with --keep left there")
    options.add_argument("--base-image", help="for the images, instead of one made of Debian packages (not with local)")
    options.add_argument("--keep", action="store_true", help="leave the fleet running (and the cluster up)")
    options.add_argument("--only-install", action="store_true", help="stop when the fleet serves; implies --keep")
    options.add_argument("--references", type=Path, help="also write the cold engine's answers to this file")
    return options


def main(arguments: list[str] | None = None) -> int:
    """0 when every claim held."""
    options = parser().parse_args(arguments)
    if reason := contradiction(options):
        parser().error(reason)
    voice = Voice()
    try:
        return run(options, voice)
    except (ClusterError, KubeError, NotInTime) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def contradiction(options: argparse.Namespace) -> str:
    """What of the options does not go together, as a sentence; empty: nothing."""
    mode = options.cluster.mode
    if mode == "context" and not (options.registry or options.images_loaded or options.remove):
        return (
            "say how images reach the nodes of that cluster: --registry HOST/PATH pushes them there, and nodes pull "
            "them; --images-loaded says that you have loaded them"
        )
    if mode != "context" and (options.registry or options.images_loaded or options.remove or options.kubeconfig):
        return "--kubeconfig, --registry, --images-loaded and --remove go with --cluster context:NAME or current"
    if mode == "local" and options.base_image:
        return "--base-image goes with --cluster kind, context:NAME or current"
    return ""


def run(options: argparse.Namespace, voice: Voice) -> int:
    """Install, tell the story, clean up, and end with the summary."""
    was_up = install.is_up(options.cluster)
    voice.head("From nothing to a fleet that serves")
    target = install.cluster(options.cluster, options.kubeconfig, voice)
    if options.remove:
        install.withdraw(target, voice)
        return 0
    target = install.images(target, voice, Source(options.registry, options.images_loaded, options.base_image))
    stays = options.keep or options.only_install
    try:
        summary = _serve(target, options, voice)
    except BaseException:
        # A cluster of ours is left as it is, to be looked at.
        if target.foreign and not stays:
            _clean(target, voice)
        raise
    if summary is None:
        return 0
    if options.keep:
        voice.say(f"the fleet stays; `{_ending(options, target)}` ends everything")
    else:
        voice.head("Cleaning up (--keep leaves everything running)")
        if target.foreign:
            install.withdraw(target, voice)
        else:
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


def _serve(target: Target, options: argparse.Namespace, voice: Voice) -> Summary | None:
    """Install and tell the story; None where only the first was asked for."""
    install.operator(target, voice)
    fleet = install.examples(target, voice)
    try:
        install.rewind(fleet, "1", voice)
        install.ready(fleet, "1", voice, install.PULLED_SECONDS if target.elsewhere else install.READY_SECONDS)
        voice.say("two vLLM replicas serve version 1")
        if options.only_install:
            return None
        return story.tell(fleet, target.engine_image, voice, references=options.references, claim=target.claim)
    finally:
        fleet.close()


def _ending(options: argparse.Namespace, target: Target) -> str:
    """The command that takes away what stays. It names the context: another may be the current one by then."""
    if target.foreign:
        config = f" --kubeconfig {options.kubeconfig}" if options.kubeconfig else ""
        return f"python3 -m hack.demo --cluster context:{target.access.context}{config} --remove"
    return "make cluster-down" if not target.elsewhere else "python3 -m hack.cluster down --cluster kind"


def _clean(target: Target, voice: Voice) -> None:
    """Leave nothing in somebody else's cluster, whatever has gone wrong; what goes wrong now is said, not raised."""
    voice.head("Cleaning up after a failure (--keep leaves everything, to be looked at)")
    try:
        install.withdraw(target, voice)
    except (ClusterError, KubeError) as error:
        voice.say(f"not everything is gone: {error}")


if __name__ == "__main__":
    sys.exit(main())
