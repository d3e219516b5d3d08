"""Reconciles without an API server and without a network: objects in memory, and real gates over idle engines."""

from __future__ import annotations

import copy
import datetime as dt
import json
import ssl
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import httpx
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.config import Config
from moontide.kube.client import Kube, Resource, parse
from moontide.kube.kinds import DEPLOYMENT, POLICY, POOL, Kind
from moontide.kube.tokens import Tokens
from moontide.reconcile.context import Context
from moontide_engine.admin import AdminApp, Commands
from moontide_engine.asgi import Receive, Scope, Send
from moontide_engine.auth import TokenFile
from moontide_engine.gate import Gate
from moontide_engine.middleware import GateMiddleware
from tests.integration.engine_double import IdleEngine
from tests.unit.operator.paperhttp import session

Body = dict[str, Any]
KINDS: Mapping[str, Kind[Any]] = {kind.kind: kind for kind in (POOL, DEPLOYMENT, POLICY)}
SELECTED = (labels.MANAGED_BY, labels.COMPONENT, labels.DEPLOYMENT, labels.POOL)
TOKENS = Tokens(bytes(range(32)))


class Engine:
    """The real gate and admin plane, over an engine in which nothing runs."""

    def __init__(self, folder: Path, boot: str, token: str, key_namespace: str = "", store: bool = False) -> None:
        class Idle(IdleEngine):
            weights = "7"

            async def weights_version(self) -> str:
                return self.weights

        self.idle = Idle()
        self.idle.store_configured = store
        self.gate = Gate(boot, time.monotonic)
        middleware = GateMiddleware(_nothing, self.gate, 4)
        self.commands = Commands(self.gate, middleware, self.idle, "", key_namespace)
        path = folder / f"token-{boot}"
        path.write_text(token)
        self.app = AdminApp(self.commands, middleware, _nothing, TokenFile(str(path)))
        self.silent = False
        self.heard: list[str] = []
        """The steps that it was told to do."""

    @property
    def state(self) -> tuple[str, int]:
        stamp = self.gate.stamp
        return str(self.gate.state), 0 if stamp is None else stamp.epoch


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nobody asks this engine for anything else")


class Network(httpx.AsyncBaseTransport):
    """Engines by ``host:port``, and a wiper at every pool's address that finds nothing to remove."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.wiped: list[tuple[str, str]] = []
        """Host of the wiper, and namespace of keys."""
        self.asked: set[str] = set()
        self.names: dict[str, set[str]] = {}
        """By host, whom its certificate had to be for."""
        self.distrusted = ""
        """Host whose TLS is none."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        place = f"{request.url.host}:{request.url.port}"
        self.asked.add(f"{request.url.scheme}://{place}")
        self.names.setdefault(request.url.host, set()).add(request.extensions.get("sni_hostname", ""))
        if request.url.host == self.distrusted:
            raise httpx.ConnectError("no") from ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
        if request.url.port == 9004:
            self.wiped.append((request.url.host, json.loads(request.content)["namespace"]))
            return httpx.Response(200, json={"success": True, "removed": 0}, request=request)
        engine = self.engines.get(place)
        if engine is None or engine.silent:
            raise httpx.ConnectError("refused")
        if request.method == "POST":
            engine.heard.append(request.url.path.rpartition("/")[2])
        return await httpx.ASGITransport(engine.app).handle_async_request(request)


class FakeKube:
    """The door to an API server that holds everything in memory."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Body] = {}
        self.pods: list[k8s.V1Pod] = []
        self.events: list[tuple[str, str, str, str]] = []
        """Kind, namespace and name of whom they are about, and reason."""
        self.annotated: list[tuple[str, str]] = []
        self.deleted: list[tuple[str, str]] = []
        self.applied: list[Any] = []
        self.listed: list[tuple[str, ...]] = []
        self.missing: set[tuple[str, str, str]] = set()
        """Kind, namespace and name of what is not there although specs name it."""
        self.marked: list[dict[str, str | None]] = []

    def put(self, kind: str, namespace: str, name: str, spec: Body) -> Body:
        """Make an object, or change its spec."""
        key = (kind, namespace, name)
        before = self.objects.get(key)
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}", "generation": 1}
        if before is not None:
            metadata = {**before["metadata"], "generation": before["metadata"]["generation"] + 1}
        self.objects[key] = {"metadata": metadata, "spec": spec, "status": (before or {}).get("status")}
        return self.objects[key]

    def status(self, kind: str, namespace: str, name: str) -> Body:
        return self.objects[kind, namespace, name].get("status") or {}

    def condition(self, kind: str, namespace: str, name: str, type: str) -> tuple[str, str, str]:
        found = self.status(kind, namespace, name).get("conditions") or ()
        return next(
            ((c["status"], c["reason"], c.get("message", "")) for c in found if c["type"] == type), ("", "", "")
        )

    def _get(self, kind: str, namespace: str, name: str) -> Resource[Any] | None:
        body = self.objects.get((kind, namespace, name))
        return None if body is None else parse(KINDS[kind], copy.deepcopy(body))

    async def get_policy(self, namespace: str, name: str) -> Resource[Any] | None:
        return self._get("PolicyVersion", namespace, name)

    async def get_deployment(self, namespace: str, name: str) -> Resource[Any] | None:
        return self._get("InferenceDeployment", namespace, name)

    async def get_pool(self, namespace: str, name: str) -> Resource[Any] | None:
        return self._get("KVCachePool", namespace, name)

    async def list_deployments_following(
        self, namespace: str, policy: str, allowed: Collection[str] = ()
    ) -> list[Resource[Any]]:
        self.listed.append((namespace, *allowed))
        found = [self._get(*key) for key in sorted(self.objects) if key[0] == "InferenceDeployment"]
        return [
            each
            for each in found
            if each is not None
            and (each.meta.namespace == namespace or each.meta.namespace in allowed or "*" in allowed)
            and each.model.spec.policy_ref is not None
            and each.model.spec.policy_ref.name == policy
            and (each.model.spec.policy_ref.namespace or each.meta.namespace) == namespace
        ]

    async def apply_policy_status(self, namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
        return self._apply("PolicyVersion", namespace, name, status)

    async def apply_deployment_status(self, namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
        return self._apply("InferenceDeployment", namespace, name, status)

    async def apply_pool_status(self, namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
        return self._apply("KVCachePool", namespace, name, status)

    async def list_deployments_of_pool(self, namespace: str, pool: str) -> list[Resource[Any]]:
        found = [self._get(*key) for key in sorted(self.objects) if key[:2] == ("InferenceDeployment", namespace)]
        named = [each for each in found if each is not None and each.model.spec.kv_cache is not None]
        return [each for each in named if each.model.spec.kv_cache.pool_ref.name == pool]

    def _apply(self, kind: str, namespace: str, name: str, status: Any) -> bool:
        body = self.objects[kind, namespace, name]
        kept = (
            {"adopted": self.status(kind, namespace, name).get("adopted", {})} if kind == "InferenceDeployment" else {}
        )
        body["status"] = {**status.to_wire(), **kept}
        return True

    async def mark_adopted(self, namespace: str, name: str, uid: str, changes: Mapping[str, str | None]) -> bool:
        body = self.objects[("InferenceDeployment", namespace, name)]
        assert body["metadata"]["uid"] == uid
        merged = {**self.status("InferenceDeployment", namespace, name).get("adopted", {}), **changes}
        body["status"] = {**(body["status"] or {}), "adopted": {k: v for k, v in merged.items() if v is not None}}
        self.marked.append(dict(changes))
        return True

    async def apply(self, *children: Any) -> None:
        self.applied += children

    async def apply_made_of(self, sources: Any, make: Any) -> None:
        await self.apply(*make())

    async def delete_budget(self, namespace: str, name: str, owner: str) -> bool:
        self.deleted.append((namespace, name))
        return True

    async def get_child_deployment(self, namespace: str, name: str) -> None:
        return None

    async def get_group(self, namespace: str, name: str) -> None:
        return None

    async def secret_exists(self, namespace: str, name: str) -> bool:
        return ("Secret", namespace, name) not in self.missing

    async def claim_exists(self, namespace: str, name: str) -> bool:
        return ("PersistentVolumeClaim", namespace, name) not in self.missing

    async def list_pods(self, namespace: str, label_selector: str) -> list[k8s.V1Pod]:
        def matches(pod: k8s.V1Pod) -> bool:
            assert pod.metadata is not None
            own = {key: value for key, value in (pod.metadata.labels or {}).items() if key in SELECTED}
            return pod.metadata.namespace == namespace and labels.selector(own) == label_selector

        return [pod for pod in self.pods if matches(pod)]

    async def read_pods(self, namespace: str, label_selector: str, convert: Any, seen: Any) -> list[Any]:
        return [convert(pod) for pod in await self.list_pods(namespace, label_selector)]

    async def annotate_pod(self, namespace: str, name: str, uid: str, key: str, value: str) -> bool:
        (pod,) = (p for p in self.pods if p.metadata and (p.metadata.namespace, p.metadata.name) == (namespace, name))
        assert pod.metadata is not None
        assert pod.metadata.uid == uid
        pod.metadata.annotations = {**(pod.metadata.annotations or {}), key: value}
        self.annotated.append((namespace, name))
        return True

    async def label_pod(self, namespace: str, name: str, uid: str, key: str, value: str | None) -> bool:
        for pod in self.pods:
            if pod.metadata is not None and pod.metadata.uid == uid:
                kept = {k: v for k, v in (pod.metadata.labels or {}).items() if k != key}
                pod.metadata.labels = kept if value is None else {**kept, key: value}
                return True
        return False

    async def delete_pod(self, namespace: str, name: str, uid: str, grace_seconds: int | None = None) -> bool:
        self.deleted.append((namespace, name))
        self.pods = [p for p in self.pods if p.metadata is None or p.metadata.uid != uid]
        return True

    async def event(self, regarding: Resource[Any], reason: str, message: str, type: str = "Normal") -> None:
        self.events.append((regarding.kind, regarding.meta.namespace, regarding.meta.name, reason))


class Cluster:
    """Everything around the reconciles."""

    def __init__(self, folder: Path, watch_namespace: str = "") -> None:
        self.folder = folder
        self.kube = FakeKube()
        self.network = Network()
        self.now = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        self.http = session(self.network)
        self.ctx = Context(
            kube=cast("Kube", self.kube),
            http=self.http,
            tokens=TOKENS,
            term=lambda: 1,
            config=Config(watch_namespace=watch_namespace),
            now=lambda: self.now,
        )

    def engine(self, place: str, boot: str, fleet: Body, **more: Any) -> Engine:
        """An engine that listens at ``host:port`` and takes the fleet's token."""
        engine = Engine(self.folder, boot, TOKENS.derive(fleet["metadata"]["uid"]), **more)
        self.network.engines[place] = engine
        return engine

    def pod(self, fleet: Body, name: str, ip: str) -> Engine:
        """A pod of a fleet whose engine runs."""
        meta = fleet["metadata"]
        running = k8s.V1ContainerState(running=k8s.V1ContainerStateRunning())
        container = k8s.V1ContainerStatus(
            name="engine", image="x", image_id="x", ready=True, restart_count=0, container_id="c://1", state=running
        )
        self.kube.pods.append(
            k8s.V1Pod(
                metadata=k8s.V1ObjectMeta(
                    name=name,
                    namespace=meta["namespace"],
                    uid=f"pod-{meta['namespace']}-{name}",
                    labels=labels.engine_labels(meta["name"]),
                ),
                status=k8s.V1PodStatus(phase="Running", pod_ip=ip, container_statuses=[container]),
            )
        )
        return self.engine(f"{ip}:8001", f"boot-{meta['namespace']}-{name}", fleet)
