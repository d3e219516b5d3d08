"""The commands of ``kubectl moontide``, for people at a terminal.

exit status: 0 done; 1 refused, not found, or (doctor) broken; 2 wrong arguments; 3 not in time; 130 interrupted
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer
from pydantic import ValidationError
from rich.console import Console, RenderableType

from moontide.cli import doctor as doctors
from moontide.cli import explain as explaining
from moontide.cli import history as histories
from moontide.cli import live, picture, screen
from moontide.cli.checks import Level, examine, worst
from moontide.cli.cluster import Cluster, core, items
from moontide.cli.credentials import token_of
from moontide.cli.entry import own_version
from moontide.cli.errors import CliError, Denied
from moontide.cli.gather import PolicySight, Sight, look, policies
from moontide.cli.gather import hint as hint_at
from moontide.cli.operators import Installation, installations
from moontide.cli.rehearsal import Rehearsal, rehearse
from moontide.cli.timeline import render as render_timeline
from moontide.trainer import cli as plain
from moontide.trainer.access import HOOK, Access
from moontide.trainer.access import find as find_access
from moontide.trainer.cli import DONE, FAILED, INTERRUPTED, LATE, WRONG, version_of
from moontide.trainer.errors import (
    ApiUnavailable,
    BadVersion,
    CommitTimeout,
    MoontideError,
    PolicyNotFound,
    PrepareTimeout,
)
from moontide.trainer.kube import Api
from moontide.trainer.policy import Object
from moontide.trainer.steps import read

T = TypeVar("T")
READ_SECONDS = 15.0
SOON_SECONDS = 2.0
"""For what is not worth a longer wait: names, when a shell asks, and the version of the operator."""
NO_FILES = 4
"""To kubectl: these are all, do not complete names of files."""
PROGRAM, SCRIPT, COMPLETE = "kubectl moontide", "kubectl-moontide", "_KUBECTL_MOONTIDE_COMPLETE"
_CLICK_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""The base of what wrong arguments raise; typer has it from a click of its own or from the package."""

app = typer.Typer(
    name=PROGRAM,
    help="Look at, change and check fleets whose weights keep changing.",
    epilog="exit status: 0 done; 1 refused, not found or broken; 2 wrong arguments; 3 not in time; 130 interrupted",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


class Output(StrEnum):
    """How a command answers."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True)
class Where:
    """Which cluster and namespace: the options that every command has."""

    namespace: str | None = None
    kubeconfig: str | None = None
    context: str | None = None
    hook: str | None = None
    hook_token_file: str | None = None
    hook_ca_file: str | None = None

    @property
    def by_hook(self) -> bool:
        """Whether an operator's hook answers, and not the API server."""
        explicit = self.kubeconfig is not None or self.context is not None
        return bool(self.hook or (not explicit and os.environ.get(HOOK, "").strip()))

    def access(self) -> Access:
        """Raises AccessError."""
        return find_access(
            self.kubeconfig,
            self.context,
            hook=self.hook,
            token_file=self.hook_token_file,
            ca_file=self.hook_ca_file,
            by_program=token_of,
        )

    @contextlib.contextmanager
    def cluster(self, direct: bool = False) -> Iterator[Cluster]:
        """The API server; ``direct``: see :class:`Cluster`. Raises AccessError, and CliError where there is a hook."""
        if self.by_hook:
            raise CliError(
                f"this looks at more than one policy, and the hook shows no more; give a kubeconfig instead of --hook "
                f"or ${HOOK}, or write: {PROGRAM} status NAME"
            )
        with Cluster(self.access(), direct=direct) as found:
            yield found

    def arguments(self) -> list[str]:
        """The same for the plain program."""
        made = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                made.append(f"--{each.name.replace('_', '-')}={value}")
        return made


def _option(*names: str, text: str, metavar: str | None = None) -> Any:
    return Annotated[str | None, typer.Option(*names, help=text, metavar=metavar, rich_help_panel="Which cluster")]


_COMMON = {
    "namespace": _option("--namespace", "-n", text="of the policy; default: the context's"),
    "kubeconfig": _option("--kubeconfig", text="default: $KUBECONFIG, or ~/.kube/config", metavar="FILE"),
    "context": _option("--context", text="default: the kubeconfig's current context"),
    "hook": _option("--hook", text="of an operator; or $MOONTIDE_HOOK", metavar="URL"),
    "hook_token_file": _option("--hook-token-file", text="or $MOONTIDE_HOOK_TOKEN_FILE", metavar="FILE"),
    "hook_ca_file": _option("--hook-ca-file", text="or $MOONTIDE_HOOK_CA_FILE", metavar="FILE"),
}


def command(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function a command: its parameter ``where`` becomes the options that say which cluster."""

    def made(function: Callable[..., int]) -> Callable[..., int]:
        own = [each for each in inspect.signature(function, eval_str=True).parameters.values() if each.name != "where"]
        shared = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for key, kind in _COMMON.items()
        ]

        @functools.wraps(function)
        def run(**given: Any) -> int:
            where = Where(**{key: given.pop(key) for key in _COMMON})
            return function(where=where, **given)

        del run.__wrapped__
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + shared
        run.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name)(run)
        return function

    return made


def _seconds(text: str) -> float:
    try:
        return plain.seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _version(text: str) -> int | str:
    try:
        return version_of(text)
    except BadVersion as error:
        raise typer.BadParameter(str(error)) from error


def _complete_policy(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of policies, for a shell. Silent where they cannot be had, or not soon."""
    given = {key: ctx.params.get(key) for key in _COMMON}

    def ask() -> list[str]:
        with Where(**given).cluster() as cluster:
            found = policies(cluster, given["namespace"] or cluster.namespace)
        return [each.resource.meta.name for each in found]

    try:
        return [each for each in soon(ask) or () if each.startswith(incomplete)]
    except (MoontideError, httpx.InvalidURL, ValidationError):
        return []


def soon(ask: Callable[[], T]) -> T | None:
    """What comes of it, or None where it takes too long. Raises what it raises.

    In a thread, because neither the search for a host's address nor a program that gives credentials has a bound.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(ask())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return found.result(SOON_SECONDS)
    except TimeoutError:
        return None


Name = Annotated[str, typer.Argument(metavar="NAME", help="of the PolicyVersion", autocompletion=_complete_policy)]
MaybeName = Annotated[
    str | None, typer.Argument(metavar="POLICY", help="of one PolicyVersion", autocompletion=_complete_policy)
]
Version = Annotated[str, typer.Argument(metavar="VERSION", help="for example 43 or step-43")]
As = Annotated[Output, typer.Option("--output", "-o", help="text, or json for programs")]
Timeout = Annotated[str, typer.Option("--timeout", metavar="TIME", help="of the wait: 90s, 5m")]
Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="of all namespaces")]
NoEngines = Annotated[bool, typer.Option("--no-engines", help="do not ask engines, take what status says")]
Direct = Annotated[
    bool,
    typer.Option(
        "--direct",
        help="ask engines at their own addresses, not through the API server: for engines without pods, and where it "
        "passes nothing on; only where such an address cannot be another host's, which would get the admin token, "
        "without TLS in clear",
    ),
]


def console() -> Console:
    """The terminal."""
    return Console(highlight=False, markup=False, emoji=False)


def show(what: RenderableType) -> int:
    """Print it; where nobody sees it, in lines as long as they are, with no colour and no blanks at their ends."""
    made = console()
    if made.is_terminal:
        made.print(what)
    else:
        print(live.plainly(what))
    return DONE


def _json(found: object) -> int:
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return DONE


# -- look --------------------------------------------------------------------------------------------------------------


@command("status")
def status(
    where: Where,
    policy: MaybeName = None,
    everywhere: Everywhere = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="go on, live; end it with Ctrl-C")] = False,
    no_engines: NoEngines = False,
    direct: Direct = False,
    output: As = Output.TEXT,
) -> int:
    """The fleet on one screen: policies, deployments, replicas, pools."""
    if where.by_hook and policy is not None and output is Output.TEXT and not watch:
        return plain.main(["status", policy, *where.arguments()], access=where.access())
    if everywhere and policy is not None:
        raise typer.BadParameter("one policy is in one namespace: leave -A out, or the name")
    with where.cluster(direct) as cluster:
        place = None if everywhere else where.namespace or cluster.namespace

        def seen() -> Sight:
            return look(cluster, place, policy, ask_engines=not no_engines)

        if watch:
            live.watch(console(), seen, as_json=output is Output.JSON)
            return DONE
        found = seen()
    if output is Output.JSON:
        return _json(screen.wire(found))
    return show(screen.render(found))


def _events(cluster: Cluster, seen: PolicySight) -> tuple[list[Object], list[str]]:
    """Events of the policy, oldest first, and what could not be seen."""
    meta = seen.resource.meta
    selector = f"involvedObject.kind=PolicyVersion,involvedObject.name={meta.name}"
    try:
        found = items(cluster, core("events", meta.namespace), {"fieldSelector": selector})
    except Denied as error:
        return [], [f"events: {error}"]
    return histories.in_order(found), []


@command("history")
def history(
    where: Where,
    name: Name,
    events: Annotated[bool, typer.Option("--events", help="and what the operator told of it")] = False,
    output: As = Output.TEXT,
) -> int:
    """The last ten changes of a policy: how long each took, and paused."""
    with where.cluster() as cluster:
        (seen,) = policies(cluster, where.namespace, name)
        told, unseen = _events(cluster, seen) if events or output is Output.JSON else ([], [])
    if output is Output.JSON:
        return _json(histories.wire(seen, told))
    return show(histories.render(seen, told, unseen))


@command("explain")
def explain(
    where: Where,
    policy: Name,
    no_engines: NoEngines = False,
    direct: Direct = False,
    output: As = Output.TEXT,
) -> int:
    """What the planner sees, what it would do next, and why."""
    with where.cluster(direct) as cluster:
        sight = look(cluster, where.namespace, policy, ask_engines=not no_engines)
    seen = sight.policies[0]
    rehearsal = _rehearsed(sight, seen)
    if output is Output.JSON:
        return _json(explaining.wire(sight, seen, rehearsal))
    _say(explaining.policy(sight, seen, rehearsal))
    return DONE


def _rehearsed(sight: Sight, seen: PolicySight) -> Rehearsal:
    meta = seen.resource.meta
    return rehearse(seen.resource.model.spec, meta.generation, seen.status, sight.observed(seen))


def _say(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


@command("doctor")
def doctor(where: Where, everywhere: Everywhere = False, output: As = Output.TEXT) -> int:
    """Check a cluster, before and after an install: each line ok, warn or FAIL, with what to do.

    The exit status is that of the worst line: 0 for ok and warn, 1 for FAIL.
    """
    with where.cluster() as cluster:
        place = None if everywhere else where.namespace or cluster.namespace
        found = examine(doctors.facts(cluster, place))
    level = worst(found)
    if output is Output.JSON:
        _json({"worst": level.name.lower(), "findings": [each.wire() for each in found]})
    else:
        show(doctors.render(found))
    return FAILED if level is Level.FAIL else DONE


@command("timeline")
def timeline(
    where: Where,
    name: Name,
    epoch: Annotated[int | None, typer.Option(help="of an older change; default: the last")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="write a picture")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="the same; needs pillow")] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="the operator's log, where it was saved")] = None,
    output: As = Output.TEXT,
) -> int:
    """When each replica did what in a change: a bar a replica, a colour a step."""
    try:
        lines = log.read_text().splitlines() if log is not None else None
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{log} cannot be read: {error}; name the operator's log") from error
    with where.cluster() as cluster:
        (seen,) = policies(cluster, where.namespace, name)
        found = live.drawn(cluster, seen, epoch, lines)
    if svg is not None:
        written(svg, picture.svg(picture.draw(found)).encode())
    if png is not None:
        written(png, picture.png(picture.draw(found)))
    if output is Output.JSON:
        return _json(found.wire())
    if svg is None and png is None:
        show(render_timeline(found))
    return DONE


# -- change ------------------------------------------------------------------------------------------------------------


@command("bump")
def bump(
    where: Where,
    name: Name,
    version: Version,
    wait: Annotated[
        bool, typer.Option("--wait", help="until it is current: a line a replica, then the timeline")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="change nothing; print what would be done")] = False,
    timeout: Timeout = "5m",
    direct: Direct = False,
    output: As = Output.TEXT,
) -> int:
    """Set spec.version: the weights have been pushed, or are not looked at."""
    wanted, seconds = _version(version), _seconds(timeout)
    if dry_run:
        return _rehearse_bump(where, name, wanted, direct, output)
    if where.by_hook or not wait or output is Output.JSON:
        return _plainly(where, "bump", name, output, version, wait=wait, timeout=timeout)
    done = _plainly(where, "bump", name, output, version)
    if done != DONE:
        return done
    with where.cluster(direct) as cluster:
        place = where.namespace or cluster.namespace
        return live.follow(console(), cluster, place, name, str(wanted), seconds)


def _rehearse_bump(where: Where, name: str, version: int | str, direct: bool, output: Output) -> int:
    with where.cluster(direct) as cluster:
        sight = look(cluster, where.namespace, name)
        seen = sight.policies[0]
        spec, meta = seen.resource.model.spec, seen.resource.meta
        if spec.preparing_label == str(version):
            raise CliError(
                f"version {version} is being prepared: write {PROGRAM} commit {name} -n {meta.namespace}, which makes "
                "it current"
            )
        if spec.preparing_label is not None:
            raise CliError(
                f"version {spec.preparing_label} is being prepared, and another version would begin that anew; first: "
                f"{PROGRAM} commit {name} -n {meta.namespace}, or: {PROGRAM} abort {name} -n {meta.namespace}"
            )
    changed = spec.label != str(version)
    asked = spec.model_copy(update={"version": version}) if changed else spec
    rehearsal = rehearse(asked, meta.generation + changed, seen.status, sight.observed(seen))
    if output is Output.JSON:
        return _json({"policy": seen.full_name, "version": str(version), **rehearsal.wire(), "unseen": sight.unseen})
    lines = explaining.looks(rehearsal)
    _say(
        [
            f"{seen.full_name}: version {version} (dry run, nothing is changed)",
            f"the planner {lines[0]}",
            *lines[1:],
            "as if every call succeeded at once; requests that run may hold a quiesce up",
            *explaining.assumptions(sight.following(seen)),
            *(f"not seen: {each}" for each in sight.unseen),
        ]
    )
    return DONE


def _plainly(
    where: Where, verb: str, name: str, output: Output, *more: str, wait: bool = False, timeout: str | None = None
) -> int:
    """Run a command of the plain program; with ``-o json`` its words go to stderr, and the policy follows."""
    arguments = [verb, *where.arguments(), *(["--wait"] if wait else [])]
    arguments += [f"--timeout={timeout}"] if timeout is not None else []
    arguments += [name, *more]
    access = where.access()
    if output is Output.TEXT:
        return plain.main(arguments, access=access, told=_with_hint(where, name))
    with contextlib.redirect_stdout(sys.stderr):
        done = plain.main(arguments, access=access, told=_with_hint(where, name))
    if done in (DONE, LATE):
        target = access.target(name, where.namespace)
        with Api(access) as api:
            _json(api.run(read(target, target.clock() + READ_SECONDS)).body)
    return done


def _with_hint(where: Where, name: str) -> Callable[[MoontideError], str]:
    """The plain program's errors, with near names where a policy was not found."""

    def text(error: MoontideError) -> str:
        if isinstance(error, PolicyNotFound) and not where.by_hook:
            with contextlib.suppress(MoontideError), where.cluster() as cluster:
                place = where.namespace or cluster.namespace
                return f"there is no PolicyVersion {place}/{name}; {hint_at(cluster, place, name)}"
        return str(error)

    return text


Wait = Annotated[bool, typer.Option("--wait", help="until it is done")]


@command("prepare")
def prepare(
    where: Where, name: Name, version: Version, wait: Wait = False, timeout: Timeout = "5m", output: As = Output.TEXT
) -> int:
    """Make the fleets ready for new weights; with --wait, print the engines' addresses."""
    _version(version), _seconds(timeout)
    return _plainly(where, "prepare", name, output, version, wait=wait, timeout=timeout)


@command("commit")
def commit(where: Where, name: Name, wait: Wait = False, timeout: Timeout = "5m", output: As = Output.TEXT) -> int:
    """The prepared version's weights have been pushed: make it current."""
    _seconds(timeout)
    return _plainly(where, "commit", name, output, wait=wait, timeout=timeout)


@command("abort")
def abort(where: Where, name: Name, output: As = Output.TEXT) -> int:
    """Clear spec.preparing: the fleets go back to the old version."""
    return _plainly(where, "abort", name, output)


@command("reset")
def reset(where: Where, name: Name, wait: Wait = False, timeout: Timeout = "5m", output: As = Output.TEXT) -> int:
    """Begin a new epoch of the same version: nothing that is cached is found again."""
    _seconds(timeout)
    return _plainly(where, "reset", name, output, wait=wait, timeout=timeout)


class What(StrEnum):
    """What to wait for."""

    CURRENT = "current"
    PREPARED = "prepared"


@command("wait")
def wait(
    where: Where,
    name: Name,
    what: Annotated[What, typer.Option("--for", help="current, or prepared")] = What.CURRENT,
    timeout: Timeout = "5m",
    output: As = Output.TEXT,
) -> int:
    """Wait, and print each change of state with the seconds since the start."""
    _seconds(timeout)
    return _plainly(where, "wait", name, output, f"--for={what.value}", timeout=timeout)


# -- versions ----------------------------------------------------------------------------------------------------------


def _versions(where: Where, output: Output) -> int:
    def ask() -> list[Installation]:
        with where.cluster() as cluster:
            return installations(cluster)

    unseen = ""
    try:
        found = soon(ask)
        if not found:
            unseen = f"no answer from a cluster within {SOON_SECONDS:.0f} s" if found is None else "none is installed"
    except MoontideError as error:
        found, unseen = [], str(error)
    if output is Output.JSON:
        return _json({"version": own_version(), "operators": [each.wire() for each in found or ()], "unseen": unseen})
    lines = [f"operator {each.namespace}/{each.name} {each.version}, image {each.image}" for each in found or ()]
    _say([f"{PROGRAM} {own_version()}", *(lines or [f"operator: not seen: {unseen}"])])
    return DONE


@command("version")
def version(where: Where, output: As = Output.TEXT) -> int:
    """The versions of this program and, where a cluster answers soon, of its operators."""
    return _versions(where, output)


def _version_option(given: bool) -> None:
    if given:
        raise typer.Exit(_versions(Where(), Output.TEXT))


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version_option, is_eager=True, help="the same as the command version")
    ] = False,
) -> None:
    pass


# -- the program -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Shells complete the script; people read how it is typed.
    completes = COMPLETE in os.environ or any(each.endswith("-completion") for each in given)
    try:
        done = app(given, prog_name=SCRIPT if completes else PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except MoontideError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        late = isinstance(error, CommitTimeout | PrepareTimeout | ApiUnavailable)
        return LATE if late else FAILED
    except _CLICK_ERROR as error:
        return _wrong(error)
    except httpx.InvalidURL as error:
        print(f"{PROGRAM}: the server of the kubeconfig is no URL: {error}; write https://host:port", file=sys.stderr)
        return FAILED
    except ValidationError as error:
        said = " ".join(str(error).split())[:400]
        print(f"{PROGRAM}: the cluster sent an object that this release cannot read: {said}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has had enough; what is still in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    return done if isinstance(done, int) else DONE


def _wrong(error: Any) -> int:
    """One line that says what is wrong and what to write."""
    text = str(error.format_message()).strip()
    ctx = getattr(error, "ctx", None)
    if not text:
        # Nothing was given: typer's own answer is its help.
        return WRONG
    usage = re.sub(r"[{}]", "", ctx.get_usage()).replace("Usage: ", "") if ctx is not None else f"{PROGRAM} --help"
    text = text.replace("Value error, ", "").replace("?", "").rstrip(".").replace(". Did", "; did")
    print(f"{PROGRAM}: {text}; write: {' '.join(usage.split())}", file=sys.stderr)
    return WRONG


def complete(words: Sequence[str]) -> int:
    """What kubectl asks a plugin's ``kubectl_complete-NAME``: the words so far, the last one perhaps empty."""
    said = io.StringIO()
    before = {key: os.environ.get(key) for key in (COMPLETE, "COMP_WORDS", "COMP_CWORD")}
    os.environ |= {COMPLETE: "complete_bash", "COMP_WORDS": shlex.join([SCRIPT, *words]), "COMP_CWORD": str(len(words))}
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(said):
            main([])
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    print("\n".join([*filter(None, said.getvalue().splitlines()), f":{NO_FILES}"]))
    return DONE


def written(path: Path, data: bytes) -> None:
    """Write a file. Raises CliError."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}; name another file") from error


if __name__ == "__main__":
    sys.exit(main())
