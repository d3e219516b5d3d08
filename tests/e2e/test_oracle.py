"""The oracle: changes of policy under load, every answer held against a cold engine with the weights it claims."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from hack.demo.cold import References
from hack.demo.fleet import Fleet
from hack.demo.judge import explain, judge
from hack.demo.load import Load
from hack.demo.prompts import Prompts
from hack.demo.story import side_of
from tests.e2e.oracle.arms import MoontideArm, complaints
from tests.e2e.oracle.clients import Router
from tests.e2e.oracle.disturbances import SCHEDULE
from tests.e2e.oracle.trainer import Trainer, plain_fanout, stale_after_fanout

BUMPS = 10
ANSWERS_PER_EPOCH = 40
SETTLE_SECONDS = 30.0
SHORT = tuple(
    fault
    for fault in SCHEDULE
    if (fault.name, fault.phase)
    in {
        ("EngineCore frozen 8 s", "commit"),
        ("operator killed", "commit"),
        ("master frozen 5 s", "quiesce"),
        ("API server frozen 5 s", "commit"),
        ("none, three changes at once", "quiesce"),
        ("none, given up by the trainer", "quiesce"),
    }
)
"""Those of `make oracle` after which no engine has to start again."""
CONTROL_ROUNDS = 4
CONTROL_ANSWERS = 30


def test_ten_bumps_under_load_serve_nothing_stale(fleet: Fleet, texts: Prompts, references: References) -> None:
    trainer = Trainer(fleet, references)
    trainer.begin()
    # At most the first prompt of each prefix in an epoch is new: few prompts make most answers begin with a hit.
    prompts = dict(enumerate(texts.all))
    with Load(fleet.replicas(), fleet.model, prompts, clients=6) as load:
        load.until(ANSWERS_PER_EPOCH, SETTLE_SECONDS)
        for number in range(BUMPS):
            held = number % 2 == 0
            epoch = trainer.change(load, hold=held)
            came = load.until(ANSWERS_PER_EPOCH, SETTLE_SECONDS)
            so_far = judge(load.answers, trainer.by_version, trainer.windows)
            print(
                f"bump {number + 1} ({'held' if held else 'under load'}) epoch {epoch}, +{len(came)}: {so_far.line()}"
            )
    verdict = judge(load.answers, trainer.by_version, trainer.windows)
    print(verdict.line())
    wrong = [explain(answer, trainer.by_version) for answer in verdict.stale]
    assert not wrong, "\n".join([f"{len(wrong)} stale", *wrong[:40]])
    assert 2 * verdict.cached >= verdict.checked, verdict.line()
    assert verdict.left_out_share <= 0.05, verdict.line()
    assert trainer.epochs == sorted(set(trainer.epochs)), "epochs only ever go up"
    each = Counter(answer.epoch for answer in load.answers if answer.status == 200)
    assert all(each[epoch] >= ANSWERS_PER_EPOCH // 2 for epoch in trainer.epochs), each


@pytest.mark.parametrize("strategy", ["Barrier", "Fence"])
def test_prepared_changes_with_faults_keep_every_promise(
    strategy: str, fleet: Fleet, texts: Prompts, references: References
) -> None:
    """No answer is excused for having been under way: it is right, or it says itself that it straddled."""
    with Router(fleet.replicas) as router:
        arm = MoontideArm(fleet, references, router, strategy)
        outcome = arm.run(texts, SHORT, ANSWERS_PER_EPOCH, print)
    print(outcome.line())
    assert complaints(outcome, len(SHORT) * ANSWERS_PER_EPOCH * 9 // 10) == [], "\n".join(outcome.wrong[:40])
    assert [each.fault for each in outcome.rounds if each.overlap in ("", "nothing") and "none" not in each.fault] == []
    if strategy == "Barrier":
        assert (outcome.verdict.straddled, outcome.verdict.in_transit) == (0, 0)
    else:
        assert outcome.verdict.in_transit > 0, "nobody was served while weights were pushed"


def test_the_oracle_sees_what_a_plain_fanout_leaves(fleet: Fleet, texts: Prompts, references: References) -> None:
    """The control arm: without it a silent oracle would prove nothing."""
    trainer = Trainer(fleet, references)
    version = trainer.begin()
    prompts = dict(enumerate(texts.all))
    stale = {True: 0, False: 0}
    replicas = fleet.replicas()
    try:
        with Load(replicas, fleet.model, prompts, clients=6) as load:
            load.until(ANSWERS_PER_EPOCH, SETTLE_SECONDS)
            # Upstream's route with the store's reset first; the local reset alone where ours tells the truth too well.
            for external in (True, False):
                for turn in range(CONTROL_ROUNDS):
                    side = side_of(version + 1 + turn)
                    plain_fanout(replicas, side, external=external)
                    done = time.time()
                    load.until(CONTROL_ANSWERS, SETTLE_SECONDS)
                    # Requests that were under way while weights changed belong to neither side.
                    came = [answer for answer in load.answers if answer.began > done]
                    checked, wrong = stale_after_fanout(came, references[side])
                    stale[external] += wrong
                    print(f"fan-out {turn + 1} (reset_external={external}): {wrong} of {checked} answers are stale")
                if stale[external]:
                    break
    finally:
        # Back to weights that are what their label says, in an epoch of their own.
        trainer.change(None, hold=False)
    if not stale[True]:
        print("with reset_external=true the plain fan-out left nothing stale here; the local reset alone did")
    assert stale[True] + stale[False] > 0, "the oracle is too weak to trust"
