"""``policy_update`` and its twin for asyncio: prepare, push in the body, commit; an exception in the body aborts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from moontide.trainer.access import Access, find
from moontide.trainer.errors import MoontideError
from moontide.trainer.kube import Api, AsyncApi
from moontide.trainer.policy import Policy
from moontide.trainer.steps import Change, Engine, Steps

PREPARE_SECONDS = 300.0
COMMIT_SECONDS = 300.0
CANCEL_SECONDS = 10.0


@dataclass
class Update:
    """One change of a policy, as the body of ``policy_update`` sees it."""

    namespace: str
    policy: str
    version: str
    epoch: int
    """That of the preparation: what engines compute in it is found in no other. After the commit, the version's."""
    engines: tuple[Engine, ...] = ()
    """``(fleet, "host:port" of the admin port, bearer token)`` of every engine to push to."""
    already_current: bool = False
    """The version is served already: there is nothing to push, ``engines`` is empty, and nothing is committed."""
    pause_seconds: float | None = None
    """After the commit: the longest time that any replica held requests; None without a pause."""
    replicas: str = ""
    """After the commit: how many replicas serve the version, of how many, for example 8/8."""


class _Session:
    """What both twins do, in their order."""

    def __init__(
        self,
        access: Access,
        name: str,
        version: int | str,
        namespace: str | None,
        prepare_timeout: float,
        timeout: float,
        progress: Callable[[str], None],
    ) -> None:
        self.target = access.target(name, namespace, progress)
        self.change = Change(self.target, version)
        self.prepare_timeout = prepare_timeout
        self.timeout = timeout
        self.until = 0.0

    def begin(self) -> Steps[Update]:
        until = self.target.clock() + self.prepare_timeout
        policy = yield from self.change.begin(until)
        update = Update(self.target.namespace, self.target.name, self.change.label, 0)
        if policy.version == self.change.label:
            update.already_current = True
            _finished(update, policy)
        else:
            update.epoch = int(policy.preparation["epoch"])
            update.engines = yield from self.change.engines(policy, until)
        return update

    def commit(self, update: Update) -> Steps[None]:
        self.until = self.target.clock() + self.timeout
        if not update.already_current:
            yield from self.change.commit(update.epoch, self.until)

    def settle(self, update: Update) -> Steps[None]:
        if not update.already_current:
            _finished(update, (yield from self.change.settle(self.until)))

    def cancel(self) -> Steps[bool]:
        if not self.change.asked:
            return False
        return (yield from self.change.cancel(self.target.clock() + CANCEL_SECONDS))

    def not_cancelled(self, error: BaseException) -> str:
        """A note for the exception that is on its way."""
        return (
            f"spec.preparing could not be cleared: {error}; the operator aborts by itself after "
            f"prepareDeadlineSeconds; sooner with: {self.target.command('abort')}"
        )


def _finished(update: Update, policy: Policy) -> None:
    last = policy.status.get("lastUpdate") or {}
    update.epoch = int(policy.status.get("epoch", 0))
    update.pause_seconds = last.get("pauseSeconds")
    update.replicas = str((policy.status.get("replicas") or {}).get("summary", ""))


@contextmanager
def policy_update(
    name: str,
    version: int | str,
    *,
    namespace: str | None = None,
    wait: bool = True,
    prepare_timeout: float = PREPARE_SECONDS,
    timeout: float = COMMIT_SECONDS,
    kubeconfig: str | os.PathLike[str] | None = None,
    context: str | None = None,
    hook: str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Update]:
    """Make the fleets ready for the weights of ``version``, let the body push them, then make the version current.

    Enters once the policy's condition ``Prepared`` holds, within ``prepare_timeout`` seconds. At the end of the body
    it commits and, with ``wait``, returns once ``Current`` holds; both within ``timeout`` seconds. If the body, or
    anything before the commit, raises, the preparation is aborted and the exception goes on.

    A version that is served already is not prepared again, as its weights are there: the body then runs with
    ``already_current`` and no engines. A preparation of the same version that an earlier process left is taken over.

    ``namespace`` is the policy's; by default the pod's own, or the context's. ``progress`` hears one line a change.
    ``hook`` is the URL of an operator's hook, in place of a kubeconfig, with a ``token`` of its audience or a
    ``token_file`` that is read for each request; ``ca_file`` holds the authority of its certificate.

    Raises BadVersion, AccessError, PolicyNotFound, ApiError, ApiUnavailable, PrepareFailed (PrepareTimeout) before the
    body; PreparationLost, CommitTimeout, Superseded, ApiError, ApiUnavailable after it.
    """
    access = find(kubeconfig, context, hook=hook, token=token, token_file=token_file, ca_file=ca_file)
    session = _Session(access, name, version, namespace, prepare_timeout, timeout, progress)
    with Api(access) as api:
        try:
            update = api.run(session.begin())
            yield update
            api.run(session.commit(update))
        except BaseException as error:
            try:
                api.run(session.cancel())
            except MoontideError as failure:
                error.add_note(session.not_cancelled(failure))
            raise
        if wait:
            api.run(session.settle(update))


@asynccontextmanager
async def policy_update_async(
    name: str,
    version: int | str,
    *,
    namespace: str | None = None,
    wait: bool = True,
    prepare_timeout: float = PREPARE_SECONDS,
    timeout: float = COMMIT_SECONDS,
    kubeconfig: str | os.PathLike[str] | None = None,
    context: str | None = None,
    hook: str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Update]:
    """:func:`policy_update` for asyncio. A task that is cancelled in the body aborts, too."""
    access = find(kubeconfig, context, hook=hook, token=token, token_file=token_file, ca_file=ca_file)
    session = _Session(access, name, version, namespace, prepare_timeout, timeout, progress)
    async with AsyncApi(access) as api:
        try:
            update = await api.run(session.begin())
            yield update
            await api.run(session.commit(update))
        except BaseException as error:
            try:
                await api.run(session.cancel())
            except MoontideError as failure:
                error.add_note(session.not_cancelled(failure))
            raise
        if wait:
            await api.run(session.settle(update))
