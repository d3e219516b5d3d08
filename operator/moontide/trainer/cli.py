"""`kubectl moontide`: change, prepare, reset and look at a PolicyVersion.

exit status: 0 done; 1 refused, not found or superseded; 2 wrong arguments; 3 not in time; 130 interrupted
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from moontide.trainer import table, verbs
from moontide.trainer.access import Access, find
from moontide.trainer.errors import (
    ApiUnavailable,
    BadVersion,
    CommitTimeout,
    MoontideError,
    PrepareTimeout,
)
from moontide.trainer.kube import Api
from moontide.trainer.policy import Policy, label_of
from moontide.trainer.steps import Steps, Target, read, until_current, until_prepared

DONE, FAILED, WRONG, LATE, INTERRUPTED = 0, 1, 2, 3, 130
WAIT_SECONDS = 300.0
_CALL_SECONDS = 30.0
_PROGRAM = "kubectl moontide"


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong and what to write."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{_PROGRAM}: {message}; write: {' '.join(self.format_usage().split()[1:])}\n")


def version_of(text: str) -> int | str:
    """A version as `kubectl patch` would send it: a number where it is one."""
    label = label_of(text)
    return int(label) if label.isdigit() and str(int(label)) == label and len(label) <= 18 else label


def _version(text: str) -> int | str:
    try:
        return version_of(text)
    except BadVersion as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def seconds_of(text: str) -> float:
    """Seconds, also as 90s, 5m or 1h. Raises ValueError."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is no time: write seconds, or for example 90s, 5m or 1h")
    return seconds


def _seconds(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    common = _Parser(add_help=False)
    common.add_argument("-n", "--namespace", default=argparse.SUPPRESS, help="of the policy; default: the context's")
    common.add_argument("--kubeconfig", default=argparse.SUPPRESS, help="default: $KUBECONFIG, or ~/.kube/config")
    common.add_argument("--context", default=argparse.SUPPRESS, help="default: the kubeconfig's current context")
    common.add_argument("--hook", default=argparse.SUPPRESS, metavar="URL", help="of an operator; or $MOONTIDE_HOOK")
    text = "for the hook; or $MOONTIDE_HOOK_TOKEN_FILE"
    common.add_argument("--hook-token-file", default=argparse.SUPPRESS, metavar="FILE", help=text)
    text = "of the hook's certificate's authority; or $MOONTIDE_HOOK_CA_FILE"
    common.add_argument("--hook-ca-file", default=argparse.SUPPRESS, metavar="FILE", help=text)
    told = (__doc__ or "").strip().split("\n\n")
    root = _Parser(
        prog=_PROGRAM,
        usage="%(prog)s COMMAND NAME [VERSION] [options]",
        description=told[0],
        epilog=told[1],
        parents=[common],
        allow_abbrev=False,
    )
    commands = root.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    def command(
        name: str, run: Callable[[argparse.Namespace, Target], Steps[None]], text: str, *, versioned: bool = False
    ) -> _Parser:
        usage = f"{_PROGRAM} {name} NAME{' VERSION' if versioned else ''} [options]"
        made = commands.add_parser(name, usage=usage, help=text, description=text, parents=[common], allow_abbrev=False)
        made.add_argument("name", metavar="NAME", help="of the PolicyVersion")
        if versioned:
            made.add_argument("version", metavar="VERSION", type=_version, help="for example 43 or step-43")
        made.set_defaults(run=run)
        return made

    def waits(made: argparse.ArgumentParser, what: str) -> None:
        made.add_argument("--wait", action="store_true", help=f"until it is {what}")
        timed(made)

    def timed(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--timeout", type=_seconds, default=WAIT_SECONDS, metavar="TIME", help="of the wait: 90s, 5m; default 5m"
        )

    text = "Set spec.version: the weights have been pushed, or are not looked at."
    waits(command("bump", _bump, text, versioned=True), "current")
    text = "Make the fleets ready for new weights (spec.preparing)."
    waits(command("prepare", _prepare, text, versioned=True), "ready, and print the engines' addresses")
    waits(command("commit", _commit, "The prepared version's weights have been pushed: make it current."), "current")
    command("abort", _abort, "Clear spec.preparing: the fleets go back to the old version.")
    waits(
        command("reset", _reset, "Begin a new epoch of the same version: nothing that is cached is found again."),
        "done",
    )
    wait = command("wait", _wait, "Wait, and print each change of state with the seconds since the start.")
    wait.add_argument("--for", dest="what", choices=("current", "prepared"), default="current", help="default: current")
    timed(wait)
    command("status", _status, "Print version, epoch, replicas, the last change's timeline and the history.")
    return root


def _out(text: str) -> None:
    print(text, flush=True)


def _until(target: Target, seconds: float = _CALL_SECONDS) -> float:
    return target.clock() + seconds


def _told(target: Target, text: str, policy: Policy) -> None:
    _out(f"{target}: {text}")
    if policy.spec.get("suspend"):
        _out("spec.suspend is true: nothing begins until it is false")


def _settled(options: argparse.Namespace, target: Target, label: str) -> Steps[None]:
    """Wait until the version is current, where that is asked for."""
    if options.wait:
        policy = yield from until_current(target, label, _until(target, options.timeout))
        _finished(target, policy)


def _finished(target: Target, policy: Policy) -> None:
    counts = (policy.status.get("replicas") or {}).get("summary", "0/0")
    _out(f"{target}: version {policy.version} is current in epoch {policy.status.get('epoch')}, {counts} replicas")


def _bump(options: argparse.Namespace, target: Target) -> Steps[None]:
    policy = yield from verbs.bump(target, options.version, _until(target))
    label = label_of(options.version)
    _told(target, f"spec.version is {label}", policy)
    yield from _settled(options, target, label)


def _prepare(options: argparse.Namespace, target: Target) -> Steps[None]:
    until = _until(target, options.timeout)
    policy = yield from verbs.prepare(target, options.version, until)
    label = label_of(options.version)
    _told(target, f"spec.preparing is {label}", policy)
    if options.wait:
        _ready(target, (yield from until_prepared(target, label, until)))


def _ready(target: Target, policy: Policy) -> None:
    found = policy.preparation
    _out(f"{target}: version {found['version']} may be pushed, epoch {found['epoch']} is one of transit")
    for fleet in found.get("fleets") or ():
        elsewhere = fleet.get("namespace") not in (None, target.namespace)
        secret = f"{fleet['namespace']}/{fleet['tokenSecret']}" if elsewhere else fleet["tokenSecret"]
        for address in fleet.get("addresses") or ():
            _out(f"  {fleet['name']}  {address}  token in Secret {secret}")


def _commit(options: argparse.Namespace, target: Target) -> Steps[None]:
    policy = yield from verbs.commit(target, _until(target))
    label = str(policy.preparing)
    _told(target, f"spec.version is {label}", policy)
    yield from _settled(options, target, label)


def _abort(options: argparse.Namespace, target: Target) -> Steps[None]:
    label = yield from verbs.abort(target, _until(target))
    _out(f"{target}: " + ("nothing was being prepared" if label is None else f"version {label} is aborted"))


def _reset(options: argparse.Namespace, target: Target) -> Steps[None]:
    nonce = verbs.new_nonce()
    policy = yield from verbs.reset(target, nonce, _until(target))
    _told(target, f"spec.resetNonce is {nonce}", policy)
    yield from _settled(options, target, str(policy.version))


def _wait(options: argparse.Namespace, target: Target) -> Steps[None]:
    until = _until(target, options.timeout)
    policy = yield from read(target, until)
    if options.what == "prepared":
        _ready(target, (yield from until_prepared(target, verbs.preparing(target, policy), until)))
    else:
        _finished(target, (yield from until_current(target, str(policy.version), until)))


def _status(options: argparse.Namespace, target: Target) -> Steps[None]:
    policy = yield from read(target, _until(target))
    for line in table.status(policy):
        _out(line)


def _progress() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda text: _out(f"  {time.monotonic() - began:7.2f} s  {text}")


def _access(options: argparse.Namespace) -> Access:
    def given(name: str) -> str | None:
        return getattr(options, name, None)

    return find(
        given("kubeconfig"),
        given("context"),
        hook=given("hook"),
        token_file=given("hook_token_file"),
        ca_file=given("hook_ca_file"),
    )


def main(
    arguments: Sequence[str] | None = None,
    *,
    access: Access | None = None,
    told: Callable[[MoontideError], str] = str,
) -> int:
    """The exit status. ``told`` puts an error into words."""
    options = parser().parse_args(arguments)
    try:
        found = access or _access(options)
        target = found.target(options.name, getattr(options, "namespace", None), _progress())
        with Api(found, patient=False) as api:
            api.run(options.run(options, target))
    except MoontideError as error:
        print(f"{_PROGRAM}: {told(error)}", file=sys.stderr)
        late = isinstance(error, CommitTimeout | PrepareTimeout | ApiUnavailable)
        if isinstance(error, PrepareTimeout):
            print(f"spec.preparing stays as it is; clear it with: {target.command('abort')}", file=sys.stderr)
        return LATE if late else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
