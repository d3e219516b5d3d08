"""The operator's configuration: environment variables, read once at the start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

_OWN_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

DEFAULT_ENGINE_IMAGE = "moontide/engine:0.1.0-vllm{version}-cuda"
DEFAULT_ENGINE_VERSION = "0.32.0"
DEFAULT_MOONCAKE_IMAGE = "moontide/mooncake:0.1.0-mooncake0.3.13"
DEFAULT_FETCH_IMAGE = "rclone/rclone:1.71.0"
DEFAULT_ETCD_IMAGE = "moontide/etcd:0.1.0-etcd3.4.23"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True)
class Config:
    """What may differ from one installation to the next. Specs win over every default here."""

    namespace: str = "default"
    """The operator's own namespace, where its root key is."""
    watch_namespace: str = ""
    """The one namespace whose resources it serves; empty: all of them."""
    engine_image: str = DEFAULT_ENGINE_IMAGE
    """``{version}`` in it is the vLLM release."""
    engine_version: str = DEFAULT_ENGINE_VERSION
    """The vLLM release of fleets that name none."""
    engine_device: Literal["cuda", "cpu"] = "cuda"
    mooncake_image: str = DEFAULT_MOONCAKE_IMAGE
    fetch_image: str = DEFAULT_FETCH_IMAGE
    """Fetches models from ``s3://``."""
    log_level: str = "INFO"
    liveness_port: int = 8080
    """Serves ``/healthz``."""
    metrics_port: int = 8081
    """Serves ``/readyz`` and ``/metrics``."""
    hook_port: int = 0
    """Serves the hook for trainers; 0: nothing does."""
    hook_audience: str = "moontide"
    """What a trainer's token must be made for."""
    hook_tls: str = ""
    """A folder with ``tls.crt`` and ``tls.key`` for the hook; empty: plain HTTP."""
    resync_seconds: float = 60.0
    """Every resource is looked at again after this time, whatever was or was not observed."""
    lease_name: str = "moontide-operator"
    """The Lease in ``namespace`` that decides who leads."""
    lease_seconds: int = 15
    """How long the Lease holds without a renewal: a standby waits this long for a leader that fell silent."""
    pod_name: str = ""
    pod_uid: str = ""
    """Empty outside a pod. A process takes the Lease at once from an earlier process of its own pod."""
    etcd_image: str = DEFAULT_ETCD_IMAGE
    """For pools of three masters that name no etcd."""
    admin_authorities: str = ""
    """A file with the authorities (PEM) of admin ports and wipers that serve TLS; empty: the public ones alone."""
    token_overlap_seconds: float = 600.0
    """How long engines and wipers take the old token, too, once a new one is in use."""


def load(environ: Mapping[str, str], own_namespace_file: Path = _OWN_NAMESPACE_FILE) -> Config:
    """The configuration that ``environ`` describes. Raises ValueError for a value that makes no sense."""
    default = Config()
    namespace = environ.get("MOONTIDE_NAMESPACE", "").strip()
    if not namespace and own_namespace_file.exists():
        namespace = own_namespace_file.read_text().strip()
    device = environ.get("MOONTIDE_ENGINE_DEVICE") or default.engine_device
    if device not in ("cuda", "cpu"):
        raise ValueError(f"MOONTIDE_ENGINE_DEVICE is {device!r}; write cuda or cpu")
    version = environ.get("MOONTIDE_ENGINE_VERSION") or default.engine_version
    if not re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", version):
        raise ValueError(f"MOONTIDE_ENGINE_VERSION is {version!r}; write a vLLM release, for example 0.32.0")
    level = (environ.get("MOONTIDE_LOG_LEVEL") or default.log_level).upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"MOONTIDE_LOG_LEVEL is {level!r}; write one of {', '.join(LOG_LEVELS)}")
    return Config(
        namespace=namespace or default.namespace,
        watch_namespace=environ.get("MOONTIDE_WATCH_NAMESPACE", "").strip(),
        engine_image=environ.get("MOONTIDE_ENGINE_IMAGE") or default.engine_image,
        engine_version=version,
        engine_device=cast("Literal['cuda', 'cpu']", device),
        mooncake_image=environ.get("MOONTIDE_MOONCAKE_IMAGE") or default.mooncake_image,
        fetch_image=environ.get("MOONTIDE_FETCH_IMAGE") or default.fetch_image,
        log_level=level,
        liveness_port=_port(environ, "MOONTIDE_LIVENESS_PORT", default.liveness_port),
        metrics_port=_port(environ, "MOONTIDE_METRICS_PORT", default.metrics_port),
        hook_port=0 if environ.get("MOONTIDE_HOOK_PORT", "0") in ("", "0") else _port(environ, "MOONTIDE_HOOK_PORT", 0),
        hook_audience=environ.get("MOONTIDE_HOOK_AUDIENCE") or default.hook_audience,
        hook_tls=environ.get("MOONTIDE_HOOK_TLS", ""),
        resync_seconds=_seconds(environ, "MOONTIDE_RESYNC_SECONDS", default.resync_seconds),
        lease_name=environ.get("MOONTIDE_LEASE_NAME") or default.lease_name,
        lease_seconds=_lease_seconds(environ, default.lease_seconds),
        pod_name=environ.get("MOONTIDE_POD_NAME", ""),
        pod_uid=environ.get("MOONTIDE_POD_UID", ""),
        token_overlap_seconds=_seconds(environ, "MOONTIDE_TOKEN_OVERLAP_SECONDS", default.token_overlap_seconds),
        admin_authorities=environ.get("MOONTIDE_ADMIN_AUTHORITIES", ""),
        etcd_image=environ.get("MOONTIDE_ETCD_IMAGE") or default.etcd_image,
    )


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    raw = environ.get(name) or str(default)
    if not raw.isdigit() or not 0 < int(raw) < 65536:
        raise ValueError(f"{name} is {raw!r}; write a TCP port")
    return int(raw)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    raw = environ.get(name) or str(default)
    try:
        value = float(raw)
    except ValueError:
        value = 0.0
    if not 0 < value < 86_400:
        raise ValueError(f"{name} is {raw!r}; write seconds, for example 60")
    return value


def _lease_seconds(environ: Mapping[str, str], default: int) -> int:
    raw = environ.get("MOONTIDE_LEASE_SECONDS") or str(default)
    if not raw.isdigit() or not 3 <= int(raw) <= 600:
        raise ValueError(f"MOONTIDE_LEASE_SECONDS is {raw!r}; write whole seconds from 3 to 600, for example 15")
    return int(raw)
