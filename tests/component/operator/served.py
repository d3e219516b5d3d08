"""Engines' admin planes behind real HTTP servers in this process, and waiting for what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn

from tests.component.engine.enginekit import PATIENCE
from tests.unit.operator.doubles import Engine


@asynccontextmanager
async def serving(engine: Engine, http: str = "auto") -> AsyncIterator[int]:
    """The port of this machine at which the engine's admin plane answers; ``http``: uvicorn's parser."""
    config = uvicorn.Config(engine.app, host="127.0.0.1", port=0, log_level="error", lifespan="off", http=http)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def until(true: Callable[[], bool]) -> None:
    """Wait for what is not told."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
