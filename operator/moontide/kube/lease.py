"""A ``coordination.k8s.io`` Lease, as :mod:`moontide.leader` reads and writes it."""

from __future__ import annotations

import copy
import datetime as dt
from dataclasses import dataclass
from typing import Any, cast

from kubernetes.aio import client as k8s
from kubernetes.aio.client.exceptions import ApiException

from moontide import labels
from moontide.kube.errors import mapped

_GROUP, _VERSION, _PLURAL = "coordination.k8s.io", "v1", "leases"


@dataclass(frozen=True)
class Lease:
    """A Lease as the API server has it."""

    body: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.body.get("spec") or {})

    @property
    def holder(self) -> str:
        """Empty when nobody holds it."""
        return str(self.spec.get("holderIdentity") or "")

    @property
    def transitions(self) -> int:
        """How often it was acquired."""
        return int(self.spec.get("leaseTransitions") or 0)

    @property
    def seconds(self) -> float | None:
        """How long it holds without a renewal."""
        found = self.spec.get("leaseDurationSeconds")
        return None if found is None else float(found)

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def term(self) -> int:
        """The term of the period of leadership that it is in."""
        created = dt.datetime.fromisoformat(self.body["metadata"]["creationTimestamp"])
        return int(created.timestamp()) * 1000 + self.transitions

    def with_spec(self, **changes: Any) -> Lease:
        """A copy with other fields of the spec. Its resourceVersion stays: writing it fails if somebody else wrote."""
        body = copy.deepcopy(self.body)
        body["spec"] = {**self.spec, **changes}
        return Lease(body)


class KubeLease:
    """The Lease ``namespace``/``name``. Every request is given ``seconds``."""

    def __init__(self, api: k8s.ApiClient, namespace: str, name: str, seconds: float) -> None:
        self._api = k8s.CustomObjectsApi(api)
        self._where = (_GROUP, _VERSION, namespace, _PLURAL)
        self._name = name
        self._seconds = seconds

    async def read(self) -> Lease | None:
        with mapped(f"get Lease {self._name}"):
            try:
                body = await self._api.get_namespaced_custom_object(
                    *self._where, self._name, _request_timeout=self._seconds
                )
            except ApiException as error:
                if error.status == 404:
                    return None
                raise
        return Lease(cast("dict[str, Any]", body))

    async def create(self, spec: dict[str, Any]) -> None:
        metadata = {"name": self._name, "labels": {labels.MANAGED_BY: labels.MANAGER}}
        body = {"apiVersion": f"{_GROUP}/{_VERSION}", "kind": "Lease", "metadata": metadata, "spec": spec}
        with mapped(f"create Lease {self._name}"):
            try:
                await self._api.create_namespaced_custom_object(*self._where, body, _request_timeout=self._seconds)
            except ApiException as error:
                if error.status != 409:
                    raise

    async def write(self, lease: Lease) -> Lease | None:
        with mapped(f"write Lease {self._name}"):
            try:
                body = await self._api.replace_namespaced_custom_object(
                    *self._where, self._name, lease.body, _request_timeout=self._seconds
                )
            except ApiException as error:
                if error.status in (404, 409):
                    return None
                raise
        return Lease(cast("dict[str, Any]", body))


def now() -> str:
    """The time of day as the API server wants it: always six decimals."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
