"""What one run of a policy's reconcile has at hand: what it read and heard, and what it still has to write and tell.

A pause lasts as long as the slowest of what the turns wait for. So they wait for engines, and for the API server only
where the protocol needs it: what the API server said is used for :data:`RECENT_SECONDS`, an engine whose answer to a
command says how it is now is not asked again, and what only tells people is said beside the next step. A status is
written when engines have been told what they are to do, or :data:`UNSAID_SECONDS` later: the newest one alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from moontide.api.v1alpha1 import InferenceDeployment, PolicyVersion, PolicyVersionStatus
from moontide.engines.client import fan_out
from moontide.kube.client import Resource
from moontide.kube.kinds import POLICY
from moontide.planning import protocol
from moontide.planning.model import Command, EngineStatus, Fleet, Result
from moontide.reconcile.context import Context
from moontide.reconcile.fleets import Roster, ask, roster
from moontide.reconcile.quiet import Quiet

RECENT_SECONDS = 1.0
"""How old pods, fleets and the policy's spec may be, as a turn sees them. Engines refuse what is meant for another
process, and one that nobody has listed yet was never admitted."""
READ_SHARE = 0.2
"""Of a run's time, at most, goes into reading them: a list of thousands of pods takes a second, and a pause that waits
for one is longer by it."""
LONGEST_SECONDS = 10.0
"""However long they took to read, they are read anew after this."""
HEARD_SECONDS = 2.0
"""The same for what an engine said with its answer: longer than others are waited for."""
UNSAID_SECONDS = 0.25
"""How long a pause may last before its status is written: that takes milliseconds of the core that its calls need, and
pauses of a few replicas are over by then."""
ROSTERS_AT_ONCE = 16


class Gone(Exception):
    """The policy does not exist any more."""


class Round:
    """One run. Close it with :meth:`end`."""

    def __init__(self, ctx: Context, namespace: str, name: str) -> None:
        self._ctx = ctx
        self._namespace = namespace
        self._name = name
        self._policy: Resource[PolicyVersion] | None = None
        self._rosters: list[Roster] = []
        self._good_until = 0.0
        self._commands = False
        self.quiet = Quiet()
        """Of this run alone."""
        self._heard: dict[str, tuple[float, EngineStatus]] = {}
        self._written = PolicyVersionStatus()
        self._gone = False
        self._unwritten: list[tuple[PolicyVersionStatus, PolicyVersionStatus]] = []
        """Statuses that nobody has begun to write, each after the one before it."""
        self._uncounted: list[Result] = []
        self._hushed = 0.0
        """When the pause had lasted for long enough."""
        self._calm = asyncio.Event()
        """Set while people may be told."""
        self._calm.set()
        self._writing: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self.followers: list[Resource[InferenceDeployment]] = []
        self.status = PolicyVersionStatus()
        """The newest; perhaps not yet written."""

    # Reading ------------------------------------------------------------------------------------------------------

    async def look(self) -> tuple[Resource[PolicyVersion], tuple[Fleet, ...]]:
        """The policy's spec, and its fleets with what their engines say. Raises :class:`Gone`."""
        if time.monotonic() > self._good_until:
            await self._read()
        assert self._policy is not None
        since = time.monotonic() - HEARD_SECONDS
        heard, self._heard = {uid: said for uid, (at, said) in self._heard.items() if at > since}, {}
        home = self._namespace
        fleets: list[Fleet] = await fan_out(self._rosters, lambda each: ask(self._ctx, each, home, heard))
        return self._policy, tuple(fleets)

    async def _read(self) -> None:
        await self.flush()
        began = time.monotonic()
        policy = await self._ctx.kube.get_policy(self._namespace, self._name)
        if policy is None or policy.meta.deletion_timestamp is not None:
            raise Gone
        self._policy, self.status = policy, policy.model.status or PolicyVersionStatus()
        self._written = self.status
        self.followers = await following(self._ctx, policy)
        self._rosters = await fan_out(
            self.followers, lambda each: roster(self._ctx, each, self._namespace), ROSTERS_AT_ONCE
        )
        share = (time.monotonic() - began) / READ_SHARE
        self._good_until = began + min(max(RECENT_SECONDS, share), LONGEST_SECONDS)

    def hear(self, result: Result) -> None:
        """What an engine said of itself as it answered a command: a look that comes soon need not ask it."""
        if result.status is not None and isinstance(result.action, Command):
            self._heard[result.action.replica.pod_uid] = time.monotonic(), result.status

    def keep(self, fleets: Iterable[Fleet]) -> None:
        """Engines were told nothing since ``fleets`` were looked at: a turn that comes soon may go by it."""
        now = time.monotonic()
        for fleet in fleets:
            self._heard.update({r.pod_uid: (now, r.status) for r in fleet.replicas if r.status is not None})

    def forget(self) -> None:
        """What the API server said is over: marks were written that decide what silence means."""
        self._good_until = 0.0

    def acts(self, commands: bool) -> None:
        """Whether engines are told something from now on: see :mod:`moontide.reconcile.quiet`."""
        if commands == self._commands:
            return
        self._commands = commands
        if commands:
            self._hushed = time.monotonic() + UNSAID_SECONDS
            self._calm.clear()
        else:
            self._calm.set()
            self._count()
        for quiet in (self.quiet, self._ctx.quiet):
            if commands:
                quiet.begin()
            else:
                quiet.end()

    def count(self, results: list[Result]) -> None:
        """What came of actions, for the metrics."""
        self._uncounted += results
        if not self._commands or time.monotonic() > self._hushed:
            self._count()

    def _count(self) -> None:
        results, self._uncounted = self._uncounted, []
        self._ctx.metrics.acted(results)

    # Writing and telling ------------------------------------------------------------------------------------------

    async def write(self, status: PolicyVersionStatus) -> None:
        """Have ``status`` written, after those before it. Waits for what must be there before anybody acts on it.

        Raises :class:`Gone`, and :class:`moontide.errors.Retry` of this write or an earlier one.
        """
        if status == self.status:
            # Nothing is written, and who has just begun to lead has not counted what there is.
            self._ctx.metrics.policy(self._namespace, self._name, status, status)
        else:
            before, self.status = self.status, status
            self._unwritten.append((before, status))
            if len(self._unwritten) == 1:
                self._writing = asyncio.ensure_future(self._write(self._writing))
        if protocol.must_precede(self._written, self.status):
            await self.flush()

    async def _write(self, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        await self._until_calm()
        steps, self._unwritten = self._unwritten, []
        status = steps[-1][1]
        policy = self._policy
        assert policy is not None
        meta = policy.meta
        if self._gone or not await self._ctx.kube.apply_policy_status(meta.namespace, meta.name, status, uid=meta.uid):
            self._gone = True
            return
        self._written = status
        # What could not be written is looked at again, and would count twice.
        for before, after in steps:
            self._ctx.metrics.policy(meta.namespace, meta.name, before, after)

    async def _until_calm(self) -> None:
        left = self._hushed - time.monotonic()
        if left > 0 and not self._calm.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._calm.wait()

    def tell(self, telling: Callable[[], Awaitable[None]]) -> None:
        """Logs and Events, in order, beside what comes next."""

        async def one(earlier: asyncio.Task[None] | None) -> None:
            if earlier is not None:
                await earlier
            await telling()

        self._telling = asyncio.ensure_future(one(self._telling))

    async def flush(self) -> None:
        """Wait until all is written. Raises as :meth:`write` does."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._calm.set()
            try:
                await writing
            finally:
                if self._commands:
                    self._calm.clear()
        if self._gone:
            raise Gone

    async def end(self) -> None:
        """Wait until all is written and said. Raises as :meth:`write` does."""
        self.acts(False)
        try:
            if self._telling is not None:
                await self._telling
        finally:
            await self.flush()

    def drop(self) -> None:
        """Leave the rest unwritten and unsaid."""
        self.acts(False)
        for task in (self._writing, self._telling):
            if task is not None:
                task.cancel()

    def gone(self) -> None:
        """Nothing is counted of a policy that is no more."""
        self._ctx.metrics.gone(POLICY.kind, self._namespace, self._name)


async def following(ctx: Context, policy: Resource[PolicyVersion]) -> list[Resource[InferenceDeployment]]:
    """The fleets that follow the policy: of its namespace, and of those that it allows and this operator serves."""
    allowed = () if ctx.config.watch_namespace else policy.model.spec.allowed_namespaces
    return await ctx.kube.list_deployments_following(policy.meta.namespace, policy.meta.name, allowed)
