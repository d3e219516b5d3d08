"""The one door to the API server: typed reads, server-side apply, status, Events.

Every method raises :class:`moontide.errors.Retry` or :class:`moontide.errors.InvalidSpec` where the API server refuses
or cannot be reached (see :mod:`moontide.kube.errors`); none returns success without the server's answer.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast
from urllib.parse import urlsplit

from kubernetes.aio import client as k8s
from kubernetes.aio.client.exceptions import ApiException
from pydantic import ValidationError

from moontide import labels
from moontide.api.v1alpha1 import (
    API_VERSION,
    GROUP,
    VERSION,
    Api,
    InferenceDeployment,
    InferenceDeploymentStatus,
    KVCachePool,
    KVCachePoolStatus,
    PolicyVersion,
    PolicyVersionStatus,
)
from moontide.errors import InvalidSpec, Retry
from moontide.kube.applying import APPLY, readable_as_yaml
from moontide.kube.errors import found_or_none, mapped
from moontide.kube.kinds import DEPLOYMENT, POLICY, POOL, Kind
from moontide.resources import groups
from moontide.resources.podtemplate import Overridden

T = TypeVar("T", bound=Api)
M = TypeVar("M", bound=Api)
R = TypeVar("R")

MANAGER = "moontide"
MERGE = "application/merge-patch+json"
METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
"""Sent with every write of a Secret: an answer has the whole object otherwise, whoever made it."""
NOT_OURS = "is not of Moontide's making"
"""What the chart's admission policy says of an object that the operator may not touch."""
REQUEST_SECONDS = 15.0
CONNECTIONS = 16
"""At once. One process cannot keep more of them busy, and each costs 300 KiB."""
LISTS_AT_ONCE = 8
"""More namespaces than this are listed in one request."""
EVENT_WINDOW = dt.timedelta(minutes=5)
"""An Event that says the same again within this time is not written."""
_EVENT_MEMORY = 4096

Child = k8s.V1Deployment | k8s.V1Service | k8s.V1ConfigMap | k8s.V1Secret | k8s.V1PodDisruptionBudget | groups.Group
"""The kinds of children that the operator applies."""


@dataclass(frozen=True)
class Meta:
    """What Moontide reads of an object's metadata."""

    name: str
    namespace: str
    uid: str
    generation: int
    deletion_timestamp: str | None = None
    creation_timestamp: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resource(Generic[T]):
    """A custom object: its metadata and its parsed spec and status."""

    meta: Meta
    model: T
    kind: str

    def owner_reference(self) -> k8s.V1OwnerReference:
        """A controller reference to this object: its children go when it goes."""
        return k8s.V1OwnerReference(
            api_version=API_VERSION,
            kind=self.kind,
            name=self.meta.name,
            uid=self.meta.uid,
            controller=True,
            block_owner_deletion=True,
        )


def parse(kind: Kind[T], body: dict[str, Any]) -> Resource[T]:
    """A custom object as the API server sends it. Fields of a newer schema are ignored.

    Raises :class:`InvalidSpec` for an object that the current models cannot read.
    """
    metadata = body["metadata"]
    meta = Meta(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        deletion_timestamp=metadata.get("deletionTimestamp"),
        creation_timestamp=metadata.get("creationTimestamp") or "",
        labels=dict(metadata.get("labels") or {}),
        annotations=dict(metadata.get("annotations") or {}),
    )
    content = {key: body[key] for key in ("spec", "status") if body.get(key) is not None}
    try:
        model = kind.model.model_validate(content, extra="ignore")
    except ValidationError as error:
        raise InvalidSpec("Unreadable", f"{kind.kind} {meta.namespace}/{meta.name}: {error}") from error
    return Resource(meta=meta, model=model, kind=kind.kind)


def asked_for(method: str, url: str) -> tuple[str, str]:
    """What a request is about: its method, and the resource (with its subresource) as RBAC names it."""
    parts = urlsplit(url).path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    return method.lower(), "/".join(rest[::2][:2])


class GuardedClient(k8s.ApiClient):
    """An API client that calls ``allow`` right before each request that may write, and ``count`` before each."""

    def __init__(
        self,
        allow: Callable[[], object],
        count: Callable[[str, str], object] = lambda *_: None,
        connections: int = CONNECTIONS,
    ) -> None:
        configuration = k8s.Configuration.get_default_copy()
        configuration.connection_pool_maxsize = connections
        configuration.client_session_kwargs = {"middlewares": (readable_as_yaml,)}
        super().__init__(configuration)
        self._allow = allow
        self._count = count

    async def call_api(self, method: str, url: str, *args: Any, **kwargs: Any) -> Any:
        if method != "GET":
            self._allow()
        self._count(method, url)
        return await super().call_api(method, url, *args, **kwargs)


class Kube:
    """The operator's API client. Every read asks the API server."""

    def __init__(self, api: k8s.ApiClient, wrote: Callable[[str, dict[str, Any]], object] | None = None) -> None:
        """``wrote`` is told of each custom object, by its plural, whose status was written."""
        self._tell_wrote = wrote
        self._core = k8s.CoreV1Api(api)
        self._apps = k8s.AppsV1Api(api)
        self._custom = k8s.CustomObjectsApi(api)
        self._policy = k8s.PolicyV1Api(api)
        self._events: dict[str, tuple[dt.datetime, int]] = {}

    # Custom objects --------------------------------------------------------------------------------------------

    async def get_policy(self, namespace: str, name: str) -> Resource[PolicyVersion] | None:
        """The PolicyVersion, or None when there is none."""
        return await self._get(POLICY, namespace, name)

    async def get_deployment(self, namespace: str, name: str) -> Resource[InferenceDeployment] | None:
        """The InferenceDeployment, or None when there is none."""
        return await self._get(DEPLOYMENT, namespace, name)

    async def get_pool(self, namespace: str, name: str) -> Resource[KVCachePool] | None:
        """The KVCachePool, or None when there is none."""
        return await self._get(POOL, namespace, name)

    async def list_deployments(self, namespace: str) -> list[Resource[InferenceDeployment]]:
        """Every InferenceDeployment of the namespace, by name."""
        with mapped(f"list InferenceDeployments of {namespace}"):
            answer = await self._custom.list_namespaced_custom_object(
                GROUP, VERSION, namespace, DEPLOYMENT.plural, _request_timeout=REQUEST_SECONDS
            )
        found = [parse(DEPLOYMENT, item) for item in cast("dict[str, Any]", answer)["items"]]
        return sorted(found, key=lambda resource: resource.meta.name)

    async def list_deployments_following(
        self, namespace: str, policy: str, allowed: Collection[str] = ()
    ) -> list[Resource[InferenceDeployment]]:
        """The InferenceDeployments whose ``policyRef`` names ``policy`` of ``namespace``, by namespace and name.

        They are looked for in that namespace and in ``allowed`` ones (``*``: all).
        """
        places = {namespace, *allowed}
        if "*" in places or len(places) > LISTS_AT_ONCE:
            lists = [self._list_naming("", policy)]
        else:
            others = (self._list_naming(each, policy) for each in sorted(places - {namespace}))
            lists = [self.list_deployments(namespace), *others]
        following = [
            each
            for found in await asyncio.gather(*lists)
            for each in found
            if _follows(each, namespace, policy) and ("*" in places or each.meta.namespace in places)
        ]
        return sorted(following, key=lambda each: (each.meta.namespace, each.meta.name))

    async def _list_naming(self, namespace: str, policy: str) -> list[Resource[InferenceDeployment]]:
        """The InferenceDeployments of one namespace (of all: an empty one) that name a policy of that name.

        The API server selects them, so that a fleet costs only those who follow it; one that cannot (before 1.31)
        sends all.
        """
        for selector in (f"spec.policyRef.name={policy}", None):
            more: dict[str, Any] = {"field_selector": selector} if selector else {}
            try:
                with mapped(f"list InferenceDeployments of {namespace or 'all namespaces'}"):
                    answer = await (
                        self._custom.list_namespaced_custom_object(
                            GROUP, VERSION, namespace, DEPLOYMENT.plural, _request_timeout=REQUEST_SECONDS, **more
                        )
                        if namespace
                        else self._custom.list_cluster_custom_object(
                            GROUP, VERSION, DEPLOYMENT.plural, _request_timeout=REQUEST_SECONDS, **more
                        )
                    )
            except InvalidSpec:
                if selector is None:
                    raise
                continue
            break
        return [parse(DEPLOYMENT, item) for item in cast("dict[str, Any]", answer)["items"]]

    async def list_deployments_of_pool(self, namespace: str, pool: str) -> list[Resource[InferenceDeployment]]:
        """The InferenceDeployments of the namespace whose ``kvCache.poolRef`` names ``pool``, by name."""
        return [
            resource
            for resource in await self.list_deployments(namespace)
            if resource.model.spec.kv_cache is not None and resource.model.spec.kv_cache.pool_ref.name == pool
        ]

    async def apply_policy_status(
        self, namespace: str, name: str, status: PolicyVersionStatus, uid: str | None = None
    ) -> bool:
        """Make ``status`` the PolicyVersion's status: what it does not hold is removed.

        With ``uid``, an object of that name but another uid is refused (:class:`Retry`). Returns False when the
        object is gone.
        """
        return await self._apply_status(POLICY, namespace, name, status, uid)

    async def apply_deployment_status(
        self, namespace: str, name: str, status: InferenceDeploymentStatus, uid: str | None = None
    ) -> bool:
        """As :meth:`apply_policy_status`, of an InferenceDeployment. ``adopted`` stays: :meth:`mark_adopted` has it."""
        return await self._apply_status(DEPLOYMENT, namespace, name, status, uid, without="adopted")

    async def mark_adopted(self, namespace: str, name: str, uid: str, changes: Mapping[str, str | None]) -> bool:
        """Write boot ids into ``status.adopted`` of an InferenceDeployment, or remove those with None.

        A merge of single keys: whoever writes others at the same time loses nothing. Returns False when the object
        with this uid is gone.
        """
        body = {"metadata": {"uid": uid}, "status": {"adopted": dict(changes)}}
        with mapped(f"mark engines of {DEPLOYMENT.kind} {namespace}/{name}"):
            try:
                await self._custom.patch_namespaced_custom_object_status(
                    GROUP,
                    VERSION,
                    namespace,
                    DEPLOYMENT.plural,
                    name,
                    body,
                    field_manager=MANAGER,
                    _content_type=MERGE,
                    _request_timeout=REQUEST_SECONDS,
                )
            except ApiException as error:
                if error.status in (404, 409):
                    return False
                raise
        return True

    async def apply_pool_status(
        self, namespace: str, name: str, status: KVCachePoolStatus, uid: str | None = None
    ) -> bool:
        """As :meth:`apply_policy_status`, of a KVCachePool."""
        return await self._apply_status(POOL, namespace, name, status, uid)

    async def _get(self, kind: Kind[T], namespace: str, name: str) -> Resource[T] | None:
        asked = self._custom.get_namespaced_custom_object(
            GROUP, VERSION, namespace, kind.plural, name, _request_timeout=REQUEST_SECONDS
        )
        body = await found_or_none(f"get {kind.kind} {namespace}/{name}", asked)
        return parse(kind, cast("dict[str, Any]", body)) if body is not None else None

    async def _apply_status(
        self, kind: Kind[T], namespace: str, name: str, status: Api, uid: str | None, without: str = ""
    ) -> bool:
        metadata = {"name": name} if uid is None else {"name": name, "uid": uid}
        content = {key: value for key, value in status.to_wire().items() if key != without}
        body = {"apiVersion": API_VERSION, "kind": kind.kind, "metadata": metadata, "status": content}
        asked = self._custom.patch_namespaced_custom_object_status(
            GROUP,
            VERSION,
            namespace,
            kind.plural,
            name,
            body,
            field_manager=MANAGER,
            force=True,
            _content_type=APPLY,
            _request_timeout=REQUEST_SECONDS,
        )
        written = await found_or_none(f"apply status of {kind.kind} {namespace}/{name}", asked)
        if written is not None and self._tell_wrote is not None:
            self._tell_wrote(kind.plural, cast("dict[str, Any]", written))
        return written is not None

    # Children --------------------------------------------------------------------------------------------------

    async def apply(self, *children: Child | Overridden) -> None:
        """Server-side apply of ``children`` in order; the controller reference of each names its owner.

        Raises ``InvalidSpec("NameTaken")`` when an object of that kind and name exists that this owner does not
        control: it is left as it is. All but Secrets are checked before the first is applied.
        """
        bodies: list[tuple[Child, Any]] = [
            (each.child, each.body) if isinstance(each, Overridden) else (each, each) for each in children
        ]
        for child, _ in bodies:
            if not isinstance(child, k8s.V1Secret):
                await self._check_owner(child)
        for child, body in bodies:
            await self._apply(child, body)

    async def apply_made_of(
        self, sources: tuple[Resource[Any] | None, ...], make: Callable[[], Sequence[Child | Overridden]]
    ) -> None:
        """:meth:`apply` what ``make`` returns. That follows from ``sources``, of which the first owns them, alone: who
        knows that the very same were applied need not have them made again."""
        await self.apply(*make())

    async def _apply(self, child: Child, body: Any) -> Any:
        """Apply one. Returns it as the API server has it now; None of a group."""
        name, namespace, _ = _identity(child)
        what = f"apply {child.kind} {namespace}/{name}"
        if isinstance(child, groups.Group):
            await self._apply_group(child, what)
            return None
        if isinstance(child, k8s.V1Secret) and (made := await self._created_secret(child, what)) is not None:
            return made
        with mapped(what):
            return await self._patcher(child)(
                name,
                namespace,
                body,
                field_manager=MANAGER,
                field_validation="Strict",
                force=True,
                _headers=METADATA_ONLY if isinstance(child, k8s.V1Secret) else None,
                _content_type=APPLY,
                _request_timeout=REQUEST_SECONDS,
            )

    async def _created_secret(self, child: k8s.V1Secret, what: str) -> k8s.V1Secret | None:
        """Create ``child`` where its name is free; of the answer only the metadata. Returns None when it exists and its
        owner controls it."""
        name, namespace, owner = _identity(child)
        with mapped(what):
            try:
                made: k8s.V1Secret = await self._create_secret(namespace, child)
                return made
            except ApiException as error:
                if error.status != 409:
                    raise
        seen = await self._secret_metadata(what, namespace, name)
        if seen is not None and not _controls(owner, seen):
            raise _taken(child)
        return None

    async def _create_secret(self, namespace: str, secret: k8s.V1Secret, **more: Any) -> Any:
        return await self._core.create_namespaced_secret(
            namespace,
            secret,
            field_manager=MANAGER,
            _headers=METADATA_ONLY,
            _request_timeout=REQUEST_SECONDS,
            **more,
        )

    async def _secret_metadata(self, what: str, namespace: str, name: str) -> k8s.V1ObjectMeta | None:
        """Of the Secret of that name, or None when there is none. Empty of one that the operator may not touch.

        The operator may not read Secrets. A patch that changes nothing, is a dry run, and asks for metadata tells.
        """
        asked = self._core.patch_namespaced_secret(
            name,
            namespace,
            {},
            dry_run="All",
            field_manager=f"{MANAGER}-look",
            _headers=METADATA_ONLY,
            _content_type=MERGE,
            _request_timeout=REQUEST_SECONDS,
        )
        try:
            seen = await found_or_none(what, asked)
        except Retry as refused:
            if NOT_OURS in refused.reason:
                return k8s.V1ObjectMeta()
            raise
        return seen.metadata if seen is not None else None

    async def _apply_group(self, child: groups.Group, what: str) -> None:
        name, namespace, _ = _identity(child)
        with mapped(what):
            try:
                await self._custom.patch_namespaced_custom_object(
                    groups.GROUP,
                    groups.VERSION,
                    namespace,
                    groups.PLURAL,
                    name,
                    child.body,
                    field_manager=MANAGER,
                    force=True,
                    _content_type=APPLY,
                    _request_timeout=REQUEST_SECONDS,
                )
            except ApiException as error:
                if error.status != 404:
                    raise
                # An apply makes what does not exist, so it is the kind that is not there.
                raise InvalidSpec(
                    "LeaderWorkerSetMissing",
                    f"the cluster has no {groups.GROUP}/{groups.VERSION}, which makes replicas of several pods: "
                    "install LeaderWorkerSet, or write parallelism.nodes: 1 in another InferenceDeployment",
                ) from error

    async def get_group(self, namespace: str, name: str) -> k8s.V1Deployment | None:
        """The LeaderWorkerSet of that name as a Deployment would describe it, or None when there is none."""
        asked = self._custom.get_namespaced_custom_object(
            groups.GROUP, groups.VERSION, namespace, groups.PLURAL, name, _request_timeout=REQUEST_SECONDS
        )
        body = await found_or_none(f"get {groups.KIND} {namespace}/{name}", asked)
        return groups.as_deployment(cast("dict[str, Any]", body)) if body is not None else None

    async def _check_owner(
        self,
        child: k8s.V1Deployment | k8s.V1Service | k8s.V1ConfigMap | k8s.V1PodDisruptionBudget | groups.Group,
    ) -> None:
        name, namespace, owner = _identity(child)
        if isinstance(child, groups.Group):
            group = await self.get_group(namespace, name)
            if group is not None and not _controls(owner, group.metadata):
                raise _taken(child)
            return
        reader: Callable[..., Awaitable[Any]]
        if isinstance(child, k8s.V1Deployment):
            reader = self._apps.read_namespaced_deployment
        elif isinstance(child, k8s.V1Service):
            reader = self._core.read_namespaced_service
        elif isinstance(child, k8s.V1PodDisruptionBudget):
            reader = self._policy.read_namespaced_pod_disruption_budget
        else:
            reader = self._core.read_namespaced_config_map
        asked = reader(name, namespace, _request_timeout=REQUEST_SECONDS)
        live: Any = await found_or_none(f"get {child.kind} {namespace}/{name}", asked)
        if live is not None and not _controls(owner, live.metadata):
            raise _taken(child)

    def _patcher(self, child: Child) -> Callable[..., Awaitable[Any]]:
        if isinstance(child, k8s.V1Deployment):
            return self._apps.patch_namespaced_deployment
        if isinstance(child, k8s.V1Service):
            return self._core.patch_namespaced_service
        if isinstance(child, k8s.V1ConfigMap):
            return self._core.patch_namespaced_config_map
        if isinstance(child, k8s.V1PodDisruptionBudget):
            return self._policy.patch_namespaced_pod_disruption_budget
        return self._core.patch_namespaced_secret

    async def get_child_deployment(self, namespace: str, name: str) -> k8s.V1Deployment | None:
        """The apps/v1 Deployment of that name, or None when there is none."""
        asked = self._apps.read_namespaced_deployment(name, namespace, _request_timeout=REQUEST_SECONDS)
        live: k8s.V1Deployment | None = await found_or_none(f"get Deployment {namespace}/{name}", asked)
        return live

    async def delete_budget(self, namespace: str, name: str, owner: str) -> bool:
        """Delete the PodDisruptionBudget of that name if the object with uid ``owner`` controls it. Returns whether."""
        with mapped(f"delete PodDisruptionBudget {namespace}/{name}"):
            try:
                live = await self._policy.read_namespaced_pod_disruption_budget(
                    name, namespace, _request_timeout=REQUEST_SECONDS
                )
                meta = live.metadata
                if meta is None or not any(ref.controller and ref.uid == owner for ref in meta.owner_references or ()):
                    return False
                await self._policy.delete_namespaced_pod_disruption_budget(
                    name,
                    namespace,
                    body=k8s.V1DeleteOptions(preconditions=k8s.V1Preconditions(uid=meta.uid)),
                    _request_timeout=REQUEST_SECONDS,
                )
            except ApiException as error:
                if error.status in (404, 409):
                    return False
                raise
        return True

    # Pods ------------------------------------------------------------------------------------------------------

    async def list_pods(self, namespace: str, label_selector: str) -> list[k8s.V1Pod]:
        """The pods that ``label_selector`` matches, by name; terminating ones too."""
        with mapped(f"list pods of {namespace}"):
            answer = await self._core.list_namespaced_pod(
                namespace, label_selector=label_selector, _request_timeout=REQUEST_SECONDS
            )
        return sorted(answer.items, key=lambda pod: str(pod.metadata.name if pod.metadata else ""))

    async def read_pods(
        self,
        namespace: str,
        label_selector: str,
        convert: Callable[[k8s.V1Pod], R],
        seen: dict[str, tuple[str, R]],
    ) -> list[R]:
        """``convert`` of the pods that ``label_selector`` matches, by name; terminating ones too.

        ``seen`` has, by uid, the resource version and what was made of it at the last look, and is brought up to date:
        a pod that has not changed is not parsed again, which takes a millisecond.
        """
        with mapped(f"list pods of {namespace}"):
            answer: Any = await self._core.list_namespaced_pod_without_preload_content(
                namespace, label_selector=label_selector, _request_timeout=REQUEST_SECONDS
            )
            text = await answer.read()
            if answer.status >= 300:
                raise ApiException(status=answer.status, reason=answer.reason, body=text.decode(errors="replace"))
        return converted(json.loads(text)["items"], convert, seen)

    async def annotate_pod(self, namespace: str, name: str, uid: str, key: str, value: str) -> bool:
        """Set one annotation on the pod with this uid. Returns False, and changes nothing, when that pod is gone."""
        return await self._mark_pod(namespace, name, {"uid": uid, "annotations": {key: value}})

    async def label_pod(self, namespace: str, name: str, uid: str, key: str, value: str | None) -> bool:
        """As :meth:`annotate_pod`, a label; None removes it."""
        return await self._mark_pod(namespace, name, {"uid": uid, "labels": {key: value}})

    async def _mark_pod(self, namespace: str, name: str, metadata: dict[str, Any]) -> bool:
        body = {"metadata": metadata}
        with mapped(f"mark pod {namespace}/{name}"):
            try:
                await self._core.patch_namespaced_pod(
                    name,
                    namespace,
                    body,
                    field_manager=MANAGER,
                    _content_type=MERGE,
                    _request_timeout=REQUEST_SECONDS,
                )
            except ApiException as error:
                # Only the uid can conflict: a merge patch without a resourceVersion is retried by the API server.
                if error.status in (404, 409):
                    return False
                raise
        return True

    async def delete_pod(self, namespace: str, name: str, uid: str, grace_seconds: int | None = None) -> bool:
        """Delete the pod with this uid, with its own grace period unless ``grace_seconds`` is given.

        Returns False when that pod is gone already; another pod of the same name is not touched.
        """
        options = k8s.V1DeleteOptions(preconditions=k8s.V1Preconditions(uid=uid), grace_period_seconds=grace_seconds)
        with mapped(f"delete pod {namespace}/{name}"):
            try:
                await self._core.delete_namespaced_pod(name, namespace, body=options, _request_timeout=REQUEST_SECONDS)
            except ApiException as error:
                if error.status in (404, 409):
                    return False
                raise
        return True

    # Events ----------------------------------------------------------------------------------------------------

    async def event(
        self,
        regarding: Resource[Any],
        reason: str,
        message: str,
        type: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Write an Event about ``regarding``; the same one again within five minutes is not written.

        An Event tells people; it must not stop a reconcile. So a failure to write one is left out, and the next
        occurrence tries again.
        """
        now = dt.datetime.now(dt.UTC)
        meta = regarding.meta
        digest = hashlib.sha256("\0".join((meta.uid, type, reason, message)).encode()).hexdigest()[:16]
        last, count = self._events.get(digest, (None, 0))
        if last is not None and now - last < EVENT_WINDOW:
            return
        try:
            await self._write_event(regarding, f"{meta.name}.{digest}", reason, message[:1024], type, now, count + 1)
        except (Retry, InvalidSpec):
            return
        if len(self._events) >= _EVENT_MEMORY:
            self._events.pop(next(iter(self._events)))
        self._events[digest] = (now, count + 1)

    async def _write_event(
        self, regarding: Resource[Any], name: str, reason: str, message: str, type: str, now: dt.datetime, count: int
    ) -> None:
        meta = regarding.meta
        event = k8s.CoreV1Event(
            metadata=k8s.V1ObjectMeta(name=name, namespace=meta.namespace),
            involved_object=k8s.V1ObjectReference(
                api_version=API_VERSION, kind=regarding.kind, name=meta.name, namespace=meta.namespace, uid=meta.uid
            ),
            reason=reason,
            message=message,
            type=type,
            source=k8s.V1EventSource(component=MANAGER),
            reporting_component=f"{GROUP}/operator",
            reporting_instance=MANAGER,
            first_timestamp=now,
            last_timestamp=now,
            count=count,
        )
        with mapped(f"event {reason} of {meta.namespace}/{meta.name}"):
            try:
                await self._core.create_namespaced_event(meta.namespace, event, _request_timeout=REQUEST_SECONDS)
            except ApiException as error:
                if error.status != 409:
                    raise
                again = {"lastTimestamp": now.isoformat(), "count": max(count, 2)}
                await self._core.patch_namespaced_event(
                    name, meta.namespace, again, _content_type=MERGE, _request_timeout=REQUEST_SECONDS
                )

    # What specs name ------------------------------------------------------------------------------------------------

    async def secret_exists(self, namespace: str, name: str) -> bool:
        """Whether there is a Secret of that name. Its content is neither asked for nor sent.

        The operator may not read Secrets. To make one, as a dry run, is refused where the name is taken.
        """
        what = f"look for Secret {namespace}/{name}"
        metadata = k8s.V1ObjectMeta(name=name, labels={labels.MANAGED_BY: labels.MANAGER})
        secret = k8s.V1Secret(api_version="v1", kind="Secret", metadata=metadata, type="Opaque")
        with mapped(what):
            try:
                await self._create_secret(namespace, secret, dry_run="All")
            except ApiException as error:
                if error.status == 409:
                    return True
                # A quota of Secrets that is used up, for example, which is no matter of this one.
                if error.status == 403:
                    return await self._secret_metadata(what, namespace, name) is not None
                raise
        return False

    async def claim_exists(self, namespace: str, name: str) -> bool:
        """Whether there is a PersistentVolumeClaim of that name."""
        asked = self._core.read_namespaced_persistent_volume_claim(name, namespace, _request_timeout=REQUEST_SECONDS)
        return await found_or_none(f"get PersistentVolumeClaim {namespace}/{name}", asked) is not None

    # Root key --------------------------------------------------------------------------------------------------

    async def read_secret(self, namespace: str, name: str) -> k8s.V1Secret | None:
        """A Secret of the operator's own namespace, or None when there is none."""
        asked = self._core.read_namespaced_secret(name, namespace, _request_timeout=REQUEST_SECONDS)
        secret: k8s.V1Secret | None = await found_or_none(f"get Secret {namespace}/{name}", asked)
        return secret

    async def create_secret(self, namespace: str, secret: k8s.V1Secret) -> None:
        """Create a Secret. Raises :class:`Retry` when one of that name exists."""
        with mapped(f"create Secret {namespace}/{secret.metadata.name if secret.metadata else ''}"):
            await self._create_secret(namespace, secret)


def converted(
    bodies: Iterable[Mapping[str, Any]], convert: Callable[[k8s.V1Pod], R], seen: dict[str, tuple[str, R]]
) -> list[R]:
    """``convert`` of pods, by name: see :meth:`Kube.read_pods`."""
    now: dict[str, tuple[str, R]] = {}
    found: list[tuple[str, R]] = []
    for body in bodies:
        metadata = body["metadata"]
        version, uid = metadata["resourceVersion"], metadata["uid"]
        known = seen.get(uid)
        if known is None or known[0] != version:
            pod = k8s.V1Pod.from_dict(dict(body))
            assert pod is not None
            known = version, convert(pod)
        now[uid] = known
        found.append((metadata["name"], known[1]))
    seen.clear()
    seen.update(now)
    return [made for _, made in sorted(found, key=lambda each: each[0])]


def _follows(deployment: Resource[InferenceDeployment], namespace: str, policy: str) -> bool:
    ref = deployment.model.spec.policy_ref
    return ref is not None and (ref.namespace or deployment.meta.namespace, ref.name) == (namespace, policy)


def _identity(child: Child) -> tuple[str, str, k8s.V1OwnerReference]:
    metadata = child.metadata
    if metadata is None or not metadata.name or not metadata.namespace or not metadata.owner_references:
        raise ValueError(f"a child needs a name, a namespace and an owner: {child.kind}")
    return metadata.name, metadata.namespace, metadata.owner_references[0]


def _controls(owner: k8s.V1OwnerReference, live: k8s.V1ObjectMeta | None) -> bool:
    references = live.owner_references if live is not None else None
    return any(ref.controller and ref.uid == owner.uid for ref in references or ())


def _taken(child: Child) -> InvalidSpec:
    name, namespace, owner = _identity(child)
    return InvalidSpec(
        "NameTaken",
        f"{child.kind} {namespace}/{name} exists and does not belong to {owner.kind} {owner.name}; "
        f"delete it, or give the {owner.kind} another name",
    )
