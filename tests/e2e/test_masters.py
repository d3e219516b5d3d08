"""Three masters in pods: their leader dies under requests, and nobody but the pool notices.

Worth its two minutes for what processes alone cannot show: addresses of pods, the label that moves, and an engine in a
pod that finds the next leader without a restart.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from hack.demo.fleet import Answer, Fleet
from hack.demo.kube import Object, condition, holds, wait
from hack.demo.prompts import Prompts
from moontide import labels

POOL, FLEET = "three", "spare"
API = "moontide.dev/v1alpha1"
WAIT_SECONDS = 180.0


@pytest.fixture
def spare(fleet: Fleet) -> Iterator[Fleet]:
    """One engine that follows no policy, on a pool of three masters."""
    kube, namespace = fleet.kube, fleet.namespace
    engine = kube.get("ifd", fleet.deployment, namespace)["spec"]
    resources = {"requests": {"cpu": "100m", "memory": "2Gi"}, "limits": {"cpu": "800m", "memory": "6Gi"}}
    spec = {
        "replicas": 1,
        "model": engine["model"],
        "engine": engine["engine"],
        "resources": resources,
        "kvCache": {"poolRef": {"name": POOL}},
    }
    made = Fleet(kube, fleet.reach, namespace, deployment=FLEET, pool=POOL)
    try:
        kube.apply(
            # A machine that stands still for seconds is no subject here: the leader would take the engine for lost.
            _object(
                "KVCachePool",
                POOL,
                namespace,
                {"master": {"replicas": 3, "clientTtlSeconds": 30}, "memory": {"perReplica": "256Mi"}},
            ),
            _object("InferenceDeployment", FLEET, namespace, spec),
        )
        wait(lambda: _leader(made), WAIT_SECONDS, "a leader", last=lambda: str(_pool(made).get("status")))
        wait(
            lambda: holds(kube.get("ifd", FLEET, namespace), "Available") or None,
            WAIT_SECONDS,
            "an engine",
            last=lambda: str(kube.get("ifd", FLEET, namespace).get("status")),
        )
        yield made
    finally:
        kube.run("delete", f"ifd/{FLEET}", f"kvp/{POOL}", "-n", namespace, "--ignore-not-found", "--wait=true")
        wait(lambda: not made.pods() or None, WAIT_SECONDS, "the engine to be gone")
        made.leave()


def _object(kind: str, name: str, namespace: str, spec: Object) -> Object:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def _pool(fleet: Fleet) -> Object:
    return fleet.kube.get("kvp", POOL, fleet.namespace)


def _leader(fleet: Fleet) -> str | None:
    """The leader that status names, once the pool is Ready."""
    pool = _pool(fleet)
    leader: str | None = pool.get("status", {}).get("leader")
    return leader if leader and holds(pool, "Ready") else None


def _endpoints(fleet: Fleet) -> set[str]:
    """Pods behind the masters' Service."""
    slices = fleet.kube.list("endpointslices", fleet.namespace, f"kubernetes.io/service-name={POOL}-master")
    return {each["targetRef"]["name"] for part in slices for each in part.get("endpoints") or []}


def test_the_leader_dies_and_engines_serve_on(spare: Fleet, texts: Prompts) -> None:
    (engine,) = spare.replicas()
    boot = engine.look()["bootId"]
    prompts = texts.kept
    first = _leader(spare)
    assert first is not None
    wait(lambda: _endpoints(spare) == {first} or None, 60, "the Service to follow", last=lambda: str(_endpoints(spare)))
    for number, text in enumerate(prompts):
        assert engine.ask(spare.model, number, text).status == 200
    keys = wait(lambda: _pool(spare)["status"].get("keys") or None, 60, "keys")

    answers: list[Answer] = []
    over = threading.Event()

    def ask_on() -> None:
        while not over.is_set():
            number = len(answers) % len(prompts)
            answers.append(engine.ask(spare.model, number, f"{len(answers)} {prompts[number]}"))

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        time.sleep(2)
        killed = time.time()
        spare.kube.run("delete", "pod", first, "-n", spare.namespace, "--grace-period=0", "--force")

        def another() -> str | None:
            leader = _leader(spare)
            return leader if leader != first else None

        second = wait(another, WAIT_SECONDS, "another leader", every=0.25, last=lambda: str(_pool(spare)["status"]))
        serving = time.time() - killed
        wait(lambda: _endpoints(spare) == {second} or None, 60, "the Service to follow")
        time.sleep(10)
    finally:
        over.set()
        asking.join()
    failed = [answer for answer in answers if answer.status != 200]
    gap = max(later.ended - sooner.ended for sooner, later in itertools.pairwise(answers))
    print(
        f"{first} was killed, {second} leads after {serving:.1f} s: {len(answers)} requests, {len(failed)} failed, "
        f"longest gap {gap:.1f} s, keys {keys} before and {_pool(spare)['status'].get('keys')} after"
    )
    assert failed == []
    assert engine.look()["bootId"] == boot, "the engine restarted"
    assert (
        spare.kube.list("pods", spare.namespace, labels.selector(labels.engine_labels(FLEET)))[0]["status"][
            "containerStatuses"
        ][0]["restartCount"]
        == 0
    )
    assert _pool(spare)["status"]["keys"] >= keys, "keys survive"
    assert condition(_pool(spare), "LeaderElection")["reason"] == "Etcd"
    events = spare.kube.list("events", spare.namespace)
    told = [each["message"] for each in events if each["reason"] == "LeaderChanged"]
    assert any(second in message for message in told), told
