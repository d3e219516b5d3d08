"""Thousands of specs that nobody would write, against a real API server and an operator at work beside a real change.

What the API server takes must reach a status; what it refuses must be refused in a sentence; the operator must neither
crash nor log an error; and a fleet that serves in the same namespace must not notice. `make fuzz` runs many more.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.integration.stage import PLURALS, RESOLVING, ROOT, Stage
from tests.integration.wild import HOSTILE, Plan, bodies, put

COUNT = int(os.environ.get("MOONTIDE_FUZZ", "100"))
SEED = int(os.environ.get("MOONTIDE_FUZZ_SEED", "1"))
BATCH = 100
API = "moontide.dev/v1alpha1"
CANNOT = 'InferenceDeployment in version "v1alpha1" cannot be handled as a InferenceDeployment:'


def _base(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": "x"}, "spec": spec}


HUB = {"source": "hf://org/name", "servedName": "tiny", "version": "1"}
MODEL = {"source": "pvc://weights/a", "servedName": "tiny", "version": "1"}
POOL = _base("KVCachePool", {})
POLICY = _base("PolicyVersion", {"version": 7})
FLEET = _base("InferenceDeployment", {"model": MODEL})
BASES = (
    POOL,
    POLICY,
    _base("InferenceDeployment", {"model": HUB}),
    FLEET,
    _base(
        "InferenceDeployment", {"endpoints": {"urls": ["http://10.0.0.7:8001"]}, "kvCache": {"poolRef": {"name": "kv"}}}
    ),
    _base(
        "InferenceDeployment", {"model": MODEL, "kvCache": {"poolRef": {"name": "kv"}}, "policyRef": {"name": "calm"}}
    ),
)
SCHEMAS = {
    crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for crd in (yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml")))
}


@dataclass
class Tally:
    """What became of the inputs."""

    sent: int = 0
    admitted: int = 0
    changed: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    worst: str = ""
    """The longest refusal, as the API server said it."""

    def line(self) -> str:
        """For people."""
        often = "".join(f"\n{count:6} {text[:150]}" for text, count in self.refusals.most_common(5))
        return (
            f"fuzz: {self.sent} inputs (seed {SEED}), {self.admitted} admitted and reconciled "
            f"({dict(self.kinds)}), {self.changed} of them changed to something wild; "
            f"{len(self.refusals)} different refusals; the most frequent:{often}\n"
            f"the longest is of {len(self.worst)} characters and begins: {self.worst[:600]!r}"
        )


@pytest.fixture(name="calm", scope="module")
def _calm(make_stage: Any) -> Iterator[tuple[Stage, Any]]:
    """A fleet that serves, and its operator."""
    with make_stage() as (stage, make):
        # A machine that is busy for seconds is no subject here.
        operator = make("operator", {"MOONTIDE_LEASE_SECONDS": "120"}, RESOLVING.format(services=stage.services))
        operator.start()
        stage.pool()
        stage.fleet("calm", fences=True)
        stage.wait_current("calm", 1)
        stage.wait_for("it serves", lambda: {tuple(each) for each in stage.double("states").values()} == {("open", 1)})
        yield stage, operator


def inputs(count: int) -> list[dict[str, Any]]:
    """That many objects.

    What is replaced is drawn here and only the values by hypothesis, which prefers some draws to others, and other
    ones in another process.
    """
    random = Random(SEED)
    return [_drawn(Plan.draw(random, SCHEMAS, BASES), SEED + number) for number in range(count)]


def _drawn(plan: Plan, number: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    @seed(number)
    @settings(
        # The first is always the simplest.
        max_examples=3,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies(plan, SCHEMAS))
    def draw(body: dict[str, Any]) -> None:
        found.append(body)

    draw()
    return found[-1]


def horrors() -> Iterator[dict[str, Any]]:
    """Made by hand."""
    for text in HOSTILE:
        yield put(FLEET, ("spec", "engine", "args"), [text])
        yield put(FLEET, ("spec", "engine", "env"), [{"name": text, "value": text}])
        yield put(FLEET, ("spec", "model", "source"), text)
        yield put(FLEET, ("spec", "model", "servedName"), text)
        yield put(POLICY, ("spec", "version"), text)
        yield put(POOL, ("spec", "memory", "perReplica"), text)
    yield put(FLEET, ("spec", "engine", "args"), [f"--x{i}={'y' * 1500}" for i in range(128)])
    yield put(FLEET, ("spec", "engine", "env"), [{"name": f"V{i}", "value": "z" * 30_000} for i in range(7)])
    yield put(FLEET, ("metadata", "annotations"), {"big": "b" * 200_000})
    yield put(FLEET, ("spec", "resources"), {"limits": {"cpu": "NaN"}})
    yield put(FLEET, ("spec", "resources"), {"limits": {"cpu": 1}, "requests": {"cpu": 2}})
    yield put(FLEET, ("spec", "resources"), {"limits": {"memory": "999999999Ti"}})


def said(refusal: str) -> str:
    """The message of the API server's refusal, without names and values of this input."""
    found = re.search(r'"message":"((?:[^"\\]|\\.)*)"', refusal)
    assert found is not None, refusal
    return json.loads(f'"{found[1]}"')  # type: ignore[no-any-return]


def sentence(text: str) -> bool:
    """Whether it says something to a person: several words, and no trace of a program."""
    return len(text.split()) >= 4 and "Traceback" not in text and "0x" not in text


class Fuzz:
    """One run."""

    def __init__(self, stage: Stage, operator: Any) -> None:
        self.stage = stage
        self.operator = operator
        self.names = 0
        self.tally = Tally()

    def post(self, body: dict[str, Any]) -> str | None:
        """Create it. Returns its name if the API server took it."""
        self.tally.sent += 1
        path = self.stage.path(body["kind"]) + "?fieldValidation=Strict"
        try:
            made = self.stage.api("POST", path, body)
        except AssertionError as error:
            self.refused(str(error))
            return None
        self.tally.admitted += 1
        self.tally.kinds[body["kind"]] += 1
        return str(made["metadata"]["name"])

    def refused(self, error: str) -> None:
        text = said(error)
        assert sentence(text), text
        self.tally.worst = max(self.tally.worst, text, key=len)
        self.tally.refusals[re.sub(r'"[^"]*"', '""', text)[:4000]] += 1

    def batch(self, some: list[dict[str, Any]]) -> None:
        """Create them, change every second one, wait until the operator has been through all, and delete them."""
        made = []
        for body in some:
            self.names += 1
            if body["metadata"]["name"] == "x":
                # Children of a deleted object go some seconds later than it does.
                body = put(body, ("metadata", "name"), f"w{self.names}")
            if (name := self.post(body)) is not None:
                made.append((body["kind"], name))
        for (kind, name), other in zip(made[::2], some, strict=False):
            if other["kind"] == kind:
                try:
                    self.stage.api("PATCH", self.stage.path(kind, name), {"spec": other["spec"]})
                    self.tally.changed += 1
                except AssertionError as error:
                    self.refused(str(error))
        ends = time.monotonic() + 180
        while behind := self.behind(made):
            assert time.monotonic() < ends, f"{behind}:\n{self.operator.log()[-4000:]}"
            time.sleep(0.2)
        for kind, name in made:
            self.stage.api("DELETE", self.stage.path(kind, name))

    def behind(self, made: list[tuple[str, str]]) -> list[str]:
        """Objects that the operator has not said anything of since they were changed."""
        assert self.operator.http(self.operator.liveness_port, "/healthz") == 200
        found = []
        for kind in PLURALS:
            names = {name for each, name in made if each == kind}
            for item in self.stage.api("GET", self.stage.path(kind))["items"]:
                if item["metadata"]["name"] in names:
                    generation, status = item["metadata"]["generation"], item.get("status") or {}
                    # A change that spec.suspend holds back is looked at and not acted on: only conditions say so.
                    seen = [status, *(status.get("conditions", ()) if item["spec"].get("suspend") else ())]
                    if generation not in [each.get("observedGeneration") for each in seen]:
                        found.append(f"{kind}/{item['metadata']['name']}: {item['spec']} {status}")
        return found


def test_wild_specs_disturb_nothing(calm: tuple[Stage, Any]) -> None:
    stage, operator = calm
    run = Fuzz(stage, operator)
    before, kept = stage.double("states"), _children(stage)
    by_hand, drawn, taken = list(horrors()), inputs(COUNT), []
    began = time.monotonic()
    for some in (by_hand, drawn):
        for start in range(0, len(some), BATCH):
            run.batch(some[start : start + BATCH])
        taken.append(run.tally.admitted)
    print(f"{run.tally.line()}; {time.monotonic() - began:.0f} s")
    assert run.tally.sent == len(by_hand) + len(drawn)
    # Most of what is made by hand is there to be refused.
    assert taken[0] > 0
    assert taken[1] - taken[0] >= len(drawn) / 2
    assert run.tally.changed > 0
    # What served serves, untouched, and a change of its policy goes through.
    assert stage.double("states") == before
    assert _children(stage) == kept
    stage.double("change", names=sorted(before), weights="2")
    stage.ask("calm", version="2")
    stage.wait_current("calm", 2)
    errors = [line for line in _whole_lines(operator.log()) if "error" in json.loads(line)]
    assert errors == []


def test_the_worst_refusal_is_the_api_servers_own(make_stage: Any) -> None:
    """The longest of all that a run has met, which docs/security.md quotes: an object for a word, and 4,096 letters."""
    fields = ("../../../etc/passwd", "0.0000001m", "a" * 4096)
    assert set(fields) <= set(HOSTILE)
    body = put(FLEET, ("spec", "service", "type"), dict.fromkeys(fields, 1))
    with make_stage() as (stage, _), pytest.raises(AssertionError) as refusal:
        stage.api("POST", stage.path("InferenceDeployment") + "?fieldValidation=Strict", body)
    text = said(str(refusal.value))
    unknown = ", ".join(f'unknown field "spec.service.type.{field}"' for field in fields)
    assert text == f"{CANNOT} strict decoding error: {unknown}"
    assert len(text) == 4340
    assert sentence(text)
    assert f"{CANNOT} strict decoding error: {unknown}".replace(fields[-1], "aaaa…") in " ".join(
        (ROOT / "docs" / "security.md").read_text().split()
    )


def _whole_lines(log: str) -> list[str]:
    """All but one that is being written. Names in them may hold what str.splitlines takes for the end of a line."""
    return log.split("\n")[:-1]


def _children(stage: Stage) -> dict[str, int]:
    """The generation of everything that the calm fleet is made of."""
    found = {}
    for group, plural, names in (
        ("apis/apps/v1", "deployments", ("calm", "kv-master")),
        ("apis/moontide.dev/v1alpha1", "inferencedeployments", ("calm",)),
        ("apis/moontide.dev/v1alpha1", "kvcachepools", ("kv",)),
    ):
        for item in stage.api("GET", f"/{group}/namespaces/{stage.namespace}/{plural}")["items"]:
            if item["metadata"]["name"] in names:
                found[f"{plural}/{item['metadata']['name']}"] = item["metadata"]["generation"]
    return found
