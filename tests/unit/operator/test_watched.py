"""What the watches brought is read, and what was applied is not applied again until something changed it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.errors import InvalidSpec
from moontide.kube import watched
from moontide.kube.client import asked_for
from moontide.kube.sight import Seen, Sight
from moontide.kube.watched import WatchedKube
from moontide.resources import admintls

REPAIR = 300.0
OWNER = k8s.V1OwnerReference(
    api_version="moontide.dev/v1alpha1", kind="InferenceDeployment", name="chat", uid="owner", controller=True
)
EVERYTHING = {"inferencedeployments", "kvcachepools", "pods", "deployments", "services", "configmaps"}


class Answer:
    """As aiohttp's, for the client."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.reason, self.headers = status, "because", {"content-type": "application/json"}
        self.data = json.dumps(body).encode()

    async def read(self) -> bytes:
        return self.data


class MemoryServer(k8s.ApiClient):
    """A few objects by path, and what was asked for. It merges nothing: an apply replaces."""

    def __init__(self) -> None:
        super().__init__(k8s.Configuration())
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.accepted: dict[str, set[str]] = {}
        """By resource, what answers were asked for."""
        self.version = 100

    async def call_api(
        self, method: str, url: str, header_params: Any = None, body: Any = None, *_: Any, **__: Any
    ) -> Any:
        path = url.removeprefix("http://localhost").partition("?")[0]
        self.asked.append(asked_for(method, url))
        self.accepted.setdefault(self.asked[-1][1], set()).add(header_params["Accept"])
        found = self.objects.get(path)
        if method == "GET" and "as=PartialObjectMetadataList" in str(header_params):
            plural = path.rpartition("/")[2]
            items = [each for place, each in self.objects.items() if f"/{plural}/" in place]
            return Answer(200, {"metadata": {"resourceVersion": str(self.version)}, "items": items or None})
        if method == "GET":
            return Answer(200, found) if found is not None else Answer(404, {"message": "no"})
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return Answer(409, {"message": "there is one"})
            return Answer(201, self.put(path, body))
        if "dryRun" in url:
            return Answer(200, found)
        uid = body["metadata"].get("uid")
        if uid is not None and (found is None or found["metadata"]["uid"] != uid):
            return Answer(409, {"message": "uid mismatch"})
        same = found is not None and found.get("data") == body.get("data") and found.get("spec") == body.get("spec")
        return Answer(200, found if same else self.put(path, body))

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        kept = copy.deepcopy(self.objects.get(path, {"metadata": {"uid": f"uid-{self.version}"}}))
        metadata = {**body["metadata"], "uid": kept["metadata"]["uid"], "resourceVersion": str(self.version)}
        self.objects[path] = {**copy.deepcopy(body), "metadata": metadata}
        return self.objects[path]

    def told(self) -> list[tuple[str, str]]:
        asked, self.asked = self.asked, []
        return asked


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


@pytest.fixture(name="sight")
def _sight(clock: Clock) -> Sight:
    sight = Sight(clock)
    sight.complete |= EVERYTHING
    return sight


@pytest.fixture(name="server")
def _server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture(name="kube")
def _kube(server: MemoryServer, sight: Sight) -> WatchedKube:
    return WatchedKube(server, sight, REPAIR)


def _child(kind: Callable[..., Any], name: str, **more: Any) -> Any:
    metadata = k8s.V1ObjectMeta(
        name=name, namespace="ns", labels=labels.engine_labels("chat"), owner_references=[OWNER]
    )
    return kind(api_version="v1", kind=kind.__name__.removeprefix("V1"), metadata=metadata, **more)


def _config(text: str = "a") -> Any:
    return _child(k8s.V1ConfigMap, "chat-mooncake", data={"mooncake.json": text})


SECRET_PATH = "/api/v1/namespaces/ns/secrets/chat-admin"
CONFIG_PATH = "/api/v1/namespaces/ns/configmaps/chat-mooncake"


def _secret() -> Any:
    return _child(k8s.V1Secret, "chat-admin", data={"token": "YQ=="})


def _pod(phase: str, version: int = 900) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "ns", "uid": "p", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": labels.engine_labels("chat")}, "status": {"phase": phase}}


async def test_what_stands_is_not_applied_again(kube: WatchedKube, server: MemoryServer) -> None:
    await kube.apply(_secret(), _config())
    assert server.told() == [("get", "configmaps"), ("post", "secrets"), ("patch", "configmaps")]
    await kube.apply(_secret(), _config())
    assert server.told() == []
    await kube.apply(_secret(), _config("b"))
    assert server.told() == [("patch", "configmaps")], "whose it is was seen"


async def test_the_event_of_an_own_apply_is_nothing_new(kube: WatchedKube, server: MemoryServer, sight: Sight) -> None:
    await kube.apply(_config())
    assert not sight.saw("configmaps", server.objects[CONFIG_PATH])


async def test_what_somebody_changed_is_applied_again(kube: WatchedKube, server: MemoryServer, sight: Sight) -> None:
    await kube.apply(_config())
    changed = server.put(CONFIG_PATH, {**server.objects[CONFIG_PATH], "data": {"mooncake.json": "theirs"}})
    assert sight.saw("configmaps", changed)
    server.told()
    await kube.apply(_config())
    assert server.told() == [("patch", "configmaps")]
    assert server.objects[CONFIG_PATH]["data"] == {"mooncake.json": "a"}
    await kube.apply(_config())
    assert server.told() == []


async def test_what_somebody_deleted_is_applied_again(kube: WatchedKube, server: MemoryServer, sight: Sight) -> None:
    await kube.apply(_config())
    old = server.objects.pop(CONFIG_PATH)
    gone = {**old, "metadata": {**old["metadata"], "resourceVersion": "500"}}
    assert sight.saw("configmaps", gone, deleted=True)
    assert not sight.saw("configmaps", old), "an answer that comes late does not bring it back"
    server.told()
    server.version = 600
    await kube.apply(_config())
    assert server.told() == [("get", "configmaps"), ("patch", "configmaps")]


async def test_a_kind_that_is_not_seen_whole_is_asked_for_and_applied(
    kube: WatchedKube, server: MemoryServer, sight: Sight
) -> None:
    await kube.apply(_config())
    sight.complete.clear()
    server.told()
    await kube.apply(_config())
    assert server.told() == [("get", "configmaps"), ("patch", "configmaps")]


async def test_a_secret_is_applied_again_in_time_with_one_request(
    kube: WatchedKube, server: MemoryServer, clock: Clock
) -> None:
    await kube.apply(_secret())
    server.objects[SECRET_PATH]["data"] = {"token": "theirs"}
    server.told()
    clock.now += REPAIR * 0.74
    await kube.apply(_secret())
    assert server.told() == []
    clock.now += REPAIR
    await kube.apply(_secret())
    assert server.told() == [("patch", "secrets")]
    assert server.objects[SECRET_PATH]["data"] == {"token": "YQ=="}


async def test_a_secret_is_applied_again_soon_while_a_pod_waits_to_start(
    kube: WatchedKube, server: MemoryServer, clock: Clock, sight: Sight
) -> None:
    await kube.apply(_secret())
    sight.saw("pods", _pod("Pending"))
    server.told()
    del server.objects[SECRET_PATH]
    clock.now += 13
    await kube.apply(_secret())
    assert server.told() == [("patch", "secrets"), ("post", "secrets")]
    assert server.objects[SECRET_PATH]["data"] == {"token": "YQ=="}
    sight.saw("pods", _pod("Running", 901))
    clock.now += 13
    await kube.apply(_secret())
    assert server.told() == []


async def test_a_secret_of_somebody_else_is_left_alone(kube: WatchedKube, server: MemoryServer, clock: Clock) -> None:
    await kube.apply(_secret())
    del server.objects[SECRET_PATH]
    theirs = server.put(SECRET_PATH, {"metadata": {"name": "chat-admin", "namespace": "ns"}, "data": {"x": "eA=="}})
    clock.now += 2 * REPAIR
    with pytest.raises(InvalidSpec, match="does not belong"):
        await kube.apply(_secret())
    assert server.objects[SECRET_PATH] == theirs
    with pytest.raises(InvalidSpec, match="does not belong"):
        await kube.apply(_secret())


async def test_no_answer_about_a_secret_is_asked_to_have_its_content(
    kube: WatchedKube, server: MemoryServer, clock: Clock
) -> None:
    await kube.apply(_secret(), _config())
    clock.now += 2 * REPAIR
    await kube.apply(_secret())
    del server.objects[SECRET_PATH]
    server.put(SECRET_PATH, {"metadata": {"name": "chat-admin", "namespace": "ns"}})
    clock.now += 2 * REPAIR
    with pytest.raises(InvalidSpec, match="does not belong"):
        await kube.apply(_secret())
    assert await kube.secret_exists("ns", "chat-admin")
    assert not await kube.secret_exists("ns", "other")
    await kube.create_secret("ns", _child(k8s.V1Secret, "moontide-root-key", data={"key": "YQ=="}))
    assert server.accepted["secrets"] == {"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
    assert server.accepted["configmaps"] == {"application/json"}


async def test_a_budget_that_must_not_be_is_looked_for_now_and_then(
    kube: WatchedKube, server: MemoryServer, clock: Clock
) -> None:
    for _ in range(3):
        assert not await kube.delete_budget("ns", "chat", "owner")
    assert server.told() == [("get", "poddisruptionbudgets")]
    clock.now += 2 * REPAIR
    assert not await kube.delete_budget("ns", "chat", "owner")
    assert server.told() == [("get", "poddisruptionbudgets")]


async def test_pods_are_those_of_the_labels(kube: WatchedKube, server: MemoryServer, sight: Sight) -> None:
    other = _pod("Running")
    other["metadata"] |= {"name": "w", "labels": labels.worker_labels("chat")}
    for each in (_pod("Running"), other):
        sight.saw("pods", each)
    (found,) = await kube.list_pods("ns", labels.selector(labels.engine_labels("chat")))
    assert found.metadata is not None
    assert (found.metadata.name, found.status.phase if found.status else "") == ("p", "Running")
    assert await kube.list_pods("elsewhere", labels.selector(labels.engine_labels("chat"))) == []
    gone = _pod("Running", 950)
    sight.saw("pods", gone, deleted=True)
    assert await kube.list_pods("ns", labels.selector(labels.engine_labels("chat"))) == []
    assert server.told() == []


@pytest.mark.parametrize("served", [admintls.ENGINE, admintls.WIPER], ids=["engine", "wiper"])
async def test_of_a_pods_spec_is_kept_whether_it_serves_tls_and_nothing_else(
    kube: WatchedKube, server: MemoryServer, sight: Sight, served: admintls.Served
) -> None:
    def seen(name: str, version: int, *more: dict[str, str]) -> None:
        body = _pod("Running", version)
        body["metadata"] |= {"name": name, "uid": name}
        env = [{"name": "SECRET_OF_THE_USERS", "value": "x"}, *more]
        other = {"name": "other", "image": "i", "env": list(more)}
        body["spec"] = {"nodeName": "n", "containers": [other, {"name": served.container, "image": "i", "env": env}]}
        sight.saw("pods", body)

    variable = {"name": served.variable, "value": admintls.FOLDER}
    seen("new", 901, variable)
    seen("old", 902)
    selector = labels.selector(labels.engine_labels("chat"))
    found = await kube.list_pods("ns", selector)
    assert [admintls.serves(each, served) for each in found] == [True, False]
    assert await kube.read_pods("ns", selector, lambda pod: admintls.serves(pod, served), {}) == [True, False]
    kept = [each.get("spec") for each in sight.selected("pods", "ns", labels.engine_labels("chat"))]
    assert kept == [{"containers": [{"name": served.container, "env": [variable]}]}, None]
    assert server.told() == []


def _fleet(version: int, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "chat", "namespace": "ns", "uid": "owner", "resourceVersion": str(version), "generation": 1}
    model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
    return {"metadata": metadata, "spec": {"model": model, **spec}}


async def test_a_fleet_is_read_as_it_was_seen_and_one_of_adopted_engines_is_not(
    kube: WatchedKube, server: MemoryServer, sight: Sight
) -> None:
    sight.saw("inferencedeployments", _fleet(10, replicas=3, kvCache={"poolRef": {"name": "kv"}}))
    found = await kube.get_deployment("ns", "chat")
    assert found is not None
    assert found.model.spec.replicas == 3
    assert [each.meta.name for each in await kube.list_deployments_of_pool("ns", "kv")] == ["chat"]
    assert await kube.list_deployments_of_pool("ns", "other") == []
    assert server.told() == []
    adopted = _fleet(11)
    adopted["spec"] = {"endpoints": {"urls": ["http://10.0.0.1:9000"]}}
    sight.saw("inferencedeployments", adopted)
    assert await kube.get_deployment("ns", "chat") is None
    assert server.told() == [("get", "inferencedeployments")]


class Maker:
    """Makes a fleet's children, and counts."""

    def __init__(self) -> None:
        self.times = 0
        self.refusal: InvalidSpec | None = None

    def __call__(self) -> tuple[Any, ...]:
        self.times += 1
        if self.refusal is not None:
            raise self.refusal
        return _secret(), _config()


async def _at_rest(kube: WatchedKube, sight: Sight, maker: Maker) -> Any:
    """A fleet whose children stand."""
    sight.saw("inferencedeployments", _fleet(10, replicas=3))
    fleet = await kube.get_deployment("ns", "chat")
    await kube.apply_made_of((fleet, None), maker)
    assert maker.times == 1
    return fleet


async def test_children_of_the_same_sources_are_not_made_again(
    kube: WatchedKube, server: MemoryServer, sight: Sight
) -> None:
    maker = Maker()
    fleet = await _at_rest(kube, sight, maker)
    assert server.told() == [("get", "configmaps"), ("post", "secrets"), ("patch", "configmaps")]
    again = await kube.get_deployment("ns", "chat")
    assert again is fleet, "it is parsed once"
    await kube.apply_made_of((again, None), maker)
    assert (maker.times, server.told()) == (1, [])


async def test_children_are_made_again_when_a_source_is_another(
    kube: WatchedKube, server: MemoryServer, sight: Sight
) -> None:
    maker = Maker()
    fleet = await _at_rest(kube, sight, maker)
    await kube.apply_made_of((fleet, fleet), maker)
    assert maker.times == 2, "another pool"
    await kube.apply_made_of((fleet, fleet), maker)
    assert maker.times == 2
    sight.saw("inferencedeployments", _fleet(11, replicas=4))
    await kube.apply_made_of((fleet, fleet), maker)
    assert maker.times == 3, "the fleet was seen in another state meanwhile"
    await kube.apply_made_of((await kube.get_deployment("ns", "chat"), fleet), maker)
    assert maker.times == 4


async def test_children_are_made_again_when_one_does_not_stand(
    kube: WatchedKube, server: MemoryServer, sight: Sight, clock: Clock
) -> None:
    maker = Maker()
    fleet = await _at_rest(kube, sight, maker)
    changed = server.put(CONFIG_PATH, {**server.objects[CONFIG_PATH], "data": {"mooncake.json": "theirs"}})
    sight.saw("configmaps", changed)
    server.told()
    await kube.apply_made_of((fleet, None), maker)
    assert (maker.times, server.told()) == (2, [("patch", "configmaps")])
    clock.now += 2 * REPAIR
    await kube.apply_made_of((fleet, None), maker)
    assert (maker.times, server.told()) == (3, [("patch", "secrets")]), "what is not watched is repaired by time"
    sight.complete.discard("configmaps")
    await kube.apply_made_of((fleet, None), maker)
    assert (maker.times, server.told()) == (4, [("get", "configmaps"), ("patch", "configmaps")])


async def test_a_refusal_is_said_each_time(kube: WatchedKube, server: MemoryServer, sight: Sight) -> None:
    maker = Maker()
    fleet = await _at_rest(kube, sight, maker)
    maker.refusal = InvalidSpec("MemoryTooSmall", "no")
    sight.saw("inferencedeployments", _fleet(11, replicas=4))
    fleet = await kube.get_deployment("ns", "chat")
    for _ in range(2):
        with pytest.raises(InvalidSpec, match="no"):
            await kube.apply_made_of((fleet, None), maker)
    assert maker.times == 3


async def test_children_of_what_was_read_from_the_api_server_are_made_each_time(
    kube: WatchedKube, server: MemoryServer, sight: Sight
) -> None:
    maker = Maker()
    fleet = await _at_rest(kube, sight, maker)
    other = dataclasses.replace(fleet)
    await kube.apply_made_of((other, None), maker)
    assert maker.times == 2


async def test_what_is_missing_is_found_by_comparing(kube: WatchedKube, server: MemoryServer, sight: Sight) -> None:
    server.put(CONFIG_PATH, {"metadata": {"name": "chat-mooncake", "namespace": "ns"}})
    gone, behind = await kube.compare("configmaps", "")
    assert (gone, list(behind)) == ([], [("configmaps", "ns", "chat-mooncake")])
    sight.saw("configmaps", server.objects[CONFIG_PATH])
    assert await kube.compare("configmaps", "") == ([], {})
    del server.objects[CONFIG_PATH]
    server.version += 1
    ((key, seen),), behind = await kube.compare("configmaps", "")
    assert key == ("configmaps", "ns", "chat-mooncake")
    assert isinstance(seen, Seen)
    assert not behind
    assert sight.get(*key) is None


async def test_what_came_after_the_listing_is_not_gone(kube: WatchedKube, server: MemoryServer, sight: Sight) -> None:
    metadata = {"name": "new", "namespace": "ns", "uid": "n", "resourceVersion": str(server.version + 5)}
    sight.saw("configmaps", {"metadata": metadata})
    assert await kube.compare("configmaps", "") == ([], {})
    assert sight.get("configmaps", "ns", "new") is not None


def test_nothing_is_kept_of_what_is_gone(sight: Sight) -> None:
    sight.saw("inferencedeployments", _fleet(10))
    sight.applied(("secrets", "ns", "chat-admin"), "d", "owner", {"uid": "s"})
    sight.saw("pods", _pod("Running"))
    sight.saw("pods", _pod("Running", 901), deleted=True)
    sight.saw("inferencedeployments", _fleet(11), deleted=True)
    assert len(sight) == 0
    assert not sight.stands(("secrets", "ns", "chat-admin"), "d", REPAIR)


def test_a_status_is_no_change_of_a_deployment(sight: Sight) -> None:
    def body(version: int, ready: int, **labels_: str) -> dict[str, Any]:
        metadata = {"name": "d", "namespace": "ns", "uid": "d", "resourceVersion": str(version), "generation": 1}
        return {
            "metadata": {**metadata, "labels": labels_},
            "spec": {"replicas": 1},
            "status": {"readyReplicas": ready},
        }

    key = ("deployments", "ns", "d")
    sight.saw("deployments", body(5, 0))
    sight.applied(key, "digest", "owner", body(5, 0)["metadata"])
    assert sight.saw("deployments", body(6, 1))
    assert sight.stands(key, "digest")
    sight.saw("deployments", body(7, 1, other="label"))
    assert not sight.stands(key, "digest")


@pytest.mark.parametrize(
    ("url", "resource"),
    [
        ("https://h/api/v1/namespaces/ns/secrets/x?dryRun=All", "secrets"),
        ("https://h/apis/apps/v1/namespaces/ns/deployments/d/status", "deployments/status"),
        ("https://h/api/v1/pods?limit=1", "pods"),
        ("https://h/api/v1/namespaces/ns", "namespaces"),
    ],
)
def test_requests_are_counted_by_what_they_ask_for(url: str, resource: str) -> None:
    assert asked_for("GET", url) == ("get", resource)


async def test_a_kind_is_complete_while_nothing_of_it_is_missing(
    kube: WatchedKube, server: MemoryServer, sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SOON_SECONDS", "AGAIN_SECONDS", "LATE_SECONDS"):
        monkeypatch.setattr(watched, name, 0.01)
    sight.complete.clear()
    sight.saw("configmaps", server.put(CONFIG_PATH, {"metadata": {"name": "chat-mooncake", "namespace": "ns"}}))
    ghost = {"metadata": {"name": "ghost", "namespace": "ns", "uid": "g", "resourceVersion": "1"}}
    sight.saw("services", ghost)
    told: list[Any] = []

    async def until(look: Callable[[], bool]) -> None:
        for _ in range(1000):
            if look():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("not within 10 s")

    task = asyncio.create_task(kube.keep_honest("", lambda key, seen: told.append(key), 0.01))
    try:
        await asyncio.wait_for(kube.begun.wait(), 10)
        assert sight.complete == {*EVERYTHING, "policyversions"}
        assert told == [("services", "ns", "ghost")]
        late = server.put(f"{CONFIG_PATH}-2", {"metadata": {"name": "chat-mooncake-2", "namespace": "ns"}})
        await until(lambda: "configmaps" not in sight.complete)
        sight.saw("configmaps", late)
        await until(lambda: "configmaps" in sight.complete)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
