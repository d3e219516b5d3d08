"""The operator is killed before and after every action of the planner and every write of a status; the next resumes.

The kill points are not written down here: each scenario is played through once by the pure planner in its small world
(tests/unit/planning/world.py), and every effect that this has is one to be killed before; so is the moment in which the
first of two replicas has obeyed, and the moment after the last effect. Each is then brought about for real: API server,
gates, admin planes and wiper are the real ones, and the operator is a process that SIGKILLs itself.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, get_args

import pytest

from moontide.api.v1alpha1 import PolicyVersionSpec
from moontide.planning import protocol
from moontide.planning.model import Action, Step
from tests.integration.mortal_operator import AFTER, BEFORE, FIRST, Point, arm, record_of, write_of
from tests.integration.stage import ROOT, Judge, Stage
from tests.unit.planning.world import World

OPERATOR = """
import runpy, sys
sys.path.insert(0, {root!r})
sys.argv[1:] = [{folder!r}]
runpy.run_module("tests.integration.mortal_operator", run_name="__main__")
"""
ALL = (0, 1)
"""Both replicas of a fleet."""
NEW = "the new version"


@dataclass(frozen=True)
class Change:
    """What somebody writes into the spec, and what is done to engines right before."""

    spec: dict[str, object] = field(hash=False)
    pushed: tuple[int, ...] = ALL
    """The replicas that have got the weights of the new version."""
    fails: tuple[int, ...] = ()
    """The replicas whose caches cannot be reset any more."""

    def asked(self, version: int) -> dict[str, object]:
        return {name: version if value == NEW else value for name, value in self.spec.items()}


@dataclass(frozen=True)
class Scenario:
    """A fleet of two, and what is asked of it, one after the other."""

    name: str
    changes: tuple[Change, ...]
    fences: bool = True
    policy: dict[str, object] = field(default_factory=dict, hash=False)
    ends_old: bool = False
    """It ends in the version in which it began."""
    abandoned: bool = False
    """The next operator comes so late that the engines are closed by then."""


BUMP = Change({"version": NEW})
PREPARE = Change({"preparing": NEW}, pushed=())
COMMIT = Change({"version": NEW, "preparing": None})
ABORT = Change({"preparing": None}, pushed=())
ALONE = Change({"version": NEW}, pushed=())
LAGGARD = Change({"version": NEW}, pushed=(0,))
LOAD: dict[str, object] = {"weights": "Load", "weightsSource": "/models/policy-{version}"}
SHORT: dict[str, object] = {"deadlineSeconds": 12, "replicaTimeoutSeconds": 10}
"""Short enough to wait for; an engine that is silent for a few seconds is not replaced."""
UNABLE = Change({"version": NEW}, fails=(0,))

SCENARIOS = (
    Scenario("plain", (BUMP,), fences=False),
    Scenario("barrier", (BUMP,)),
    Scenario("fence", (BUMP,), policy={"strategy": "Fence"}),
    Scenario("commit", (PREPARE, COMMIT)),
    Scenario("abort", (PREPARE, ABORT), ends_old=True),
    Scenario("plain-commit", (PREPARE, COMMIT), fences=False),
    Scenario("fence-commit", (PREPARE, COMMIT), policy={"strategy": "Fence"}),
    Scenario("load", (ALONE,), policy=LOAD),
    Scenario("laggard", (LAGGARD,)),
    Scenario("replace", (UNABLE,), fences=False, policy={"replicaTimeoutSeconds": 4}),
    Scenario("abandoned", (BUMP,), policy=SHORT, abandoned=True),
    Scenario("abandoned-plain", (BUMP,), fences=False, policy=SHORT, abandoned=True),
)
ONLY: dict[str, Callable[[str], bool]] = {
    # What these have beyond the others; the rest of theirs is there already.
    "commit": lambda effect: effect in ("write of the allotment", "write of the plan to rest") or "write" not in effect,
    "abort": lambda effect: effect in ("write of the allotment", "write of the plan to rest") or "write" not in effect,
    "plain-commit": lambda effect: effect in ("write of the allotment", "wipe") or "rest" in effect,
    "fence-commit": lambda effect: effect in ("write of the allotment", "fence") or "rest" in effect,
    "load": lambda effect: effect == "load",
    "laggard": lambda effect: "close" in effect,
    "replace": lambda effect: "replace" in effect,
    "abandoned": lambda effect: effect == "admit",
    "abandoned-plain": lambda effect: effect == "wipe",
}


# -- where to kill -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """Something that the operator does to the world in a scenario."""

    change: int
    name: str
    count: int


@cache
def effects(scenario: Scenario) -> tuple[Effect, ...]:
    """Every effect that the planner asks for in the scenario, in order, each kind once a change."""
    spec = PolicyVersionSpec.model_validate({"version": "1", **scenario.policy})
    world = World(spec, fences=scenario.fences, opens=scenario.fences)
    world.add_fleet("a", 2)
    world.run()
    found: dict[tuple[int, str], Effect] = {}
    for number, change in enumerate(scenario.changes):
        world.serve()
        for index in change.pushed:
            world.pod(index).engine.weights = "2"
        for index in change.fails:
            world.pod(index).engine.refuses_reset = True
        before = dict(world.spec.to_wire())
        world.spec = PolicyVersionSpec.model_validate({**before, **change.asked(2)})
        world.generation += 1
        world.base_weights = str(world.spec.version)
        for _ in range(60):
            for name, count in _turn(world):
                found.setdefault((number, name), Effect(number, name, count))
            world.pass_time(0.1)
    return tuple(found.values())


def _turn(world: World) -> Iterator[tuple[str, int]]:
    """One turn of the reconcile, and the names of its effects."""
    plan = world.plan()
    if plan.status != world.status:
        yield write_of(world.status, plan), 1
    world.status = plan.status
    yield from Counter(protocol.step_of(action).value for action in plan.actions).items()
    results = [world.perform(action) for action in plan.actions]
    after = protocol.record(plan.status, results, world.now)
    if after != plan.status:
        yield record_of(list(plan.actions)), 1
    world.status = after


@dataclass(frozen=True)
class Case:
    """One kill."""

    scenario: Scenario
    change: int
    point: Point

    def __str__(self) -> str:
        which = f"{self.change + 1}: " if len(self.scenario.changes) > 1 else ""
        return f"{self.scenario.name}, {which}{self.point}"


def cases(scenario: Scenario) -> Iterator[Case]:
    """Between any two effects; and where the first of several replicas has obeyed."""
    for number in range(len(scenario.changes)):
        mine = [each for each in effects(scenario) if each.change == number]
        wanted = [ONLY.get(scenario.name, lambda effect: True)(each.name) for each in mine]
        for effect, want, next_too in zip(mine, wanted, [*wanted[1:], False], strict=True):
            if not want:
                continue
            yield Case(scenario, number, Point(BEFORE, effect.name))
            if "write" in effect.name and not next_too:
                yield Case(scenario, number, Point(AFTER, effect.name))
            elif scenario.abandoned and scenario.fences:
                # Once the first has obeyed it serves, and does not close.
                continue
            elif "write" not in effect.name and (effect.count > 1 or not next_too):
                yield Case(scenario, number, Point(FIRST, effect.name))


CASES = [case for scenario in SCENARIOS for case in cases(scenario)]


def test_every_step_and_every_write_of_the_planner_is_a_kill_point() -> None:
    killed = {(case.point.when, case.point.effect) for case in CASES}
    steps = {step.value for step in Step}
    assert {effect for when, effect in killed if when == BEFORE and not effect.startswith("write")} == steps
    for scenario in SCENARIOS:
        named = {case.point.effect for case in cases(scenario)}
        assert scenario.name in ONLY or named == {effect.name for effect in effects(scenario)}
    assert {cls.__name__ for cls in get_args(Action)} == {"Command", "Wipe", "Collect", "Replace"}
    print(f"{len(CASES)} kill points in {len(SCENARIOS)} scenarios")


# -- what must be true -------------------------------------------------------------------------------------------------


class Theatre:
    """One namespace with its operator, and the fleet of the scenario at hand."""

    def __init__(self, stage: Stage, operator: Any) -> None:
        self.stage = stage
        self.operator = operator
        self.folder = stage.folder / "operator"
        self._scenario: Scenario | None = None
        self._judge = Judge(False, "")
        self._read = 0
        self._version = 1
        self._told = 0

    def play(self, case: Case) -> str:
        """One case. Returns what the operators did."""
        began = time.monotonic()
        self._enter(case.scenario)
        name, stage = case.scenario.name, self.stage
        before = stage.wait_for("nothing is under way", lambda: stage.current(name))
        epoch = stage.status(name)["epoch"]
        old, self._version = int(before[0]), max(self._version, int(before[0])) + 1
        ends = old if case.scenario.ends_old else self._version
        said = ""
        for number, change in enumerate(case.scenario.changes):
            last = number == len(case.scenario.changes) - 1
            engines = sorted(each["metadata"]["name"] for each in stage.pods(name))
            if change.pushed:
                stage.double("change", names=[engines[i] for i in change.pushed], weights=str(self._version))
            if change.fails:
                stage.double("change", names=[engines[i] for i in change.fails], reset_fails=True)
            if number == case.change:
                generation = stage.policy(name)["metadata"]["generation"] + 1
                arm(self.folder, replace(case.point, generation=generation))
            stage.ask(name, **change.asked(self._version))
            if number == case.change:
                self._die(case)
                said = self._effects()
                if case.scenario.abandoned:
                    stage.wait_for("closed engines", lambda: {s for s, _ in self._states().values()} == {"closed"})
                self._raise()
            if last:
                break
            stage.wait_for("it is prepared", lambda: self._prepared(name))
        if case.scenario.name == "laggard":
            stage.wait_for("the laggard is closed", lambda: "closed" in {s for s, _ in self._states().values()})
            stage.double("change", names=engines, weights=str(self._version))
            # It is current without the laggard, too.
            stage.wait_for("both serve", lambda: self._open(name) == 2)
        if case.scenario.name == "replace":
            uid = stage.api("GET", stage.path("InferenceDeployment", name))["metadata"]["uid"]

            def replaced() -> bool:
                pods = stage.start_pods(name, uid, False, str(self._version))
                return engines[0] not in pods and len(pods) == 2

            stage.wait_for("the pod is another", replaced)
            stage.double("kill", name=engines[0])
        reached = stage.wait_current(name, ends)
        took = time.monotonic() - began
        self._inspect()
        after = self._effects()
        allotted = sum(each.name == "write of the allotment" for each in effects(case.scenario))
        assert reached == epoch + allotted, f"from epoch {epoch} to {reached} for {allotted} changes"
        # One that did not answer for a moment is not waited for.
        stage.wait_for("all serve", lambda: set(self._states().values()) == {("open", reached)})
        assert len(self._states()) == 2
        return f"{case} ({took:.1f} s)\n    killed after: {said}\n    the next one: {after}"

    def _prepared(self, name: str) -> bool:
        status = self.stage.status(name)
        found = status.get("preparation") or {}
        return found.get("version") == str(self._version) and "preparedAt" in found

    def _enter(self, scenario: Scenario) -> None:
        """Have the scenario's fleet serve, and no other."""
        if self._scenario is scenario:
            return
        self.leave()
        self.stage.fleet(scenario.name, scenario.fences, str(self._version), **scenario.policy)
        # A policy is current before its first replica has come up, too.
        self.stage.wait_for("both serve", lambda: self._open(scenario.name) == 2)
        self.stage.wait_current(scenario.name, self._version)
        self._judge = Judge(not scenario.fences, str(scenario.policy.get("strategy", "Barrier")))
        self._scenario = scenario
        self._inspect()
        self._effects()

    def _open(self, fleet: str) -> int:
        states = self.stage.double("states")
        return sum(state[0] == "open" for name, state in states.items() if name.startswith(f"{fleet}-"))

    def leave(self) -> None:
        """Clear the stage: after a failure too."""
        scenario, self._scenario = self._scenario, None
        self._inspect(judge=False)
        if scenario is not None:
            self.stage.remove(scenario.name)

    def recover(self) -> None:
        """After a failure: an operator that lives, and a fleet of its own for the next case."""
        (self.folder / "kill").unlink(missing_ok=True)
        if (self.folder / "dead").exists():
            self._raise()
        self.leave()

    def _die(self, case: Case) -> None:
        self.stage.wait_for(f"the operator dies {case.point}", (self.folder / "dead").exists, 120)
        self._inspect()
        status = self.stage.status(case.scenario.name)
        heard = self._judge.commanded
        assert heard <= status["epoch"], f"an engine heard of epoch {heard}, status has {status['epoch']}"

    def _raise(self) -> None:
        (self.folder / "next").touch()

    def _states(self) -> dict[str, tuple[str, int]]:
        assert self._scenario is not None
        found = self.stage.double("states")
        return {name: tuple(state) for name, state in found.items() if name.startswith(f"{self._scenario.name}-")}

    def _inspect(self, judge: bool = True) -> None:
        """Judge what is new in the journal."""
        seen = self.stage.journal()
        events, self._read = seen[self._read :], len(seen)
        if judge:
            self._judge.read(events)

    def _effects(self) -> str:
        """What the operators did since this was last asked."""
        lines = (self.folder / "effects").read_text().splitlines()
        fresh, self._told = [json.loads(line) for line in lines[self._told :]], len(lines)
        done = [each["effect"] for each in fresh if each["when"] == AFTER]
        told: list[str] = []
        for effect in done:
            short = effect.replace("write of the ", "+").replace("plan to ", "")
            if told and told[-1].split(" x")[0] == short:
                count = int(told[-1].split(" x")[1]) if " x" in told[-1] else 1
                told[-1] = f"{short} x{count + 1}"
            else:
                told.append(short)
        return ", ".join(told) or "nothing"


@pytest.fixture(scope="module", name="theatre")
def _theatre(kubectl: Any, make_stage: Callable[..., Any]) -> Iterator[Theatre]:
    with make_stage() as (stage, make):
        folder = stage.folder / "operator"
        folder.mkdir()
        (folder / "services").write_text(stage.services)
        environ = {"MOONTIDE_POD_NAME": "mortal", "MOONTIDE_POD_UID": "mortal", "MOONTIDE_LEASE_SECONDS": "60"}
        running = make("mortal", environ, OPERATOR.format(root=str(ROOT), folder=str(folder)))
        running.start()
        stage.pool()
        yield Theatre(stage, running)
        lines = [json.loads(line) for line in running.log().splitlines()]
        assert [line for line in lines if "error" in line] == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_next_operator_finishes_what_it_finds(theatre: Theatre, case: Case) -> None:
    try:
        print(theatre.play(case))
    except BaseException:
        theatre.recover()
        raise
