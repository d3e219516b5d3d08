"""The front end's half of ``reset-truth``: the reset route's body, and resets after an update of the weights."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Collection
from typing import Any

from moontide_engine import settings as settings_module

ROUTERS = ("vllm.entrypoints.serve.dev.cache.api_router", "vllm.entrypoints.serve.cache.api_router")
"""Where the route is, since 0.23 and before."""
PATH = "/reset_prefix_cache"

_GRACE = 3.0
"""Seconds that the engine cores may take beyond the store timeout; each of them keeps to a second."""


class CachesNotReset(RuntimeError):
    """The weights are new and a cache may still hold blocks of the old ones."""


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Body of the route from the answers of all engine cores: cleared is what every one of them cleared."""
    bad = next((answer for answer in answers if not answer["success"]), None)
    counts = [answer["removed"] for answer in answers if answer["removed"] is not None]
    body: dict[str, Any] = {
        "success": bool(answers) and bad is None,
        "cleared": [name for name in ("local", "external") if answers and all(name in a["cleared"] for a in answers)],
        "removed": sum(counts) if counts else None,
    }
    if not body["success"]:
        body["reason"] = bad["reason"] if bad else "EngineFault"
        body["message"] = bad["message"] if bad else "no engine core answered"
    return body


class _Unusable(ValueError):
    """The body of a request says nothing that the route understands; the message says why."""


def router() -> Any:
    """The module of the route."""
    try:
        return importlib.import_module(ROUTERS[0])
    except ModuleNotFoundError:
        return importlib.import_module(ROUTERS[1])


async def everywhere(core: Any, method: str, *args: object) -> list[Any]:
    """Answers of all engine cores to a utility; vLLM's client has that since 0.32."""
    calls = [core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines]
    return list(await asyncio.gather(*calls))


def reset_everywhere(original: Any) -> Any:
    """``AsyncMPClient.reset_prefix_cache_async``: whether all engine cores did; until 0.31 only one is listened to."""

    async def reset_prefix_cache_async(
        self: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return all(await everywhere(self, "reset_prefix_cache", reset_running_requests, reset_connector))

    return reset_prefix_cache_async


async def _ask(client: Any, running: bool, external: bool) -> dict[str, Any]:
    """Reset every engine core, and say what became of it. One that waits for a dead worker does not answer at all."""
    core = client.engine_core
    seconds = settings_module.load().store_timeout + _GRACE
    try:
        async with asyncio.timeout(seconds):
            if external and len(core.core_engines) > 1:
                # One of them would wipe the store that they share while another one refuses and fills it again.
                ready = merged(await everywhere(core, "moontide_reset_local", running))
                if not ready["success"]:
                    return ready
            return merged(await everywhere(core, "moontide_reset", running, external))
    except TimeoutError:
        message = f"no answer within {seconds:g} s; the engine may yet carry it out"
        return {"success": False, "cleared": [], "removed": None, "reason": "EngineTimeout", "message": message}


def route(original: Any) -> Any:
    """Handler of ``POST /reset_prefix_cache``; FastAPI reads the parameters of its query from the original.

    They may also come as a JSON object; what the query says goes first.
    """

    async def reset_prefix_cache(
        raw_request: Any, reset_running_requests: bool = False, reset_external: bool = False
    ) -> Any:
        answer: Any = importlib.import_module("fastapi.responses").JSONResponse
        wanted = {"reset_running_requests": reset_running_requests, "reset_external": reset_external}
        try:
            given = _parameters(await raw_request.body(), wanted.keys())
        except _Unusable as error:
            return answer({"success": False, "reason": "BadRequest", "message": f"{error}"}, status_code=422)
        wanted |= {name: value for name, value in given.items() if name not in raw_request.query_params}
        return answer(await _ask(router().engine_client(raw_request), *wanted.values()))

    return reset_prefix_cache


def _parameters(body: bytes, names: Collection[str]) -> dict[str, bool]:
    """What a body says. Raises _Unusable: a misspelt word must not become a smaller reset than was asked for."""
    if not body.strip():
        return {}
    try:
        given = json.loads(body)
    except ValueError:
        raise _Unusable("the body is not JSON") from None
    if not isinstance(given, dict):
        raise _Unusable("the body is not a JSON object")
    for name, value in given.items():
        if name not in names:
            raise _Unusable(f"{name} is none of {', '.join(names)}")
        if not isinstance(value, bool):
            raise _Unusable(f"{name} is neither true nor false")
    return given


def reroute() -> None:
    """Let the router, which took the original when its module was imported, serve what the module has now."""
    module = router()
    module.router.routes[:] = [entry for entry in module.router.routes if entry.path != PATH]
    module.router.add_api_route(PATH, module.reset_prefix_cache, methods=["POST"])


def _not_reset(why: str) -> CachesNotReset:
    return CachesNotReset(
        f"the weights were updated, the caches were not reset ({why}) and the weight version was left as it was; "
        "reset them with POST /reset_prefix_cache?reset_external=true, then set the version"
    )


def finish_online(original: Any) -> Any:
    """``AsyncLLM.finish_weight_update``: both caches are reset before the version is set. Raises CachesNotReset.

    There are versions since 0.27.
    """

    async def finish_weight_update(self: Any, weight_version: str | None = None) -> None:
        await original(self)
        body = await _ask(self, False, True)
        if not body["success"]:
            raise _not_reset(f"{body['reason']}: {body['message']}")
        if weight_version is not None:
            await self.update_weight_version(weight_version)

    return finish_weight_update


def finish_offline(original: Any) -> Any:
    """``LLM.finish_weight_update``, the same. Raises CachesNotReset."""

    def finish_weight_update(self: Any, weight_version: str | None = None) -> None:
        original(self)
        if not self.llm_engine.reset_prefix_cache(False, True):
            raise _not_reset("the engine's log says why")
        if weight_version is not None:
            self.update_weight_version(weight_version)

    return finish_weight_update
