"""The operator's API client for reconciles that may look at what the watches have brought, and need not apply twice.

A policy's reconcile, on which it depends what engines serve, reads from the API server itself. With this one it is only
seen that a policy is at rest (:mod:`moontide.reconcile.glance`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from kubernetes.aio import client as k8s
from kubernetes.aio.client.exceptions import ApiException

from moontide import labels
from moontide.api.v1alpha1 import API_VERSION, Api, InferenceDeployment, KVCachePool, PolicyVersion
from moontide.errors import InvalidSpec, Retry
from moontide.kube.client import REQUEST_SECONDS, Child, Kube, Resource, converted, parse
from moontide.kube.errors import mapped
from moontide.kube.kinds import DEPLOYMENT, KINDS, POLICY, POOL, Kind
from moontide.kube.sight import Key, Seen, Sight, named
from moontide.resources import groups
from moontide.resources.podtemplate import Overridden

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Api)
R = TypeVar("R")

NAMES_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
CUSTOM = (DEPLOYMENT.plural, POOL.plural, POLICY.plural)
CHILDREN = ("pods", "deployments", "services", "configmaps")
PAGE = 500
STARTING_SECONDS = 10.0
"""After which a Secret is applied again while a pod that needs it has not started."""
COMPARE_SECONDS = 300.0
"""Between two comparisons of what the watches have brought with what there is."""
BEGIN_SECONDS = 10.0
"""For which the watches may take to bring what there is at the start."""
SOON_SECONDS = 0.5
AGAIN_SECONDS = 60.0
LATE_SECONDS = 5.0
"""An event that has not come in this time is lost."""

_PLURALS = {
    "Deployment": "deployments",
    "Service": "services",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "PodDisruptionBudget": "poddisruptionbudgets",
}
_NONE = ""
"""Digest of an object that must not be."""
_UNWATCHED = ("secrets", "poddisruptionbudgets")


@dataclass(frozen=True)
class _Mark:
    """What tells whether a child has to be applied: a few hundred bytes, where the child has tens of thousands."""

    key: Key
    digest: str
    marks: Mapping[str, str]
    """Its labels that name a fleet or a pool."""


@dataclass(frozen=True)
class _Made:
    """The children of a fleet or pool, and what they were made of."""

    sources: tuple[object, ...]
    children: tuple[_Mark, ...]

    def of(self, sources: tuple[object, ...]) -> bool:
        """Whether they would be made of the very same."""
        return len(sources) == len(self.sources) and all(a is b for a, b in zip(sources, self.sources, strict=True))


class WatchedKube(Kube):
    """Reads from a :class:`Sight`, where that is complete, and applies what would change something.

    What is not watched is applied again after ``repair_seconds``: nothing else would notice that it was changed.
    """

    def __init__(self, api: k8s.ApiClient, sight: Sight, repair_seconds: float) -> None:
        super().__init__(api, sight.saw)
        self._api = api
        self.sight = sight
        self.begun = asyncio.Event()
        """Set when all there is was seen for the first time, or the watches did not bring it in time."""
        self._repair_seconds = repair_seconds

    # Reads ------------------------------------------------------------------------------------------------------

    async def get_deployment(self, namespace: str, name: str) -> Resource[InferenceDeployment] | None:
        found = self._seen(DEPLOYMENT, namespace, name)
        # Which engines of others may serve is in the status, which a policy's reconcile writes, too.
        if found is None or found.model.spec.endpoints is not None:
            return await super().get_deployment(namespace, name)
        return found

    async def get_pool(self, namespace: str, name: str) -> Resource[KVCachePool] | None:
        return self._seen(POOL, namespace, name) or await super().get_pool(namespace, name)

    async def get_policy(self, namespace: str, name: str) -> Resource[PolicyVersion] | None:
        return self._seen(POLICY, namespace, name) or await super().get_policy(namespace, name)

    async def list_deployments_following(
        self, namespace: str, policy: str, allowed: Collection[str] = ()
    ) -> list[Resource[InferenceDeployment]]:
        if DEPLOYMENT.plural not in self.sight.complete:
            return await super().list_deployments_following(namespace, policy, allowed)
        places = None if "*" in allowed else sorted({namespace, *allowed})
        found = []
        for seen in self.sight.every(DEPLOYMENT.plural, places):
            assert seen.body is not None
            ref, home = seen.body["spec"].get("policyRef") or {}, seen.body["metadata"]["namespace"]
            if (ref.get("namespace") or home, ref.get("name")) == (namespace, policy):
                found.append(_parsed(DEPLOYMENT, seen))
        return found

    async def list_deployments_of_pool(self, namespace: str, pool: str) -> list[Resource[InferenceDeployment]]:
        if DEPLOYMENT.plural not in self.sight.complete:
            return await super().list_deployments_of_pool(namespace, pool)
        return [
            _parsed(DEPLOYMENT, seen)
            for seen in self.sight.every(DEPLOYMENT.plural, [namespace])
            if seen.body is not None
            and (((seen.body["spec"].get("kvCache") or {}).get("poolRef") or {}).get("name")) == pool
        ]

    async def get_child_deployment(self, namespace: str, name: str) -> k8s.V1Deployment | None:
        """As of :class:`Kube`, but of its spec only the replicas and the grace period; one that is not labelled as
        Moontide's is not seen."""
        if "deployments" not in self.sight.complete:
            return await super().get_child_deployment(namespace, name)
        seen = self.sight.get("deployments", namespace, name)
        if seen is None or seen.body is None:
            return None
        return _once(seen, k8s.V1Deployment.from_dict)

    async def list_pods(self, namespace: str, label_selector: str) -> list[k8s.V1Pod]:
        """As of :class:`Kube`; of the specs only how admin ports are served."""
        if "pods" not in self.sight.complete:
            return await super().list_pods(namespace, label_selector)
        found = self._pods(namespace, label_selector)
        return [pod for body in found if (pod := k8s.V1Pod.from_dict(body)) is not None]

    async def read_pods(
        self,
        namespace: str,
        label_selector: str,
        convert: Callable[[k8s.V1Pod], R],
        seen: dict[str, tuple[str, R]],
    ) -> list[R]:
        """As of :class:`Kube`; of the specs only how admin ports are served."""
        if "pods" not in self.sight.complete:
            return await super().read_pods(namespace, label_selector, convert, seen)
        return converted(self._pods(namespace, label_selector), convert, seen)

    def _pods(self, namespace: str, label_selector: str) -> list[dict[str, Any]]:
        wanted = dict(part.split("=", 1) for part in label_selector.split(","))
        return self.sight.selected("pods", namespace, wanted)

    def _seen(self, kind: Kind[T], namespace: str, name: str) -> Resource[T] | None:
        if kind.plural not in self.sight.complete:
            return None
        seen = self.sight.get(kind.plural, namespace, name)
        return _parsed(kind, seen) if seen is not None and seen.body is not None else None

    # Children ---------------------------------------------------------------------------------------------------

    async def apply(self, *children: Child | Overridden) -> None:
        """As of :class:`Kube`, but for what was applied like this and has not been changed since."""
        await super().apply(*(each for each in children if not self._stands(_mark(each))))

    async def apply_made_of(
        self, sources: tuple[Resource[Any] | None, ...], make: Callable[[], Sequence[Child | Overridden]]
    ) -> None:
        """As of :class:`Kube`. Where the sources are as they were and all children stand, none is made."""
        owner = sources[0]
        assert owner is not None
        plural = next(kind.plural for kind in KINDS if kind.kind == owner.kind)
        seen = self.sight.get(plural, owner.meta.namespace, owner.meta.name)
        if seen is None or seen.made.get("model") is not owner:
            await self.apply(*make())
            return
        known: _Made | None = seen.made.get("children")
        if known is not None and known.of(sources) and all(self._stands(each) for each in known.children):
            return
        children = make()
        marks = [_mark(each) for each in children]
        await super().apply(*(each for each, mark in zip(children, marks, strict=True) if not self._stands(mark)))
        kept = tuple(mark for mark in marks if mark is not None)
        if len(kept) == len(marks):
            seen.made["children"] = _Made(sources, kept)

    def _stands(self, mark: _Mark | None) -> bool:
        if mark is None:
            return False
        seconds = None
        if mark.key[0] in _UNWATCHED:
            seconds = self._repair_seconds
            if mark.key[0] == "secrets" and self._starting(mark):
                seconds = min(seconds, STARTING_SECONDS)
        return self.sight.stands(mark.key, mark.digest, seconds)

    def _starting(self, mark: _Mark) -> bool:
        """Whether a pod of the fleet or pool waits to start: without its Secret it would wait for ever."""
        if not mark.marks:
            return True
        pods = self.sight.selected("pods", mark.key[1], mark.marks)
        return any((pod.get("status") or {}).get("phase") == "Pending" for pod in pods)

    async def _check_owner(self, child: Any) -> None:
        if not isinstance(child, groups.Group):
            key, owner = _key(child), _owner(child)
            seen = self.sight.get(*key) if key[0] in self.sight.complete else None
            if (seen is not None and owner in seen.owners) or self._known(child) is not None:
                return
        await super()._check_owner(child)

    async def _apply(self, child: Child, body: Any) -> Any:
        if isinstance(child, groups.Group):
            return await super()._apply(child, body)
        key, digest = _key(child), _digest(body)
        uid = self._known(child)
        try:
            # Whoever made another object of that name meanwhile keeps it: the uid is not that one's.
            live = await super()._apply(child, body if uid is None else _bound(body, uid))
        except (Retry, InvalidSpec):
            if uid is None:
                raise
            self.sight.forget(key)
            await super()._check_owner(child) if not isinstance(child, k8s.V1Secret) else None
            live = await super()._apply(child, body)
        if live is not None and live.metadata is not None:
            self._learn(key, digest, _owner(child), live)
        return live

    def _known(self, child: Child) -> str | None:
        """UID of the object of a kind that is not watched, where its owner has applied to it before."""
        key = _key(child)
        return self.sight.uid_of(key, _owner(child)) if key[0] in _UNWATCHED else None

    async def _created_secret(self, child: k8s.V1Secret, what: str) -> k8s.V1Secret | None:
        return None if self._known(child) is not None else await super()._created_secret(child, what)

    def _learn(self, key: Key, digest: str, owner: str, live: Any) -> None:
        body = live.model_dump(mode="json", by_alias=True, exclude_none=True) if key[0] == "deployments" else None
        metadata = live.metadata.model_dump(mode="json", by_alias=True, exclude_none=True)
        if key[0] not in _UNWATCHED:
            self.sight.saw(key[0], body or {"metadata": metadata})
        self.sight.applied(key, digest, owner, metadata)

    async def delete_budget(self, namespace: str, name: str, owner: str) -> bool:
        """As of :class:`Kube`; one that was not there lately is not looked for."""
        key = (_PLURALS["PodDisruptionBudget"], namespace, name)
        if self.sight.stands(key, _NONE, self._repair_seconds):
            return False
        deleted = await super().delete_budget(namespace, name, owner)
        self.sight.applied(key, _NONE, owner, {"uid": ""})
        return deleted

    # What there is ----------------------------------------------------------------------------------------------

    async def compare(self, plural: str, namespace: str) -> tuple[list[tuple[Key, Seen]], dict[Key, int]]:
        """Compare what was seen of a kind with a listing of names: in all namespaces, where that is empty. Returns
        what is gone, without that an event told of it, and what was not seen as new as it is."""
        listed: dict[Key, int] = {}
        version, more = 0, ""
        while True:
            answer = await self._names(plural, namespace, more)
            metadata = answer["metadata"]
            listed |= named(plural, (each["metadata"] for each in answer["items"] or ()))
            said = str(metadata.get("resourceVersion") or "")
            version, more = version or (int(said) if said.isdigit() else 0), metadata.get("continue") or ""
            if not more:
                break
        gone, behind = self.sight.compare(plural, listed, version)
        return gone, {key: listed[key] for key in behind}

    async def _names(self, plural: str, namespace: str, more: str) -> dict[str, Any]:
        base = {"deployments": "/apis/apps/v1"}.get(plural, f"/apis/{API_VERSION}" if plural in CUSTOM else "/api/v1")
        place = f"/namespaces/{namespace}" if namespace else ""
        query = [("limit", PAGE), *([("continue", more)] if more else [])]
        if plural not in CUSTOM:
            query.append(("labelSelector", f"{labels.MANAGED_BY}={labels.MANAGER}"))
        method, url, headers, body, _ = await self._api.param_serialize(
            method="GET",
            resource_path=f"{base}{place}/{plural}",
            query_params=query,
            header_params={"Accept": NAMES_ONLY},
            auth_settings=["BearerToken"],
        )
        with mapped(f"list names of {plural}"):
            answer = await self._api.call_api(method, url, headers, body, _request_timeout=REQUEST_SECONDS)
            text = await answer.read()  # type: ignore[no-untyped-call]
            if answer.status != 200:
                raise ApiException(http_resp=answer)
        found: dict[str, Any] = json.loads(text)
        return found

    async def keep_honest(
        self, namespace: str, gone: Callable[[Key, Seen], None], seconds: float = COMPARE_SECONDS
    ) -> NoReturn:
        """Compare for ever. A kind is complete while nothing of it is missing; what is gone is told to ``gone``."""
        clock = asyncio.get_running_loop().time
        started, late, wait = clock(), 0.0, SOON_SECONDS
        while True:
            await asyncio.sleep(wait)
            for plural in (*CUSTOM, *CHILDREN):
                try:
                    await self._look(plural, namespace, gone, late)
                except (Retry, InvalidSpec) as error:
                    logger.info("what the watches have brought was not compared: %s", error)
            complete = self.sight.complete.issuperset((*CUSTOM, *CHILDREN))
            if self.begun.is_set():
                late, wait = LATE_SECONDS, seconds if complete else min(seconds, AGAIN_SECONDS)
            elif complete or clock() - started > BEGIN_SECONDS:
                self.begun.set()
                # A watch of which nothing was there to see may not have begun when this was compared.
                late, wait = LATE_SECONDS, min(seconds, AGAIN_SECONDS)

    async def _look(self, plural: str, namespace: str, gone: Callable[[Key, Seen], None], late: float) -> None:
        missing, behind = await self.compare(plural, namespace)
        for key, seen in missing:
            logger.warning("no event told that %s is gone", "/".join(key))
            gone(key, seen)
        if behind:
            await asyncio.sleep(late)
        lost = self.sight.behind(plural, behind)
        if not lost:
            self.sight.complete.add(plural)
            return
        if plural in self.sight.complete:
            logger.warning("no event told of %s of %s; they are read from the API server", len(lost), plural)
        self.sight.complete.discard(plural)


def _parsed(kind: Kind[T], seen: Seen) -> Resource[T]:
    """The object, parsed once."""
    return _once(seen, lambda body: parse(kind, body))


def _once(seen: Seen, convert: Callable[[dict[str, Any]], R]) -> R:
    """What ``convert`` makes of the body, made once: nobody changes it."""
    assert seen.body is not None
    if "model" not in seen.made:
        seen.made["model"] = convert(seen.body)
    found: R = seen.made["model"]
    return found


def _mark(each: Child | Overridden) -> _Mark | None:
    """None for what is applied each time."""
    child, body = (each.child, each.body) if isinstance(each, Overridden) else (each, each)
    if isinstance(child, groups.Group):
        return None
    marks = dict((child.metadata.labels if child.metadata is not None else None) or {})
    wanted = {key: marks[key] for key in (labels.DEPLOYMENT, labels.POOL) if key in marks}
    return _Mark(_key(child), _digest(body), wanted)


def _key(child: Child) -> Key:
    metadata = child.metadata
    assert metadata is not None
    return _PLURALS[str(child.kind)], str(metadata.namespace), str(metadata.name)


def _owner(child: Child) -> str:
    metadata = child.metadata
    assert metadata is not None
    return str((metadata.owner_references or [])[0].uid)


def _digest(body: Any) -> str:
    wire = body if isinstance(body, Mapping) else body.model_dump(mode="json", by_alias=True, exclude_none=True)
    return hashlib.sha256(json.dumps(wire, sort_keys=True, default=str).encode()).hexdigest()


def _bound(body: Any, uid: str) -> Any:
    """The same for the object with this uid and no other."""
    return body.model_copy(update={"metadata": body.metadata.model_copy(update={"uid": uid})})
