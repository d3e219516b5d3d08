"""Patch ``gate``: vLLM's HTTP server starts with the gate around it and the admin port beside it."""

from __future__ import annotations

import contextlib
from typing import Any

from moontide_engine.fingerprint import Missing
from moontide_engine.patches import Patch, replace

LAUNCHERS = ("vllm.entrypoints.launchers.launcher:serve_http", "vllm.entrypoints.launcher:serve_http")
"""Where it is from 0.30 on, and before."""


def _make(original: Any) -> Any:
    async def serve_http(app: Any, sock: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(app.state, "engine_client", None) is None:
            # The render server: it has no engine, so no cache to guard.
            return await original(app, sock, *args, **kwargs)
        from moontide_engine.server import serve

        return await serve(original, app, sock, args, kwargs)

    return serve_http


def _install() -> None:
    for launcher in LAUNCHERS:
        with contextlib.suppress(Missing):
            replace(launcher, _make)


PATCH = Patch(
    name="gate",
    summary="inference behind the gate, admin plane on its own port",
    references=(
        *LAUNCHERS,
        "vllm.entrypoints.launchers.api_server.entry:build_and_serve",
        "vllm.entrypoints.launchers.api_server.entry:run_server_worker",
    ),
    install=_install,
)
