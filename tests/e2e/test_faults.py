"""A change of policy meets a dead store, a killed operator and a frozen engine."""

from __future__ import annotations

import concurrent.futures
import math
import signal
import time

import pytest

from hack.demo.cold import References
from hack.demo.fleet import Answer, Fleet, push_weights
from hack.demo.install import SYSTEM_NAMESPACE
from hack.demo.kube import Kube, Object, condition, holds, wait
from hack.demo.prompts import Prompts
from hack.demo.story import MODELS, side_of
from moontide import labels
from tests.e2e.faults import frozen, pids, send

ABSENT_IMAGE = "moontide.local/there-is-no-such-image:none"
BACK_SECONDS = 120.0
LONG_TOKENS = 1500
"""More than ten seconds' worth: longer than an operator needs to come back."""


def _push_and_bump(fleet: Fleet) -> str:
    version = str(int(fleet.get_policy()["spec"]["version"]) + 1)
    push_weights(fleet.replicas(), MODELS[side_of(int(version))], version)
    fleet.bump(int(version))
    return version


def _current(fleet: Fleet, version: str) -> Object:
    return fleet.until_current(version, BACK_SECONDS)


def _all_right(answers: list[Answer], references: References, version: str, epoch: int) -> None:
    for answer in answers:
        assert answer.status == 200, answer
        assert (answer.version, answer.epoch) == (version, epoch)
        assert references[side_of(int(version))][answer.prompt].equals(answer), answer


def _master_pods(fleet: Fleet) -> list[Object]:
    return fleet.kube.list("pods", fleet.namespace, labels.selector(labels.store_labels(fleet.pool)))


def _images(pod: Object) -> set[str]:
    """Images of a pod's, or a pod template's, containers."""
    return {str(container["image"]) for container in pod["spec"]["containers"]}


def test_dead_master_costs_no_pause_and_old_keys_go_when_it_is_back(
    fleet: Fleet, texts: Prompts, references: References
) -> None:
    prompts = dict(enumerate(texts.kept))
    for number, text in prompts.items():
        assert fleet.replicas()[0].ask(fleet.model, number, text).status == 200
    epoch = int(fleet.get_policy()["status"]["epoch"])
    boots = [each.look()["bootId"] for each in fleet.replicas()]
    dead = fleet.store().pod
    # An image that does not exist keeps the master away after the kill, once the Deployment knows of it: killed before
    # that, it would come back with the good image, empty, and the change would rightly finish.
    fleet.kube.merge("kvp", fleet.pool, fleet.namespace, {"spec": {"master": {"image": ABSENT_IMAGE}}})
    try:
        wait(
            lambda: (
                _images(fleet.kube.get("deployment", f"{fleet.pool}-master", fleet.namespace)["spec"]["template"])
                == {ABSENT_IMAGE}
                or None
            ),
            60,
            "the Deployment to have the absent image",
        )
        if pids(dead, "mooncake_master"):
            send(dead, "mooncake_master", signal.SIGKILL)
        name = dead["metadata"]["name"]
        fleet.kube.run(
            "delete", "pod", name, "-n", fleet.namespace, "--ignore-not-found", "--grace-period=0", "--force"
        )

        def away() -> bool | None:
            pods = _master_pods(fleet)
            return all(_images(pod) == {ABSENT_IMAGE} and not pids(pod, "mooncake_master") for pod in pods) or None

        wait(away, 60, "a dead master", last=lambda: str([_images(pod) for pod in _master_pods(fleet)]))
        version = _push_and_bump(fleet)

        _current(fleet, version)

        def blamed() -> Object | None:
            found = condition(fleet.get_policy(), "Degraded")
            return found if found["status"] == "True" and found["reason"] == "StoreUnavailable" else None

        found = wait(blamed, 60, "a reason", last=lambda: str(fleet.get_policy().get("status")))
        print(f"with a dead master: Current=True, Degraded={found['status']} ({found['reason']}) {found['message']}")
        assert fleet.get_policy()["status"]["lastUpdate"].get("wipedAt") is None
        answers = [each.ask(fleet.model, n, text) for each in fleet.replicas() for n, text in prompts.items()]
        _all_right(answers, references, version, epoch + 1)
    finally:
        fleet.kube.merge("kvp", fleet.pool, fleet.namespace, {"spec": {"master": {"image": None}}})
    began = time.monotonic()
    policy = fleet.until_collected(BACK_SECONDS)
    print(f"the master's image is back: old keys were collected by itself after {time.monotonic() - began:.1f} s")
    assert int(policy["status"]["epoch"]) == epoch + 1
    wait(
        lambda: holds(fleet.kube.get("kvp", fleet.pool, fleet.namespace), "Ready") or None,
        60,
        "the pool Ready",
    )
    answers = [each.ask(fleet.model, number, text) for each in fleet.replicas() for number, text in prompts.items()]
    _all_right(answers, references, version, epoch + 1)
    # The master has another pod, with another address, and knows nobody: engines find it by its Service's name.
    assert fleet.store().pod["metadata"]["uid"] != dead["metadata"]["uid"]
    first, second, *_ = fleet.replicas()

    def shared() -> int | None:
        """A prompt that nobody has asked yet is a hit on the second replica once the first has stored it."""
        number, before = len(found), second.counters().external
        text = f"{number} " + prompts[0]
        found.append(text)
        assert first.ask(fleet.model, 0, text).status == second.ask(fleet.model, 0, text).status == 200
        return second.counters().external - before or None

    found: list[str] = []
    hits = wait(shared, BACK_SECONDS, "replicas to share KV through the new master", every=2.0)
    print(f"through the new master {hits} tokens were shared, at attempt {len(found)}; no engine restarted")
    assert [each.look()["bootId"] for each in fleet.replicas()] == boots


def _operator_pod(kube: Kube) -> Object:
    def running() -> Object | None:
        pods = [
            pod
            for pod in kube.list("pods", SYSTEM_NAMESPACE)
            if "deletionTimestamp" not in pod["metadata"] and pids(pod, "moontide")
        ]
        return pods[0] if pods else None

    return wait(running, 60, "a running operator")


@pytest.mark.parametrize("how", ["process killed", "pod deleted"])
def test_killed_operator_is_followed_by_one_that_finishes(
    how: str, fleet: Fleet, kube: Kube, texts: Prompts, references: References
) -> None:
    replicas, prompts = fleet.replicas(), dict(enumerate(texts.kept))
    epoch = int(fleet.get_policy()["status"]["epoch"])
    boots = [replica.look()["bootId"] for replica in replicas]
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(prompts) + 1) as pool:
        # A long answer holds the change between quiesce and admission.
        long = pool.submit(replicas[0].ask, fleet.model, 0, texts.kept[0], tokens=LONG_TOKENS)
        wait(lambda: replicas[0].look()["inFlight"] or None, 30, "the long answer to begin", every=0.05)
        version = _push_and_bump(fleet)
        wait(
            lambda: [each.look()["state"] for each in replicas] == ["paused"] * len(replicas) or None,
            60,
            "a pause",
            every=0.1,
            last=lambda: str(fleet.get_policy().get("status")),
        )
        waiting = [
            pool.submit(replicas[number % len(replicas)].ask, fleet.model, number, text)
            for number, text in prompts.items()
        ]
        victim = _operator_pod(kube)
        if how == "process killed":
            send(victim, "moontide", signal.SIGKILL)
        else:
            name = victim["metadata"]["name"]
            kube.run("delete", "pod", name, "--namespace", SYSTEM_NAMESPACE, "--grace-period=0", "--force")
        assert fleet.get_policy()["status"]["lastUpdate"].get("resumedAt") is None, "killed too late to prove anything"
        policy = _current(fleet, version)
        answers = [each.result(timeout=60) for each in waiting]
        held_by = long.result(timeout=60)
    assert (held_by.status, held_by.epoch) == (200, epoch), "what ran when the change began ends in its own epoch"
    update = policy["status"]["lastUpdate"]
    print(f"{how}: epoch {update['epoch']} finished by the next operator, paused {update['pauseSeconds']:.1f} s")
    assert update["epoch"] == epoch + 1, "the next operator finishes the change instead of beginning another"
    for replica, boot in zip(replicas, boots, strict=True):
        seen = replica.look()
        assert (seen["state"], seen["epoch"], seen["version"]) == ("open", epoch + 1, version)
        assert seen["bootId"] == boot
    assert math.isfinite(update["pauseSeconds"])
    _all_right(answers, references, version, epoch + 1)


def test_a_frozen_engine_costs_its_timeout_and_is_closed_by_its_gate(
    fleet: Fleet, texts: Prompts, references: References
) -> None:
    frozen_one, *others = fleet.replicas()
    prompts = dict(enumerate(texts.kept))
    epoch = int(fleet.get_policy()["status"]["epoch"])

    def asked(spec: Object) -> None:
        fleet.kube.merge("polv", fleet.policy, fleet.namespace, {"spec": spec})

    asked({"replicaTimeoutSeconds": 5, "onReplicaFailure": "Isolate"})
    try:
        version = str(int(fleet.get_policy()["spec"]["version"]) + 1)
        push_weights(fleet.replicas(), MODELS[side_of(int(version))], version)
        with frozen(frozen_one.pod, "EngineCore"):
            began = time.monotonic()
            fleet.bump(int(version))
            wait(
                lambda: all(r.look()["epoch"] == epoch + 1 and r.look()["state"] == "open" for r in others) or None,
                BACK_SECONDS,
                "the others to serve",
                every=0.2,
                last=lambda: str(fleet.get_policy().get("status")),
            )
            print(f"the others serve {time.monotonic() - began:.1f} s after the patch (replicaTimeoutSeconds 5)")
            _current(fleet, version)
            print(
                f"Current=True after {time.monotonic() - began:.1f} s; the frozen one is {frozen_one.look()['state']}"
            )

            def closed() -> Object | None:
                seen = frozen_one.look()
                return seen if seen["state"] == "closed" else None

            seen = wait(closed, BACK_SECONDS, "its gate to close", last=lambda: str(fleet.get_policy().get("status")))
            print(f"its gate closed after {time.monotonic() - began:.1f} s")
            assert (seen["reason"], seen["responsive"]) == ("EngineUnresponsive", False)
            answers = [each.ask(fleet.model, number, text) for each in others for number, text in prompts.items()]
            _all_right(answers, references, version, epoch + 1)
            assert frozen_one.ask(fleet.model, 0, prompts[0]).status == 503
        wait(
            lambda: (frozen_one.look()["state"], frozen_one.look()["epoch"]) == ("open", epoch + 1) or None,
            BACK_SECONDS,
            "the frozen one to be taken in again",
            last=lambda: str(fleet.get_policy().get("status")),
        )
        answers = [frozen_one.ask(fleet.model, number, text) for number, text in prompts.items()]
        _all_right(answers, references, version, epoch + 1)
    finally:
        asked({"replicaTimeoutSeconds": 20, "onReplicaFailure": "Replace"})
