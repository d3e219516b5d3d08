"""Configuration and logs."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from moontide.config import Config, load
from moontide.jsonlog import JsonFormatter


def test_defaults(tmp_path: Path) -> None:
    assert load({}, tmp_path / "absent") == Config()


def test_everything_can_be_set(tmp_path: Path) -> None:
    own = tmp_path / "namespace"
    own.write_text("from-file\n")
    environ = {
        "MOONTIDE_WATCH_NAMESPACE": "a",
        "MOONTIDE_ENGINE_IMAGE": "e",
        "MOONTIDE_ENGINE_VERSION": "0.24.0",
        "MOONTIDE_ENGINE_DEVICE": "cpu",
        "MOONTIDE_MOONCAKE_IMAGE": "m",
        "MOONTIDE_FETCH_IMAGE": "f",
        "MOONTIDE_ETCD_IMAGE": "etcd",
        "MOONTIDE_LOG_LEVEL": "debug",
        "MOONTIDE_LIVENESS_PORT": "1",
        "MOONTIDE_METRICS_PORT": "2",
        "MOONTIDE_HOOK_PORT": "3",
        "MOONTIDE_HOOK_AUDIENCE": "trainers",
        "MOONTIDE_HOOK_TLS": "/tls",
        "MOONTIDE_RESYNC_SECONDS": "1.5",
        "MOONTIDE_TOKEN_OVERLAP_SECONDS": "60",
        "MOONTIDE_LEASE_NAME": "l",
        "MOONTIDE_LEASE_SECONDS": "30",
        "MOONTIDE_ADMIN_AUTHORITIES": "/ca.crt",
        "MOONTIDE_POD_NAME": "p",
        "MOONTIDE_POD_UID": "u",
    }
    hook = (3, "trainers", "/tls")
    engine = ("e", "0.24.0", "cpu")
    pod = ("p", "u")
    last = ("etcd", "/ca.crt", 60.0)
    wanted = Config("from-file", "a", *engine, "m", "f", "DEBUG", 1, 2, *hook, 1.5, "l", 30, *pod, *last)
    assert load(environ, own) == wanted
    assert load({**environ, "MOONTIDE_NAMESPACE": "said"}, own).namespace == "said"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MOONTIDE_ENGINE_DEVICE", "tpu"),
        ("MOONTIDE_ENGINE_VERSION", "v0.32.0"),
        ("MOONTIDE_LOG_LEVEL", "loud"),
        ("MOONTIDE_LIVENESS_PORT", "0"),
        ("MOONTIDE_METRICS_PORT", "http"),
        ("MOONTIDE_HOOK_PORT", "yes"),
        ("MOONTIDE_RESYNC_SECONDS", "-1"),
        ("MOONTIDE_RESYNC_SECONDS", "soon"),
        ("MOONTIDE_LEASE_SECONDS", "2"),
        ("MOONTIDE_LEASE_SECONDS", "15.5"),
    ],
)
def test_nonsense_is_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        load({name: value}, tmp_path / "absent")


def test_log_lines_carry_the_fields_and_nothing_else() -> None:
    record = logging.LogRecord("moontide.x", logging.INFO, __file__, 1, "reset %s", ("a-0",), None)
    record.__dict__.update(resource="PolicyVersion/ns/p", epoch=3, replica="a-0", step="reset", secret="s3cret")
    line = json.loads(JsonFormatter().format(record))
    assert line.pop("time").startswith("20")
    assert line == {
        "level": "INFO",
        "logger": "moontide.x",
        "message": "reset a-0",
        "resource": "PolicyVersion/ns/p",
        "epoch": 3,
        "replica": "a-0",
        "step": "reset",
    }


@pytest.mark.parametrize(("soft", "hard", "wanted"), [(256, 4096, 4096), (256, 256, 256), (1024, 10**6, 65536)])
def test_the_operator_may_open_a_file_for_each_replica(soft: int, hard: int, wanted: int) -> None:
    """Containers begin with 1,024 where their runtime sets none."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and hard > most:
        hard, wanted = most, min(wanted, most)
    code = (
        f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard}));"
        "from moontide.__main__ import raise_open_files as raised; raised();"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(wanted), str(hard)]
