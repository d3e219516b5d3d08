"""What a trainer does to a PolicyVersion, as generators without I/O: they yield what is to be done, and a driver of
:mod:`moontide.trainer.kube` does it, blocking or not. So there is one text for both."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from moontide.trainer.errors import (
    ApiError,
    ApiUnavailable,
    CommitTimeout,
    PolicyNotFound,
    PreparationLost,
    PrepareFailed,
    PrepareTimeout,
    Superseded,
)
from moontide.trainer.policy import Object, Policy, checked_name, label_of

T = TypeVar("T")

POLL_SECONDS = 0.25
"""The fleets stand still while a trainer does not notice that it may push."""
CALL_SECONDS = 10.0
PATIENCE_SECONDS = 20.0
"""How long a look through a hook waits for a change."""
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 5.0
PASSING = frozenset({0, 429, 500, 502, 503, 504})
"""Answers after which the same is tried again; 0 is no answer."""


@dataclass(frozen=True)
class Call:
    """One request to the API server, or to a hook in its place; ``patch`` makes it a merge patch."""

    path: str
    patch: Object | None = None
    seconds: float = CALL_SECONDS
    """Without ``wait``."""
    after: str = ""
    """Answer when the object has another resourceVersion than this, or ``wait`` seconds have passed."""
    wait: float = 0.0


@dataclass(frozen=True)
class Sleep:
    """Do nothing for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Answer:
    """What came of a call. ``status`` 0: no answer, and ``text`` says why."""

    status: int
    body: Object = field(default_factory=dict)
    text: str = ""
    retry_after: float = 0.0

    @property
    def message(self) -> str:
        """The sentence of the server."""
        return str(self.body.get("message") or self.text or f"HTTP {self.status}")


Steps = Generator[Call | Sleep, Answer | None, T]


class Engine(NamedTuple):
    """One engine to push weights to. Its ``repr`` does not show the token."""

    fleet: str
    address: str
    """``host:port`` of the admin port, or its URL where that is not http."""
    token: str

    @property
    def url(self) -> str:
        """Base URL of the admin port."""
        return self.address if "://" in self.address else f"http://{self.address}"

    @property
    def headers(self) -> dict[str, str]:
        """What every request to the admin port needs."""
        return {"authorization": f"Bearer {self.token}"}

    def __repr__(self) -> str:
        return f"Engine(fleet={self.fleet!r}, address={self.address!r})"


@dataclass(frozen=True)
class Target:
    """One PolicyVersion, who hears of progress, a clock in seconds that never goes back, and whom to ask."""

    namespace: str
    name: str
    say: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    hook: bool = False
    """An operator's hook answers, not the API server."""
    patience: float = 0.0
    """How long a look may wait for a change of the policy; 0: there is a look every so often."""

    def __post_init__(self) -> None:
        checked_name(self.namespace, "namespace")
        checked_name(self.name, "policy")

    def __str__(self) -> str:
        return f"PolicyVersion {self.namespace}/{self.name}"

    @property
    def path(self) -> str:
        """Where the API server, or the hook, has it."""
        if self.hook:
            return f"/hook/v1/namespaces/{self.namespace}/policies/{self.name}"
        return f"/apis/moontide.dev/v1alpha1/namespaces/{self.namespace}/policyversions/{self.name}"

    @property
    def server(self) -> str:
        """Who answers, in words."""
        return "the hook" if self.hook else "the API server"

    def command(self, verb: str, more: str = "") -> str:
        """What a person would type."""
        return f"kubectl moontide {verb} {self.name} -n {self.namespace}{more}"


def call(target: Target, path: str, patch: Object | None, until: float, after: str = "") -> Steps[Answer]:
    """The server's answer. What may pass is tried again, with pauses that grow, until the clock says ``until``.

    Raises ApiUnavailable.
    """
    pause = FIRST_PAUSE
    while True:
        left = until - target.clock()
        wait = max(0.0, min(target.patience, left)) if after else 0.0
        answer = yield Call(path, patch, max(1.0, min(CALL_SECONDS, left)), after if wait else "", wait)
        assert answer is not None
        if answer.status not in PASSING:
            return answer
        left = until - target.clock()
        if left <= 0:
            raise ApiUnavailable(
                f"{target.server} does not answer usefully: {answer.message}; is it up, and reachable from here? "
                f"What became of the policy says: {target.command('status')}"
            )
        target.say(f"{target.server}: {answer.message}; trying again")
        yield Sleep(min(max(pause, answer.retry_after), left))
        pause = min(2 * pause, LONGEST_PAUSE)


def read(target: Target, until: float, after: str = "") -> Steps[Policy]:
    """The policy as it is now, or, with patience, once it has another resourceVersion than ``after``.

    Raises PolicyNotFound, ApiError, ApiUnavailable.
    """
    answer = yield from call(target, target.path, None, until, after)
    if answer.status in (200, 202):  # A hook says 202 where the wait ended without a change.
        return Policy(answer.body)
    raise _refused(target, answer, "get")


def look_again(target: Target, seen: Policy, until: float) -> Steps[Policy]:
    """The policy a little later, or, with patience, once it is no longer what was ``seen``."""
    if target.patience:
        began = target.clock()
        policy = yield from read(target, until, seen.resource_version)
        if policy.resource_version != seen.resource_version or target.clock() - began >= POLL_SECONDS:
            return policy
    yield Sleep(max(0.0, min(POLL_SECONDS, until - target.clock())))
    return (yield from read(target, until))


def change(target: Target, spec: Object, until: float, *, seen: Policy | None = None) -> Steps[Policy | None]:
    """Merge ``spec`` into the policy's. None, and no change, when it is no longer what was ``seen``."""
    patch: Object = {"spec": spec}
    if seen is not None:
        patch["metadata"] = {"resourceVersion": seen.resource_version}
    answer = yield from call(target, target.path, patch, until)
    if answer.status == 409 and seen is not None:
        return None
    if answer.status == 200:
        return Policy(answer.body)
    raise _refused(target, answer, "patch")


def _refused(target: Target, answer: Answer, verb: str) -> Exception:
    if answer.status == 404:
        if (answer.body.get("details") or {}).get("name") == target.name:
            return PolicyNotFound(
                f"there is no {target}; `kubectl get polv -A` lists those there are; name another, or its namespace"
            )
        return PolicyNotFound("the cluster knows no PolicyVersion: install Moontide's CRDs (kubectl apply -f crds/)")
    if answer.status == 401:
        return ApiError(401, f"{target.server} does not know the credentials: {answer.message}; get a new token")
    if answer.status == 403 and target.hook:
        return ApiError(403, answer.message)
    if answer.status == 403:
        return ApiError(403, f"{answer.message}; allow the trainer to {verb} it (examples/trainers/rbac.yaml)")
    return ApiError(answer.status, f"{target.server} refuses to {verb} {target}: {answer.message}")


def until_current(target: Target, label: str, until: float) -> Steps[Policy]:
    """The policy once the version is current. Raises CommitTimeout, Superseded, and what :func:`read` raises."""
    policy, last = (yield from read(target, until)), ""
    while True:
        last = _tell(target, policy, last)
        if policy.is_current(label):
            return policy
        if policy.version != label:
            raise Superseded(f"version {label} was waited for, and spec.version is {policy.version} now")
        left = until - target.clock()
        if left <= 0:
            raise CommitTimeout(
                policy.condition("Current").reason,
                f"version {label} of {target} is not current in time; {policy.advice()}; the operator goes on, follow "
                f"it with: {target.command('wait')}",
            )
        policy = yield from look_again(target, policy, until)


def until_prepared(target: Target, label: str, until: float) -> Steps[Policy]:
    """The policy once the version may be pushed. Raises PrepareFailed, PrepareTimeout, and what read raises."""
    policy, last = (yield from read(target, until)), ""
    while True:
        last = _tell(target, policy, last)
        if policy.is_prepared(label):
            return policy
        _check_preparing(target, policy, label)
        left = until - target.clock()
        if left <= 0:
            raise PrepareTimeout(
                policy.condition("Current").reason,
                f"the fleets of {target} are not ready for version {label} in time; {policy.advice()}",
            )
        policy = yield from look_again(target, policy, until)


def _tell(target: Target, policy: Policy, last: str) -> str:
    """Say the state where it is another than before."""
    text = policy.state()
    if text != last:
        target.say(text)
    return text


def _check_preparing(target: Target, policy: Policy, label: str) -> None:
    """Raise PrepareFailed where waiting does not help."""
    if policy.version == label:
        raise PrepareFailed("Committed", f"somebody else set spec.version of {target} to {label} meanwhile")
    if policy.preparing != label:
        now = policy.preparing or "empty"
        raise PrepareFailed("Aborted", f"somebody else changed spec.preparing of {target}; it is {now} now")
    prepared, current = policy.condition("Prepared"), policy.condition("Current")
    if prepared.fresh and prepared.reason == "Expired" and policy.is_over(label):
        raise PrepareFailed(
            "Expired",
            f"the fleets were not ready within prepareDeadlineSeconds ({policy.spec.get('prepareDeadlineSeconds')} s); "
            f"raise it, or see what holds them up: {target.command('status')}",
        )
    if current.fresh and current.reason == "Suspended" and not policy.preparation:
        raise PrepareFailed("Suspended", f"spec.suspend of {target} is true, so nothing begins; set it to false")


class Change:
    """One version on its way into the fleets: begin, commit, settle, or cancel."""

    def __init__(self, target: Target, version: int | str) -> None:
        self.target = target
        self.version = version
        self.label = label_of(version)
        self.asked = False
        """``spec.preparing`` may be ours, so that it is ours to clear."""

    def begin(self, until: float) -> Steps[Policy]:
        """The policy once the weights may be pushed, or, where the version is current already, as it is.

        A version that is asked for already, and not current yet, is waited for. Raises PrepareFailed.
        """
        policy = yield from self.ask(until)
        if policy.version != self.label:
            return (yield from until_prepared(self.target, self.label, until))
        try:
            return (yield from until_current(self.target, self.label, until))
        except CommitTimeout as error:
            raise PrepareTimeout(
                error.reason,
                f"version {self.label} is spec.version of {self.target} already, and is not current: "
                f"{policy.advice()}; to push its weights, set spec.version back to {policy.served} and begin again",
            ) from error

    def ask(self, until: float) -> Steps[Policy]:
        """Set ``spec.preparing``, unless it is set or the version is asked for already. Raises PrepareFailed."""
        target, label = self.target, self.label
        while True:
            policy = yield from read(target, until)
            if policy.version == label:
                return policy
            other = policy.preparing
            if other not in (None, label) and not policy.is_over(str(other)):
                raise PrepareFailed(
                    "Busy",
                    f"version {other} of {target} is being prepared, perhaps by another trainer; commit it, or abort "
                    f"it with: {target.command('abort')}",
                )
            if policy.is_over(label):
                yield from self._forget(policy, until)
                continue
            self.asked = True
            if other == label:
                return policy
            done = yield from change(target, {"preparing": self.version}, until, seen=policy)
            if done is not None:
                return done

    def _forget(self, policy: Policy, until: float) -> Steps[None]:
        """Let the operator forget an earlier preparation of the same version, so that it begins another."""
        if policy.preparing is not None:
            policy = (yield from change(self.target, {"preparing": None}, until, seen=policy)) or policy
        left = until - self.target.clock()
        if left <= 0:
            raise PrepareTimeout(
                policy.condition("Current").reason,
                f"an earlier preparation of version {self.label} is not forgotten in time; {policy.advice()}",
            )
        yield from look_again(self.target, policy, until)

    def commit(self, epoch: int, until: float) -> Steps[None]:
        """Make the version current, if its preparation in ``epoch`` still holds at that moment.

        Raises PreparationLost.
        """
        while True:
            policy = yield from read(self.target, until)
            if policy.version == self.label and policy.preparing is None:
                return
            lost = policy.why_lost(self.label, epoch)
            if lost is not None:
                raise PreparationLost(
                    lost[0],
                    f"version {self.label} of {self.target} was not committed, as its preparation is over: {lost[1]}; "
                    "replicas with other weights than the policy's stay closed; begin again and push again, and raise "
                    "spec.prepareDeadlineSeconds if a push takes longer",
                )
            spec: Object = {"version": self.version, "preparing": None}
            if (yield from change(self.target, spec, until, seen=policy)) is not None:
                return

    def settle(self, until: float) -> Steps[Policy]:
        """The policy once the version is current. Raises CommitTimeout, Superseded."""
        return (yield from until_current(self.target, self.label, until))

    def cancel(self, until: float) -> Steps[bool]:
        """Clear ``spec.preparing`` where it is this version. Whether there was anything to clear."""
        while True:
            policy = yield from read(self.target, until)
            if policy.preparing != self.label:
                return False
            if (yield from change(self.target, {"preparing": None}, until, seen=policy)) is not None:
                return True

    def engines(self, policy: Policy, until: float) -> Steps[tuple[Engine, ...]]:
        """The engines of a prepared policy, with their tokens. Raises ApiError."""
        found: list[Engine] = []
        fleets: list[dict[str, Any]] = policy.preparation.get("fleets") or []
        for fleet in fleets:
            addresses = fleet.get("addresses") or ()
            if addresses:
                token = _given(fleet)
                if not token:
                    token = yield from self._token(str(fleet["tokenSecret"]), fleet.get("namespace"), until)
                found += [Engine(str(fleet["name"]), str(address), token) for address in addresses]
        return tuple(found)

    def _token(self, secret: str, namespace: str | None, until: float) -> Steps[str]:
        """The first line of a Secret's ``token``."""
        namespace = namespace or self.target.namespace
        path = f"/api/v1/namespaces/{namespace}/secrets/{secret}"
        answer = yield from call(self.target, path, None, until)
        if answer.status != 200:
            more = f"; allow the trainer to get Secret {secret} of {namespace} (examples/trainers/rbac.yaml)"
            text = f"the token of the engines cannot be read from Secret {namespace}/{secret}: {answer.message}"
            raise ApiError(answer.status, text + (more if answer.status == 403 else ""))
        try:
            return base64.b64decode((answer.body.get("data") or {})["token"], validate=True).decode().split()[0]
        except (KeyError, IndexError, binascii.Error, UnicodeDecodeError) as error:
            raise ApiError(200, f"Secret {namespace}/{secret} holds no token under the key `token`") from error


def _given(fleet: Object) -> str | None:
    """The token that a hook writes beside the addresses of a fleet. Raises ApiError where it refuses."""
    if fleet.get("tokenRefused"):
        raise ApiError(403, f"the token of the engines cannot be had: {fleet['tokenRefused']}")
    return fleet.get("token")
