"""Engines are replaced under load, on a cluster whose GPUs are all taken, and no request fails.

Worth about three minutes: real kubelet, real endpoints, real drains. Clients reach the fleet through its Service.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import pytest

from hack.demo.fleet import ASK_SECONDS, Answer, Fleet, Replica
from hack.demo.kube import Object, condition, wait
from hack.demo.load import Load
from hack.demo.prompts import Prompts
from hack.demo.story import MODELS, side_of
from tests.e2e.faults import found

ROLL_SECONDS = 420.0
GPU = "nvidia.com/gpu"
SHARED_MEMORY = 1 << 30
"""The default of ``spec.sharedMemory``."""
LONG_TOKENS = 600
"""Seconds' worth: the pod is deleted while this runs."""


class Front(Replica):
    """The fleet's Service, asked as if it were one replica."""

    def __init__(self, address: str, *, keeps: bool) -> None:
        """``keeps``: connections are used again; else each request has its own."""
        self.name = "kept connections" if keeps else "fresh connections"
        self._address = address
        self._http = httpx.Client(
            timeout=ASK_SECONDS,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=16 if keeps else 0),
        )

    @property
    def inference(self) -> str:
        return self._address


@pytest.fixture(name="fronts")
def _fronts(fleet: Fleet) -> Iterator[list[Front]]:
    spec = fleet.kube.get("service", fleet.deployment, fleet.namespace)["spec"]
    address = f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"
    made = [Front(address, keeps=True), Front(address, keeps=False)]
    yield made
    for front in made:
        front.close()


@pytest.fixture(name="full", scope="module")
def _full(session_fleet: Fleet) -> Iterator[None]:
    """No GPU is free; and there is a Service named ``vllm``, whose link would be ``VLLM_PORT`` in every pod."""
    kube, namespace = session_fleet.kube, session_fleet.namespace
    (node,) = kube.list("nodes", namespace)
    free = int(node["status"]["allocatable"][GPU])
    for pod in json.loads(kube.run("get", "pods", "--all-namespaces", "-o", "json"))["items"]:
        if pod["status"].get("phase") in ("Pending", "Running") and pod["spec"].get("nodeName"):
            limits = [each.get("resources", {}).get("limits", {}) for each in pod["spec"]["containers"]]
            free -= sum(int(each.get(GPU, 0)) for each in limits)
    # A pod that is placed holds what it asked for, whether its image exists or not.
    container = {"name": "none", "image": "moontide.local/none:none", "resources": {"limits": {GPU: str(free)}}}
    hog = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gpus-taken", "namespace": "default"},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }
    link = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "vllm", "namespace": namespace},
        "spec": {"selector": {"nobody": "here"}, "ports": [{"port": 8000}]},
    }
    kube.apply(link, *([hog] if free else []))
    try:
        if free:
            wait(lambda: kube.get("pod", "gpus-taken", "default")["spec"].get("nodeName"), 60, "the last GPU is taken")
        yield
    finally:
        kube.run("delete", "pod", "gpus-taken", "-n", "default", "--ignore-not-found", "--wait=false")
        kube.run("delete", "service", "vllm", "-n", namespace, "--ignore-not-found")


def _progressing(fleet: Fleet) -> Object:
    return condition(fleet.kube.get("ifd", fleet.deployment, fleet.namespace), "Progressing")


def _push_to_new(fleet: Fleet, before: set[str], version: str) -> None:
    """Be the trainer of engines that started with other weights than the policy's. One that is starting is left."""
    for replica in fleet.replicas():
        if replica.uid in before:
            continue
        try:
            seen = replica.look(timeout=10)
        except (httpx.HTTPError, OSError):
            continue
        if seen["responsive"] and seen["weightsVersion"] != version:
            replica.push_weights(MODELS[side_of(int(version))], version)


def _replaced(fleet: Fleet, before: set[str], wanted: int, *, push: str = "") -> list[str]:
    """Wait until ``wanted`` pods are new and every one serves; ``push``: weights that are pushed to new ones.

    Returns what was called a stall meanwhile.
    """
    stalls: list[str] = []

    def look() -> bool:
        if push:
            _push_to_new(fleet, before, push)
        body = fleet.kube.get("ifd", fleet.deployment, fleet.namespace)
        status, said = body.get("status", {}), condition(body, "Progressing")
        if said["reason"] == "Stalled":
            stalls.append(said["message"])
        fresh = {pod["metadata"]["uid"] for pod in fleet.pods()} - before
        seen = status.get("observedGeneration") == body["metadata"]["generation"]
        serve = status.get("readyReplicas") == status.get("currentReplicas") == body["spec"]["replicas"]
        return seen and serve and said["reason"] == "Complete" and len(fresh) == wanted

    wait(lambda: look() or None, ROLL_SECONDS, "new pods", every=1.0, last=lambda: str(_progressing(fleet)))
    return stalls


def _count(what: str, answers: Sequence[Answer], version: str, epoch: int) -> None:
    """Every request was answered, in the epoch that holds; printed with the longest time without an answer."""
    good = sorted(answer.ended for answer in answers if answer.status == 200)
    gap = max(after - before for before, after in itertools.pairwise(good))
    failures = [answer for answer in answers if answer.status != 200]
    slowest = max(answer.seconds for answer in answers)
    print(
        f"{what}: {len(answers)} requests, {len(failures)} failures, longest gap {gap:.1f} s, slowest {slowest:.1f} s; "
        + ", ".join(
            f"{sum(a.replica == name for a in answers)} on {name}" for name in sorted({a.replica for a in answers})
        )
    )
    assert failures == []
    assert {(answer.version, answer.epoch) for answer in answers} == {(version, epoch)}


@contextmanager
def _load(fleet: Fleet, fronts: Sequence[Front], texts: Prompts) -> Iterator[Load]:
    prompts = dict(enumerate(texts.load))
    with Load(fronts, fleet.model, prompts, clients=2) as load:
        assert len(load.until(8, 60)) >= 8
        yield load
        assert len(load.until(8, 60)) >= 8


def _stands(fleet: Fleet, version: str, epoch: int) -> None:
    """Both replicas are back in the fleet's epoch, with the environment and the shared memory that they should have."""
    for replica in fleet.replicas():
        seen = replica.look()
        assert (seen["state"], seen["version"], seen["epoch"]) == ("open", version, epoch)
        pid = found(replica.pod, "vllm")[0]
        with open(f"/proc/{pid}/environ", "rb") as file:
            names = {each.partition(b"=")[0] for each in file.read().split(b"\0")}
        assert b"MOONTIDE_ENABLED" in names
        assert [name for name in names if name.startswith(b"VLLM_PORT")] == []
        shm = os.statvfs(f"/proc/{pid}/root/dev/shm")
        assert shm.f_blocks * shm.f_frsize == SHARED_MEMORY


def test_a_rolling_update_fails_no_request_on_a_full_cluster(
    fleet: Fleet, fronts: list[Front], texts: Prompts, full: None
) -> None:
    policy = fleet.get_policy()
    version, epoch = str(policy["spec"]["version"]), int(policy["status"]["epoch"])
    before = {pod["metadata"]["uid"] for pod in fleet.pods()}
    # New engines start with the weights that the policy has by now; so nobody has to push any.
    source = f"pvc://tiny-models/{MODELS[side_of(int(version))].rpartition('/')[2]}"
    model = {"source": source, "version": version}
    over = {"metadata": {"annotations": {"rolled-at": str(time.time())}}}
    with _load(fleet, fronts, texts) as load:
        began = time.monotonic()
        fleet.kube.merge("ifd", fleet.deployment, fleet.namespace, {"spec": {"model": model, "podTemplate": over}})
        stalls = _replaced(fleet, before, len(before))
        took = time.monotonic() - began
    _count(f"rolling update of {len(before)} engines in {took:.0f} s", load.answers, version, epoch)
    assert stalls == []
    _stands(fleet, version, epoch)


def test_a_pod_deleted_in_the_midst_of_a_request_finishes_it(
    fleet: Fleet, fronts: list[Front], texts: Prompts, full: None
) -> None:
    policy = fleet.get_policy()
    version, epoch = str(policy["spec"]["version"]), int(policy["status"]["epoch"])
    victim, *_ = fleet.replicas()
    before = {pod["metadata"]["uid"] for pod in fleet.pods()}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, _load(fleet, fronts, texts) as load:
        long = pool.submit(victim.ask, fleet.model, 0, texts.kept[0], tokens=LONG_TOKENS)
        wait(lambda: victim.look()["inFlight"] or None, 30, "the long answer to begin", every=0.05)
        fleet.kube.run("delete", "pod", victim.name, "-n", fleet.namespace, "--wait=false")
        deleted = time.time()
        answer = long.result(timeout=90)
        # Unless the test before this one ran, a new engine comes with the weights of the fleet's first version.
        stalls = _replaced(fleet, before, 1, push=version)
    print(f"the long request ended {answer.ended - deleted:.1f} s after its pod was deleted")
    assert (answer.status, len(answer.tokens), answer.epoch) == (200, LONG_TOKENS, epoch)
    assert answer.ended > deleted
    _count("a pod deleted", load.answers, version, epoch)
    assert stalls == []
    _stands(fleet, version, epoch)
