"""An API server that refuses, is away or loses answers; versions in a hurry; two operators; a spec that is too large.

Between the operator and the API server is a proxy that does what the test says. The operator looks at everything again
only after a minute here, so what it does sooner it was told by its watches.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.flaky_api import DROP, LOSE, Fault, FlakyApi
from tests.integration.stage import RESOLVING, Judge, Stage

RESYNC = {"MOONTIDE_RESYNC_SECONDS": "60"}
LEASE = {"MOONTIDE_LEASE_SECONDS": "60"}
AWAY_SECONDS = 4.0
BUMPS = 20

ENDING = """
import asyncio, pathlib, runpy
from kopf._cogs.clients import watching
real, armed = watching.infinite_watch, pathlib.Path({armed!r})
async def ending(**arguments):
    stream, event = real(**arguments), None
    while True:
        event = event or asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait({{event}}, timeout=0.1)
        if armed.exists() and arguments["resource"].plural == "policyversions":
            event.cancel()
            if armed.read_text() == "fails":
                raise RuntimeError("on command")
            if armed.read_text() == "is cancelled":
                asyncio.current_task().cancel()
                await asyncio.sleep(1)
            return
        if done:
            yield event.result()
            event = None
watching.infinite_watch = ending
runpy.run_module("moontide", run_name="__main__")
"""
"""The operator, whose watch of PolicyVersions ends once ``armed`` exists, as that says."""


class Scene:
    """A fleet that serves, its operator, and the API server between them."""

    def __init__(self, stage: Stage, operator: Any, flaky: Any = None, plain: bool = False) -> None:
        self.stage = stage
        self.flaky = flaky
        self.operator = operator
        self.version = 1
        self._judge = Judge(plain, "Barrier")
        self._read = 0
        stage.pool()
        stage.fleet("chat", fences=not plain, weights="Unchecked")

    def bump(self) -> None:
        """Ask for the next version."""
        self.version += 1
        self.stage.ask("chat", version=self.version)

    def epoch(self) -> int:
        epoch: int = self.stage.status("chat")["epoch"]
        return epoch

    def events(self) -> list[dict[str, Any]]:
        """What is new in the journal, judged."""
        seen = self.stage.journal()
        fresh, self._read = seen[self._read :], len(seen)
        self._judge.read(fresh)
        return fresh

    def wait_current(self, seconds: float = 150.0) -> int:
        """Wait until the last version that was asked for is served by all. Returns the epoch."""
        epoch = self.stage.wait_current("chat", self.version, seconds)

        def served() -> bool:
            # A change does not wait for newcomers, so the first one may be over before they are admitted.
            return {tuple(state) for state in self.stage.double("states").values()} == {("open", epoch)}

        self.stage.wait_for(f"all serve in epoch {epoch}", served, seconds)
        return epoch


@pytest.fixture(scope="module", name="scene")
def _scene(make_stage: Callable[..., Any]) -> Iterator[Scene]:
    with make_stage() as (stage, make):
        with FlakyApi(stage.folder / "kubeconfig").serving() as flaky:
            config = {"KUBECONFIG": str(flaky.kubeconfig(stage.folder / "kubeconfig"))}
            running = make("operator", {**RESYNC, **LEASE, **config}, RESOLVING.format(services=stage.services))
            running.start()
            scene = Scene(stage, running, flaky)
            assert scene.wait_current() == 1
            scene.events()
            yield scene
            flaky.fault = None
            assert running.stop() == 0
            failed = [line for line in running.log().splitlines() if "Traceback" in line]
            assert failed == []


@pytest.mark.parametrize("fault", [429, 503, DROP], ids=str)
def test_an_api_server_that_was_away_is_come_back_to(scene: Scene, fault: int | str) -> None:
    epoch, pid = scene.epoch(), scene.operator.pid
    scene.events()
    began = time.monotonic()
    scene.flaky.fault = Fault(fault)
    scene.flaky.cut()
    time.sleep(AWAY_SECONDS / 4)
    scene.bump()
    time.sleep(AWAY_SECONDS)
    early = [event for event in scene.events() if "step" in event]
    away, scene.flaky.fault, seconds = scene.flaky.fault, None, time.monotonic() - began
    assert early == [], "it acts on a policy that it cannot have seen"
    assert scene.wait_current() == epoch + 1
    # Only a watch can tell of a resource that is new.
    scene.stage.create("PolicyVersion", f"new-{fault}", {"version": 1})
    scene.stage.wait_for("the new one is seen", lambda: "epoch" in scene.stage.status(f"new-{fault}"), 45)
    scene.bump()
    assert scene.wait_current() == epoch + 2
    scene.events()
    assert scene.operator.pid == pid
    assert scene.operator.http(scene.operator.liveness_port, "/healthz") == 200
    print(f"{fault}: {away.hits} requests within {seconds:.0f} s")
    assert away.hits < 40 * seconds, "a refused request is not repeated at once"


@pytest.mark.parametrize("fault", [409, 429, 503, DROP, LOSE], ids=str)
@pytest.mark.parametrize("after", [0, 1, 2], ids=["allotment", "second-write", "third-write"])
def test_a_change_under_way_survives_a_status_that_cannot_be_written(
    scene: Scene, fault: int | str, after: int
) -> None:
    def status_of_the_policy(method: str, path: str) -> bool:
        return method == "PATCH" and path.endswith("/policyversions/chat/status")

    scene.wait_current()
    scene.events()
    epoch = scene.epoch()
    refuses = scene.flaky.fault = Fault(fault, status_of_the_policy, after, times=2)
    scene.bump()
    assert scene.wait_current() == epoch + 1
    assert refuses.hits == 2, "the fault did not overlap the change"
    heard = [event["epoch"] for event in scene.events() if "step" in event]
    assert set(heard) == {epoch + 1}


def test_versions_in_a_hurry_end_at_the_last(scene: Scene) -> None:
    hurry = False
    for _ in range(5):
        epoch, first = scene.wait_current(), scene.version + 1
        scene.events()
        began = time.monotonic()
        for _ in range(3):
            scene.bump()
        # On a machine that stood still it was none.
        if hurry := time.monotonic() - began < 2:
            break
    assert hurry
    last = scene.wait_current()
    events = scene.events()
    assert epoch < last <= epoch + 3
    versions: dict[int, set[str]] = {}
    for event in events:
        if event.get("step") == "admit":
            versions.setdefault(event["epoch"], set()).add(event["version"])
    assert all(len(each) == 1 for each in versions.values()), f"two versions in one epoch: {versions}"
    assert versions[last] == {str(first + 2)}
    for engine in scene.stage.double("states"):
        heard = [event["epoch"] for event in events if "step" in event and event["engine"] == engine]
        assert heard == sorted(heard), "an epoch began before the one before it was over"
    print(f"versions by epoch: {versions}")


def test_a_version_that_is_asked_for_again_wipes_nothing(scene: Scene) -> None:
    stage, epoch = scene.stage, scene.wait_current()
    scene.events()
    before = stage.policy("chat")["metadata"]["generation"]
    stage.ask("chat", version=scene.version)
    assert stage.policy("chat")["metadata"]["generation"] == before
    stage.api("PATCH", stage.path("PolicyVersion", "chat"), {"metadata": {"labels": {"a": "b"}}})
    assert stage.ask("chat", version=str(scene.version)) == before + 1
    stage.wait_for("it is seen", lambda: stage.status("chat")["observedGeneration"] == before + 1)
    time.sleep(2)
    assert scene.events() == []
    assert scene.wait_current() == epoch


def test_a_large_spec_is_refused_or_carried_out_and_can_be_deleted(scene: Scene, kubectl: Any) -> None:
    namespace = scene.stage.namespace
    model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
    env = [{"name": f"E{n}", "value": "x" * 32_000} for n in range(7)]
    spec = {"model": model, "engine": {"env": env}}
    metadata = {"name": "large", "namespace": namespace}
    body = {"apiVersion": "moontide.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": metadata, "spec": spec}
    assert 200_000 < len(json.dumps(body)) < 240_000
    kubectl.apply(body)
    scene.stage.wait_for("its Deployment", lambda: kubectl.get("deployment", "large", namespace))
    found = kubectl.must_get("ifd", "large", namespace)["metadata"]
    assert set(found["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
    kubectl("delete", "ifd", "large", "-n", namespace, "--timeout=60s")
    assert kubectl.get("ifd", "large", namespace) is None

    env[0]["value"] = "x" * 40_000
    said = kubectl.run("create", "-f", "-", stdin=json.dumps(body), check=False)
    assert said.returncode != 0
    assert "spec.engine.env[0].value" in said.stderr
    assert "32768" in said.stderr
    body["spec"] = {"model": model, "engine": {"env": [{"name": f"E{n}", "value": "x" * 32_000} for n in range(100)]}}
    said = kubectl.run("create", "-f", "-", stdin=json.dumps(body), check=False)
    assert said.returncode != 0, "3 MB are more than etcd takes"
    assert kubectl.get("ifd", "large", namespace) is None
    epoch = scene.epoch()
    scene.bump()
    assert scene.wait_current() == epoch + 1


def test_two_operators_do_what_one_would(make_stage: Callable[..., Any]) -> None:
    with make_stage() as (stage, make):
        code = RESOLVING.format(services=stage.services)
        pair = [make(name, {"MOONTIDE_POD_NAME": name, **LEASE}, code) for name in ("first", "second")]
        pair[0].start()
        scene = Scene(stage, pair[0], plain=True)
        scene.wait_current()
        pair[1].start()
        start = len(stage.journal())
        for number in range(BUMPS):
            if number == BUMPS // 2:
                assert pair[0].stop(signal.SIGTERM) == 0
            scene.bump()
            scene.wait_current()
        assert scene.epoch() == 1 + BUMPS
        time.sleep(2)
        scene.events()
        events = stage.journal()[start:]
        removals = [event["removed"] for event in events if "removal" in event]
        assert len(removals) == 2 * BUMPS, "each wipe is one removal and one that verifies it"
        assert removals[1::2] == [0] * BUMPS
        assert all(removals[::2]), "every wipe finds the keys of the epoch before"
        terms: dict[tuple[Any, ...], set[int]] = {}
        for event in events:
            if "step" in event:
                terms.setdefault((event["engine"], event["epoch"], event["step"]), set()).add(event["term"])
        assert all(len(each) == 1 for each in terms.values()), "two leaders gave one command"
        done = Counter((e["engine"], e["epoch"], e["step"]) for e in events if e.get("outcome") == "Done")
        assert set(done.values()) == {1}, {key: count for key, count in done.items() if count > 1}
        assert len({term for each in terms.values() for term in each}) == 2
        print(f"{BUMPS} bumps, {len(removals) // 2} wipes, {sum(done.values())} commands, none twice")


@pytest.mark.usefixtures("released_lease")
@pytest.mark.parametrize("how", ["returns", "is cancelled", "fails"])
def test_an_operator_whose_watch_has_ended_ends_too(
    kubectl: Any, wait_for: Any, namespace: str, tmp_path: Any, operators_of: Callable[[str], Any], how: str
) -> None:
    armed = tmp_path / "armed"
    running = operators_of(namespace)("operator", LEASE, ENDING.format(armed=str(armed)))
    running.start()
    wait_for("it watches", lambda: running.http(running.liveness_port, "/healthz") == 200)
    metadata = {"name": "policy", "namespace": namespace}
    kubectl.apply(
        {"apiVersion": "moontide.dev/v1alpha1", "kind": "PolicyVersion", "metadata": metadata, "spec": {"version": 1}}
    )
    wait_for("it reconciles", lambda: (kubectl.must_get("polv", "policy", namespace).get("status") or {}).get("epoch"))
    began = time.monotonic()
    armed.write_text(how)
    assert running.wait(60) not in (0, -signal.SIGKILL)
    print(f"a watch that {how}: the operator ended {time.monotonic() - began:.1f} s later")
