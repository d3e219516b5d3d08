"""The command line: `python3 -m hack.cluster --help`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import signal
import sys
from pathlib import Path

from hack.cluster import access, binaries, cleanup, kind, prerequisites, selfcheck
from hack.cluster import settings as defaults
from hack.cluster.cluster import Cluster
from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import Settings


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    top = argparse.ArgumentParser(
        prog="python3 -m hack.cluster", description="A real Kubernetes cluster on this machine."
    )
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *, modes: bool = False) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--name", default=defaults.DEFAULT_NAME, help="the cluster's name (default: %(default)s)")
        added.add_argument("--quiet", action="store_true", help="print no progress")
        if modes:
            added.add_argument(
                "--cluster", choices=("local", "kind", "current"), default="local", help="which kind of cluster"
            )
            added.add_argument("--kubeconfig", type=Path, help="with --cluster current (default: $KUBECONFIG)")
            added.add_argument("--allow-context", help="with --cluster current: the foreign context to use")
        return added

    up = command(
        "up", "Bring a cluster up, or start again what of it has died. Prints the kubeconfig's path.", modes=True
    )
    up.add_argument(
        "--control-plane-only", action="store_true", help="etcd and API server on loopback, no node, no root"
    )
    up.add_argument(
        "--controller-manager", action="store_true", help="with --control-plane-only: run the controller manager too"
    )
    up.add_argument("--audit-policy", type=Path, help="with --control-plane-only: log the requests that it asks for")
    up.add_argument(
        "--gpus", type=int, default=defaults.DEFAULT_GPUS, help="fake GPUs of the node (default: %(default)s)"
    )
    command("down", "End a cluster and leave nothing behind. Images stay in the cache.", modes=True)
    command("status", "Show each component. Exits 1 unless all of them serve.").add_argument(
        "--json", action="store_true"
    )
    command("kubeconfig", "Print the kubeconfig's path.", modes=True)
    command("env", "Print shell commands that set KUBECONFIG and PATH, for eval.")
    command("bin-dir", "Print the folder of kubectl, helm and the rest, building what is missing.")
    load = command("load-image", "Import image archives.", modes=True)
    load.add_argument("archives", nargs="+", type=Path)
    for name, text in (("start", "Start one component."), ("stop", "Stop one component.")):
        added = command(name, text)
        added.add_argument("component")
        if name == "stop":
            added.add_argument("--signal", default="TERM", help="first signal, for example KILL (default: %(default)s)")
    command("verify-clean", "Prove that nothing of a cluster is on the machine. Exits 1 and lists what is.")
    command("guard", "Exit 1 unless the current context is a local cluster or is named on purpose.", modes=True)
    command("self-check", "Run pods, DNS, volumes and GPU scheduling on the cluster that is up.")
    command(
        "smoke", "On a machine without a cluster: up, self-check, a killed component, down, and proof that it is clean."
    )
    command("prerequisites", "Install the Debian packages that are missing.").add_argument(
        "--list", action="store_true", help="only print what is missing"
    )
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 is success."""
    options = parser().parse_args(arguments)
    progress = Progress(quiet=options.quiet)
    try:
        return _run(options, progress)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, progress: Progress) -> int:
    if options.command == "prerequisites":
        return _prerequisites(options, progress)
    if options.command == "bin-dir":
        print(binaries.ensure(progress))
        return 0
    if options.command == "guard":
        return _print_access(options)
    mode = getattr(options, "cluster", "local")
    if mode == "current":
        return _current(options)
    if mode == "kind":
        return _kind(options, progress)
    return _local(options, progress)


def _prerequisites(options: argparse.Namespace, progress: Progress) -> int:
    if options.list:
        print("\n".join(prerequisites.missing()))
        return 0
    installed = prerequisites.install(progress)
    print(f"installed: {' '.join(installed)}" if installed else "nothing is missing")
    return 0


def _print_access(options: argparse.Namespace) -> int:
    found = access.resolve(options.kubeconfig, options.allow_context)
    print(f"{found.context} {found.server}")
    return 0


def _current(options: argparse.Namespace) -> int:
    """A cluster that somebody else made: it is used as it is, and neither made nor ended."""
    found = access.resolve(options.kubeconfig, options.allow_context)
    if options.command == "load-image":
        raise ClusterError("images of a cluster that is not ours come from its own registry; push them there")
    if options.command == "down":
        raise ClusterError(f"{found.context} was not made here and is not ended here")
    print(found.kubeconfig)
    return 0


def _kind(options: argparse.Namespace, progress: Progress) -> int:
    if options.command == "up":
        kind.up(progress)
    elif options.command == "down":
        kind.down(progress)
        return 0
    elif options.command == "load-image":
        for archive in options.archives:
            kind.load_image(archive, progress)
        return 0
    print(kind.kubeconfig())
    return 0


def _local(options: argparse.Namespace, progress: Progress) -> int:
    stored = defaults.load(options.name)
    if options.command == "smoke":
        if stored is not None:
            raise ClusterError(f"cluster {options.name!r} is up; a smoke test makes and ends its own")
        selfcheck.smoke(Settings(name=options.name), progress)
        return 0
    if options.command == "verify-clean":
        return _verify_clean(stored or defaults.load_last(options.name) or Settings(name=options.name))
    if options.command == "up":
        cluster = Cluster(stored or _new_settings(options), progress)
        if cluster.settings.control_plane_only != options.control_plane_only:
            raise ClusterError(
                f"{options.name!r} is there already as another sort of cluster: end it or use another name"
            )
        cluster.up()
        progress.say(f"{options.name} is up: {sum(each.resident_mib for each in cluster.status()):.0f} MiB")
        print(cluster.settings.kubeconfig)
        return 0
    if stored is None:
        if options.command == "down":
            # What a crash or a removed run folder left is taken away all the same.
            Cluster(Settings(name=options.name), progress).down()
            return 0
        raise ClusterError(f"there is no cluster {options.name!r}: bring it up first")
    cluster = Cluster(stored, progress)
    if options.command == "down":
        cluster.down()
    elif options.command == "status":
        return _status(cluster, options.json)
    elif options.command == "kubeconfig":
        print(stored.kubeconfig)
    elif options.command == "env":
        print(f"export KUBECONFIG={shlex.quote(str(stored.kubeconfig))}")
        print(f"export PATH={shlex.quote(str(binaries.bin_dir()))}:$PATH")
    elif options.command == "load-image":
        for archive in options.archives:
            cluster.load_image(archive)
    elif options.command == "start":
        cluster.start(options.component)
    elif options.command == "stop":
        cluster.stop(options.component, _signal(options.signal))
    elif options.command == "self-check":
        selfcheck.run_all(cluster, progress)
    else:
        raise AssertionError(options.command)
    return 0


def _signal(name: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise ClusterError(f"there is no signal {name!r}") from None


def _new_settings(options: argparse.Namespace) -> Settings:
    if options.control_plane_only:
        return Settings(
            name=options.name,
            control_plane_only=True,
            controller_manager=options.controller_manager,
            gpus=0,
            ports=defaults.free_ports(),
            audit_policy=str(options.audit_policy.absolute()) if options.audit_policy is not None else "",
        )
    return Settings(name=options.name, gpus=options.gpus)


def _status(cluster: Cluster, as_json: bool) -> int:
    found = cluster.status()
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
    else:
        for each in found:
            state = "serving" if each.serving else "not serving" if each.pid else "stopped"
            print(f"{each.name:<24} {state:<12} pid {each.pid or '-':<8} {each.resident_mib:6.0f} MiB")
        print(f"{'total':<37} {'':<12} {sum(each.resident_mib for each in found):6.0f} MiB")
    return 0 if all(each.serving for each in found) else 1


def _verify_clean(settings: Settings) -> int:
    baseline = cleanup.Baseline.read(settings.last_baseline)
    left = cleanup.leftovers(settings, baseline)
    for line in left:
        print(line)
    if baseline is None and not settings.control_plane_only:
        print("there is no record of the machine before a cluster: only what is ours by name was looked for")
    if not left:
        print("clean: no process, mount, network device, address, route, rule, control group or folder is left")
    return 1 if left else 0
