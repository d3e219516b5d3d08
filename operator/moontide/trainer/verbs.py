"""What is asked of a policy in one word, as steps: one text for ``kubectl moontide`` and for the operator's hook."""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Callable

from moontide.trainer.errors import Refused
from moontide.trainer.policy import Object, Policy, label_of
from moontide.trainer.steps import Change, Steps, Target, change, read


def new_nonce() -> str:
    """A text for ``spec.resetNonce`` that was not there before."""
    return f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def bump(target: Target, version: int | str, until: float) -> Steps[Policy]:
    """Set ``spec.version``. Raises Refused while a version is being prepared."""
    label = label_of(version)

    def spec(policy: Policy) -> Object:
        if policy.preparing == label:
            raise Refused(f"version {label} of {target} is being prepared; write: {target.command('commit')}")
        _not_preparing(target, policy, "another version")
        # 7 and "7" are the same version: written again in the other form it would only raise the generation.
        return {} if policy.version == label else {"version": version}

    return (yield from _merged(target, spec, until))


def prepare(target: Target, version: int | str, until: float) -> Steps[Policy]:
    """Set ``spec.preparing``. Raises Refused for the version that is asked for already, and PrepareFailed."""
    ahead = Change(target, version)
    policy = yield from ahead.ask(until)
    if policy.version == ahead.label:
        raise Refused(f"version {ahead.label} is spec.version of {target} already; prepare the next one")
    return policy


def commit(target: Target, until: float, version: int | str | None = None) -> Steps[Policy]:
    """Make the version that is prepared the policy's; a ``version`` that was committed already is good, too.

    Gives the policy as it was before. Raises Refused, PreparationLost.
    """
    policy = yield from read(target, until)
    asked = None if version is None else label_of(version)
    if asked is not None and policy.version == asked and policy.preparing is None:
        return policy
    label = preparing(target, policy)
    if asked not in (None, label):
        raise Refused(f"version {label} of {target} is being prepared, not {asked}, so nothing is committed")
    if not policy.is_prepared(label):
        then = target.command("abort") if policy.is_over(label) else target.command("wait", " --for prepared")
        raise Refused(
            f"version {label} of {target} is not prepared ({policy.condition('Prepared').reason}), so nothing is "
            f"committed; write: {then}"
        )
    yield from Change(target, policy.spec["preparing"]).commit(int(policy.preparation["epoch"]), until)
    return policy


def abort(target: Target, until: float, version: int | str | None = None) -> Steps[str | None]:
    """Clear ``spec.preparing``, or only where it is ``version``. Gives the label that was there, or None."""
    if version is not None:
        label = label_of(version)
        return label if (yield from Change(target, version).cancel(until)) else None
    before: list[str | None] = []

    def spec(policy: Policy) -> Object:
        before.append(policy.preparing)
        return {"preparing": None}

    yield from _merged(target, spec, until)
    return before[-1]


def reset(target: Target, nonce: str, until: float) -> Steps[Policy]:
    """Set ``spec.resetNonce``. Raises Refused while a version is being prepared."""

    def spec(policy: Policy) -> Object:
        _not_preparing(target, policy, "a reset")
        return {"resetNonce": nonce}

    return (yield from _merged(target, spec, until))


def preparing(target: Target, policy: Policy) -> str:
    """The version that is being prepared. Raises Refused where there is none."""
    if policy.preparing is None:
        raise Refused(f"no version of {target} is being prepared; write: {target.command('prepare', ' VERSION')}")
    return policy.preparing


def _not_preparing(target: Target, policy: Policy, what: str) -> None:
    """Raise Refused while a trainer may be pushing weights."""
    if policy.preparing is not None:
        raise Refused(
            f"version {policy.preparing} of {target} is being prepared, and {what} would begin that anew; first: "
            f"{target.command('commit')}, or: {target.command('abort')}"
        )


def _merged(target: Target, spec_of: Callable[[Policy], Object], until: float) -> Steps[Policy]:
    """Read, decide, and write what was decided on just that."""
    while True:
        policy = yield from read(target, until)
        done = yield from change(target, spec_of(policy), until, seen=policy)
        if done is not None:
            return done
