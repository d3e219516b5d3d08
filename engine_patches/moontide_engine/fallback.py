"""What an engine does whose store's master does not answer at its start: start without the store, or not at all.

Decided once, in the process that makes the engine's configuration and before it is made, so that every process of the
engine (API server, EngineCore, workers) sees the same connector, or none. The others hear why by the environment, which
they inherit.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

from moontide_engine import settings as settings_module
from moontide_engine.jsonlog import log
from moontide_engine.settings import Settings

CONNECTOR = "MooncakeStoreConnector"
FELL_BACK = "MOONTIDE_FELL_BACK"
"""Why this engine runs without its store; for the processes of the engine alone."""
REFUSED = 3
"""Exit status of the probe: the store's client says that it cannot reach the master."""
RETRY_SECONDS = 0.5


class PoolUnreachable(RuntimeError):
    """The store's master does not answer, and the engine must not start without it."""


def fell_back() -> str:
    """Why this engine runs without the store that it is configured with; empty if it does not."""
    return os.environ.get(FELL_BACK, "")


def prepare() -> None:
    """Let vLLM's configuration be made with a store only where its master answers."""
    arguments: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    if not hasattr(arguments.create_engine_config, "__moontide__"):
        arguments.create_engine_config = configured(arguments.create_engine_config)


def configured(original: Any) -> Any:
    """``EngineArgs.create_engine_config`` without the connector where the engine falls back. Raises PoolUnreachable."""

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        headless = bool(kwargs.get("headless") or (len(args) > 1 and args[1]))
        if not headless and decides(self) and decide():
            self.kv_transfer_config = None
        return original(self, *args, **kwargs)

    create_engine_config.__moontide__ = True  # type: ignore[attr-defined]
    return create_engine_config


def decides(arguments: Any) -> bool:
    """Whether these EngineArgs are of a whole engine whose one connector is the store's.

    Parts of an engine that are started apart, on several nodes for instance, could each decide differently: they fail
    without a master, as vLLM does.
    """
    transfer = arguments.kv_transfer_config
    name = transfer.get("kv_connector") if isinstance(transfer, dict) else getattr(transfer, "kv_connector", None)
    return (
        name == CONNECTOR
        and arguments.nnodes == 1
        and arguments.data_parallel_size_local in (None, arguments.data_parallel_size)
        and arguments.data_parallel_rank is None
        and not arguments.data_parallel_hybrid_lb
        and not arguments.data_parallel_external_lb
    )


@functools.cache
def decide() -> bool:
    """Whether this engine starts without its store. Raises PoolUnreachable for ``Crash``."""
    settings = settings_module.load()
    os.environ.pop(FELL_BACK, None)
    why = unreachable(settings, os.environ.get("MOONCAKE_CONFIG_PATH", ""))
    if not why:
        return False
    log("pool-unreachable", policy=settings.on_pool_failure, message=why)
    if settings.on_pool_failure == "Crash":
        raise PoolUnreachable(f"{why}, and kvCache.onPoolFailure is Crash: the engine does not start without its store")
    os.environ[FELL_BACK] = why
    return True


def unreachable(settings: Settings, path: str) -> str:
    """Why the master of the store's configuration cannot be reached, empty if it can, within ``pool_wait`` seconds.

    Empty too where that cannot be told: vLLM then starts as it is configured, and says itself what is wrong.
    """
    try:
        with open(path, encoding="utf-8") as file:
            master = str(json.load(file)["master_server_address"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    # A client of the store is all there is that finds the leader among several masters, too. It waits for a master for
    # a minute and more, in a call that nothing ends: hence a process of its own.
    command = [sys.executable, "-m", "moontide_engine.fallback", master]
    why = f"the pool's master at {master} did not answer within {settings.pool_wait:g} s of the engine's start"
    deadline = time.monotonic() + settings.pool_wait
    while (left := deadline - time.monotonic()) > 0:
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=left
            ).returncode
        except subprocess.TimeoutExpired:
            break
        if code != REFUSED:
            if code:
                log("pool-probe-failed", master=master, code=code)
            return ""
        time.sleep(min(RETRY_SECONDS, max(deadline - time.monotonic(), 0)))
    return why


def main(master: str) -> None:
    """The probe: one client that lends nothing and transfers nothing. Does not return."""
    store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
    # Not through the client's destructor: it may wait for a master that is gone.
    os._exit(REFUSED if code else 0)


if __name__ == "__main__":
    main(sys.argv[1])
