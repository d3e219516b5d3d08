"""What a fleet's pods need that is not of the operator's making: Secrets and claims that the spec names."""

from __future__ import annotations

import datetime as dt

from moontide import naming
from moontide.api.v1alpha1 import InferenceDeployment
from moontide.errors import InvalidSpec
from moontide.kube.client import Meta, Resource
from moontide.reconcile.context import Context
from moontide.resources import sources

AGAIN_SECONDS = 5.0
"""Nothing tells the operator that a Secret or a claim was made."""
GOOD_FOR = dt.timedelta(minutes=5)
"""How long what was there is not asked for again. A pod that misses it then is listed with the kubelet's reason."""


async def check(ctx: Context, resource: Resource[InferenceDeployment]) -> None:
    """Raises :class:`InvalidSpec` (``SecretMissing``, ``ClaimMissing``) where the spec names what does not exist, and
    (``SourceInvalid``) where the model's source is no place.

    Whether a Secret exists is all that is asked: its content is never read. A key that it lacks shows when the kubelet
    refuses to start the container. While all of it was there for this spec lately, nothing is asked.
    """
    model, namespace = resource.model.spec.model, resource.meta.namespace
    if model is None:
        return
    meta = resource.meta
    if met_lately(ctx, meta):
        return
    try:
        sources.check(model)
    except ValueError as error:
        raise InvalidSpec("SourceInvalid", f"{error}; nothing that runs is changed until then") from error
    for name in sources.secrets(model):
        if not await ctx.kube.secret_exists(namespace, name):
            raise _missing("SecretMissing", f"Secret {name}", namespace)
    secret = resource.model.spec.engine.admin_tls_secret_ref
    if secret is not None:
        host = naming.service_host(meta.name, namespace)
        await check_certificate(ctx, namespace, secret.name, "spec.engine.adminTlsSecretRef", host)
    for name in sources.claims(model):
        if not await ctx.kube.claim_exists(namespace, name):
            raise _missing("ClaimMissing", f"PersistentVolumeClaim {name}", namespace)
    remember(ctx, meta)


def met_lately(ctx: Context, meta: Meta) -> bool:
    """Whether all that the spec names was there lately."""
    generation, at = ctx.needs_met.get(meta.uid, (None, ctx.now()))
    return generation == meta.generation and ctx.now() - at < GOOD_FOR


def remember(ctx: Context, meta: Meta) -> None:
    """All that the spec names is there now."""
    now, met = ctx.now(), ctx.needs_met
    for uid in [uid for uid, (_, at) in met.items() if now - at >= GOOD_FOR]:
        del met[uid]
    met[meta.uid] = (meta.generation, now)


async def check_certificate(ctx: Context, namespace: str, secret: str, field: str, host: str) -> None:
    """Raises :class:`InvalidSpec` (``SecretMissing``) where the certificate that ``field`` names does not exist.

    ``host``: the name that it must be for.
    """
    if await ctx.kube.secret_exists(namespace, secret):
        return
    text = (
        f"Secret {secret} of {field} does not exist in namespace {namespace}: make it, of type kubernetes.io/tls and "
        f"for the DNS name {host} (kubectl create secret tls {secret} -n {namespace} --cert=tls.crt --key=tls.key), or "
        "remove the field; nothing that runs is changed until then"
    )
    raise InvalidSpec("SecretMissing", text)


def _missing(reason: str, what: str, namespace: str) -> InvalidSpec:
    text = f"{what} of spec.model does not exist in namespace {namespace}: create it, or name another one"
    return InvalidSpec(reason, f"{text}; nothing that runs is changed until then")


REASONS = ("SecretMissing", "ClaimMissing")
