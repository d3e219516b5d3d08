"""Who may use a pool: every fleet that names it, or, where it is dedicated, the one that named it first."""

from __future__ import annotations

from collections.abc import Sequence

from moontide.api.v1alpha1 import InferenceDeployment, KVCachePool
from moontide.errors import InvalidSpec
from moontide.kube.client import Resource


def holder(pool: Resource[KVCachePool], fleets: Sequence[Resource[InferenceDeployment]]) -> str | None:
    """UID of the fleet that has a dedicated pool; None for a shared one, and while no fleet names it.

    The one that has it keeps it as long as it names the pool, whoever comes; after it the oldest gets it.
    """
    if pool.model.spec.isolation != "Dedicated":
        return None
    before = pool.model.status.holder if pool.model.status is not None else None
    if any(each.meta.uid == before for each in fleets):
        return before
    waiting = sorted(fleets, key=lambda each: (each.meta.creation_timestamp, each.meta.uid))
    return waiting[0].meta.uid if waiting else None


def refusal(pool: Resource[KVCachePool], fleet: Resource[InferenceDeployment]) -> InvalidSpec | None:
    """Why the fleet may not use the pool it names; None where it may."""
    if pool.model.spec.isolation != "Dedicated":
        return None
    has_it = pool.model.status.holder if pool.model.status is not None else None
    name = pool.meta.name
    if has_it is None:
        return InvalidSpec("WaitingForPool", f"KVCachePool {name} is dedicated and is about to say whose it is")
    if has_it == fleet.meta.uid:
        return None
    return InvalidSpec(
        "PoolTaken",
        f"KVCachePool {name} is dedicated (spec.isolation), and another fleet has it: name another pool, or "
        "write isolation: Shared, where each fleet has a namespace of keys of its own; nothing that runs is changed",
    )
