"""What the gate and the probe use of the release under test: it is there, and they work with it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corekit as kit
import httpx
import pytest
from fastapi import FastAPI

from moontide_engine import server
from moontide_engine.patches import probe, weight_version

INSTALL = """
import sys, warnings
warnings.simplefilter("ignore")
from moontide_engine.plugin import PATCHES
release = sys.argv[1]
PATCHES.apply()
assert dict(PATCHES.table) == {patch.name: patch.state(release) for patch in PATCHES.patches}, PATCHES.table
import vllm.entrypoints.openai.api_server
held = {}
for name in ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"):
    function = vars(sys.modules.get(name, sys)).get("serve_http")
    if function is not None:
        held[name] = hasattr(function, "__moontide_original__")
assert held and all(held.values()), held
print("installed")
"""


def test_all_patches_are_installed_in_a_process_and_the_api_server_calls_the_gate() -> None:
    done = subprocess.run([sys.executable, "-c", INSTALL, kit.RELEASE], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["installed"], done.stderr[-2000:]


def test_the_names_that_the_front_end_uses_are_there() -> None:
    engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    assert {"mode", "clear_cache"} <= inspect.signature(engine.pause_generation).parameters.keys()
    assert all(hasattr(engine, name) for name in ("resume_generation", "reset_mm_cache", "shutdown"))
    with kit.installed(weight_version.PATCH):
        assert all(hasattr(engine, name) for name in ("update_weight_version", "get_weight_version"))
    client = importlib.import_module("vllm.v1.engine.core_client").AsyncMPClient
    assert "engine" in inspect.signature(client._call_utility_async).parameters
    assert isinstance(importlib.import_module("vllm.envs").VLLM_ENABLE_RESPONSES_API_STORE, bool)
    assert importlib.import_module("vllm.config").ParallelConfig()._api_process_count == 1


class Cores:
    """The client of two engine cores of an old release: calls go to one core each."""

    core_engines = (b"0", b"1")

    def __init__(self) -> None:
        self.cores = {engine: SimpleNamespace() for engine in self.core_engines}

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        return getattr(weight_version, method)(self.cores[engine], *args)


def test_the_version_of_the_weights_is_kept_in_every_engine_core() -> None:
    cores = Cores()
    client = SimpleNamespace(engine_core=cores)
    assert asyncio.run(weight_version.get_weight_version(client)) == "default"
    asyncio.run(weight_version.update_weight_version(client, "v7"))
    assert [core.moontide_weight_version for core in cores.cores.values()] == ["v7", "v7"]
    assert asyncio.run(weight_version.get_weight_version(client)) == "v7"
    cores.cores[b"1"].moontide_weight_version = "v6"
    with pytest.raises(RuntimeError, match="v6, v7"):
        asyncio.run(weight_version.get_weight_version(client))


async def asked(app: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and body of one request to an application in this process."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.request(method, path, json=body)
    return answer.status_code, answer.json()


def test_the_routes_of_the_version_are_added_where_there_are_none() -> None:
    said = ["default"]

    async def update(version: str) -> None:
        said.append(version)

    async def get() -> str:
        return said[-1]

    app = FastAPI()
    app.state.engine_client = SimpleNamespace(update_weight_version=update, get_weight_version=get)
    for _ in range(2):
        weight_version.give_routes(app)
    assert sum(getattr(route, "path", "") == "/weight_info" for route in app.routes) == 1
    changed = {"success": True, "new_version": "v7"}
    assert asyncio.run(asked(app, "POST", "/update_weight_version", {"new_version": "v7"})) == (200, changed)
    assert asyncio.run(asked(app, "GET", "/weight_info")) == (200, {"weight_version": "v7"})
    for body in (None, [], {"version": "v8"}, {"new_version": 8}, {"new_version": ""}):
        status, answer = asyncio.run(asked(app, "POST", "/update_weight_version", body))
        assert status == 400
        assert "new_version" in answer["error"]
    assert said[-1] == "v7"


def test_several_api_servers_are_refused() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_count=2), kv_transfer_config=None)
    settings: Any = SimpleNamespace(key_namespace="")
    with pytest.raises(server.StartRefused, match="api-server-count 1"):
        server.check_setup(SimpleNamespace(vllm_config=config), settings, {})
    config.parallel_config._api_process_count = 1
    server.check_setup(SimpleNamespace(vllm_config=config), settings, {})


@pytest.mark.parametrize("connected", [False, True], ids=["no store", "store"])
def test_the_probe_counts_requests_and_unfinished_saves(tiny: Path, connected: bool) -> None:
    with kit.installed(probe.PATCH):
        core = kit.Core(tiny, store=kit.SimStore(save_steps=5) if connected else None, max_num_seqs=1)
        for name in ("first", "second"):
            core.add(name, kit.prompt(1))
        core.step(2)
        seen = core.core.moontide_probe()
        assert (seen["running"], seen["waiting"], seen["paused"]) == (1, 1, False)
        core.run()
        seen = core.core.moontide_probe()
        assert (seen["running"], seen["waiting"]) == (0, 0)
        assert (seen["settling"] > 0) == connected
        core.settle()
        assert core.core.moontide_probe()["settling"] == 0
