"""The arms of the oracle: changes with prepare and commit, and the plain fan-out, with the same faults in each."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from hack.demo.cold import Cold, References
from hack.demo.fleet import Answer, Fleet, Replica
from hack.demo.judge import Verdict, explain, judge
from hack.demo.kube import Kube, KubeError, NotInTime, Object, is_current, wait
from hack.demo.load import Load
from hack.demo.prompts import Prompts
from hack.demo.story import MODELS, side_of
from tests.e2e.oracle.clients import Router, Stock
from tests.e2e.oracle.disturbances import Fault, Scene, fresh_operator, nothing

CURRENT_SECONDS = 150.0
PUSH_SECONDS = 20.0
LOOK_SECONDS = 3.0
CLIENTS = 6
LEFT_OUT_SHARE = 0.05
BASE_SPEC: Object = {
    "preparing": None,
    "runningRequests": "Wait",
    "requestsDuringBarrier": "Queue",
    "prepareDeadlineSeconds": 120,
    "replicaTimeoutSeconds": 5,
    "onReplicaFailure": "Isolate",
}


@dataclass
class Round:
    """One change, what went wrong meanwhile, and what was answered until the next one."""

    number: int
    fault: str
    phase: str
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Phases, in seconds since 1970."""
    fault_span: tuple[float, float] | None = None
    pause: float | None = None
    note: str = ""
    checked: int = 0
    stale: int = 0
    began: float = 0.0

    @property
    def overlap(self) -> str:
        """Phases that the fault overlapped, with seconds."""
        if self.fault_span is None or self.fault.startswith("none"):
            return ""
        since, until = self.fault_span
        found = []
        for phase, (began, ended) in self.spans.items():
            shared = min(until, ended) - max(since, began)
            if shared > 0:
                found.append(f"{phase} {shared:.1f} s")
        return ", ".join(found) or "nothing"

    def line(self) -> str:
        """For people."""
        took = " ".join(f"{phase} {ended - began:.1f}" for phase, (began, ended) in self.spans.items())
        pause = "" if self.pause is None else f", pause {self.pause:.2f}"
        overlap = f" [overlaps {self.overlap}]" if self.overlap else ""
        note = f" ({self.note})" if self.note else ""
        return (
            f"{self.number:3} {self.fault}{overlap}{note}: {took}{pause} s; {self.checked} checked, {self.stale} stale"
        )


@dataclass
class Outcome:
    """What an arm came to."""

    arm: str
    rounds: list[Round] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    wrong: list[str] = field(default_factory=list)
    """Of each stale answer, where it leaves the reference."""
    unfaulted_stale: int = 0
    """Stale answers of rounds without a fault."""
    base_weights: int = 0
    """Wrong answers of replicas that had restarted since the last push: wrong weights, which no cache explains."""
    changes: int = 0
    trouble: list[str] = field(default_factory=list)
    """Rounds that did not end."""

    def line(self) -> str:
        """For people."""
        return f"{self.arm}: {self.changes} changes, {self.verdict.line()}"

    def data(self) -> dict[str, Any]:
        """For a file."""
        return {
            "arm": self.arm,
            "changes": self.changes,
            "checked": self.verdict.checked,
            "stale": len(self.verdict.stale),
            "began_with_a_hit": self.verdict.cached,
            "straddled": self.verdict.straddled,
            "in_transit": self.verdict.in_transit,
            "in_a_change": self.verdict.blurred,
            "left_out": dict(self.verdict.left_out),
            "base_weights": self.base_weights,
            "rounds": [
                {
                    "fault": each.fault,
                    "phase": each.phase,
                    "overlap": each.overlap,
                    "pause": each.pause,
                    "checked": each.checked,
                    "stale": each.stale,
                }
                for each in self.rounds
            ],
        }


def complaints(outcome: Outcome, least_checked: int) -> list[str]:
    """What is wrong with an arm; empty when nothing is."""
    verdict, found = outcome.verdict, []
    if outcome.arm == "plain fan-out":
        return [] if verdict.stale else ["the plain fan-out left nothing stale: the oracle is too weak to trust"]
    found += [f"{outcome.arm}: {each}" for each in outcome.trouble]
    missing = (row for row in outcome.rounds if row.fault_span is None and not row.fault.startswith("none"))
    found += [f"{outcome.arm}: round {row.number}, {row.fault}, had no fault: {row.note}" for row in missing]
    if verdict.stale:
        found.append(f"{outcome.arm}: {len(verdict.stale)} stale answers")
    if verdict.checked < least_checked:
        found.append(f"{outcome.arm}: {verdict.checked} answers checked, {least_checked} are wanted")
    if 2 * verdict.cached < verdict.checked:
        found.append(f"{outcome.arm}: fewer than half of the checked answers began with a cache hit")
    if verdict.left_out_share > LEFT_OUT_SHARE:
        found.append(f"{outcome.arm}: {verdict.left_out_share:.1%} of the answers were left out")
    if outcome.arm == "Barrier" and verdict.in_transit:
        found.append(f"Barrier: {verdict.in_transit} answers claim no version")
    return found


class _Stage:
    """Runs the phases of one round, and the fault beside the one that it belongs to."""

    def __init__(self, row: Round, fault: Fault, scene: Scene) -> None:
        self._row = row
        self._fault = fault
        self._fire: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        try:
            self._fire = fault.arm(scene)
        except LookupError as error:
            row.note = f"no fault: {error}"

    @contextmanager
    def phase(self, *names: str) -> Iterator[None]:
        """One phase; ``names`` are those whose faults begin with it."""
        if self._fault.phase in names and self._fire is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._fire,))
            self._thread.start()
        began = time.time()
        yield
        before = self._row.spans.get(names[0])
        self._row.spans[names[0]] = (began if before is None else before[0], time.time())

    def _run(self, fire: Callable[[], None]) -> None:
        began = time.time()
        try:
            fire()
        except (KubeError, NotInTime) as error:
            self._row.note = str(error)[:120]
        self._row.fault_span = (began, time.time())

    def join(self) -> None:
        """Wait until the fault is over."""
        if self._thread is not None:
            self._thread.join()


def together(replicas: Sequence[Replica], call: Callable[[Replica], object]) -> list[str]:
    """Call all at once; names of those that failed."""

    def one(replica: Replica) -> str:
        try:
            call(replica)
        except (httpx.HTTPError, OSError, RuntimeError):
            return replica.name
        return ""

    if not replicas:
        return []
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(replicas)) as pool:
        return [name for name in pool.map(one, replicas) if name]


class MoontideArm:
    """Prepared changes of one strategy. No answer is excused for having been under way."""

    def __init__(self, fleet: Fleet, references: References, router: Router, strategy: str) -> None:
        self._fleet = fleet
        self._references = references
        self._router = router
        self._strategy = strategy
        self.by_version: dict[str, tuple[Cold, ...]] = {}
        self.outcome = Outcome(strategy)

    def run(self, texts: Prompts, schedule: Sequence[Fault], answers: int, say: Callable[[str], None]) -> Outcome:
        """One round for each fault of ``schedule``, with ``answers`` good answers after each."""
        self._spec({"strategy": self._strategy, **BASE_SPEC})
        version = self._version()
        self._know(version)
        scene = Scene(self._fleet.kube, self._fleet, self._router, self._fleet.deployment)
        self._all_serve(version)
        try:
            with Load(self._router.ready, self._fleet.model, dict(enumerate(texts.all)), clients=CLIENTS) as load:
                load.until(answers, CURRENT_SECONDS)
                for number, fault in enumerate(schedule, 1):
                    if fault.barrier_only and self._strategy != "Barrier":
                        fault = Fault("none", "quiesce", nothing)
                    try:
                        self._round(number, fault, scene, load, answers)
                    except NotInTime as error:
                        self.outcome.trouble.append(f"round {number}, {fault.name}: {str(error)[:300]}")
                        self._all_serve(self._version())
                    say(self.outcome.rounds[-1].line())
                self._all_serve(self._version())
        finally:
            self._spec({"strategy": "Barrier", **BASE_SPEC, "prepareDeadlineSeconds": 600})
        self._judge(load.answers)
        return self.outcome

    def _round(self, number: int, fault: Fault, scene: Scene, load: Load, answers: int) -> None:
        row = Round(number, fault.name, fault.phase, began=time.time())
        self.outcome.rounds.append(row)
        self._spec(dict(fault.spec))
        stage = _Stage(row, fault, scene)
        try:
            self._changes(stage, row, fault, load, answers)
        finally:
            # Also after a round that did not end: the next one has a fault and a spec of its own.
            stage.join()
            self._spec({name: BASE_SPEC[name] for name, _ in fault.spec})
        if fault.name.startswith("operator"):
            fresh_operator(scene)
        self._heal(str(self._version()))
        row.checked, row.stale = self._so_far(load.answers, row.began)

    def _changes(self, stage: _Stage, row: Round, fault: Fault, load: Load, answers: int) -> None:
        if fault.follow == "abort":
            self._given_up()
        if fault.follow == "death":
            self._dies(stage)
        else:
            self._change(stage, row, wait_current=fault.follow != "burst")
        if fault.follow == "burst":
            self._change(stage, row, wait_current=False)
            self._change(stage, row)
        if fault.follow == "again":
            self._again()
        with stage.phase("collect"):
            self._fleet.until_collected(CURRENT_SECONDS)
        load.until(answers, CURRENT_SECONDS)

    def _change(self, stage: _Stage, row: Round, *, wait_current: bool = True) -> None:
        version = self._version() + 1
        self._know(version)
        with stage.phase("quiesce"):
            self._fleet.prepare(version, CURRENT_SECONDS)
        with stage.phase("push"):
            self._push(version)
        with stage.phase("commit"):
            self._fleet.commit(version)
            if wait_current:
                policy = self._fleet.until_current(str(version), CURRENT_SECONDS)
                row.pause = policy["status"]["lastUpdate"].get("pauseSeconds")
        self.outcome.changes += 1

    def _given_up(self) -> None:
        """A preparation whose weights reached one replica only, and which is then taken back."""
        version = self._version()
        self._know(version + 1)
        self._fleet.prepare(version + 1, CURRENT_SECONDS)
        first = self._router.all[:1]
        together(first, lambda each: each.push_weights(MODELS[side_of(version + 1)], str(version + 1)))
        epoch = int(self._fleet.get_policy()["status"]["epoch"])
        self._spec({"preparing": None})
        wait(lambda: int(self._fleet.get_policy()["status"]["epoch"]) > epoch or None, CURRENT_SECONDS, "a way back")
        self._heal(str(version))
        self._fleet.until_current(str(version), CURRENT_SECONDS)

    def _dies(self, stage: _Stage) -> None:
        """The trainer is gone between push and commit, and comes back when its preparation has expired."""
        version = self._version() + 1
        self._know(version)
        with stage.phase("quiesce"):
            self._fleet.prepare(version, CURRENT_SECONDS)
        with stage.phase("push"):
            self._push(version)

            def expired() -> bool | None:
                preparation = self._fleet.get_policy()["status"].get("preparation") or {}
                return preparation.get("outcome") == "Expired" or None

            wait(expired, CURRENT_SECONDS, "the preparation to expire")
        with stage.phase("commit"):
            self._fleet.commit(version)
            self._fleet.until_current(str(version), CURRENT_SECONDS)
        self.outcome.changes += 1

    def _again(self) -> None:
        """The same version once more: nothing may happen."""
        before = self._fleet.get_policy()
        self._fleet.bump(before["spec"]["version"])
        self._fleet.kube.merge(
            "polv", self._fleet.policy, self._fleet.namespace, {"metadata": {"labels": {"said": str(time.time_ns())}}}
        )
        time.sleep(2)
        after = self._fleet.get_policy()
        if after["status"]["epoch"] != before["status"]["epoch"]:
            raise AssertionError(f"the same version again began epoch {after['status']['epoch']}")

    def _push(self, version: int) -> None:
        path = MODELS[side_of(version)]
        together(self._router.all, lambda each: each.push_weights(path, str(version), timeout=PUSH_SECONDS))

    def _heal(self, version: str) -> None:
        """Give replicas that do not serve ``version`` the weights that they wait for."""
        path, epoch = MODELS[side_of(int(version))], int(self._fleet.get_policy()["status"]["epoch"])

        def one(replica: Replica) -> None:
            seen = replica.look(timeout=LOOK_SECONDS)
            serves = seen["state"] == "open" and seen["epoch"] == epoch
            if not serves and seen["responsive"] and seen["weightsVersion"] != version:
                replica.push_weights(path, version, timeout=PUSH_SECONDS)

        together(self._router.all, one)

    def _all_serve(self, version: int) -> None:
        wanted = int(self._fleet.kube.get("ifd", self._fleet.deployment, self._fleet.namespace)["spec"]["replicas"])

        def done() -> bool | None:
            self._heal(str(version))
            ready = self._router.ready()
            try:
                states = [each.look(timeout=LOOK_SECONDS)["state"] for each in ready]
            except (httpx.HTTPError, OSError):
                return None
            return (states == ["open"] * wanted and is_current(self._fleet.get_policy(), str(version))) or None

        wait(done, 2 * CURRENT_SECONDS, f"{wanted} replicas that serve version {version}", every=1.0)

    def _version(self) -> int:
        return int(self._fleet.get_policy()["spec"]["version"])

    def _know(self, version: int) -> None:
        self.by_version[str(version)] = self._references[side_of(version)]

    def _spec(self, changes: Object) -> None:
        if changes:
            self._fleet.kube.merge("polv", self._fleet.policy, self._fleet.namespace, {"spec": changes})

    def _so_far(self, answers: Sequence[Answer], since: float) -> tuple[int, int]:
        verdict = judge([each for each in answers if each.ended >= since], self.by_version, [])
        return verdict.checked, len(verdict.stale)

    def _judge(self, answers: Sequence[Answer]) -> None:
        self.outcome.verdict = judge(answers, self.by_version, [])
        self.outcome.wrong = [explain(each, self.by_version) for each in self.outcome.verdict.stale]


class FanOutArm:
    """What trainers do without Moontide, on engines without its plugin: push, then reset every replica, bodies ignored.

    An answer counts when it began after a fan-out was done and ended before the next one began.
    """

    def __init__(self, fleet: Fleet, references: References, router: Router, deployment: str) -> None:
        self._fleet = fleet
        self._references = references
        self._router = router
        self._deployment = deployment
        self.outcome = Outcome("plain fan-out")

    def run(self, texts: Prompts, schedule: Sequence[Fault], answers: int, say: Callable[[str], None]) -> Outcome:
        """One round for each fault of ``schedule``, with ``answers`` good answers after each."""
        scene = Scene(self._fleet.kube, self._fleet, self._router, self._deployment)
        with Load(self._router.ready, self._fleet.model, dict(enumerate(texts.all)), clients=CLIENTS) as load:
            load.until(answers, CURRENT_SECONDS)
            for number, fault in enumerate(schedule, 1):
                row = Round(number, fault.name, fault.phase, began=time.time())
                self.outcome.rounds.append(row)
                scene.victims.clear()
                stage = _Stage(row, fault, scene)
                seen, side = len(load.answers), side_of(number + 1)
                with stage.phase("push", "quiesce"):
                    pushed = self._push(side)
                with stage.phase("reset", "commit", "collect"):
                    together(pushed, _reset)
                done = time.time()
                load.until(answers, CURRENT_SECONDS)
                ended = time.time()
                stage.join()
                self.outcome.changes += 1
                names = {each.name for each in pushed} - set(scene.victims)
                self._judge(row, load.answers[seen:], done, ended, names, side)
                say(row.line())
        return self.outcome

    def _push(self, side: str) -> list[Replica]:
        replicas = self._router.all
        body = {"method": "reload_weights", "kwargs": {"weights_path": MODELS[side]}}

        def one(replica: Replica) -> None:
            replica.command("/collective_rpc", body, timeout=PUSH_SECONDS).raise_for_status()

        failed = together(replicas, one)
        return [each for each in replicas if each.name not in failed]

    def _judge(
        self, row: Round, answers: Sequence[Answer], done: float, ended: float, pushed: set[str], side: str
    ) -> None:
        verdict, reference = self.outcome.verdict, self._references[side]
        for answer in answers:
            if answer.status != 200 or answer.error:
                reason = answer.error if answer.status in (0, 200) else f"HTTP {answer.status}"
                verdict.left_out[reason] += 1
            elif answer.began < done or answer.ended > ended:
                verdict.blurred += 1
            elif answer.replica not in pushed:
                # It restarted since, or was told nothing: its weights are others, which no cache is to blame for.
                right = reference[answer.prompt].equals(answer)
                self.outcome.base_weights += not right
                verdict.left_out["restarted, or not pushed to"] += 1
            else:
                row.checked += 1
                verdict.cached += bool(answer.cached)
                if reference[answer.prompt].equals(answer):
                    verdict.right += 1
                else:
                    row.stale += 1
                    verdict.stale.append(answer)
                    self.outcome.unfaulted_stale += row.fault.startswith("none")


def _reset(replica: Replica) -> None:
    replica.command("/reset_prefix_cache", params={"reset_external": "true"}, timeout=PUSH_SECONDS)


STOCK = "stock"


def stock_fleet(fleet: Fleet, replicas: int) -> Callable[[], list[Replica]]:
    """The same engines from the same image as a plain Deployment, without the plugin; lists its running pods."""
    kube = fleet.kube
    template = kube.get("deployment", fleet.deployment, fleet.namespace)["spec"]["template"]
    label = {"app": STOCK}
    template["metadata"] = {"labels": label}
    (container,) = template["spec"]["containers"]
    container["command"] = [_without_prefix(part) for part in container["command"]]
    container["env"] = [
        *(each for each in container["env"] if not each["name"].startswith("MOONTIDE_")),
        {"name": "VLLM_PLUGINS", "value": ""},
    ]
    container["readinessProbe"]["httpGet"]["path"] = "/health"
    template["spec"]["terminationGracePeriodSeconds"] = 10
    kube.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": STOCK, "namespace": fleet.namespace},
            "spec": {"replicas": replicas, "selector": {"matchLabels": label}, "template": template},
        }
    )
    known: dict[str, Replica] = {}

    def pods() -> list[Replica]:
        found = [
            pod
            for pod in kube.list("pods", fleet.namespace, f"app={STOCK}")
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
        ]
        for pod in found:
            known.setdefault(pod["metadata"]["uid"], Stock(pod, fleet.reach, "nobody-asks"))
        return sorted((known[pod["metadata"]["uid"]] for pod in found), key=lambda each: each.name)

    return pods


def _without_prefix(part: str) -> str:
    """The connector's configuration with a namespace of keys of its own."""
    if "cache_prefix" not in part:
        return part
    transfer = json.loads(part)
    transfer["kv_connector_extra_config"]["cache_prefix"] = STOCK
    return json.dumps(transfer)


def end_stock_fleet(kube: Kube, namespace: str) -> None:
    """Take it away, and wait until it is gone."""
    kube.run("delete", "deployment", STOCK, "--namespace", namespace, "--ignore-not-found")
    wait(lambda: not kube.list("pods", namespace, f"app={STOCK}") or None, 90, "the stock engines to end")
