"""A pool's reconcile in memory: the API server, the network, the master and the memory nodes are fakes."""

from __future__ import annotations

import base64
import datetime as dt
from typing import Any, cast

import httpx
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.config import Config
from moontide.kube.client import Resource, parse
from moontide.kube.kinds import DEPLOYMENT, POOL
from moontide.kube.tokens import Tokens
from moontide.metrics import Metrics
from moontide.reconcile import kvcachepool
from moontide.reconcile.context import Context
from tests.unit.operator.paperhttp import session

OWNER = k8s.V1OwnerReference(
    api_version="moontide.dev/v1alpha1", kind="KVCachePool", name="kv", uid="u-1", controller=True
)
MIB = 2**20
TOKENS = Tokens(bytes(32))
NOW = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
FIGURES = {
    "master_active_clients": 2,
    "master_key_count": 40,
    "master_total_capacity_bytes": 1000,
    "master_allocated_bytes": 123,
    "master_evicted_key_count": 7,
    "master_evicted_size_bytes": 70,
}


class World:
    """A pool, the Deployment of its nodes, pods, a master and the nodes' own status. Fakes, all in memory."""

    def __init__(self, nodes: dict[str, Any] | None, live: int | None) -> None:
        memory = {"perReplica": "0", "storeNodes": nodes} if nodes is not None else {}
        self.body: dict[str, Any] = {
            "metadata": {"name": "kv", "namespace": "ns", "uid": "u-1", "generation": 1},
            "spec": {"memory": memory},
            "status": {"keys": 100},
        }
        self.live = live
        self.pods: list[k8s.V1Pod] = []
        self.masters: list[k8s.V1Pod] = []
        self.secrets: set[str] = set()
        self.fleets: list[Resource[Any]] = []
        self.figures = dict(FIGURES)
        self.mounted: list[str] = ["10.0.0.1:1", "10.0.0.2:1"]
        self.now = NOW
        self.told = Metrics()
        self.segments: list[dict[str, Any]] = []
        self.drain: dict[str, Any] | None = None
        self.said: list[tuple[str, ...]] = []
        """Events and applies, in order."""
        self.status: Any = None
        self.token = ""
        """What the wiper's Secret holds."""
        self.taken: dict[str, set[str]] = {}
        """By host of a wiper, the tokens that it takes; a wiper that is not here does not answer."""
        self.asked: list[str] = []
        """Of wipers, in order: URL, and whom the certificate had to be for."""

    # What a reconcile asks of the API server.

    async def get_pool(self, namespace: str, name: str) -> Resource[Any]:
        return parse(POOL, self.body)

    async def list_deployments_of_pool(self, namespace: str, pool: str) -> list[Any]:
        return self.fleets

    async def get_child_deployment(self, namespace: str, name: str) -> k8s.V1Deployment | None:
        if name != "kv-nodes" or self.live is None:
            return None
        return k8s.V1Deployment(
            metadata=k8s.V1ObjectMeta(owner_references=[OWNER]),
            spec=k8s.V1DeploymentSpec(
                replicas=self.live,
                selector=k8s.V1LabelSelector(),
                template=k8s.V1PodTemplateSpec(spec=k8s.V1PodSpec(containers=[], termination_grace_period_seconds=80)),
            ),
            status=k8s.V1DeploymentStatus(replicas=self.live, ready_replicas=self.live),
        )

    async def list_pods(self, namespace: str, selector: str) -> list[k8s.V1Pod]:
        if selector == labels.selector(labels.store_node_labels("kv")):
            return self.pods
        assert selector == labels.selector(labels.store_labels("kv"))
        return self.masters

    async def secret_exists(self, namespace: str, name: str) -> bool:
        return name in self.secrets

    async def apply(self, *children: Any) -> None:
        for child in children:
            if child.kind == "Secret":
                self.token = base64.b64decode(child.data["token"]).decode()
            if child.kind == "Deployment":
                self.said.append(("apply", child.metadata.name, str(child.spec.replicas)))
                if child.metadata.name == "kv-nodes":
                    self.live = child.spec.replicas

    async def apply_made_of(self, sources: Any, make: Any) -> None:
        await self.apply(*make())

    async def event(self, regarding: Any, reason: str, message: str, type: str = "Normal") -> None:
        self.said.append(("event", reason, message, type))

    async def apply_pool_status(self, namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
        self.status = status
        self.body["status"] = status.to_wire()
        return True

    # The network.

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.port == 9005:
            return httpx.Response(200, json={"state": "draining", "drain": self.drain})
        if request.url.port == 9004:
            self.asked.append(f"{request.url} {request.extensions.get('sni_hostname', '')}".rstrip())
            if request.url.host not in self.taken:
                raise httpx.ConnectError("refused")
            known = request.headers["authorization"].removeprefix("Bearer ") in self.taken[request.url.host]
            return httpx.Response(400 if known else 401, json={"success": False})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics())
        if request.url.path == "/get_segments_detail":
            return httpx.Response(200, json={"segments": self.segments})
        return httpx.Response(200, json={"service_ready": True})

    def metrics(self) -> str:
        lines = []
        for name, value in self.figures.items():
            lines += [f"# TYPE {name} {'counter' if 'evicted' in name else 'gauge'}", f"{name} {value}"]
        lines += [f'segment_total_capacity_bytes{{segment="{each}"}} 1000' for each in self.mounted]
        return "\n".join([*lines, 'segment_total_capacity_bytes{segment="10.9.9.9:1"} 0', ""])

    async def reconcile(self) -> float:
        ctx = Context(
            kube=cast("Any", self),
            http=session(self.answer),
            tokens=TOKENS,
            term=lambda: 1,
            config=Config(),
            now=lambda: self.now,
            metrics=self.told,
        )
        return await kvcachepool.reconcile(ctx, "ns", "kv")

    def condition(self, type: str) -> tuple[str, str]:
        (found,) = (each for each in self.status.conditions if each.type == type)
        return found.status, found.reason

    def pod(self, name: str, ip: str, leaving: bool = False) -> None:
        gone = NOW if leaving else None
        self.pods.append(
            k8s.V1Pod(metadata=k8s.V1ObjectMeta(name=name, deletion_timestamp=gone), status=k8s.V1PodStatus(pod_ip=ip))
        )

    def master(self, started: dt.datetime) -> None:
        """The master's pod, whose container started then."""
        running = k8s.V1ContainerState(running=k8s.V1ContainerStateRunning(started_at=started))
        container = k8s.V1ContainerStatus(
            name="master", image="x", image_id="x", ready=True, restart_count=0, state=running
        )
        self.masters = [
            k8s.V1Pod(
                metadata=k8s.V1ObjectMeta(name="kv-master-a"), status=k8s.V1PodStatus(container_statuses=[container])
            )
        ]

    def fleet(self, name: str, ready: int, reason: str = "Complete", **spec: Any) -> None:
        """A fleet of this pool, and what its status says."""
        progressing = {
            "type": "Progressing",
            "status": "False",
            "reason": reason,
            "lastTransitionTime": "2026-01-02T00:00:00Z",
        }
        body = {
            "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "generation": 1},
            "spec": {
                "model": {"source": "pvc://w/a", "servedName": "tiny"},
                "kvCache": {"poolRef": {"name": "kv"}},
                **spec,
            },
            "status": {"conditions": [progressing], "readyReplicas": ready},
        }
        self.fleets.append(parse(DEPLOYMENT, body))
