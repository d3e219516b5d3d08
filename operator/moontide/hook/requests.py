"""What trainers send to the hook, read and checked. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moontide.hook.errors import Refusal, bad
from moontide.trainer.policy import Object, Policy, label_of

LONGEST_WAIT = 60.0
VERBS = {
    "bump": frozenset({"version"}),
    "prepare": frozenset({"version"}),
    "commit": frozenset({"version"}),
    "abort": frozenset({"version"}),
    "reset": frozenset({"nonce"}),
}
"""Each verb, and what its body may hold."""
_NEEDS_VERSION = frozenset({"bump", "prepare"})
_SPEC = frozenset({"version", "preparing", "resetNonce"})
_LONGEST_NONCE = 128


@dataclass(frozen=True)
class Wait:
    """How long to wait, and for what: ``goal``, or else another resourceVersion than ``after`` or than there is."""

    seconds: float
    after: str = ""
    goal: Literal["", "current", "prepared"] = ""


def wait_of(query: Mapping[str, str]) -> Wait:
    """``wait``, ``after`` and ``for`` of a query. Raises Refusal: 400."""
    for name in query:
        if name not in ("wait", "after", "for"):
            raise bad(f"nothing is known of {name!r}; write wait=SECONDS, with after=RESOURCEVERSION or for=prepared")
    raw = query.get("wait", "0")
    try:
        seconds = float(raw)
    except ValueError:
        seconds = -1.0
    if not (math.isfinite(seconds) and seconds >= 0):
        raise bad(f"wait={raw} is no time; write seconds, for example wait=30; the longest is {LONGEST_WAIT:.0f}")
    goal = query.get("for", "")
    if goal not in ("", "current", "prepared"):
        raise bad(f"for={goal} is nothing to wait for; write for=current or for=prepared")
    return Wait(min(seconds, LONGEST_WAIT), query.get("after", ""), goal)  # type: ignore[arg-type]


def body_of(verb: str, sent: bytes) -> Object:
    """The body of a verb. Raises Refusal: 400, 404."""
    if verb not in VERBS:
        raise Refusal(404, "NotFound", f"nothing is done by {verb!r}; POST to one of: {', '.join(VERBS)}")
    body = _object(sent) if sent.strip() else {}
    known = ", ".join(sorted(VERBS[verb]))
    for name in body:
        if name not in VERBS[verb]:
            raise bad(f"{verb} knows no {name!r}; its body is a JSON object with: {known}")
    if verb in _NEEDS_VERSION and "version" not in body:
        raise bad(f'{verb} needs a version; send for example {{"version": 43}}')
    if "version" in body:
        label_of(body["version"])
    if "nonce" in body:
        _check_nonce(body["nonce"])
    return body


def patch_of(sent: bytes) -> tuple[str, Object]:
    """A merge patch of what trainers change, and the verb that it comes to. Raises Refusal: 400, and BadVersion."""
    body = _object(sent)
    spec, metadata = body.get("spec", {}), body.get("metadata", {})
    if not isinstance(spec, dict) or not isinstance(metadata, dict) or set(body) - {"spec", "metadata"}:
        raise bad('a patch is a JSON object: {"spec": {...}, "metadata": {"resourceVersion": "..."}}')
    if set(metadata) - {"resourceVersion"} or not isinstance(metadata.get("resourceVersion", ""), str):
        raise bad("a patch's metadata may hold a resourceVersion, as a text, and nothing else")
    for name in set(spec) - _SPEC:
        raise bad(f"spec.{name} is not changed through the hook, only {', '.join(sorted(_SPEC))}; use kubectl patch")
    for name in ("version", "preparing"):
        if name in spec and (name == "version" or spec[name] is not None):
            label_of(spec[name])
    if "resetNonce" in spec:
        _check_nonce(spec["resetNonce"])
    return _verb(spec), body


def _verb(spec: Object) -> str:
    fields = frozenset(spec)
    if fields == {"version"}:
        return "bump"
    if fields == {"resetNonce"}:
        return "reset"
    if fields == {"preparing"}:
        return "abort" if spec["preparing"] is None else "prepare"
    if fields == {"version", "preparing"} and spec["preparing"] is None:
        return "commit"
    if not fields:
        return "look"
    raise bad("a patch is one step: a version, a preparing, a resetNonce, or a version with preparing null (a commit)")


def _object(sent: bytes) -> Object:
    try:
        found = json.loads(sent)
    except (ValueError, RecursionError) as error:
        raise bad(f'the body is no JSON: {error}; send for example {{"version": 43}}') from error
    if not isinstance(found, dict):
        raise bad('the body is no JSON object; send for example {"version": 43}')
    return found


def _check_nonce(value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NONCE:
        raise bad(f"a nonce is a text of 1 to {_LONGEST_NONCE} characters that was not there before")


def shown(body: Object) -> Object:
    """A PolicyVersion as the hook gives it: the API server's words, and what a script wants to know in one."""
    metadata = body.get("metadata") or {}
    kept = ("name", "namespace", "uid", "generation", "resourceVersion")
    policy = Policy(body)
    return {
        "apiVersion": body.get("apiVersion", ""),
        "kind": body.get("kind", ""),
        "metadata": {key: metadata[key] for key in kept if key in metadata},
        "current": policy.version is not None and policy.is_current(policy.version),
        "prepared": policy.preparing is not None and policy.is_prepared(policy.preparing),
        "state": policy.state(),
        "spec": policy.spec,
        "status": policy.status,
    }
