"""A trainer that changes the policy again and again while clients ask, and the record by which answers are judged."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hack.demo.cold import Cold, References
from hack.demo.fleet import Answer, Fleet, Replica, push_weights
from hack.demo.judge import Window
from hack.demo.kube import is_current
from hack.demo.load import Load
from hack.demo.story import MODELS, side_of

CURRENT_SECONDS = 150.0


@dataclass
class Trainer:
    """Pushes weights into running engines, bumps the policy, and remembers when."""

    fleet: Fleet
    references: References
    by_version: dict[str, tuple[Cold, ...]] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def begin(self) -> int:
        """Take note of the version that is served now; returns it as a number."""
        policy = self.fleet.get_policy()
        version = int(policy["spec"]["version"])
        assert is_current(policy, str(version))
        self.by_version[str(version)] = self.references[side_of(version)]
        self.epochs.append(int(policy["status"]["epoch"]))
        return version

    def change(self, load: Load | None, *, hold: bool) -> int:
        """New weights and a new version, up to ``Current=True``; returns the epoch.

        With ``hold`` clients send nothing between the push and the end: whatever they get then is new. Without it they
        go on, and what overlaps the change counts only if it was admitted to the new epoch.
        """
        version = int(self.fleet.get_policy()["spec"]["version"]) + 1
        self.by_version[str(version)] = self.references[side_of(version)]
        if hold and load is not None:
            load.hold()
        opened = time.time()
        self.windows.append(Window(opened, math.inf, None))
        push_weights(self.fleet.replicas(), MODELS[side_of(version)], str(version))
        self.fleet.bump(version)
        policy = self.fleet.until_current(str(version), CURRENT_SECONDS)
        epoch = int(policy["status"]["epoch"])
        self.windows[-1] = Window(opened, time.time(), epoch)
        self.epochs.append(epoch)
        if load is not None:
            load.release()
        return epoch


def plain_fanout(replicas: Sequence[Replica], side: str, *, external: bool) -> None:
    """What trainers do without Moontide: new weights, then every replica's reset in parallel, the bodies ignored."""
    params = {"reset_external": "true"} if external else {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(replicas)) as pool:
        body = {"method": "reload_weights", "kwargs": {"weights_path": MODELS[side]}}
        for response in pool.map(lambda each: each.command("/collective_rpc", body), replicas):
            response.raise_for_status()
        list(pool.map(lambda each: each.command("/reset_prefix_cache", params=params), replicas))


def stale_after_fanout(answers: Sequence[Answer], reference: Sequence[Cold]) -> tuple[int, int]:
    """Of good answers, how many there are and how many are not a cold engine's with the weights just pushed."""
    good = [each for each in answers if each.status == 200]
    return len(good), sum(not reference[each.prompt].equals(each) for each in good)
