"""One leader, and a standby that takes over: a ``coordination.k8s.io`` Lease, and the term that engines fence by.

Time
    A leader acts until its deadline: two thirds of the Lease's seconds after the *start* of its last successful
    renewal, by its own monotonic clock. A candidate takes the Lease when it has seen it unchanged for all of the
    Lease's seconds, by its own monotonic clock. No two machines' clocks are compared.

Term
    The Lease's creation, as the API server wrote it, in milliseconds since 1970, plus ``leaseTransitions``. Every
    acquisition raises ``leaseTransitions``, whoever held the Lease before, so within one Lease no two periods of
    leadership have one term. A Lease that was deleted and made anew was created later, and a new Lease is not held
    before its seconds have passed, so its terms are higher too (docs/decisions/2026-11-28-leader-lease.md).

Fence
    A process that was frozen past its Lease may have a command half sent when it goes on. That command carries the old
    term, and engines refuse it as soon as they have heard the new leader once.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from moontide.errors import InvalidSpec, Retry
from moontide.kube.lease import Lease, now

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_RELEASE_ATTEMPTS = 3


@dataclass(frozen=True)
class Identity:
    """Who holds the Lease: one process. ``boot`` is drawn at its start."""

    pod: str
    pod_uid: str
    boot: str

    def __str__(self) -> str:
        return "_".join(part for part in (self.pod, self.pod_uid, self.boot) if part)

    def is_dead(self, holder: str) -> bool:
        """Whether ``holder`` was this process before a lost answer, or an earlier process of the same pod.

        A container starts only when the one before it in its pod has ended.
        """
        return holder == str(self) or (self.pod_uid != "" and holder.startswith(f"{self.pod}_{self.pod_uid}_"))


class Move(enum.Enum):
    """What a candidate does next."""

    WAIT = "wait"
    CREATE = "create"
    TAKE = "take"


class Candidacy:
    """When a candidate may take the Lease. Pure: it is told what was read, and has a monotonic clock."""

    def __init__(self, identity: Identity, seconds: float, clock: Clock) -> None:
        """``seconds`` counts where a Lease does not say how long it holds."""
        self._identity = identity
        self._seconds = seconds
        self._clock = clock
        self._seen: tuple[str, dict[str, Any]] | None = None
        self._since = 0.0

    def look(self, lease: Lease | None) -> Move:
        """The next move, after the Lease was read: None when there is none.

        A Lease that nobody ever held is waited for like one that is held: it may follow one that was deleted under a
        leader that has yet to notice.
        """
        if lease is None:
            self._seen = None
            return Move.CREATE
        seen = (lease.uid, lease.spec)
        if seen != self._seen:
            self._seen, self._since = seen, self._clock()
        released = lease.holder == "" and lease.transitions > 0
        if released or self._identity.is_dead(lease.holder):
            return Move.TAKE
        return Move.TAKE if self._clock() - self._since >= (lease.seconds or self._seconds) else Move.WAIT


class LeaseApi(Protocol):
    """One Lease in the API server. Methods raise Retry or InvalidSpec when it refuses or cannot be reached."""

    async def read(self) -> Lease | None:
        """The Lease, or None when there is none."""

    async def create(self, spec: dict[str, Any]) -> None:
        """Make it; one that exists stays as it is."""

    async def write(self, lease: Lease) -> Lease | None:
        """Replace it. None, and nothing is changed, when somebody else wrote since ``lease`` was read."""


class Leader:
    """This process's part in the election: :meth:`acquire`, then act, then :meth:`release`.

    ``lost`` is called, with the reason, when this process must not act any more; it must end the process at once.
    ``seconds`` is how long the Lease holds without a renewal: renewed every 2/15 of it, looked at by standbys every
    1/15, and given up by a leader that could not renew it for 2/3.
    """

    def __init__(
        self,
        api: LeaseApi,
        identity: Identity,
        seconds: int,
        lost: Callable[[str], NoReturn],
        resource: str = "Lease",
        clock: Clock = time.monotonic,
    ) -> None:
        self._api = api
        self._identity = identity
        self._seconds = seconds
        self._lost = lost
        self._clock = clock
        self._candidacy = Candidacy(identity, seconds, clock)
        self._lease: Lease | None = None
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._keeping: asyncio.Task[NoReturn] | None = None
        self._resource = resource
        self.seen = False
        """Whether the API server has answered yet."""

    @property
    def leading(self) -> bool:
        """Whether this process leads, as far as it has noticed."""
        return self._lease is not None

    def term(self) -> int:
        """The term of this leadership, to be asked for right before each act.

        Does not return once the deadline has passed: the process ends.
        """
        lease = self._lease
        if lease is None or self._clock() >= self._deadline:
            self._lost("the Lease is not held, or was not renewed in time")
        return lease.term

    async def acquire(self) -> int:
        """Wait until this process leads, and keep the Lease from then on. Returns the term."""
        waits_for: str | None = None
        while True:
            try:
                lease = await self._api.read()
                self.seen = True
                move = self._candidacy.look(lease)
                if move is Move.CREATE:
                    await self._api.create({"leaseDurationSeconds": self._seconds})
                    continue
                assert lease is not None
                if move is Move.TAKE and (term := await self._take(lease)) is not None:
                    self._keeping = asyncio.create_task(self._keep(), name="keep the Lease")
                    self._keeping.add_done_callback(self._on_kept)
                    return term
                if lease.holder != waits_for:
                    waits_for = lease.holder
                    self._tell(logging.INFO, "standby", f"standby; the leader is {waits_for or 'nobody yet'}")
            except (Retry, InvalidSpec) as error:
                self._tell(logging.WARNING, "standby", f"the Lease cannot be had: {error}")
            await asyncio.sleep(self._seconds / 15)

    async def _take(self, lease: Lease) -> int | None:
        started, at = self._clock(), now()
        wanted = lease.with_spec(
            holderIdentity=str(self._identity),
            leaseDurationSeconds=self._seconds,
            leaseTransitions=lease.transitions + 1,
            acquireTime=at,
            renewTime=at,
        )
        held = await self._api.write(wanted)
        if held is None:
            return None
        self._held(held, started)
        self._tell(logging.INFO, "acquire", f"leads as {self._identity} in term {held.term}")
        return held.term

    async def _keep(self) -> NoReturn:
        """Renew for ever. Calls ``lost`` when the Lease went to somebody else, is gone, or could not be renewed."""
        while True:
            await asyncio.sleep(self._seconds / 7.5)
            try:
                while not await self._renew():
                    pass
            except (Retry, InvalidSpec) as error:
                left = self._deadline - self._clock()
                self._tell(logging.WARNING, "renew", f"not renewed, {left:.1f} s left: {error}")

    async def _renew(self) -> bool:
        """One attempt. False: another field of the Lease was changed, so try again at once."""
        assert self._lease is not None
        started, mine = self._clock(), self._lease
        written = await self._api.write(mine.with_spec(renewTime=now()))
        if written is not None:
            self._held(written, started)
            return True
        found = await self._api.read()
        if found is None:
            self._lost("the Lease is gone")
        if (found.uid, found.transitions, found.holder) != (mine.uid, mine.transitions, mine.holder):
            self._lost(f"the Lease is with {found.holder or 'nobody'}")
        self._lease = found
        return False

    def _held(self, lease: Lease, started: float) -> None:
        self._lease = lease
        self._deadline = started + self._seconds * 2 / 3
        self._disarm()
        left = max(0.0, self._deadline - self._clock())
        self._alarm = asyncio.get_running_loop().call_later(left, self._on_alarm)

    def _on_kept(self, task: asyncio.Task[NoReturn]) -> None:
        if not task.cancelled():
            self._lost(f"nothing renews the Lease any more: {task.exception()!r}")

    def _on_alarm(self) -> None:
        self._lost("the Lease was not renewed in time")

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def release(self) -> None:
        """Give the Lease up, so that the standby need not wait. Nothing may act any more when this is called.

        A failure costs the standby the Lease's seconds and is no error.
        """
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        if self._lease is None:
            return
        try:
            for _ in range(_RELEASE_ATTEMPTS):
                if await self._api.write(self._lease.with_spec(holderIdentity="", renewTime=now())) is not None:
                    self._tell(logging.INFO, "release", "released the Lease")
                    break
                # A renewal whose answer was lost, or somebody else.
                found = await self._api.read()
                if found is None or (found.uid, found.transitions) != (self._lease.uid, self._lease.transitions):
                    break
                self._lease = found
        except (Retry, InvalidSpec) as error:
            self._tell(logging.WARNING, "release", f"the Lease was not released: {error}")
        self._lease = None
        self._disarm()

    def _tell(self, level: int, step: str, message: str) -> None:
        logger.log(level, message, extra={"resource": self._resource, "step": step})
