"""What the tests of token rotations share: an object whose token rotates, and holders whose files change late."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import os
import time
from abc import abstractmethod
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from kubernetes.aio import client as k8s

from moontide import labels
from tests.unit.operator.doubles import TOKENS, Cluster

OVERLAP_SECONDS = 0.8
TICK_SECONDS = 0.01
LAGS = (0.05, 0.3, 0.6)
"""Seconds after which a holder's token file is what the Secret is."""


class World(Cluster):
    """One object with one Secret, as last applied. Each holder of the token has a kubelet of its own."""

    kind: ClassVar[str]
    name: ClassVar[str]
    uid: ClassVar[str]
    field: ClassVar[str]
    """Of its status, where the rotation is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = replace(self.ctx.config, token_overlap_seconds=OVERLAP_SECONDS)
        self.clock = dt.datetime.now(dt.UTC)
        self.asking = False
        self.ctx = replace(self.ctx, now=lambda: self.clock, config=config)
        self.failures: list[str] = []
        self.over = False

    @property
    def secret(self) -> str:
        found = [each for each in self.kube.applied if isinstance(each, k8s.V1Secret)]
        return base64.b64decode((found[-1].data or {})["token"]).decode() if found else TOKENS.derive(self.uid)

    @property
    def token(self) -> dict[str, Any]:
        return dict(self.kube.status(self.kind, "rl", self.name).get(self.field) or {})

    @property
    def events(self) -> list[str]:
        return [reason for *_, reason in self.kube.events if reason.startswith("Token")]

    def ask(self, value: str) -> None:
        metadata = self.kube.objects[self.kind, "rl", self.name]["metadata"]
        metadata["annotations"] = {labels.ROTATE_TOKEN: value}

    def path(self, holder: str) -> Path:
        return self.folder / f"token-{holder}"

    async def kubelet(self, holder: str, lag: float) -> None:
        while not self.over:
            text = self.secret
            await asyncio.sleep(lag)
            late = self.path(holder).with_suffix(".late")
            late.write_text(text)
            os.replace(late, self.path(holder))
            await asyncio.sleep(0.02)

    async def ticks(self) -> None:
        """Time, which stands still while this process does, and while the test asks what is so for a while only."""
        while not self.over:
            await asyncio.sleep(TICK_SECONDS)
            if not self.asking:
                self.clock += dt.timedelta(seconds=TICK_SECONDS)

    @abstractmethod
    async def told(self, token: str) -> list[str]:
        """What each holder says to this token; empty where it is taken."""

    async def until(self, phase: str, seconds: float = 60.0) -> None:
        ends = time.monotonic() + seconds
        while self.token.get("phase", "Current") != phase:
            assert time.monotonic() < ends, (phase, self.token)
            await asyncio.sleep(0.01)

    async def rotate_twice(self, *work: Coroutine[Any, Any, None]) -> None:
        """Twice under this load, which ends when :attr:`over` is set. Each holder takes what it has to all along."""
        all_take, none_takes = [""] * len(LAGS), ["Http401"] * len(LAGS)
        tasks = asyncio.gather(*work, self.ticks())
        await asyncio.sleep(0.3)
        old = TOKENS.derive(self.uid)
        assert self.secret == old

        self.ask("november")
        await self.until("Introducing")
        await self.until("Overlapping")
        self.asking = True
        # The old one is taken all along, the new one from now on, by every holder.
        kept, new = self.secret, TOKENS.derive(self.uid, self.token["rotation"])
        assert sorted(kept.split()) == sorted([old, new])
        assert await self.told(old) == await self.told(new) == all_take
        self.asking = False
        await self.until("Current")
        assert await self.told(old) == none_takes
        assert await self.told(new) == all_take
        assert self.secret == new

        self.ask("december")
        await self.until("Introducing")
        await self.until("Current")
        assert await self.told(new) == none_takes
        self.over = True
        await asyncio.wait_for(tasks, 60)
        assert self.events == ["TokenRotating", "TokenRotated"] * 2
        assert self.failures == []
