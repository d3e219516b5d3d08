"""A fleet's admin token is rotated under load: real gates over HTTP, whose token files change late, as by a kubelet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from moontide.engines.client import EngineStatus, Unanswered, engine_status, new_http_client
from moontide.reconcile import inferencedeployment, policyversion
from tests.component.operator import rotating
from tests.component.operator.rotating import LAGS, OVERLAP_SECONDS
from tests.component.operator.served import serving
from tests.unit.operator.doubles import TOKENS, Engine

UID = "uid-rl-chat"
Port = int


def first_of(text: str) -> str:
    """As trainers read the Secret."""
    return text.split()[0]


class World(rotating.World):
    """Engines on ports of this machine, adopted by a fleet that follows a policy."""

    kind, name, uid, field = "InferenceDeployment", "chat", UID, "adminToken"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client = new_http_client()
        self.ctx = replace(self.ctx, http=self.client)
        self.engines: dict[Port, Engine] = {}
        self.answered = 0

    def fleet(self) -> None:
        urls = [f"http://127.0.0.1:{port}" for port in self.engines]
        self.kube.put("PolicyVersion", "rl", "policy", {"version": 1, "weights": "Unchecked"})
        spec = {"policyRef": {"name": "policy"}, "endpoints": {"urls": urls}}
        self.kube.put("InferenceDeployment", "rl", "chat", spec)

    async def operator(self) -> None:
        """The fleet's loop."""
        while not self.over:
            await inferencedeployment.reconcile(self.ctx, "rl", "chat")
            await asyncio.sleep(0.05)

    async def changes(self) -> None:
        version = 1
        while not self.over:
            version += 1
            self.kube.put("PolicyVersion", "rl", "policy", {"version": version, "weights": "Unchecked"})
            await policyversion.reconcile(self.ctx, "rl", "policy")
            await asyncio.sleep(0.05)
        self.version = version

    async def trainer(self) -> None:
        """Reads the Secret, and goes on with what it read for a while, as a trainer does that pushes weights."""
        while not self.over:
            token, until = first_of(self.secret), time.monotonic() + OVERLAP_SECONDS / 4
            while time.monotonic() < until and not self.over:
                for port in self.engines:
                    answer = await engine_status(self.client, f"127.0.0.1:{port}", token, 30.0)
                    if isinstance(answer, Unanswered):
                        self.failures.append(f"{self.token}: {answer.reason}")
                    self.answered += 1
                await asyncio.sleep(0.02)

    async def told(self, token: str) -> list[str]:
        answers = [await engine_status(self.client, f"127.0.0.1:{port}", token, 30.0) for port in self.engines]
        return ["" if isinstance(answer, EngineStatus) else answer.reason for answer in answers]


@asynccontextmanager
async def joined(world: World, boot: str) -> AsyncIterator[None]:
    """An engine of the fleet."""
    engine = Engine(world.folder, boot, TOKENS.derive(UID), key_namespace=UID)
    async with serving(engine) as port:
        world.engines[port] = engine
        yield


async def test_no_request_fails_while_the_token_is_rotated_under_load(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.client, joined(world, "a"), joined(world, "b"), joined(world, "c"):
        world.fleet()
        boots = [engine.gate.boot_id for engine in world.engines.values()]
        await world.rotate_twice(
            *(world.kubelet(boot, lag) for boot, lag in zip(boots, LAGS, strict=True)),
            *(world.trainer() for _ in range(3)),
            world.operator(),
            world.changes(),
        )
        assert world.answered > 100
        # The changes of policy went on, too: none waits for an engine that takes no command.
        assert world.version > 5
        await policyversion.reconcile(world.ctx, "rl", "policy")
        assert world.kube.status("PolicyVersion", "rl", "policy")["version"] == str(world.version)
        assert {engine.state[0] for engine in world.engines.values()} == {"open"}
