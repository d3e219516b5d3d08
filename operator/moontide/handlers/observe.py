"""kopf's part: it watches, and tells :class:`moontide.handlers.routes.Routes`. It decides and writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn

import kopf
from kopf._cogs.structs.references import Insights

from moontide import labels
from moontide.api.v1alpha1 import GROUP, VERSION
from moontide.handlers.routes import Routes
from moontide.kube.kinds import KINDS
from moontide.kube.sight import Sight

CHILDREN = (("", "v1", "pods"), ("apps", "v1", "deployments"), ("", "v1", "services"), ("", "v1", "configmaps"))
"""Kinds of children that are watched. Secrets are not: the operator may not read them; a resync repairs them."""

PLURALS = {each.kind: each.plural for each in KINDS}


def registry(routes: Routes, sight: Sight) -> kopf.OperatorRegistry:
    """The handlers of one operator process. What they see is kept in ``sight``, too."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    for kind in KINDS:

        @kopf.on.event(GROUP, VERSION, kind.plural, registry=made, param=kind.kind, id=f"see-{kind.plural}")
        async def resource(
            *,
            namespace: str | None,
            name: str,
            body: Mapping[str, Any],
            type: str | None,
            param: Any = None,
            **_: Any,
        ) -> None:
            if namespace is not None:
                sight.saw(PLURALS[param], body, type == "DELETED")
                routes.resource(param, namespace, name, body, deleted=type == "DELETED")

    for group, version, plural in CHILDREN:

        @kopf.on.event(
            group,
            version,
            plural,
            registry=made,
            labels={labels.MANAGED_BY: labels.MANAGER},
            param=plural,
            id=f"see-{plural}",
        )
        async def child(
            *,
            namespace: str | None,
            labels: Mapping[str, str],
            body: Mapping[str, Any],
            type: str | None,
            param: Any = None,
            **_: Any,
        ) -> None:
            # What the operator's own apply made of it is nothing new.
            if namespace is not None and sight.saw(param, body, type == "DELETED"):
                routes.child(namespace, labels)

    return made


class NoDifferences(kopf.AnnotationsDiffBaseStorage):
    """For handlers of events alone: kopf would copy every object twice to find out how it differs from before."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return {}


def settings(*, cluster_wide: bool) -> kopf.OperatorSettings:
    """kopf's settings: no peering, nothing written to any object, and every wait bounded."""
    made = kopf.OperatorSettings()
    # Looking for new CRDs while running needs rights that a Role cannot give.
    made.scanning.disabled = not cluster_wide
    made.peering.standalone = True
    made.posting.enabled = False
    made.persistence.finalizer = labels.FINALIZER
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP, v1=False)
    made.persistence.diffbase_storage = NoDifferences(prefix=GROUP, v1=False)
    made.watching.server_timeout = 300
    made.watching.client_timeout = 310
    made.watching.connect_timeout = 10
    made.networking.request_timeout = 30
    made.execution.default_backoff = 10
    selector = f"{labels.MANAGED_BY}={labels.MANAGER}"
    for group, version, plural in CHILDREN:
        made.watching.label_selectors[group, version, plural] = selector
    return made


class WatchEnded(Exception):
    """Nobody tells this process of changes any more."""


async def guard(insights: Insights, stop: asyncio.Event, seconds: float = 5.0) -> NoReturn:
    """Raise :class:`WatchEnded` when a watch is missing at two looks, ``seconds`` apart.

    kopf goes on when one of its watches returns without an error or is cancelled, and looks alive ever after.
    """
    before: set[str] = set()
    while True:
        await asyncio.sleep(seconds)
        wanted = {
            f"watcher for {resource}@{namespace if resource.namespaced else None}"
            for resource in insights.watched_resources
            for namespace in insights.namespaces
        }
        missing = wanted - {task.get_name() for task in asyncio.all_tasks()}
        if missing & before and not stop.is_set():
            raise WatchEnded(f"no {', '.join(sorted(missing & before))}")
        before = missing
