"""Where a pool's wipers are, which token they take, and whether they are spoken to over TLS: a pod says so, as it was
made for one or the other.

The look at the pod is in the way of a removal, so it is left out for pools that have nothing to do with TLS.
"""

from __future__ import annotations

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import KVCachePool, KVCachePoolStatus
from moontide.engines.client import fan_out, wiper_refusal
from moontide.kube.client import Resource
from moontide.planning.model import Fleet
from moontide.planning.rotation import Taker
from moontide.reconcile import needs
from moontide.reconcile.context import Context
from moontide.resources import admintls


def secret_of(pool: Resource[KVCachePool]) -> str | None:
    """The Secret with the wiper's certificate."""
    found = pool.model.spec.master.wiper_tls_secret_ref
    return found.name if found is not None else None


async def check(ctx: Context, pool: Resource[KVCachePool]) -> None:
    """Raises :class:`moontide.errors.InvalidSpec` (``SecretMissing``) where that Secret does not exist."""
    secret, meta = secret_of(pool), pool.meta
    if secret is None or needs.met_lately(ctx, meta):
        return
    host = naming.service_host(naming.master(meta.name), meta.namespace)
    await needs.check_certificate(ctx, meta.namespace, secret, "spec.master.wiperTlsSecretRef", host)
    needs.remember(ctx, meta)


def may_serve_tls(pool: Resource[KVCachePool]) -> bool:
    """Whether a pod of the pool may have a wiper that serves TLS."""
    return secret_of(pool) is not None or bool(pool.model.status is not None and pool.model.status.wiper_tls)


async def tls_of(ctx: Context, pool: Resource[KVCachePool]) -> bool | None:
    """``status.wiperTls``: it stays until no pod is left that was made with a certificate."""
    before = pool.model.status or KVCachePoolStatus()
    if secret_of(pool) is not None:
        return True
    if not before.wiper_tls:
        return None
    return (
        any(admintls.serves(pod, admintls.WIPER) for pod in await _pods(ctx, pool.meta.namespace, pool.meta.name))
        or None
    )


async def base_url(ctx: Context, fleet: Fleet) -> str:
    """Of the wiper of the fleet's pool. Over TLS unless the pod at hand was made without."""
    assert fleet.pool is not None
    place = f"{naming.service_host(naming.master(fleet.pool), fleet.namespace)}:{naming.WIPER_PORT}"
    if not fleet.wiper_tls:
        return f"http://{place}"
    pods = at_hand(await _pods(ctx, fleet.namespace, fleet.pool))
    secured = not pods or any(admintls.serves(pod, admintls.WIPER) for pod in pods)
    return f"{'https' if secured else 'http'}://{place}"


def at_hand(pods: list[k8s.V1Pod]) -> list[k8s.V1Pod]:
    """Those of a pool's masters that its Service may lead to: the leader, where there is one; no pod that goes while
    another stays."""
    leading = [pod for pod in pods if labels.LEADER in ((pod.metadata and pod.metadata.labels) or {})] or pods
    return [pod for pod in leading if pod.metadata is None or pod.metadata.deletion_timestamp is None] or leading


async def ask_each(ctx: Context, pool: Resource[KVCachePool], token: str) -> list[Taker]:
    """What each wiper of the pool answers to this token alone: one beside each master, whoever leads."""
    meta = pool.meta
    pods = [pod for pod in await _pods(ctx, meta.namespace, meta.name) if _runs(pod)]

    async def ask(pod: k8s.V1Pod) -> Taker:
        assert pod.metadata is not None
        assert pod.status is not None
        address, secured = str(pod.status.pod_ip), admintls.serves(pod, admintls.WIPER)
        host = f"[{address}]" if ":" in address else address
        url = f"{'https' if secured else 'http'}://{host}:{naming.WIPER_PORT}"
        name = naming.service_host(naming.master(meta.name), meta.namespace) if secured else ""
        reason = await wiper_refusal(ctx.http, url, token, server_name=name)
        return Taker(str(pod.metadata.name), reason, terminating=pod.metadata.deletion_timestamp is not None)

    return await fan_out(pods, ask)


def _runs(pod: k8s.V1Pod) -> bool:
    """A pod without an address has not started: it begins with the Secret as it is then."""
    return pod.status is not None and bool(pod.status.pod_ip) and pod.status.phase not in ("Succeeded", "Failed")


async def _pods(ctx: Context, namespace: str, pool: str) -> list[k8s.V1Pod]:
    return await ctx.kube.list_pods(namespace, labels.selector(labels.store_labels(pool)))
