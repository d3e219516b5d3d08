"""Patch ``gate``: vLLM's HTTP server starts with the gate around it and the admin port beside it."""

from __future__ import annotations

from typing import Any

from moontide_engine.patches import Patch, replace

LAUNCHER = "vllm.entrypoints.launchers.launcher:serve_http"


def _make(original: Any) -> Any:
    async def serve_http(app: Any, sock: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(app.state, "engine_client", None) is None:
            # The render server: it has no engine, so no cache to guard.
            return await original(app, sock, *args, **kwargs)
        from moontide_engine.server import serve

        return await serve(original, app, sock, args, kwargs)

    return serve_http


def _install() -> None:
    replace(LAUNCHER, _make)


PATCH = Patch(
    name="gate",
    summary="inference behind the gate, admin plane on its own port",
    references=(
        LAUNCHER,
        "vllm.entrypoints.launchers.api_server.entry:build_and_serve",
        "vllm.entrypoints.launchers.api_server.entry:run_server_worker",
    ),
    install=_install,
    made_for=("0.32.0", "0.33.0"),
)
