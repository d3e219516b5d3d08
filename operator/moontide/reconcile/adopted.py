"""Engines that others launched: a fleet adopts them by URL (``spec.endpoints``). No pod stands for them.

An engine is what its boot id says. Which ones may serve or write is in ``status.adopted`` of the InferenceDeployment
(boot id to URL), written before an engine is first admitted. A boot id leaves it only

- when another engine answers at its URL: the process that had the port is gone;
- when its URL is no longer listed and the engine was seen closed, with its transfers ended;
- when it does not answer and ``spec.endpoints.gone`` says that its process has ended.

An engine belongs to the fleet whose UID is its namespace of keys. Any other is never sent a command, so that a URL that
is wrong, or is listed by two fleets, harms nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from moontide import naming
from moontide.api.v1alpha1 import Endpoints, InferenceDeployment, InferenceDeploymentStatus
from moontide.engines import tls
from moontide.engines.client import STATUS_SECONDS, Unanswered, engine_status, fan_out, refuse_own_fault, send
from moontide.kube.client import Resource
from moontide.planning import protocol
from moontide.planning.model import Command, EngineStatus, Replica, Step
from moontide.reconcile import tokens
from moontide.reconcile.context import Context

logger = logging.getLogger(__name__)

UNKNOWN_SECONDS = 1.0
"""For the answer of a URL where no engine was adopted yet: a change does not wait long for one that is not there."""
CLOSE_REASON = "RemovedFromEndpoints"
Answer = EngineStatus | Unanswered


@dataclass
class Look:
    """What was seen of a fleet's engines."""

    replicas: list[Replica] = field(default_factory=list)
    """Those whose URL is listed; then, ``terminating``, those that are to be closed."""
    changes: dict[str, str | None] = field(default_factory=dict)
    """What of ``status.adopted`` is not so: boot id to its URL, None where nothing is left of it."""


def address_of(url: str) -> str:
    """``host:port``, or the URL itself where it is not http."""
    return url.removeprefix("http://")


def marks_of(deployment: Resource[InferenceDeployment]) -> Mapping[str, str]:
    """``status.adopted``."""
    return (deployment.model.status or InferenceDeploymentStatus()).adopted


async def observe(
    ctx: Context, deployment: Resource[InferenceDeployment], home: str, heard: Mapping[str, EngineStatus]
) -> list[Replica]:
    """The fleet's engines, as they are called in namespace ``home``. ``heard``: see :func:`look`."""
    return (await look(ctx, deployment, home, heard)).replicas


async def look(
    ctx: Context, deployment: Resource[InferenceDeployment], home: str, heard: Mapping[str, EngineStatus] | None = None
) -> Look:
    """Ask every URL that is listed, or where an engine was adopted, and judge what is there.

    ``heard``: what engines said just now, by their URL. Those are not asked.
    """
    endpoints, marks = deployment.model.spec.endpoints or Endpoints(urls=()), marks_of(deployment)
    urls = list(dict.fromkeys([*endpoints.urls, *marks.values()]))
    token = ctx.tokens.each(deployment.meta.uid, tokens.rotations(deployment))
    known, said = set(marks.values()), heard or {}

    async def ask(url: str) -> Answer:
        if url in said:
            return said[url]
        seconds = STATUS_SECONDS if url in known else UNKNOWN_SECONDS
        return await engine_status(ctx.http, address_of(url), token, seconds)

    answers: list[Answer] = await fan_out(urls, ask)
    refuse_own_fault(answers)
    return judge(deployment, dict(zip(urls, answers, strict=True)), home)


def judge(deployment: Resource[InferenceDeployment], answers: Mapping[str, Answer], home: str) -> Look:
    """What the answers, by URL, amount to."""
    spec, marks = deployment.model.spec, marks_of(deployment)
    endpoints = spec.endpoints or Endpoints(urls=())
    places: dict[str, str] = {}
    """Boot id to the first listed URL at which it answers."""
    for url in endpoints.urls:
        answer = answers[url]
        if isinstance(answer, EngineStatus):
            places.setdefault(answer.boot_id, url)
    found = Look(changes={boot: places[boot] for boot, url in marks.items() if places.get(boot, url) != url})

    for url in dict.fromkeys([*endpoints.urls, *marks.values()]):
        listed, answer = url in endpoints.urls, answers[url]
        # Engines that were admitted here and have not been seen elsewhere.
        here = {boot for boot, place in marks.items() if place == url and boot not in found.changes}
        if isinstance(answer, EngineStatus):
            over = here - {answer.boot_id}
            here -= over
        else:
            over = here & set(endpoints.gone)
            here -= over
        found.changes.update(dict.fromkeys(over))
        if not listed and not here:
            continue
        status, error = (None, _unanswered(deployment, url, answer)) if isinstance(answer, Unanswered) else (answer, "")
        if status is not None and listed and not here and (refusal := _refusal(deployment, url, status, places)):
            status, error = None, refusal
        served = bool(here) or (status is not None and status.boot_id in marks)
        replica = Replica(
            name=naming.qualified(address_of(url), deployment.meta.namespace, home),
            pod_uid=url,
            fleet=deployment.meta.uid,
            # A trainer is sent to no engine that is not, or not yet, one of the fleet.
            address=address_of(url) if served or status is not None else None,
            container_id=None,
            may_have_served=served,
            terminating=not listed,
            status=status,
            error=error,
            namespace=deployment.meta.namespace,
            url=url,
            fleet_name=deployment.meta.name,
            tokens=tokens.rotations(deployment),
        )
        found.replicas.append(replica)
        if status is not None and not replica.newcomer and status.boot_id not in marks:
            # Its mark was lost: it must not be passed over when it falls silent.
            found.changes[status.boot_id] = url
    return found


def _refusal(
    deployment: Resource[InferenceDeployment], url: str, engine: EngineStatus, places: Mapping[str, str]
) -> str:
    """Why an engine that was never admitted is left alone; empty when it may be admitted."""
    uid = deployment.meta.uid
    if places[engine.boot_id] != url:
        return f"Duplicate: the engine of {places[engine.boot_id]} answers here, too; remove one of the two URLs"
    if engine.key_namespace != uid:
        return (
            f"WrongKeyNamespace: the engine says MOONTIDE_KEY_NAMESPACE={engine.key_namespace!r}; launch it with the "
            f"UID of this InferenceDeployment, {uid}, there and as cache_prefix of its connector"
        )
    if engine.store.configured and deployment.model.spec.kv_cache is None:
        return (
            "PoolNotNamed: the engine is connected to a store, whose old keys could not be removed; write "
            "spec.kvCache.poolRef, or launch it without a store"
        )
    return ""


def _unanswered(deployment: Resource[InferenceDeployment], url: str, answer: Unanswered) -> str:
    """Why there is no status. What another server answers is not repeated: the URL may be anything."""
    if answer.reason in ("Http401", "Http403"):
        secret = naming.admin_secret(deployment.meta.name)
        return (
            f"{answer.reason}: {url} does not take the fleet's token: write the token of Secret {secret} into the "
            "engine's MOONTIDE_ADMIN_TOKEN_FILE"
        )
    if answer.reason in ("Timeout", "Unreachable", tls.REASON):
        return f"{answer.reason}: {answer.message}"
    return f"{answer.reason}: what answers at {url} is no admin port of an engine with the Moontide plugin"


async def mark(ctx: Context, replica: Replica) -> bool:
    """Before an admission: write that the engine may have served from now on. False when the fleet is gone."""
    assert replica.status is not None
    return await ctx.kube.mark_adopted(
        replica.namespace, replica.fleet_name, replica.fleet, {replica.status.boot_id: replica.url}
    )


async def release(ctx: Context, deployment: Resource[InferenceDeployment]) -> None:
    """Close the engines whose URL is no longer listed, and forget those of which nothing is left."""
    meta = deployment.meta
    seen = await look(ctx, deployment, meta.namespace)
    commands = []
    for replica in seen.replicas:
        engine = replica.status
        if not replica.terminating or engine is None:
            continue
        epoch = max(engine.epoch, engine.command_epoch)
        if engine.state != "closed":
            body: dict[str, str | int | float | bool | None] = {"reason": CLOSE_REASON}
            commands.append(Command(Step.CLOSE, replica, epoch, body, protocol.CALL_SECONDS))
        elif not engine.drained:
            commands.append(Command(Step.DRAIN, replica, epoch, {}, protocol.ATTEMPT_SECONDS))
        else:
            seen.changes[engine.boot_id] = None
    token = ctx.tokens.each(meta.uid, tokens.rotations(deployment))
    for result in await fan_out(commands, lambda command: send(ctx.http, command, token, ctx.term())):
        assert isinstance(result.action, Command)
        logger.info(
            "%s %s, which is no longer listed: %s",
            result.action.step.value,
            result.action.replica.name,
            "done" if result.success else f"{result.reason}: {result.message}",
            extra={"resource": f"InferenceDeployment/{meta.namespace}/{meta.name}"},
        )
    if seen.changes:
        await ctx.kube.mark_adopted(meta.namespace, meta.name, meta.uid, seen.changes)
