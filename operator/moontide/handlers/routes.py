"""Who is woken by what. Pure bookkeeping: it remembers which fleet follows which policy and lends to which pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moontide import labels
from moontide.handlers.loops import Key, Loops
from moontide.kube.kinds import DEPLOYMENT, POLICY, POOL


class Routes:
    """Turns observations into wake-ups of :class:`Loops`."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._joined: dict[Key, frozenset[Key]] = {}
        """Fleet → the policy and the pool that its spec names."""
        self._seen: dict[Key, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}

    def resource(self, kind: str, namespace: str, name: str, body: Mapping[str, Any], deleted: bool) -> None:
        """A custom resource was seen, or was seen to be gone.

        A change of its status alone does not wake its own loop, which wrote it, and wakes others only where they
        read what changed.
        """
        key = Key(kind, namespace, name)
        if deleted:
            self._seen.pop(key, None)
            self._loops.retire(key)
            for other in self._neighbours(key, body, deleted):
                self._loops.wake(other)
            return
        own, shared = _own(body), _shared(kind, body)
        before = self._seen.get(key)
        self._seen[key] = (own, shared)
        if before is None or before[0] != own:
            self._loops.start(key)
        if before is None or before != (own, shared):
            for other in self._neighbours(key, body, deleted):
                self._loops.wake(other)

    def child(self, namespace: str, child_labels: Mapping[str, str]) -> None:
        """A labelled child was seen, or was seen to be gone."""
        pool = child_labels.get(labels.POOL)
        if pool is not None:
            self._loops.wake(Key(POOL.kind, namespace, pool))
        fleet = child_labels.get(labels.DEPLOYMENT)
        if fleet is not None:
            key = Key(DEPLOYMENT.kind, namespace, fleet)
            self._loops.wake(key)
            for other in self._joined.get(key, frozenset()):
                if other.kind == POLICY.kind:
                    self._loops.wake(other)

    def _neighbours(self, key: Key, body: Mapping[str, Any], deleted: bool) -> frozenset[Key]:
        if key.kind == DEPLOYMENT.kind:
            before = self._joined.pop(key, frozenset())
            now = frozenset() if deleted else _named(key.namespace, body)
            if now:
                self._joined[key] = now
            return before | now
        return frozenset(fleet for fleet, joined in self._joined.items() if key in joined)


def _named(namespace: str, body: Mapping[str, Any]) -> frozenset[Key]:
    spec = body.get("spec") or {}
    ref = spec.get("policyRef") or {}
    pool = ((spec.get("kvCache") or {}).get("poolRef") or {}).get("name")
    named = set()
    if ref.get("name"):
        named.add(Key(POLICY.kind, ref.get("namespace") or namespace, ref["name"]))
    if pool:
        named.add(Key(POOL.kind, namespace, pool))
    return frozenset(named)


def _own(body: Mapping[str, Any]) -> tuple[Any, ...]:
    metadata = body.get("metadata") or {}
    asked = (metadata.get("annotations") or {}).get(labels.ROTATE_TOKEN)
    return metadata.get("uid"), metadata.get("generation"), metadata.get("deletionTimestamp"), asked


def _shared(kind: str, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """What other kinds read of the status."""
    status = body.get("status") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    if kind == POOL.kind:
        return (conditions.get("Ready") or {}).get("status"), status.get("holder")
    if kind == POLICY.kind:
        return status.get("epoch"), status.get("version"), (conditions.get("Current") or {}).get("reason")
    return ()
