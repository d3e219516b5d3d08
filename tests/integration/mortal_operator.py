"""The operator, which kills itself where a file says: ``python -m tests.integration.mortal_operator FOLDER``.

This process forks the operator, and forks the next one when that has ended and ``FOLDER/next`` exists: a container that
restarts in place, without the seconds that imports take. While ``FOLDER/kill`` does not exist, the operator is the
ordinary one, and tells ``FOLDER/effects`` (one JSON object a line) of each action and each write of a PolicyVersion's
status before it begins and when it is done. A write may be of several statuses, the newest of which is written: it is
the write of each of them. ``FOLDER/services`` has the address of every Service: no DNS runs here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from moontide import __main__ as moontide_main
from moontide.api.v1alpha1 import PolicyVersionStatus
from moontide.kube.client import Kube
from moontide.planning import protocol
from moontide.planning.model import Action, Plan, Result
from moontide.reconcile import policyversion

PR_SET_PDEATHSIG = 1
BEFORE, FIRST, AFTER = "before", "after the first", "after"


@dataclass(frozen=True)
class Point:
    """A moment of a change, right before or after one of its effects."""

    when: str
    effect: str
    generation: int = 0
    """The generation of the spec from which on it counts."""

    def __str__(self) -> str:
        return f"{self.when} {self.effect}"


def write_of(before: PolicyVersionStatus, plan: Plan) -> str:
    """What the effect is called in which ``plan``'s status is written over ``before``."""
    if plan.status.epoch > before.epoch:
        return "write of the allotment"
    steps = sorted({protocol.step_of(action).value for action in plan.actions})
    return f"write of the plan to {'+'.join(steps) or 'rest'}"


def record_of(actions: list[Action]) -> str:
    """What the effect is called in which the results of ``actions`` are written."""
    return f"write of the record of {'+'.join(sorted({protocol.step_of(action).value for action in actions}))}"


class Reaper:
    """Tells of effects, and kills this process at the point that the file names."""

    def __init__(self, folder: Path) -> None:
        self._armed = folder / "kill"
        self._services = folder / "services"
        self._modules = folder / "modules"
        self._effects = os.open(folder / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._generation: contextvars.ContextVar[int] = contextvars.ContextVar("generation", default=0)
        self._unwritten: dict[str, list[tuple[object, str]]] = {}
        """By policy: the statuses that are to be written, each made of the one before it, and their effects."""
        self._policy: contextvars.ContextVar[str] = contextvars.ContextVar("policy")
        self._begun: set[str] = set()
        self._completed: set[str] = set()

    def say(self, when: str, effect: str, **more: object) -> None:
        said = {"at": time.monotonic(), "pid": os.getpid(), "when": when, "effect": effect, **more}
        os.write(self._effects, json.dumps(said).encode() + b"\n")

    def armed(self, effect: str) -> str:
        """When this effect is one to die of; empty when it is none."""
        try:
            point = Point(**json.loads(self._armed.read_text()))
        except FileNotFoundError:
            return ""
        return point.when if point.effect == effect and self._generation.get() >= point.generation else ""

    def die(self) -> NoReturn:
        if not self._modules.exists():
            self._modules.write_text("\n".join(sys.modules))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("alive")

    def install(self) -> None:
        """Wrap what has effects."""
        plan, record = protocol.plan, protocol.record
        perform, begin, apply = policyversion.perform, policyversion.begin, Kube.apply_policy_status

        def named_plan(spec: Any, generation: int, status: Any, observed: Any) -> Plan:
            self._generation.set(generation)
            self._policy.set(observed.policy_uid)
            made = plan(spec, generation, status, observed)
            unwritten = self._unwritten.setdefault(observed.policy_uid, [])
            if all(earlier is not status for earlier, _ in unwritten):
                # It was read. What was not written before is lost.
                unwritten.clear()
            if made.status != status:
                unwritten.append((made.status, write_of(status, made)))
            return made

        def named_record(status: Any, results: Any, now: Any) -> PolicyVersionStatus:
            made = record(status, results, now)
            if made != status:
                effect = record_of([result.action for result in results])
                self._unwritten[self._policy.get()].append((made, effect))
            return made

        async def mortal_apply(kube: Any, namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
            assert uid is not None
            unwritten = self._unwritten[uid]
            count = next(index for index, (each, _) in enumerate(unwritten, 1) if each is status)
            effects = [effect for _, effect in unwritten[:count]]
            del unwritten[:count]
            dies = {self.armed(effect) for effect in effects}
            for effect in effects:
                self.say(BEFORE, effect, of=name, epoch=status.epoch)
            if BEFORE in dies:
                self.die()
            written = await apply(kube, namespace, name, status, uid)
            for effect in effects:
                self.say(AFTER, effect, of=name, epoch=status.epoch)
            if AFTER in dies:
                self.die()
            return written

        def mortal_begin(http: Any, action: Any, token: Any, term: int) -> None:
            effect = protocol.step_of(action).value
            when = self.armed(effect)
            if when == BEFORE:
                self.say(BEFORE, effect, of=protocol.name_of(action))
                self.die()
            if when == FIRST and effect in self._completed:
                return
            self._completed.add(effect)
            begin(http, action, token, term)

        async def mortal_perform(ctx: Any, action: Action) -> Result:
            effect = protocol.step_of(action).value
            when = self.armed(effect)
            if when == FIRST:
                if effect in self._begun:
                    await asyncio.Event().wait()
                self._begun.add(effect)
            self.say(BEFORE, effect, of=protocol.name_of(action))
            if when == BEFORE:
                self.die()
            result = await perform(ctx, action)
            self.say(AFTER, effect, of=protocol.name_of(action), outcome=result.reason)
            if when == FIRST:
                self.die()
            return result

        resolve = socket.getaddrinfo

        def resolve_services(host: Any, *arguments: Any, **more: Any) -> Any:
            name = host.decode() if isinstance(host, bytes) else str(host)
            return resolve(self._services.read_text() if name.endswith(".svc") else host, *arguments, **more)

        socket.getaddrinfo = resolve_services
        protocol.plan, protocol.record = named_plan, named_record
        policyversion.perform, policyversion.begin = mortal_perform, mortal_begin
        Kube.apply_policy_status = mortal_apply  # type: ignore[method-assign]


def be_the_operator(folder: Path) -> NoReturn:
    """The child. It ends with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Reaper(folder).install()
    status = 1
    try:
        status = moontide_main.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> int:
    """Run one operator after another. Ends with the status of the last that was not killed."""
    folder = Path(sys.argv[1])
    while True:
        child = os.fork()
        if child == 0:
            be_the_operator(folder)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, frame, child=child: os.kill(child, got))
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return os.waitstatus_to_exitcode(status)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        (folder / "dead").write_text(str(child))
        # Much is imported only when it is used; the next ones have it from the start.
        for name in (folder / "modules").read_text().split():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        while not (folder / "next").exists():
            time.sleep(0.005)
        for name in ("kill", "dead", "next"):
            (folder / name).unlink(missing_ok=True)


def arm(folder: Path, point: Point) -> None:
    """Have the operator die there."""
    draft = folder / "kill.draft"
    draft.write_text(json.dumps(asdict(point)))
    draft.rename(folder / "kill")


if __name__ == "__main__":
    sys.exit(main())
