"""The real gate and admin plane, over an engine that is always idle: ``engine_double.py HOST PORT TOKEN_FILE``.

With ``DOUBLE_TLS=FOLDER`` it serves TLS with tls.crt and tls.key of that folder.

Every command that reached the gate is one JSON line on stdout: step, term, epoch, and what came of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "engine_patches"))

import uvicorn

from moontide_engine.admin import AdminApp, Commands
from moontide_engine.asgi import Receive, Scope, Send, send_json
from moontide_engine.auth import TokenFile
from moontide_engine.engine import Probe, RankQueue
from moontide_engine.gate import Gate, Refusal
from moontide_engine.middleware import GateMiddleware


class IdleEngine:
    """Nothing runs, nothing is held, every call succeeds at once."""

    version = "0.32.0"
    ranks = 1
    store_configured = False
    fell_back = ""
    fence_unsupported = live_fence_unsupported = ""

    def __init__(self) -> None:
        self._paused = False

    async def probe(self) -> Probe:
        return Probe(0, 0, 0, self._paused)

    async def queues(self) -> list[RankQueue]:
        return [RankQueue(0, 0, 0, True, "")]

    async def weights_version(self) -> str:
        return "7"

    async def set_weights_version(self, version: str) -> None:
        pass

    async def load_weights(self, source: str) -> None:
        pass

    async def pause(self, mode: str) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False

    async def reset_prefix(self, preempt: bool = False) -> bool:
        return True

    async def reset_encoder(self) -> None:
        pass

    async def reset_multimodal(self) -> None:
        pass

    async def switch(self, salt: str) -> None:
        pass


class Recorded(Commands):
    """Says of each command what came of it."""

    async def run(self, command: str, body: Mapping[str, Any]) -> dict[str, object]:
        said = {"step": command, "term": body["term"], "epoch": body["epoch"]}
        try:
            answer = await super().run(command, body)
        except Refusal as refusal:
            print(json.dumps({**said, "outcome": refusal.reason}), flush=True)
            raise
        print(json.dumps({**said, "outcome": answer["reason"]}), flush=True)
        return answer


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """The app behind the gate."""
    await send_json(send, 404, {})


def main() -> None:
    """Serve until killed."""
    host, port, token_file = sys.argv[1:]
    gate = Gate(os.environ.get("DOUBLE_BOOT_ID", "boot"), time.monotonic)
    middleware = GateMiddleware(nothing, gate, 16)
    commands = Recorded(gate, middleware, IdleEngine(), "pod", os.environ.get("MOONTIDE_KEY_NAMESPACE", ""))
    app = AdminApp(commands, middleware, nothing, TokenFile(token_file))
    folder = os.environ.get("DOUBLE_TLS")
    files = {"ssl_certfile": f"{folder}/tls.crt", "ssl_keyfile": f"{folder}/tls.key"} if folder else {}
    uvicorn.run(app, host=host, port=int(port), log_level="warning", **files)


if __name__ == "__main__":
    main()
