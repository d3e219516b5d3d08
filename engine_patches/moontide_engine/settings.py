"""Settings of the plugin, read from the environment of the engine process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from moontide_engine.namespace import is_namespace

_SPIN = "MOONTIDE_WORKER_SPIN_SECONDS"


class SettingsError(ValueError):
    """An environment variable has a value that cannot be used; the message names it."""


@dataclass(frozen=True)
class Settings:
    """Everything the operator tells the plugin. Times are seconds."""

    admin_host: str
    admin_port: int
    token_file: str
    pod_uid: str
    key_namespace: str
    weights_version: str
    max_held: int
    admit_ttl: float
    store_timeout: float
    load_timeout: float
    """Within which a load of external blocks ends, however it ends."""
    worker_spin: float | None
    """How long a waiting process of vLLM keeps its core busy; None leaves it at vLLM's own second."""
    on_pool_failure: str = "Fallback"
    """``Fallback``: an engine whose pool cannot be reached at its start starts without it; ``Crash``: it does not."""
    pool_wait: float = 60.0
    """How long an engine that starts waits for its pool's master."""
    admin_tls: str = ""
    """Folder of the admin port's ``tls.crt`` and ``tls.key``; empty: plain HTTP."""
    cpu_start_method: str = ""
    """How vLLM's CPU build starts its processes: ``fork`` or ``spawn``; empty leaves it at vLLM's own ``spawn``."""
    auto_patches: bool = False
    """Whether a vLLM that is not known as a whole runs with the patches that know it; else it does not start."""


def enabled(env: Mapping[str, str] | None = None) -> bool:
    """Whether the plugin is to do anything in this process."""
    return (os.environ if env is None else env).get("MOONTIDE_ENABLED", "") == "1"


def load(env: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. Raises SettingsError."""
    env = os.environ if env is None else env
    namespace = env.get("MOONTIDE_KEY_NAMESPACE", "")
    if namespace and not is_namespace(namespace):
        raise SettingsError(
            f"MOONTIDE_KEY_NAMESPACE={namespace!r} has more than letters, digits, dot, dash, underscore"
        )
    patches = env.get("MOONTIDE_PATCHES", "") or "Require"
    if patches not in ("Require", "Auto"):
        raise SettingsError(f"MOONTIDE_PATCHES={patches!r} is neither Require nor Auto")
    on_pool_failure = env.get("MOONTIDE_ON_POOL_FAILURE", "") or "Fallback"
    if on_pool_failure not in ("Fallback", "Crash"):
        raise SettingsError(f"MOONTIDE_ON_POOL_FAILURE={on_pool_failure!r} is neither Fallback nor Crash")
    start = env.get("MOONTIDE_CPU_START_METHOD", "")
    if start not in ("", "fork", "spawn"):
        raise SettingsError(f"MOONTIDE_CPU_START_METHOD={start!r} is neither fork nor spawn")
    return Settings(
        admin_host=env.get("MOONTIDE_ADMIN_HOST", "0.0.0.0"),
        admin_port=int(number(env, "MOONTIDE_ADMIN_PORT", 8001, 1, 65535)),
        token_file=env.get("MOONTIDE_ADMIN_TOKEN_FILE", "/etc/moontide/admin/token"),
        pod_uid=env.get("MOONTIDE_POD_UID", ""),
        key_namespace=namespace,
        weights_version=env.get("MOONTIDE_WEIGHTS_VERSION", "") or "default",
        max_held=int(number(env, "MOONTIDE_MAX_HELD", 1024, 0, 1_000_000)),
        admit_ttl=number(env, "MOONTIDE_ADMIT_TTL_SECONDS", 120, 0.1, 86_400),
        store_timeout=number(env, "MOONTIDE_STORE_TIMEOUT_SECONDS", 10, 0.1, 600),
        load_timeout=number(env, "MOONTIDE_LOAD_TIMEOUT_SECONDS", 5, 0.1, 600),
        worker_spin=number(env, _SPIN, 1, 0, 1) if env.get(_SPIN) else None,
        on_pool_failure=on_pool_failure,
        pool_wait=number(env, "MOONTIDE_POOL_WAIT_SECONDS", 60, 0.1, 3600),
        admin_tls=env.get("MOONTIDE_ADMIN_TLS", ""),
        cpu_start_method=start,
        auto_patches=patches == "Auto",
    )


def number(env: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    """A variable's value, ``default`` if it is unset or empty. Raises SettingsError outside ``low`` to ``high``."""
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"{name}={text!r} is not a number") from None
    if not low <= value <= high:
        raise SettingsError(f"{name}={text} is not between {low:g} and {high:g}")
    return value
