"""What `kubectl moontide` read of an API server and of engines, scene by scene, to be read again without them."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moontide.cli.cluster import Cluster, Door, Engine, Reply
from moontide.crdgen import crd
from moontide.engines.client import Unanswered
from moontide.kube.kinds import KINDS
from moontide.planning.model import EngineStatus

Object = dict[str, Any]


def _key(path: str, params: Mapping[str, str] | None, body: Object | None) -> str:
    said = [path, dict(sorted((params or {}).items()))] + ([body] if body is not None else [])
    return json.dumps(said, sort_keys=True)


class Recorder:
    """Reads a cluster, and remembers what it read."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._scenes: Object = {}
        self._scene: Object = {}

    def begin(self, scene: str) -> None:
        """What is read from now on belongs to ``scene``."""
        at = self._cluster.now().isoformat()
        self._scene = self._scenes[scene] = {"now": at, "replies": {}, "engines": {}}

    @property
    def namespace(self) -> str:
        return self._cluster.namespace

    @property
    def server(self) -> str:
        return "https://cluster.example"

    @property
    def direct(self) -> bool:
        return self._cluster.direct

    def now(self) -> dt.datetime:
        return dt.datetime.fromisoformat(self._scene["now"])

    def ask(self, path: str, params: Mapping[str, str] | None = None, body: Object | None = None) -> Reply:
        reply = self._cluster.ask(path, params, body)
        self._scene["replies"][_key(path, params, body)] = {"status": reply.status, "body": _kept(path, reply.body)}
        return reply

    def engines(self, asked: Sequence[Door]) -> list[Engine]:
        found = self._cluster.engines(asked)
        for door, answer in zip(asked, found, strict=True):
            self._scene["engines"][door.address] = (
                {"reason": answer.reason, "message": answer.message}
                if isinstance(answer, Unanswered)
                else {"status": answer.model_dump(mode="json", by_alias=True)}
            )
        return found

    def saved(self, log: Sequence[str]) -> str:
        """Everything, as JSON."""
        return json.dumps({"scenes": self._scenes, "log": list(log)}, indent=1, ensure_ascii=False) + "\n"


_DROPPED = frozenset(
    {"managedFields", "kubectl.kubernetes.io/last-applied-configuration", "volumes", "volumeMounts", "affinity"}
    | {"tolerations", "securityContext", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "ports"}
    | {"command", "args", "initContainers"}
)
_CRDS = "/customresourcedefinitions/"


def _kept(path: str, body: Object) -> Object:
    """What the pictures need of an answer: no token, and no CRD, which is that of the release at hand."""
    if "/secrets/" in path:
        return {"data": {"token": "eA=="}}
    if _CRDS in path:
        return {"metadata": {"name": path.rpartition("/")[2]}} if "spec" in body else body
    return bare(body)


def bare(body: Object) -> Object:
    """Without what nobody looks at."""
    made: Object = {}
    for key, value in body.items():
        if key in _DROPPED:
            continue
        if isinstance(value, dict):
            made[key] = bare(value)
        elif isinstance(value, list):
            made[key] = [bare(each) if isinstance(each, dict) else each for each in value]
        else:
            made[key] = value
    return made


def _crd(name: str) -> Object:
    kind = next(each for each in KINDS if name.startswith(f"{each.plural}."))
    return {**crd(kind), "status": {"conditions": [{"type": "Established", "status": "True"}]}}


@dataclass(frozen=True)
class Replay:
    """One scene of a recording, read as if it were a cluster."""

    scene: Object = field(repr=False)
    namespace: str = "rl"
    server: str = "https://cluster.example"
    direct: bool = False

    def now(self) -> dt.datetime:
        return dt.datetime.fromisoformat(self.scene["now"])

    def ask(self, path: str, params: Mapping[str, str] | None = None, body: Object | None = None) -> Reply:
        """Raises LookupError for what was not asked then, but for rights: all that were asked for were there."""
        found = self.scene["replies"].get(_key(path, params, body))
        if found is None and path.endswith("accessreviews"):
            return Reply(201, {"status": {"allowed": True}})
        if found is not None and _CRDS in path and found["status"] == 200:
            return Reply(200, _crd(path.rpartition("/")[2]))
        if found is None:
            raise LookupError(f"the recording has no answer to {_key(path, params, body)}")
        return Reply(found["status"], found["body"])

    def engines(self, asked: Sequence[Door]) -> list[Engine]:
        answers = [self.scene["engines"][door.address] for door in asked]
        return [
            EngineStatus.model_validate(each["status"])
            if "status" in each
            else Unanswered(each["reason"], each["message"])
            for each in answers
        ]
