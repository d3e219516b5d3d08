"""policy_update against the real planner: what is promised when all goes well, and when something does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moontide.trainer import (
    ApiError,
    ApiUnavailable,
    BadName,
    BadVersion,
    CommitTimeout,
    Engine,
    PolicyNotFound,
    PreparationLost,
    PrepareFailed,
    PrepareTimeout,
    Superseded,
    policy_update,
    policy_update_async,
)
from tests.unit.trainer.cluster import PATH, SECRETS, Cluster, Fault

Served = Callable[..., tuple[Cluster, Path]]


class BodyError(Exception):
    """What a body raises."""


def update_to_2(kubeconfig: Path, body: Callable[[], object] = lambda: None, **options: Any) -> None:
    """An update whose body is ``body``."""
    with policy_update("policy", 2, kubeconfig=kubeconfig, **{"prepare_timeout": 20, "timeout": 20, **options}):
        body()


def fail() -> None:
    raise BodyError


@pytest.mark.parametrize("fences", [True, False])
@pytest.mark.parametrize("strategy", ["Barrier", "Fence"])
def test_the_body_runs_prepared_and_the_end_of_it_commits(served: Served, fences: bool, strategy: str) -> None:
    cluster, kubeconfig = served(fences=fences, strategy=strategy)
    with policy_update("policy", 2, kubeconfig=kubeconfig) as update:
        states = {pod.engine.state for pod in cluster.world.pods}
        assert states == ({"open"} if fences and strategy == "Fence" else {"paused"})
        assert cluster.spec["preparing"] == 2
        assert cluster.spec["version"] == 1
        assert (update.version, update.epoch, update.already_current) == ("2", 2, False)
        assert update.engines == (Engine("tiny", "10.0.0.1:8001", "first"),) * 2
        cluster.world.push_weights("2")
    assert "preparing" not in cluster.spec
    assert cluster.spec["version"] == 2
    assert cluster.patches == [{"preparing": 2}, {"version": 2, "preparing": None}]
    assert {(pod.engine.state, pod.engine.version, pod.engine.epoch) for pod in cluster.world.pods} == {
        ("open", "2", 3)
    }
    assert (update.epoch, update.replicas) == (3, "2/2")
    cluster.world.serve()
    assert cluster.tokens == {"Bearer secret"}


def test_an_engine_can_be_unpacked_and_does_not_show_its_token() -> None:
    engine = Engine("tiny", "10.0.0.1:8001", "hidden")
    fleet, address, token = engine
    assert (fleet, address, token) == ("tiny", "10.0.0.1:8001", "hidden")
    assert "hidden" not in repr(engine)
    assert engine.url == "http://10.0.0.1:8001"
    assert engine.headers == {"authorization": "Bearer hidden"}


def test_without_wait_it_returns_once_it_is_committed(served: Served) -> None:
    cluster, kubeconfig = served()
    with policy_update("policy", 2, kubeconfig=kubeconfig, wait=False):
        cluster.world.push_weights("2")
    assert cluster.requests[-1] == ("PATCH", PATH)
    assert cluster.body["status"]["version"] == "1"


def test_an_exception_in_the_body_aborts_and_goes_on(served: Served) -> None:
    cluster, kubeconfig = served()
    with pytest.raises(BodyError), policy_update("policy", 2, kubeconfig=kubeconfig):
        raise BodyError
    assert "preparing" not in cluster.spec
    assert cluster.spec["version"] == 1
    cluster.settle()
    assert {(pod.engine.state, pod.engine.version, pod.engine.epoch) for pod in cluster.world.pods} == {
        ("open", "1", 3)
    }


def test_an_interrupt_aborts_too(served: Served) -> None:
    cluster, kubeconfig = served()
    with pytest.raises(KeyboardInterrupt), policy_update("policy", 2, kubeconfig=kubeconfig):
        raise KeyboardInterrupt
    assert "preparing" not in cluster.spec


def test_an_abort_that_fails_is_noted_on_the_exception(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide.trainer.update.CANCEL_SECONDS", 0.05)
    cluster, kubeconfig = served()

    def lose_the_server_and_fail() -> None:
        cluster.faults += [Fault("GET", 503)] * 1000
        fail()

    with pytest.raises(BodyError) as raised:
        update_to_2(kubeconfig, lose_the_server_and_fail)
    assert "kubectl moontide abort policy -n rl" in raised.value.__notes__[0]


def test_an_abort_leaves_another_trainers_preparation_alone(served: Served) -> None:
    cluster, kubeconfig = served()

    def meanwhile() -> None:
        cluster.edit(preparing=9)
        fail()

    with pytest.raises(BodyError):
        update_to_2(kubeconfig, meanwhile)
    assert cluster.spec["preparing"] == 9


def test_after_an_abort_the_same_version_is_prepared_anew(served: Served) -> None:
    cluster, kubeconfig = served()
    with pytest.raises(BodyError), policy_update("policy", 2, kubeconfig=kubeconfig):
        raise BodyError
    # Status still says that version 2 is prepared: of an older generation, so it does not count.
    assert cluster.body["status"]["preparation"]["preparedAt"]
    cluster.lag(3)
    with policy_update("policy", 2, kubeconfig=kubeconfig) as update:
        assert update.epoch > 2
        assert {pod.engine.epoch for pod in cluster.world.pods} <= {1, update.epoch}
        cluster.world.push_weights("2")
    assert cluster.body["status"]["version"] == "2"


def test_a_version_that_is_current_is_not_prepared_again(served: Served) -> None:
    cluster, kubeconfig = served()
    ran = False
    with policy_update("policy", "1", kubeconfig=kubeconfig) as update:
        ran = True
        assert update.already_current
        assert update.engines == ()
        assert update.epoch == 1
    assert ran
    assert cluster.patches == []


def test_an_exception_with_a_current_version_changes_nothing(served: Served) -> None:
    cluster, kubeconfig = served()
    with pytest.raises(BodyError), policy_update("policy", 1, kubeconfig=kubeconfig):
        raise BodyError
    assert cluster.patches == []


def test_a_version_that_is_asked_for_already_is_waited_for(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.world.push_weights("2")
    cluster.edit(version=2)
    with policy_update("policy", 2, kubeconfig=kubeconfig) as update:
        assert update.already_current
        assert {pod.engine.version for pod in cluster.world.pods} == {"2"}


def test_a_version_that_was_bumped_before_its_weights_says_what_to_do(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.edit(version=2)
    with pytest.raises(PrepareTimeout, match=r"set spec\.version back to 1") as raised:
        with policy_update("policy", 2, kubeconfig=kubeconfig, prepare_timeout=0.1):
            raise AssertionError
    assert raised.value.reason == "WaitingForWeights"
    assert "/update_weight_version" in str(raised.value)
    assert cluster.spec["version"] == 2


def test_a_preparation_that_a_dead_process_left_is_taken_over(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.edit(preparing="2")
    cluster.settle()
    with policy_update("policy", 2, kubeconfig=kubeconfig) as update:
        assert update.epoch == 2
        cluster.world.push_weights("2")
    assert cluster.patches == [{"version": 2, "preparing": None}]


def test_another_versions_preparation_is_not_disturbed(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.edit(preparing=9)
    with pytest.raises(PrepareFailed, match="kubectl moontide abort policy -n rl") as raised:
        with policy_update("policy", 2, kubeconfig=kubeconfig):
            raise AssertionError
    assert raised.value.reason == "Busy"
    assert cluster.spec["preparing"] == 9


@pytest.mark.parametrize("version", [2, 9])
def test_a_preparation_that_expired_earlier_is_cleared_first(served: Served, version: int) -> None:
    cluster, kubeconfig = served()
    cluster.edit(preparing=version)
    cluster.settle()
    cluster.world.pass_time(700)
    cluster.settle()
    assert cluster.body["status"]["preparation"]["outcome"] == "Expired"
    with policy_update("policy", 2, kubeconfig=kubeconfig, prepare_timeout=5):
        cluster.world.push_weights("2")
    assert cluster.body["status"]["version"] == "2"


def test_a_preparation_that_expires_in_the_body_is_not_committed(served: Served) -> None:
    cluster, kubeconfig = served()

    def take_too_long() -> None:
        cluster.world.push_weights("2")
        cluster.world.pass_time(700)

    with pytest.raises(PreparationLost, match="prepareDeadlineSeconds") as raised:
        update_to_2(kubeconfig, take_too_long)
    assert raised.value.reason == "Expired"
    assert cluster.spec["version"] == 1
    assert "preparing" not in cluster.spec


def test_a_preparation_that_began_anew_in_the_body_is_not_committed(served: Served) -> None:
    cluster, kubeconfig = served()

    def reset() -> None:
        cluster.edit(resetNonce="now")
        cluster.settle()

    with pytest.raises(PreparationLost) as raised:
        update_to_2(kubeconfig, reset)
    assert raised.value.reason == "BegunAnew"
    assert cluster.spec["version"] == 1
    assert "preparing" not in cluster.spec


def test_a_preparation_that_somebody_aborts_is_not_committed(served: Served) -> None:
    cluster, kubeconfig = served()
    with pytest.raises(PreparationLost, match=r"spec\.preparing is empty") as raised:
        update_to_2(kubeconfig, lambda: cluster.edit(preparing=None))
    assert raised.value.reason == "Aborted"


def test_the_operator_and_the_commit_cannot_miss_each_other(served: Served) -> None:
    # The preparation expires between the look before the commit and the commit itself.
    cluster, kubeconfig = served()
    answer = cluster.answer

    def expire_first(method: str, path: str, sent: bytes) -> tuple[int, dict[str, Any]]:
        if method == "PATCH":
            cluster.answer = answer  # type: ignore[method-assign]
            cluster.world.pass_time(700)
            cluster.turn()
        return answer(method, path, sent)

    def push() -> None:
        cluster.world.push_weights("2")
        cluster.answer = expire_first  # type: ignore[method-assign]

    with pytest.raises(PreparationLost):
        update_to_2(kubeconfig, push)
    assert {"version": 2, "preparing": None} in cluster.patches
    assert cluster.spec["version"] == 1
    assert "preparing" not in cluster.spec


def test_running_requests_that_do_not_end_are_a_timeout_and_an_abort(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.world.pod(0).engine.running = 1
    with pytest.raises(PrepareTimeout, match="not ready for version 2 in time"):
        with policy_update("policy", 2, kubeconfig=kubeconfig, prepare_timeout=0.1):
            raise AssertionError
    assert "preparing" not in cluster.spec


def test_an_operator_that_does_not_run_is_named(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.on_get = lambda: None
    with pytest.raises(PrepareTimeout, match=r"has not looked at generation 2 .* is it running"):
        with policy_update("policy", 2, kubeconfig=kubeconfig, prepare_timeout=0.05):
            raise AssertionError


def test_a_suspended_policy_fails_at_once(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.edit(suspend=True)
    began = time.monotonic()
    with pytest.raises(PrepareFailed, match="set it to false") as raised:
        with policy_update("policy", 2, kubeconfig=kubeconfig):
            raise AssertionError
    assert raised.value.reason == "Suspended"
    assert time.monotonic() - began < 30
    assert "preparing" not in cluster.spec


@pytest.mark.parametrize(("change", "reason"), [({"version": 2}, "Committed"), ({"preparing": None}, "Aborted")])
def test_somebody_who_interferes_while_it_prepares_is_an_error(
    served: Served, change: dict[str, object], reason: str
) -> None:
    cluster, kubeconfig = served()
    looks = iter([cluster.turn, lambda: cluster.edit(**change)])
    cluster.on_get = lambda: next(looks, cluster.turn)()
    with pytest.raises(PrepareFailed) as raised, policy_update("policy", 2, kubeconfig=kubeconfig):
        raise AssertionError
    assert raised.value.reason == reason


def test_weights_that_nobody_has_are_a_commit_timeout(served: Served) -> None:
    cluster, kubeconfig = served()
    with pytest.raises(CommitTimeout, match="/update_weight_version"):
        with policy_update("policy", 2, kubeconfig=kubeconfig, timeout=0.2):
            pass
    assert cluster.spec["version"] == 2
    assert cluster.world.condition("Current") == ("False", "WaitingForWeights")


def test_a_later_version_supersedes_the_wait(served: Served) -> None:
    cluster, kubeconfig = served()

    def push() -> None:
        cluster.world.push_weights("2")
        looks = iter([cluster.turn, lambda: cluster.edit(version=3)])
        cluster.on_get = lambda: next(looks, cluster.turn)()

    with pytest.raises(Superseded, match=r"spec\.version is 3 now"):
        update_to_2(kubeconfig, push)


def test_a_current_of_the_old_spec_is_not_taken_for_the_new_one(served: Served) -> None:
    cluster, kubeconfig = served()
    with policy_update("policy", 2, kubeconfig=kubeconfig, wait=False):
        cluster.world.push_weights("2")
    cluster.settle()
    # A reset, which the operator is slow to notice: Current=True is of the spec before it.
    cluster.edit(resetNonce="again")
    cluster.lag(5)
    with policy_update("policy", 2, kubeconfig=kubeconfig) as update:
        assert update.already_current
        assert update.epoch == 4
        assert {pod.engine.epoch for pod in cluster.world.pods} == {4}


def test_going_back_to_an_older_version_is_a_change_like_any_other(served: Served) -> None:
    cluster, kubeconfig = served()
    for version in ("2", "1"):
        cluster.lag(3)
        with policy_update("policy", int(version), kubeconfig=kubeconfig) as update:
            assert not update.already_current
            cluster.world.push_weights(version)
    assert {pod.engine.version for pod in cluster.world.pods} == {"1"}
    assert update.epoch == 5


@pytest.mark.parametrize("method", ["GET", "PATCH"])
@pytest.mark.parametrize("status", [0, 429, 500, 503])
@pytest.mark.parametrize("late", [False, True])
def test_passing_errors_of_the_api_server_are_tried_again(served: Served, method: str, status: int, late: bool) -> None:
    cluster, kubeconfig = served()
    cluster.faults += [Fault(method, status, late)] * 2
    said: list[str] = []
    with policy_update("policy", 2, kubeconfig=kubeconfig, progress=said.append):
        cluster.world.push_weights("2")
        cluster.faults += [Fault(method, status, late)] * 2
    assert cluster.faults == []
    assert cluster.body["status"]["version"] == "2"
    assert any("trying again" in line for line in said)


def test_retry_after_is_heeded(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.faults.append(Fault("GET", 429, headers={"retry-after": "1"}))
    began = time.monotonic()
    with policy_update("policy", 1, kubeconfig=kubeconfig):
        pass
    assert time.monotonic() - began >= 1


def test_an_api_server_that_stays_away_is_an_error_in_time(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.faults += [Fault("GET", 503, body={"message": "etcd is away"})] * 1000
    with pytest.raises(ApiUnavailable, match="etcd is away"):
        with policy_update("policy", 2, kubeconfig=kubeconfig, prepare_timeout=0.05):
            raise AssertionError


def test_a_conflict_is_read_again(served: Served) -> None:
    cluster, kubeconfig = served()
    answer = cluster.answer

    def touched(method: str, path: str, sent: bytes) -> tuple[int, dict[str, Any]]:
        if method == "PATCH" and len(cluster.patches) % 2 == 0:
            cluster.edit(deadlineSeconds=100 + len(cluster.patches))
        return answer(method, path, sent)

    cluster.answer = touched  # type: ignore[method-assign]
    with policy_update("policy", 2, kubeconfig=kubeconfig):
        cluster.world.push_weights("2")
    assert cluster.patches == [{"preparing": 2}] * 2 + [{"version": 2, "preparing": None}] * 2


@pytest.mark.parametrize("status", [401, 403, 422])
def test_refusals_are_not_tried_again(served: Served, status: int) -> None:
    cluster, kubeconfig = served()
    cluster.faults.append(Fault("PATCH", status, body={"message": "no, because"}))
    with pytest.raises(ApiError, match="no, because") as raised, policy_update("policy", 2, kubeconfig=kubeconfig):
        raise AssertionError
    assert raised.value.status == status
    assert cluster.patches == []


def test_a_secret_that_may_not_be_read_aborts_and_says_so(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.faults.append(Fault("GET", 403, body={"message": "forbidden"}, path=SECRETS))
    with pytest.raises(ApiError, match="allow the trainer to get Secret tiny-admin"):
        with policy_update("policy", 2, kubeconfig=kubeconfig):
            raise AssertionError
    assert "preparing" not in cluster.spec


@pytest.mark.parametrize("data", [{}, {"token": "!"}, {"token": ""}])
def test_a_secret_without_a_token_is_an_error(served: Served, data: dict[str, str]) -> None:
    cluster, kubeconfig = served()
    cluster.secrets["tiny-admin"] = data
    with pytest.raises(ApiError, match="holds no token"), policy_update("policy", 2, kubeconfig=kubeconfig):
        raise AssertionError


def test_a_policy_that_is_not_there(served: Served) -> None:
    _, kubeconfig = served()
    with pytest.raises(PolicyNotFound, match="no PolicyVersion rl/other"):
        with policy_update("other", 2, kubeconfig=kubeconfig):
            raise AssertionError


def test_crds_that_are_not_there(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.faults.append(Fault("GET", 404))
    with pytest.raises(PolicyNotFound, match="CRDs"), policy_update("policy", 2, kubeconfig=kubeconfig):
        raise AssertionError


@pytest.mark.parametrize("version", ["", "a b", -1, True, "x" * 129, 1.5])
def test_bad_versions(served: Served, version: Any) -> None:
    cluster, kubeconfig = served()
    with pytest.raises(BadVersion, match="for example 43 or step-43"):
        with policy_update("policy", version, kubeconfig=kubeconfig):
            raise AssertionError
    assert cluster.requests == []


@pytest.mark.parametrize("name", ["", "polv/policy", "Policy", "../x"])
def test_bad_names(served: Served, name: str) -> None:
    _, kubeconfig = served()
    with pytest.raises(BadName, match="write it alone"), policy_update(name, 2, kubeconfig=kubeconfig):
        raise AssertionError


async def test_the_twin_for_asyncio(served: Served) -> None:
    cluster, kubeconfig = served()
    async with policy_update_async("policy", 2, kubeconfig=kubeconfig) as update:
        assert update.engines == (Engine("tiny", "10.0.0.1:8001", "first"),) * 2
        cluster.world.push_weights("2")
    assert (update.epoch, update.replicas) == (3, "2/2")
    async with policy_update_async("policy", 2, kubeconfig=kubeconfig) as update:
        assert update.already_current


async def test_the_twin_tries_again_too(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.faults += [Fault("GET", 0), Fault("PATCH", 503)]
    async with policy_update_async("policy", 2, kubeconfig=kubeconfig, wait=False):
        cluster.world.push_weights("2")
    assert cluster.spec["version"] == 2


async def test_a_task_that_is_cancelled_in_the_body_aborts(served: Served) -> None:
    cluster, kubeconfig = served()
    inside = asyncio.Event()

    async def train() -> None:
        async with policy_update_async("policy", 2, kubeconfig=kubeconfig):
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(train())
    await asyncio.wait_for(inside.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "preparing" not in cluster.spec


async def test_a_timeout_around_the_twin_aborts(served: Served) -> None:
    cluster, kubeconfig = served()
    cluster.world.pod(0).engine.running = 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), policy_update_async("policy", 2, kubeconfig=kubeconfig):
            raise AssertionError
    assert "preparing" not in cluster.spec


async def test_the_twin_notes_an_abort_that_fails(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide.trainer.update.CANCEL_SECONDS", 0.05)
    cluster, kubeconfig = served()

    async def train() -> None:
        async with policy_update_async("policy", 2, kubeconfig=kubeconfig):
            cluster.faults += [Fault("GET", 0)] * 1000
            fail()

    with pytest.raises(BodyError) as raised:
        await train()
    assert "prepareDeadlineSeconds" in raised.value.__notes__[0]
