"""Who leads, in which term, and when a leader ends itself: with a clock and an API server that the test moves."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import pytest

from moontide.errors import Retry
from moontide.kube.client import GuardedClient
from moontide.kube.lease import Lease, now
from moontide.leader import Candidacy, Identity, Leader, Move

SECONDS = 15
ME = Identity("operator-a", "uid-a", "b00t")
SPEC = {"holderIdentity": "other", "leaseDurationSeconds": SECONDS, "leaseTransitions": 4, "renewTime": "r1"}


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def lease(uid: str = "u1", created: str = "2026-11-28T08:00:00Z", **spec: Any) -> Lease:
    return Lease({"metadata": {"uid": uid, "creationTimestamp": created}, "spec": {**SPEC, **spec}})


# -- the candidate -----------------------------------------------------------------------------------------------------


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


@pytest.fixture(name="candidacy")
def _candidacy(clock: Clock) -> Candidacy:
    return Candidacy(ME, SECONDS, clock)


def test_a_lease_that_is_renewed_is_never_taken(candidacy: Candidacy, clock: Clock) -> None:
    for number in range(50):
        assert candidacy.look(lease(renewTime=f"r{number}")) is Move.WAIT
        clock.time += SECONDS - 0.1
        assert candidacy.look(lease(renewTime=f"r{number}")) is Move.WAIT


def test_a_silent_leader_is_waited_for_by_the_candidates_own_clock(candidacy: Candidacy, clock: Clock) -> None:
    # The times in the Lease are long past: another machine's clock proves nothing.
    assert candidacy.look(lease()) is Move.WAIT
    clock.time += SECONDS - 0.01
    assert candidacy.look(lease()) is Move.WAIT
    clock.time += 0.01
    assert candidacy.look(lease()) is Move.TAKE


def test_the_holder_says_how_long_it_holds(candidacy: Candidacy, clock: Clock) -> None:
    assert candidacy.look(lease(leaseDurationSeconds=40)) is Move.WAIT
    clock.time += 39
    assert candidacy.look(lease(leaseDurationSeconds=40)) is Move.WAIT


def test_a_released_lease_is_taken_at_once(candidacy: Candidacy) -> None:
    assert candidacy.look(lease(holderIdentity="")) is Move.TAKE


def test_a_lease_made_anew_waits_for_a_leader_that_has_not_noticed(candidacy: Candidacy, clock: Clock) -> None:
    assert candidacy.look(lease()) is Move.WAIT
    clock.time += SECONDS - 1
    assert candidacy.look(None) is Move.CREATE
    fresh = Lease({"metadata": lease("u2").body["metadata"], "spec": {"leaseDurationSeconds": SECONDS}})
    for _ in range(SECONDS):
        assert candidacy.look(fresh) is Move.WAIT
        clock.time += 1
    assert candidacy.look(fresh) is Move.TAKE


@pytest.mark.parametrize(
    ("holder", "move"),
    [
        ("operator-a_uid-a_b00t", Move.TAKE),
        ("operator-a_uid-a_0ther", Move.TAKE),
        ("operator-a_uid-b_0ther", Move.WAIT),
        ("operator-a_uid-ab_0ther", Move.WAIT),
        ("operator-a", Move.WAIT),
    ],
)
def test_only_an_earlier_process_of_the_same_pod_is_known_to_be_dead(
    candidacy: Candidacy, holder: str, move: Move
) -> None:
    assert candidacy.look(lease(holderIdentity=holder)) is move


def test_outside_a_pod_nobody_is_known_to_be_dead() -> None:
    assert not Identity("host", "", "b1").is_dead("host_b2")
    assert Identity("host", "", "b1").is_dead("host_b1")


# -- the term ----------------------------------------------------------------------------------------------------------


def test_terms_rise_within_a_lease_and_across_leases() -> None:
    assert lease().term == 1_795_852_800_004
    assert lease(leaseTransitions=5).term == lease().term + 1
    # 900 acquisitions, and the Lease was deleted a second after it was made.
    anew = lease("u2", "2026-11-28T08:00:01Z", leaseTransitions=1)
    assert anew.term > lease(leaseTransitions=900).term
    assert now().endswith("Z")
    assert len(now()) == len("2026-11-28T08:00:01.000000Z")


# -- the leader --------------------------------------------------------------------------------------------------------


class Lost(BaseException):
    """Stands for the end of the process."""


class FakeApi:
    """One Lease with the API server's optimistic concurrency, and faults that the test turns on."""

    def __init__(self) -> None:
        self.body: dict[str, Any] | None = None
        self.version = 0
        self.made = 0
        self.down = False
        self.drop_answer = False

    def put(self, spec: dict[str, Any], **metadata: Any) -> None:
        """Somebody writes."""
        self.version += 1
        kept = self.body["metadata"] if self.body is not None else {}
        self.body = {"metadata": {**kept, **metadata, "resourceVersion": str(self.version)}, "spec": spec}

    def edit(self, **spec: Any) -> None:
        assert self.body is not None
        self.put({**self.body["spec"], **spec})

    @property
    def spec(self) -> dict[str, Any]:
        assert self.body is not None
        found: dict[str, Any] = self.body["spec"]
        return found

    def _check(self) -> None:
        if self.down:
            raise Retry(1, "the API server is down")

    async def read(self) -> Lease | None:
        await asyncio.sleep(0)
        self._check()
        return None if self.body is None else Lease(copy.deepcopy(self.body))

    async def create(self, spec: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        self._check()
        if self.body is None:
            self.made += 1
            self.put(spec, uid=f"u{self.made}", creationTimestamp=f"2026-11-28T08:{self.made:02d}:00Z")

    async def write(self, lease: Lease) -> Lease | None:
        await asyncio.sleep(0)
        self._check()
        version = lease.body["metadata"]["resourceVersion"]
        if self.body is None or self.body["metadata"]["resourceVersion"] != version:
            return None
        self.put(copy.deepcopy(lease.spec))
        if self.drop_answer:
            self.drop_answer = False
            raise Retry(1, "the answer was lost")
        return Lease(copy.deepcopy(self.body))


class World:
    """Leaders on one Lease; time passes only where a test lets it: every sleep of a leader moves the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = FakeApi()
        self.clock = Clock()
        self.lost: list[str] = []
        self.frozen = asyncio.Event()
        self.leaders: list[Leader] = []
        self._boots = 0
        real = asyncio.sleep

        async def sleep(seconds: float) -> None:
            if seconds > 0:
                self.clock.time += seconds
            await real(0)

        monkeypatch.setattr("moontide.leader.asyncio.sleep", sleep)

    def leader(self, pod: str = "pod", uid: str = "") -> Leader:
        self._boots += 1

        def lost(reason: str) -> NoReturn:
            self.lost.append(reason)
            raise Lost(reason)

        made = Leader(self.api, Identity(pod, uid, f"b{self._boots}"), SECONDS, lost, clock=self.clock)
        self.leaders.append(made)
        return made


@pytest.fixture(name="world")
async def _world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World(monkeypatch)
    yield made
    made.api.down = False
    for leader in made.leaders:
        await leader.release()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never")


async def test_the_first_leader_makes_the_lease_and_renews_it(world: World) -> None:
    leader = world.leader()
    began = world.clock.time
    assert not leader.leading
    term = await leader.acquire()
    assert leader.leading
    assert leader.term() == term > 0
    assert world.clock.time - began >= SECONDS
    assert (world.api.spec["holderIdentity"], world.api.spec["leaseTransitions"]) == ("pod_b1", 1)
    began = world.clock.time
    await until(lambda: world.clock.time > began + 20 * SECONDS)
    assert leader.term() == term
    assert world.lost == []


async def test_release_hands_over_with_a_higher_term(world: World) -> None:
    first, second = world.leader(), world.leader()
    before = await first.acquire()
    await first.release()
    assert not first.leading
    assert world.api.spec["holderIdentity"] == ""
    began = world.clock.time
    after = await second.acquire()
    assert after == before + 1
    assert world.clock.time == began
    with pytest.raises(Lost):
        first.term()


async def test_a_restart_in_the_same_pod_raises_the_term_and_does_not_wait(world: World) -> None:
    first = world.leader(uid="u")
    before = await first.acquire()
    assert first._keeping is not None
    first._keeping.cancel()
    began = world.clock.time
    assert await world.leader(uid="u").acquire() == before + 1
    assert world.clock.time == began


async def test_no_act_after_the_deadline_even_before_the_alarm_rings(world: World) -> None:
    leader = world.leader()
    await leader.acquire()
    world.clock.time += SECONDS * 2 / 3 - 0.01
    leader.term()
    # Frozen and continued: nothing of the event loop ran since.
    world.clock.time += 0.01
    with pytest.raises(Lost):
        leader.term()


async def test_a_leader_that_cannot_renew_ends_before_anybody_may_take_over(world: World) -> None:
    leader = world.leader()
    await leader.acquire()
    renewed = world.clock.time
    world.api.down = True

    def over() -> bool:
        try:
            leader.term()
        except Lost:
            return True
        return False

    await until(over)
    assert world.clock.time - renewed < SECONDS


async def test_the_alarm_is_set_for_two_thirds_of_the_lease(world: World) -> None:
    leader = world.leader()
    await leader.acquire()
    assert leader._alarm is not None
    left = leader._alarm.when() - asyncio.get_running_loop().time()
    assert SECONDS * 2 / 3 - 1 < left <= SECONDS * 2 / 3
    with pytest.raises(Lost, match="not renewed in time"):
        leader._on_alarm()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda api: api.edit(holderIdentity="other", leaseTransitions=9), "with other"),
        (lambda api: api.edit(holderIdentity=""), "with nobody"),
        (lambda api: api.edit(leaseTransitions=9), "with pod_b1"),
        (lambda api: setattr(api, "body", None), "gone"),
    ],
)
async def test_a_lease_that_is_not_its_own_any_more_ends_the_leader(
    world: World, change: Callable[[FakeApi], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    leader = world.leader()
    await leader.acquire()
    # The renewal's task ends by an exception that only this test raises.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    change(world.api)

    async def renew_until_lost() -> None:
        while True:
            await leader._renew()

    with pytest.raises(Lost, match=reason):
        await renew_until_lost()


async def test_somebody_touches_the_lease_and_a_lost_answer_are_survived(world: World) -> None:
    leader = world.leader()
    term = await leader.acquire()
    world.api.edit(note="kubectl annotate")
    world.api.drop_answer = True
    began = world.clock.time
    await until(lambda: world.clock.time > began + 3 * SECONDS)
    assert leader.term() == term
    assert world.lost == []
    assert world.api.spec["note"] == "kubectl annotate"


async def test_release_survives_a_lost_answer_and_a_server_that_is_down(world: World) -> None:
    leader = world.leader()
    await leader.acquire()
    world.api.edit(note="x")
    await leader.release()
    assert world.api.spec["holderIdentity"] == ""
    again = world.leader()
    await again.acquire()
    world.api.down = True
    await again.release()
    assert not again.leading


async def test_two_candidates_never_lead_at_once(world: World) -> None:
    first, second = world.leader(), world.leader()
    tasks = [asyncio.ensure_future(each.acquire()) for each in (first, second)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    began = world.clock.time
    await until(lambda: world.clock.time > began + 10 * SECONDS)
    assert [first.leading, second.leading].count(True) == 1
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def test_a_standby_waits_out_an_api_server_that_is_down(world: World) -> None:
    leader = world.leader()
    world.api.down = True
    task = asyncio.ensure_future(leader.acquire())
    began = world.clock.time
    await until(lambda: world.clock.time > began + SECONDS)
    assert not leader.seen
    world.api.down = False
    assert await task > 0
    assert leader.seen


async def test_only_what_writes_asks_whether_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    sent: list[str] = []

    def allow() -> None:
        asked.append("asked")
        raise Lost

    async def request(method: str, *_: Any, **__: Any) -> None:
        sent.append(method)

    async with GuardedClient(allow) as api:
        monkeypatch.setattr(api.rest_client, "request", request)
        await api.call_api("GET", "http://x")
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            with pytest.raises(Lost):
                await api.call_api(method, "http://x")
    assert sent == ["GET"]
    assert len(asked) == 4
