"""When an engine starts without its store, and who is told."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moontide_engine import fallback, settings

STORE = {"kv_connector": "MooncakeStoreConnector"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test decides anew, and leaves nothing in the environment."""
    for name in (fallback.FELL_BACK, "MOONTIDE_ON_POOL_FAILURE", "MOONTIDE_POOL_WAIT_SECONDS"):
        monkeypatch.setenv(name, "")
    fallback.decide.cache_clear()
    yield
    fallback.decide.cache_clear()


def _arguments(**more: Any) -> SimpleNamespace:
    whole = {
        "kv_transfer_config": STORE,
        "nnodes": 1,
        "data_parallel_size": 2,
        "data_parallel_size_local": None,
        "data_parallel_rank": None,
        "data_parallel_hybrid_lb": False,
        "data_parallel_external_lb": False,
    }
    return SimpleNamespace(**{**whole, **more})


def test_settings() -> None:
    assert settings.load({}).on_pool_failure == "Fallback"
    assert settings.load({}).pool_wait == 60
    assert settings.load({"MOONTIDE_ON_POOL_FAILURE": "Crash"}).on_pool_failure == "Crash"
    assert settings.load({"MOONTIDE_POOL_WAIT_SECONDS": "2"}).pool_wait == 2
    with pytest.raises(settings.SettingsError, match="neither Fallback nor Crash"):
        settings.load({"MOONTIDE_ON_POOL_FAILURE": "crash"})


def test_only_whole_engines_decide() -> None:
    assert fallback.decides(_arguments())
    assert fallback.decides(_arguments(kv_transfer_config=SimpleNamespace(**STORE)))
    assert fallback.decides(_arguments(data_parallel_size_local=2))
    for part in (
        {"nnodes": 2},
        {"data_parallel_size_local": 1},
        {"data_parallel_rank": 0},
        {"data_parallel_hybrid_lb": True},
        {"data_parallel_external_lb": True},
        {"kv_transfer_config": None},
        {"kv_transfer_config": {"kv_connector": "MultiConnector"}},
    ):
        assert not fallback.decides(_arguments(**part)), part


def test_the_configuration_is_made_with_the_store_only_where_its_master_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def original(self: Any, usage: object = None, headless: bool = False) -> None:
        made.append(self.kv_transfer_config)

    create = fallback.configured(original)
    why = ""
    monkeypatch.setattr(fallback, "unreachable", lambda *_: why)
    create(_arguments())
    assert (made, fallback.fell_back()) == ([STORE], "")

    fallback.decide.cache_clear()
    why = "nobody there"
    create(_arguments(), None, True)
    create(_arguments(), headless=True)
    create(_arguments(nnodes=2))
    assert (made[1:], fallback.fell_back()) == ([STORE] * 3, "")
    create(_arguments())
    assert (made[4:], fallback.fell_back()) == ([None], "nobody there")
    why = ""
    create(_arguments())
    assert made[5:] == [None]

    fallback.decide.cache_clear()
    why = "nobody there"
    monkeypatch.setenv("MOONTIDE_ON_POOL_FAILURE", "Crash")
    with pytest.raises(fallback.PoolUnreachable, match=r"nobody there, and kvCache\.onPoolFailure is Crash"):
        create(_arguments())
    assert (len(made), fallback.fell_back()) == (6, "")


def test_a_master_is_asked_until_it_answers_or_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "kv:1"}))
    codes: list[int | None] = []
    asked: list[str] = []

    def run(command: list[str], timeout: float, **_: Any) -> SimpleNamespace:
        assert 0 < timeout <= 5
        asked.append(command[-1])
        code = codes.pop(0)
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(fallback.subprocess, "run", run)
    monkeypatch.setattr(fallback, "RETRY_SECONDS", 0.0)
    wanted = settings.load({"MOONTIDE_POOL_WAIT_SECONDS": "5"})
    codes[:] = [fallback.REFUSED, fallback.REFUSED, 0]
    assert fallback.unreachable(wanted, str(path)) == ""
    assert asked == ["kv:1"] * 3
    codes[:] = [fallback.REFUSED, None]
    assert fallback.unreachable(wanted, str(path)) == (
        "the pool's master at kv:1 did not answer within 5 s of the engine's start"
    )
    # A probe that does not work says nothing of the master.
    codes[:] = [1]
    assert fallback.unreachable(wanted, str(path)) == ""
    for content in ("", "[]", "{}"):
        path.write_text(content)
        assert fallback.unreachable(wanted, str(path)) == ""
    assert fallback.unreachable(wanted, str(tmp_path / "none")) == ""
