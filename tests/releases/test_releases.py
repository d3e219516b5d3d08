"""Old engines beside a new one in one real cluster, under one policy: `make test-engines`.

Their images take minutes to build and 5 GB each, so that no other run of the tests has them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hack.cluster.settings import repository_root
from hack.demo import install, story
from hack.demo.elsewhere import Choice
from hack.demo.fleet import Fleet, push_weights
from hack.demo.kube import Object, condition, holds, wait
from hack.demo.say import Voice
from hack.setup.steps import engine_release, further_engines

PROMPT = "the tide comes in and the tide goes out, and what was written on the sand is gone " * 4
START_SECONDS = 420.0


def _name(release: str) -> str:
    return f"vllm-{release.replace('.', '-')}"


def _deployments(example: Object) -> dict[str, Object]:
    """One replica of the demo's fleet for each release, by release."""
    made = {}
    for release in (engine_release(), *further_engines()):
        engine = {**example["spec"]["engine"], "version": release}
        if release != engine_release():
            engine["image"] = f"moontide.local/engine-cpu-vllm{release}:dev"
        metadata = {**example["metadata"], "name": _name(release)}
        made[release] = {**example, "metadata": metadata, "spec": {**example["spec"], "replicas": 1, "engine": engine}}
    return made


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[str, Fleet]]:
    """A fleet of one for each release, by release; their cluster ends with the tests unless it was up before."""
    voice = Voice()
    was_up = install.is_up("local")
    target = install.cluster(Choice("local"), None, voice)
    try:
        install.images(target, voice)
        images = [f"engine-cpu-vllm{release}" for release in further_engines()]
        subprocess.run([sys.executable, "-m", "hack.images", "build", *images], cwd=repository_root(), check=True)
        install.operator(target, voice)
        objects = install.manifests(install.steps.models_dir())
        (example,) = (each for each in objects if each["kind"] == "InferenceDeployment")
        deployments = _deployments(example)
        target.kube.apply(*(each for each in objects if each is not example), *deployments.values())
        made = {
            release: Fleet(target.kube, target.reach(), install.NAMESPACE, deployment=_name(release))
            for release in deployments
        }
        yield made
        for fleet in made.values():
            fleet.close()
        install.remove(target, voice)
    finally:
        if not was_up:
            install.end(target, voice)


def _deployment(fleet: Fleet) -> Object:
    return fleet.kube.get("ifd", fleet.deployment, fleet.namespace)


def _serves(fleet: Fleet) -> Object | None:
    found = _deployment(fleet)
    kinds = ("Available", "PolicyCurrent", "KVCacheAttached")
    return found if all(holds(found, kind) for kind in kinds) and found["status"].get("currentReplicas") == 1 else None


@pytest.fixture(scope="module")
def serving(fleets: dict[str, Fleet]) -> dict[str, Fleet]:
    """All of them, open."""
    for release, fleet in fleets.items():
        wait(
            lambda fleet=fleet: _serves(fleet),
            START_SECONDS,
            f"vLLM {release} to serve",
            every=2.0,
            last=lambda fleet=fleet: str(_deployment(fleet).get("status")),
        )
    return fleets


def test_each_engine_says_which_patches_its_release_needs(serving: dict[str, Fleet]) -> None:
    said = {}
    for release, fleet in serving.items():
        patched = condition(_deployment(fleet), "EnginePatched")
        assert (patched["status"], patched["reason"]) == ("True", "Patched"), patched
        assert patched["message"].startswith(f"vLLM {release}; ")
        said[release] = patched["message"]
        (replica,) = fleet.replicas()
        status = replica.look()
        assert status["engineVersion"].partition("+")[0] == release
        assert status["patches"]["policy-epoch"] == "applied"
    assert "two-phase-allocation: applied" in said["0.22.1"]
    assert "store-reset: applied" in said["0.22.1"]
    newest = said[engine_release()]
    assert "two-phase-allocation: upstream" in newest
    assert "store-reset: upstream" in newest


def test_one_change_of_policy_holds_for_engines_of_all_releases(serving: dict[str, Fleet]) -> None:
    """Weights are pushed, then the version changes: every engine starts anew with empty caches, and none restarts."""
    replicas = [fleet.replicas()[0] for fleet in serving.values()]
    some = next(iter(serving.values()))
    boots = [replica.look()["bootId"] for replica in replicas]
    old = []
    for replica in replicas:
        replica.ask(some.model, 0, PROMPT)
        answer = replica.ask(some.model, 0, PROMPT)
        assert (answer.status, answer.version) == (200, "1"), answer
        assert answer.cached
        old.append(answer)
    push_weights(replicas, story.MODELS["policy-b"], "2")
    some.bump(2)
    policy = some.until_current("2", 150)
    epoch = policy["status"]["lastUpdate"]["epoch"]
    for replica, boot, before in zip(replicas, boots, old, strict=True):
        answer = replica.ask(some.model, 0, PROMPT)
        assert (answer.status, answer.version, answer.epoch) == (200, "2", epoch), answer
        assert answer.tokens != before.tokens
        # The fleets share no keys, so that nobody has computed it in this epoch yet. Old releases say nothing for none.
        assert not answer.cached
        assert replica.look()["bootId"] == boot
    some.until_collected(60)
