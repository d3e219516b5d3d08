"""Patch ``weight-version``: an engine says which weights it has, before vLLM 0.27, too.

From 0.27 on each engine core keeps the version that whoever gave it its weights has named, and the server has the
routes ``POST /update_weight_version`` and ``GET /weight_info``. Older releases get the same here.
"""

from __future__ import annotations

import importlib
from typing import Any

from moontide_engine.patches import Patch
from moontide_engine.patches.probe import ASYNC_CLIENT, CORE

_ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_DEFAULT = "default"
"""vLLM's own word for weights that nobody has named."""


def moontide_set_weight_version(self: Any, version: str) -> None:
    """Utility of EngineCore: what its weights are called from now on."""
    self.moontide_weight_version = version


def moontide_get_weight_version(self: Any) -> str:
    """Utility of EngineCore: what its weights are called."""
    version: str = getattr(self, "moontide_weight_version", _DEFAULT)
    return version


async def update_weight_version(self: Any, new_version: str) -> None:
    """``AsyncLLM.update_weight_version``: on every engine core."""
    from moontide_engine.patches.reset_truth_front import everywhere

    await everywhere(self.engine_core, "moontide_set_weight_version", new_version)


async def get_weight_version(self: Any) -> str:
    """``AsyncLLM.get_weight_version``: the one that all engine cores agree on. Raises RuntimeError if they do not."""
    from moontide_engine.patches.reset_truth_front import everywhere

    found = set(await everywhere(self.engine_core, "moontide_get_weight_version"))
    if len(found) != 1:
        raise RuntimeError(f"the engine cores have weights of different versions: {', '.join(sorted(found))}")
    version: str = found.pop()
    return version


def give_routes(app: Any) -> None:
    """Add to vLLM's application the two routes, where it has none."""
    if any(getattr(route, "path", None) == "/update_weight_version" for route in app.routes):
        return
    responses = importlib.import_module("fastapi.responses")
    engine = app.state.engine_client

    async def update(request: Any) -> Any:
        try:
            body = await request.json()
        except ValueError:
            body = None
        version = body.get("new_version") if isinstance(body, dict) else None
        if not isinstance(version, str) or not version:
            return responses.JSONResponse({"error": 'write {"new_version": "VERSION"}'}, status_code=400)
        await engine.update_weight_version(version)
        return responses.JSONResponse({"success": True, "new_version": version})

    async def info(request: Any) -> Any:
        return responses.JSONResponse({"weight_version": await engine.get_weight_version()})

    app.add_route("/update_weight_version", update, methods=["POST"])
    app.add_route("/weight_info", info, methods=["GET"])


def _install() -> None:
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    core.moontide_set_weight_version = moontide_set_weight_version
    core.moontide_get_weight_version = moontide_get_weight_version
    front = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    front.update_weight_version, front.get_weight_version = update_weight_version, get_weight_version


PATCH = Patch(
    name="weight-version",
    summary="an engine says which weights it has",
    references=(
        f"{_ASYNC_LLM}.update_weight_version",
        f"{_ASYNC_LLM}.get_weight_version",
        f"{CORE}.set_weight_version",
        f"{CORE}.get_weight_version",
        f"{ASYNC_CLIENT}._call_utility_async",
    ),
    install=_install,
    upstream=("0.27.1", "0.32.0", "0.33.0"),
)
