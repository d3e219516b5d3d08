"""The loops: one a resource, never two, woken, retried, retired, watched over. Times are milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from moontide.errors import InvalidSpec, Retry
from moontide.handlers.loops import Key, Loops

KEY = Key("PolicyVersion", "ns", "a")
OTHER = Key("PolicyVersion", "ns", "b")
Make = Callable[..., Loops]


@pytest.fixture(name="make")
async def _make() -> AsyncIterator[Make]:
    made: list[Loops] = []

    def make(reconcile: Callable[[Key], Awaitable[float]], **settings: float) -> Loops:
        loops = Loops(reconcile, **{"resync": 10.0, "gap": 0.001, "base": 0.01, "limit": 0.05, **settings})  # type: ignore[arg-type]
        made.append(loops)
        return loops

    yield make
    for loops in made:
        await loops.stop()


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Recorder:
    """A reconcile that counts its runs and returns what it is told to."""

    def __init__(self, returns: float = 10.0) -> None:
        self.runs: list[Key] = []
        self.returns = returns
        self.errors: list[BaseException] = []

    async def __call__(self, key: Key) -> float:
        self.runs.append(key)
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        return self.returns


async def test_start_runs_once_then_rests(make: Make) -> None:
    seen = Recorder()
    loops = make(seen)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 1)
    await asyncio.sleep(0.03)
    assert seen.runs == [KEY]
    assert loops.keys() == [KEY]


async def test_a_loop_that_has_not_begun_is_not_stuck(make: Make) -> None:
    loops = make(Recorder(), stuck=5.0)
    loops.start(KEY)
    assert loops.stuck() == []


async def test_wake_runs_again_and_a_burst_runs_once(make: Make) -> None:
    seen = Recorder()
    loops = make(seen, gap=0.2)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 1)
    for _ in range(50):
        loops.wake(KEY)
        await asyncio.sleep(0)
    await until(lambda: len(seen.runs) == 2)
    await asyncio.sleep(0.25)
    assert len(seen.runs) == 2


async def test_a_wake_during_a_run_is_not_lost(make: Make) -> None:
    inside, go = asyncio.Event(), asyncio.Event()
    runs = 0

    async def reconcile(key: Key) -> float:
        nonlocal runs
        runs += 1
        inside.set()
        await go.wait()
        return 10.0

    loops = make(reconcile)
    loops.start(KEY)
    await inside.wait()
    loops.wake(KEY)
    assert runs == 1, "two runs of one key at the same time"
    go.set()
    await until(lambda: runs == 2)


async def test_the_returned_time_and_the_resync_bound_the_wait(make: Make) -> None:
    quick = Recorder(returns=0.005)
    loops = make(quick)
    loops.start(KEY)
    await until(lambda: len(quick.runs) >= 4)
    slow = Recorder(returns=3600.0)
    loops = make(slow, resync=0.005)
    loops.start(KEY)
    await until(lambda: len(slow.runs) >= 4)


async def test_keys_do_not_wait_for_each_other(make: Make) -> None:
    done = []

    async def reconcile(key: Key) -> float:
        if key == KEY:
            await asyncio.sleep(10)
        done.append(key)
        return 10.0

    loops = make(reconcile)
    loops.start(KEY)
    loops.start(OTHER)
    await until(lambda: done == [OTHER])


async def test_wake_of_an_unknown_key_starts_nothing(make: Make) -> None:
    seen = Recorder()
    loops = make(seen)
    loops.wake(KEY)
    loops.retire(KEY)
    await asyncio.sleep(0.01)
    assert seen.runs == []
    assert len(loops) == 0


async def test_retire_runs_once_more_and_ends(make: Make) -> None:
    seen = Recorder()
    loops = make(seen)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 1)
    loops.retire(KEY)
    await until(lambda: len(loops) == 0)
    assert len(seen.runs) == 2
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 3)
    assert loops.keys() == [KEY]


async def test_a_resource_made_again_at_once_keeps_its_loop(make: Make) -> None:
    seen = Recorder()
    loops = make(seen)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 1)
    loops.retire(KEY)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 2)
    await asyncio.sleep(0.01)
    assert loops.keys() == [KEY]


async def test_a_retiring_loop_that_fails_does_not_end(make: Make) -> None:
    seen = Recorder()
    loops = make(seen)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 1)
    seen.errors = [RuntimeError("down"), Retry(0.001, "down")]
    loops.retire(KEY)
    await until(lambda: len(loops) == 0)
    assert len(seen.runs) == 4


async def test_retry_comes_back_after_its_time(make: Make) -> None:
    seen = Recorder()
    seen.errors = [Retry(0.005, "busy"), Retry(0.005, "busy")]
    loops = make(seen)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 3)
    await asyncio.sleep(0.03)
    assert len(seen.runs) == 3


async def test_faults_back_off_and_recover(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    seen = Recorder()
    seen.errors = [RuntimeError("a"), ValueError("b"), KeyError("c")]
    loops = make(seen)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 4)
    assert [record.exc_info is not None for record in caplog.records] == [True] * 3
    assert {getattr(record, "resource", "") for record in caplog.records} == {str(KEY)}


async def test_wakes_do_not_make_a_failing_reconcile_spin(make: Make) -> None:
    seen = Recorder()
    seen.errors = [RuntimeError("down") for _ in range(1000)]
    loops = make(seen, base=0.05, limit=5.0)
    loops.start(KEY)
    clock = asyncio.get_running_loop().time
    began = clock()
    while clock() < began + 0.12:
        loops.wake(KEY)
        await asyncio.sleep(0.001)
    # The shortest delay is half of twice the base.
    assert 1 <= len(seen.runs) <= 2 + (clock() - began) / 0.05


async def test_invalid_spec_waits_for_a_new_one(make: Make) -> None:
    seen = Recorder()
    seen.errors = [InvalidSpec("NameTaken", "taken")]
    loops = make(seen)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 1)
    await asyncio.sleep(0.03)
    assert len(seen.runs) == 1
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 2)


async def test_stuck_names_a_hung_run_and_a_dead_loop(make: Make) -> None:
    now = 0.0
    hang = asyncio.Event()

    async def reconcile(key: Key) -> float:
        if key == KEY:
            await hang.wait()
        return 10.0

    loops = make(reconcile, stuck=60.0, clock=lambda: now)
    loops.start(KEY)
    loops.start(OTHER)
    await asyncio.sleep(0.01)
    assert loops.stuck() == []
    now = 61.0
    assert loops.stuck() == [(KEY, 61.0)]
    hang.set()
    await asyncio.sleep(0.01)
    assert loops.stuck() == []
    now = 1000.0
    assert [key for key, _ in loops.stuck()] == [KEY, OTHER]


async def test_a_cancellation_that_leaks_out_of_a_reconcile_does_not_end_the_loop(make: Make) -> None:
    seen = Recorder(returns=0.001)
    seen.errors = [asyncio.CancelledError()]
    loops = make(seen)
    loops.start(KEY)
    await until(lambda: len(seen.runs) >= 3)
    assert loops.stuck() == []


async def test_a_cancellation_that_reaches_a_waiting_loop_does_not_end_it(make: Make) -> None:
    tasks: list[asyncio.Task[None] | None] = []

    async def reconcile(key: Key) -> float:
        tasks.append(asyncio.current_task())
        return 10.0

    loops = make(reconcile)
    loops.start(KEY)
    await until(lambda: len(tasks) == 1)
    await asyncio.sleep(0.01)
    assert tasks[0] is not None
    tasks[0].cancel()
    await until(lambda: len(tasks) == 2)
    assert loops.stuck() == []


async def test_a_loop_gives_way_to_a_cancellation_at_once(make: Make) -> None:
    """kopf cancels every task when it stops, before it lets us stop the loops, and waits for them."""
    seen = Recorder()
    loops = make(seen, base=10.0)
    loops.start(KEY)
    await until(lambda: len(seen.runs) == 1)
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == f"reconcile {KEY}"]
    assert len(tasks) == 1
    tasks[0].cancel()
    done, _ = await asyncio.wait(tasks, timeout=1.0)
    assert done == set(tasks)


async def test_stop_cancels_what_runs(make: Make) -> None:
    cancelled = []

    async def reconcile(key: Key) -> float:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.append(key)
            raise
        return 1.0

    loops = make(reconcile)
    loops.start(KEY)
    loops.start(OTHER)
    await asyncio.sleep(0.005)
    await loops.stop()
    assert sorted(cancelled) == [KEY, OTHER]
    assert len(loops) == 0
