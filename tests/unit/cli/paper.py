"""A cluster on paper: objects in memory, read as the API server would give them. For refusals and recorded states."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moontide.cli.cluster import Door, Engine, Reply
from moontide.engines.client import Unanswered
from moontide.planning.model import EngineStatus
from tests.unit.planning.world import World

Object = dict[str, Any]
NOW = dt.datetime(2026, 11, 28, 12, 0, tzinfo=dt.UTC)
MOONTIDE = "/apis/moontide.dev/v1alpha1"


@dataclass
class PaperCluster:
    """Lists are paths of collections; what is below one is an object of it."""

    lists: dict[str, list[Object]] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    """Beginnings of paths that may not be read."""
    installed: bool = True
    answers: dict[str, Engine] = field(default_factory=dict)
    """By address."""
    replies: dict[str, Reply] = field(default_factory=dict)
    """By path: what is said instead."""
    rights: bool = True
    namespace: str = "rl"
    server: str = "https://paper.example (a test)"
    direct: bool = False
    asked: list[str] = field(default_factory=list)

    def now(self) -> dt.datetime:
        return NOW

    def add(self, path: str, *objects: Object) -> None:
        self.lists.setdefault(path, []).extend(objects)

    def ask(self, path: str, params: Mapping[str, str] | None = None, body: Object | None = None) -> Reply:
        self.asked.append(path)
        if path in self.replies:
            return self.replies[path]
        if any(path.startswith(each) for each in self.denied):
            return Reply(403, {"message": f"user cannot read {path}"})
        if path == "/version":
            return Reply(200, {"gitVersion": "v1.36.0"})
        if path.endswith("selfsubjectreviews"):
            return Reply(201, {"status": {"userInfo": {"username": "ann"}}})
        if path.endswith("accessreviews"):
            return Reply(201, {"status": {"allowed": self.rights}})
        if path.startswith(MOONTIDE) and not self.installed:
            return Reply(404, {}, "404 page not found")
        if path == MOONTIDE:
            return Reply(200, {"kind": "APIResourceList"})
        folder, _, name = path.rpartition("/")
        if folder in self.lists:
            found = next((each for each in self.lists[folder] if each["metadata"]["name"] == name), None)
            if found is not None:
                return Reply(200, found)
        kind, namespaced = path.rsplit("/", 1)[-1], "/namespaces/" in path
        is_list = path in self.lists or (kind.endswith("s") and name == kind)
        if is_list and (path in self.lists or (folder.count("/namespaces/") or not namespaced)):
            return Reply(200, {"items": self._items(path)})
        return Reply(404, {"message": f'"{name}" not found', "details": {"name": name}})

    def _items(self, path: str) -> list[Object]:
        if path in self.lists:
            return self.lists[path]
        if "/namespaces/" in path:
            return []
        # Of all namespaces.
        kind = path.rsplit("/", 1)[-1]
        group = path.rsplit("/", 1)[0]
        return [
            each
            for folder, objects in self.lists.items()
            if folder.startswith(f"{group}/namespaces/") and folder.endswith(f"/{kind}")
            for each in objects
        ]

    def engines(self, asked: Sequence[Door]) -> list[Engine]:
        return [
            self.answers.get(door.address, Unanswered("Timeout", f"no answer from {door.address}")) for door in asked
        ]


def paper(world: World, *, fleet: str = "chat", policy: str = "policy", token: bool = True) -> PaperCluster:
    """What the API server and the engines would show of a small world with one fleet."""
    made = PaperCluster()
    namespace = "rl"
    meta = {"namespace": namespace, "creationTimestamp": "2026-11-28T08:00:00Z"}
    spec = world.spec.to_wire()
    made.add(
        f"{MOONTIDE}/namespaces/{namespace}/policyversions",
        {
            "metadata": {
                **meta,
                "name": policy,
                "uid": "policy",
                "generation": world.generation,
                "resourceVersion": "1",
            },
            "spec": spec,
            "status": world.status.to_wire(),
        },
    )
    pods = world.fleets[fleet]
    observed = next(each for each in world.observe().fleets if each.name == fleet)
    current = sum(r.status is not None and r.status.state == "open" for r in observed.replicas)
    closed = [
        {"name": r.name, "reason": "WaitingForWeights", "message": "push them"}
        for r in observed.replicas
        if r.status is not None and r.status.state == "closed"
    ]
    made.add(
        f"{MOONTIDE}/namespaces/{namespace}/inferencedeployments",
        {
            "metadata": {**meta, "name": fleet, "uid": f"fleet-{fleet}", "generation": 1},
            "spec": {
                "model": {"source": "pvc://w/a", "servedName": "tiny"},
                "replicas": len(pods),
                "kvCache": {"poolRef": {"name": "kv"}},
                "policyRef": {"name": policy},
            },
            "status": {
                "ready": f"{current}/{len(pods)}",
                "current": f"{current}/{len(pods)}",
                "currentReplicas": current,
                "version": world.status.version,
                "epoch": world.status.epoch,
                "closed": closed,
                "conditions": [
                    condition("EnginePatched", "True", "Patched"),
                    condition("Available", "True", "MinimumReplicasAvailable"),
                    condition("PolicyCurrent", "True", "Current"),
                    condition("KVCacheAttached", "True", "Attached"),
                ],
            },
        },
    )
    made.add(
        f"{MOONTIDE}/namespaces/{namespace}/kvcachepools",
        {
            "metadata": {**meta, "name": "kv", "uid": "pool-uid"},
            "spec": {},
            "status": {"clients": 2, "keys": 12, "used": "3 %", "conditions": [condition("Ready", "True", "Serving")]},
        },
    )
    for number, (pod, replica) in enumerate(zip(pods, observed.replicas, strict=True), 1):
        address = f"10.0.0.{number}"
        made.add(
            f"/api/v1/namespaces/{namespace}/pods", pod_of(pod.name, fleet, address, pod.uid, pod.container, pod.mark)
        )
        if isinstance(replica.status, EngineStatus):
            made.answers[f"{address}:8001"] = replica.status
    secret = {"metadata": {**meta, "name": f"{fleet}-admin"}, "data": {"token": "dG9rZW4="}}
    made.add(f"/api/v1/namespaces/{namespace}/secrets", *([secret] if token else []))
    return made


def condition(kind: str, status: str, reason: str, message: str = "") -> Object:
    at = {"lastTransitionTime": "2026-11-28T11:59:00Z", "observedGeneration": 1}
    return {"type": kind, "status": status, "reason": reason, "message": message, **at}


def pod_of(
    name: str, fleet: str, address: str, uid: str, container: str, mark: str | None, seed: str | None = "0"
) -> Object:
    env = [{"name": "PYTHONHASHSEED", "value": seed}] if seed is not None else []
    status = {"name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0}
    running = {"running": {"startedAt": "2026-11-28T08:00:00Z"}}
    return {
        "metadata": {
            "name": name,
            "namespace": "rl",
            "uid": uid,
            "labels": {
                "app.kubernetes.io/managed-by": "moontide",
                "app.kubernetes.io/component": "engine",
                "moontide.dev/deployment": fleet,
            },
            "annotations": {"moontide.dev/admitted-container": mark} if mark else {},
        },
        "spec": {"containers": [{"name": "engine", "env": env}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "containerStatuses": [{**status, "state": running, "containerID": container}],
        },
    }
