"""Reconciles a PolicyVersion: look, plan, write, act, until there is nothing to do. Every decision is the planner's."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import math
import time
from typing import Literal

from moontide import labels
from moontide.api.v1alpha1 import InferenceDeployment, PolicyVersion, PolicyVersionStatus
from moontide.engines.client import (
    CALLS_AT_ONCE,
    begin,
    collect,
    fan_out,
    impatient,
    prepare,
    send,
    wipe,
    wipe_without_store,
)
from moontide.errors import Retry
from moontide.kube.client import Resource
from moontide.planning import protocol
from moontide.planning.model import (
    Action,
    Collect,
    Command,
    Observed,
    Plan,
    Replace,
    Replica,
    Result,
    Step,
    Wipe,
)
from moontide.reconcile import adopted, wipers
from moontide.reconcile.context import GONE_SECONDS, Context
from moontide.reconcile.fleets import observe
from moontide.reconcile.quiet import Quiet
from moontide.reconcile.rounds import Gone, Round
from moontide.status import timestamp

logger = logging.getLogger(__name__)

REPLACE_GRACE_SECONDS = 1
"""Not 0: the pod object must outlive the process, or a frozen engine would be taken for gone."""
TURN_SECONDS = 30.0
"""A reconcile returns after this long, so that the loop shows that it lives."""
LINES_AT_ONCE = 32
"""Log lines that are written in one go while engines are waited for."""
PATIENCE_SECONDS = 1.0
"""How long the replicas that are done with a step wait for the answers of those that are not."""
REMEMBERED_REPLICAS = 16384
UNMANAGED_EPOCH = 0


async def reconcile(ctx: Context, namespace: str, name: str) -> float:
    """Bring the fleets that follow the policy to its version.

    Returns the seconds after which to look again at the latest. Raises :class:`moontide.errors.Retry` when the API
    server does not let it look or write.
    """
    ends = time.monotonic() + TURN_SECONDS
    this = Round(ctx, namespace, name)
    try:
        requeue = None
        while requeue is None and time.monotonic() < ends:
            requeue = await _turn(ctx, this)
        await this.end()
    except Gone:
        this.gone()
        return GONE_SECONDS
    finally:
        this.drop()
    return 0.0 if requeue is None else requeue


async def _turn(ctx: Context, this: Round) -> float | None:
    """One look, one plan, one set of actions. None means: look again at once."""
    policy, fleets = await this.look()
    meta, before = policy.meta, this.status
    observed = Observed(fleets, ctx.now(), meta.uid)
    plan = protocol.plan(policy.model.spec, meta.generation, before, observed)
    # Before the write, which wakes others.
    this.acts(any(isinstance(action, Command) for action in plan.actions))
    await this.write(plan.status)
    this.tell(lambda: _tell(ctx, policy, plan))
    if all(isinstance(action, Collect) for action in plan.actions):
        this.keep(fleets)
    if not plan.actions:
        return None if plan.requeue_after == 0.0 else plan.requeue_after
    results, began = await _act(ctx, this, list(plan.actions), plan.ahead)
    followers = this.followers
    this.tell(lambda: _report(ctx, policy, followers, plan.status, results, began, this.quiet))
    await this.write(protocol.record(plan.status, results, ctx.now()))
    return None if any(result.success for result in results) else plan.requeue_after


async def _tell(ctx: Context, policy: Resource[PolicyVersion], plan: Plan) -> None:
    """Log the plan's notes and leave them as Events."""
    for note in plan.notes:
        logger.info(note.message, extra=_fields(policy, plan.status.epoch, step=note.reason))
        await ctx.kube.event(policy, note.reason, note.message, "Warning" if note.warning else "Normal")


async def _act(
    ctx: Context, this: Round, actions: list[Action], ahead: tuple[Command, ...]
) -> tuple[list[Result], dict[int, dt.datetime]]:
    """Carry the actions out side by side: one result each, and when each began, by the action's id.

    Whoever took longest at its last command is told first: the others' calls take less than its answer then. What
    engines are told with a command of ``ahead`` after it is sent to them before the first of them acts on it.
    """
    limit = asyncio.Semaphore(CALLS_AT_ONCE)
    began: dict[int, dt.datetime] = {}
    if len(ctx.pace) > REMEMBERED_REPLICAS:
        # Those that were deleted are among them.
        ctx.pace.clear()
    actions = sorted(actions, key=lambda action: _pace(ctx, action), reverse=True)

    async def one(action: Action) -> Result:
        async with limit:
            began[id(action)] = ctx.now()
            if isinstance(action, Command) and action.step is Step.ADMIT and not action.replica.may_have_served:
                this.forget()
            result = await perform(ctx, action)
            this.hear(result)
            if isinstance(action, Command):
                ctx.pace[action.replica.pod_uid] = result.seconds
            return result

    _prepare(ctx, actions, ahead)
    # A fence is held back for nobody: its engine waits for no other.
    together = ctx.http.together() if ahead else None
    results: list[Result] = await impatient(actions, one, substitute, PATIENCE_SECONDS, together)
    this.count(results)
    return results, began


def _prepare(ctx: Context, actions: list[Action], ahead: tuple[Command, ...]) -> None:
    """Have engines know all but the last byte of what they are told now, and of what is ``ahead`` of them.

    An admission that an engine knows so is completed at once: it is paused, and the others' need not wait for more than
    one write each.
    """
    next_of, term = {command.replica.pod_uid: command for command in ahead}, ctx.term()
    for action in actions:
        if not isinstance(action, Command):
            continue
        after = next_of.get(action.replica.pod_uid)
        if after is None and action.step is not Step.ADMIT:
            continue
        tokens = ctx.tokens.each(action.replica.fleet, action.replica.tokens)
        if after is not None:
            prepare(ctx.http, (action, after), tokens, term)
        elif action.replica.may_have_served:
            begin(ctx.http, action, tokens, term)


def _pace(ctx: Context, action: Action) -> float:
    """The seconds of the replica's last command; what is no command takes longest."""
    return ctx.pace.get(action.replica.pod_uid, 0.0) if isinstance(action, Command) else math.inf


async def _report(
    ctx: Context,
    policy: Resource[PolicyVersion],
    followers: list[Resource[InferenceDeployment]],
    status: PolicyVersionStatus,
    results: list[Result],
    began: dict[int, dt.datetime],
    quiet: Quiet,
) -> None:
    """Log what came of each action, and leave Events. A failure that goes on is told once. Waits for ``quiet``."""
    epoch = status.epoch
    known = {(failure.replica, failure.step, failure.reason) for failure in status.failures}
    elsewhere = {each.meta.uid: each for each in followers if each.meta.namespace != policy.meta.namespace}

    async def tell(action: Action, reason: str, message: str, type: Literal["Normal", "Warning"] = "Normal") -> None:
        """On the policy, and on a fleet whose people may not see the policy's namespace."""
        await ctx.kube.event(policy, reason, message, type)
        fleet = action.fleet.uid if isinstance(action, Wipe | Collect) else action.replica.fleet
        if fleet in elsewhere:
            await ctx.kube.event(elsewhere[fleet], reason, message, type)

    # A thousand lines take as long as hundreds of calls.
    await quiet.wait()
    for number, result in enumerate(results):
        if number % LINES_AT_ONCE == 0:
            await asyncio.sleep(0)
        action = result.action
        replica, step = protocol.name_of(action), protocol.step_of(action)
        outcome = "done" if result.success else f"{result.reason}: {result.message}"
        told = (replica, step.value, result.reason) in known
        waited_for = result.reason in protocol.WAITED_FOR
        logger.log(
            logging.INFO if result.success else logging.DEBUG if told or waited_for else logging.WARNING,
            "%s %s: %s",
            step.value,
            replica,
            outcome,
            extra=_fields(
                policy,
                epoch,
                replica=replica,
                step=step.value,
                # `kubectl moontide timeline` draws these: status is written during the pause, and has no room for them.
                began=timestamp(began[id(action)]) if id(action) in began else None,
                seconds=round(result.seconds, 4),
            ),
        )
        if isinstance(action, Replace):
            await tell(action, "ReplicaReplaced", f"{replica}: {action.message}", "Warning")
        elif step is Step.CLOSE and result.success:
            await tell(action, "ReplicaClosed", f"{replica}: {action_reason(action)}", "Warning")
        elif step is Step.ADMIT and result.success and _was_closed(action):
            await tell(action, "ReplicaAdmitted", f"{replica} is admitted to epoch {epoch}")
        elif not (result.success or told or waited_for):
            await tell(action, "StepFailed", f"{step.value} {replica}: {result.reason}", "Warning")


def substitute(action: Action) -> Result | None:
    """What a command comes to that others do not wait for any longer; the next look tells what became of it. The
    answers of other steps are waited for: they have the reason why it is not done."""
    if not isinstance(action, Command) or not (action.step is Step.QUIESCE or action.replica.silent):
        return None
    text = f"not yet, after {PATIENCE_SECONDS:g} s in which others were done"
    return Result(action, False, protocol.STILL_WAITING, text)


def _was_closed(action: Action) -> bool:
    """Whether an admission is of a newcomer: those of a barrier are told by the barrier's own Events."""
    return isinstance(action, Command) and action.replica.status is not None and action.replica.status.state == "closed"


def action_reason(action: Action) -> str:
    """The reason that a close command gives, for people."""
    return str(action.body.get("reason", "")) if isinstance(action, Command) else ""


async def perform(ctx: Context, action: Action) -> Result:
    """Carry one action out. What peers do is in the result; the API server's refusals are there too."""
    started = time.monotonic()
    ctx.term()  # Whoever leads no more ends here.
    try:
        if isinstance(action, Replace):
            replica = action.replica
            await ctx.kube.delete_pod(replica.namespace, replica.pod, replica.pod_uid, REPLACE_GRACE_SECONDS)
            return Result(action, True, "Deleted", seconds=time.monotonic() - started)
        if isinstance(action, Wipe | Collect):
            fleet = action.fleet
            if fleet.pool is None or fleet.pool_uid is None:
                return wipe_without_store(action, fleet)
            url, token = await wipers.base_url(ctx, fleet), ctx.tokens.each(fleet.pool_uid, fleet.wiper_tokens)
            if isinstance(action, Collect):
                return await collect(ctx.http, action, url, token, ctx.term())
            return await wipe(ctx.http, action, url, token, ctx.term())
        if action.step is Step.ADMIT:
            refused = await _mark(ctx, action)
            if refused is not None:
                return refused
        tokens = ctx.tokens.each(action.replica.fleet, action.replica.tokens)
        return await send(ctx.http, action, tokens, ctx.term())
    except Retry as error:
        return Result(action, False, "ApiServer", error.reason, seconds=time.monotonic() - started)


async def _mark(ctx: Context, action: Command) -> Result | None:
    """Before an admission: write down which engine may have served from now on. None when that is done."""
    replica = action.replica
    if replica.may_have_served:
        return None
    if replica.url:
        marked = await adopted.mark(ctx, replica)
        return None if marked else Result(action, False, "FleetGone", "the InferenceDeployment was deleted meanwhile")
    if replica.container_id is None:
        return Result(action, False, "ContainerUnknown", "the kubelet has not yet said which container runs")
    written = await ctx.kube.annotate_pod(
        replica.namespace, replica.pod, replica.pod_uid, labels.ADMITTED_CONTAINER, replica.container_id
    )
    return None if written else Result(action, False, "PodGone", "the pod was deleted meanwhile")


def unmanaged_step(replica: Replica, version: str | None) -> Command | None:
    """The next step of a replica whose fleet follows no policy: newcomers are admitted to epoch 0 and resumed.

    ``version``: of its weights; what the engine says where it is None.
    """
    engine = replica.status
    if engine is None or not engine.responsive or replica.terminating or engine.state == "open":
        return None
    if not (engine.clean and engine.drained):
        return None
    epoch = max(engine.epoch, UNMANAGED_EPOCH)
    if engine.state == "closed":
        return Command(
            Step.ADMIT, replica, epoch, {"version": version or engine.weights_version}, protocol.CALL_SECONDS
        )
    return Command(Step.RESUME, replica, epoch, {}, protocol.CALL_SECONDS)


async def reconcile_unmanaged(ctx: Context, deployment: Resource[InferenceDeployment]) -> float:
    """Admit the newcomers of a fleet that follows no policy. Returns the seconds until the next look."""
    model = deployment.model.spec.model
    for _ in range(4):
        fleet = await observe(ctx, deployment)
        commands = [
            command
            for replica in fleet.replicas
            if (command := unmanaged_step(replica, model.version if model is not None else None)) is not None
        ]
        if not commands:
            waiting = any(r.status is None and not r.terminating for r in fleet.replicas)
            rest = 30.0 if model is not None else protocol.ADOPTED_REQUEUE
            return 2.0 if waiting else rest
        results: list[Result] = await fan_out(commands, lambda command: perform(ctx, command))
        ctx.metrics.acted(results)
        for result in results:
            assert isinstance(result.action, Command)
            logger.info(
                "%s %s: %s",
                result.action.step.value,
                result.action.replica.name,
                "done" if result.success else f"{result.reason}: {result.message}",
                extra={"resource": f"InferenceDeployment/{deployment.meta.namespace}/{deployment.meta.name}"},
            )
        if not any(result.success for result in results):
            break
    return 1.0


def _fields(policy: Resource[PolicyVersion], epoch: int, **more: object) -> dict[str, object]:
    return {"resource": f"PolicyVersion/{policy.meta.namespace}/{policy.meta.name}", "epoch": epoch, **more}
