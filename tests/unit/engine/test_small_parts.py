"""Tokens, settings, namespaces, log lines."""

from __future__ import annotations

import json
import os
import re
import types
from pathlib import Path
from typing import ClassVar

import pytest

from moontide_engine import cpu_build, jsonlog, plugin, settings
from moontide_engine.auth import TokenFile, bearer_tokens
from moontide_engine.namespace import is_namespace, pattern


def test_token_file_is_read_again_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    tokens = TokenFile(str(path))
    assert not tokens.accepts([b"a"])
    path.write_text("a\n\n b \n")
    assert tokens.accepts([b"a"])
    assert tokens.accepts([b"wrong", b"b"])
    path.write_text("c")
    assert not tokens.accepts([b"a"])
    assert tokens.accepts([b"c"])


@pytest.mark.parametrize("content", ["", "\n", "  \n\t\n"])
def test_an_empty_token_file_accepts_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    assert not TokenFile(str(path)).accepts([b"", b" ", b"a"])
    assert not TokenFile(str(path)).accepts([])


def test_bearer_tokens() -> None:
    headers = [
        (b"Authorization", b"bearer a"),
        (b"x-admin-authorization", b"Bearer  b "),
        (b"authorization", b"Basic c"),
    ]
    assert bearer_tokens(headers) == [b"a", b"b"]


def test_settings_have_defaults_and_bounds() -> None:
    loaded = settings.load({})
    assert (loaded.admin_port, loaded.weights_version, loaded.max_held, loaded.key_namespace) == (
        8001,
        "default",
        1024,
        "",
    )
    for env in (
        {"MOONTIDE_ADMIN_PORT": "0"},
        {"MOONTIDE_ADMIN_PORT": "x"},
        {"MOONTIDE_MAX_HELD": "-1"},
        {"MOONTIDE_STORE_TIMEOUT_SECONDS": "nan"},
        {"MOONTIDE_WORKER_SPIN_SECONDS": "2"},
        {"MOONTIDE_KEY_NAMESPACE": "a@b"},
        {"MOONTIDE_CPU_START_METHOD": "thread"},
    ):
        with pytest.raises(settings.SettingsError, match=next(iter(env))):
            settings.load(env)


def test_plugin_is_inert_unless_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(auto: bool) -> None:
        raise AssertionError(f"patches were applied, auto {auto}")

    monkeypatch.setattr(plugin.PATCHES, "apply", fail)
    for value in ("", "0", "true"):
        monkeypatch.setenv("MOONTIDE_ENABLED", value)
        plugin.register()
    monkeypatch.setenv("MOONTIDE_ENABLED", "1")
    with pytest.raises(AssertionError, match="auto False"):
        plugin.register()
    monkeypatch.setenv("MOONTIDE_PATCHES", "Auto")
    with pytest.raises(AssertionError, match="auto True"):
        plugin.register()
    monkeypatch.setenv("MOONTIDE_PATCHES", "auto")
    with pytest.raises(plugin.settings.SettingsError, match="neither Require nor Auto"):
        plugin.register()


def test_a_calm_wait_changes_the_default_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class SpinCondition:
        def __init__(self, reader: bool, busy_loop_s: float = 1) -> None:
            self.busy_loop_s = busy_loop_s

    module = types.SimpleNamespace(SpinCondition=SpinCondition, SHM_READER_RECHECK_INTERVAL_MS=5000)
    monkeypatch.setattr(plugin.importlib, "import_module", lambda name: module)
    assert settings.load({}).worker_spin is None
    assert settings.load({"MOONTIDE_WORKER_SPIN_SECONDS": "0.02"}).worker_spin == 0.02
    plugin.calm(0.25)
    assert SpinCondition(True).busy_loop_s == 0.25
    assert SpinCondition(True, busy_loop_s=0.5).busy_loop_s == 0.5
    assert module.SHM_READER_RECHECK_INTERVAL_MS == plugin.RECHECK_MS


def test_where_vllm_never_looks_again_a_calm_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int | None] = []

    class SpinCondition:
        def __init__(self, reader: bool, busy_loop_s: float = 1) -> None:
            self.busy_loop_s = busy_loop_s

        def wait(self, timeout_ms: int | None = None) -> None:
            waited.append(timeout_ms)

    module = types.SimpleNamespace(SpinCondition=SpinCondition)
    monkeypatch.setattr(plugin.importlib, "import_module", lambda name: module)
    plugin.calm(0.25)
    condition = SpinCondition(True)
    for given in (None, 60_000, 5):
        condition.wait(given)
    assert waited == [plugin.RECHECK_MS, plugin.RECHECK_MS, 5]
    assert condition.busy_loop_s == 0.25


def test_a_wait_that_cannot_be_changed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.importlib, "import_module", lambda name: types.SimpleNamespace())
    with pytest.raises(settings.SettingsError, match="MOONTIDE_WORKER_SPIN_SECONDS"):
        plugin.calm(0.25)


class _CpuPlatform:
    """As vLLM's: says ``spawn`` whatever was asked for."""

    checked: ClassVar[list[object]] = []

    @classmethod
    def check_and_update_config(cls, config: object) -> None:
        cls.checked.append(config)
        os.environ[cpu_build.START_METHOD] = "spawn"

    def is_cpu(self) -> bool:
        return True


def _with_platform(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> type[_CpuPlatform]:
    platform = type("CpuPlatform", (_CpuPlatform,), {"checked": [], "is_cpu": lambda self: cpu})
    torch = types.SimpleNamespace(
        cpu=types.SimpleNamespace(_is_amx_tile_supported=lambda: False),
        cuda=types.SimpleNamespace(is_available=lambda: True),
    )
    modules = {
        "torch": torch,
        "vllm.platforms": types.SimpleNamespace(current_platform=platform()),
        "vllm.platforms.cpu": types.SimpleNamespace(CpuPlatform=platform),
    }
    monkeypatch.setattr(cpu_build.importlib, "import_module", modules.__getitem__)
    monkeypatch.setenv(cpu_build.START_METHOD, "unset")
    return platform


@pytest.mark.parametrize(
    ("asked", "cpu", "bind", "then"),
    [
        ("fork", True, "nobind", "fork"),
        ("", True, "nobind", "spawn"),
        ("spawn", True, None, "spawn"),
        ("fork", False, "nobind", "spawn"),
        ("fork", True, "auto", "spawn"),
        ("fork", True, None, "spawn"),
    ],
)
def test_the_cpu_build_starts_its_processes_as_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, asked: str, cpu: bool, bind: str | None, then: str
) -> None:
    platform = _with_platform(monkeypatch, cpu)
    monkeypatch.delenv(cpu_build.BIND, raising=False)
    if bind is not None:
        monkeypatch.setenv(cpu_build.BIND, bind)
    cpu_build.prepare(asked)
    platform.check_and_update_config("config")
    assert (platform.checked, os.environ[cpu_build.START_METHOD]) == (["config"], then)


@pytest.mark.parametrize("value", ["", "@", "a@", ".*", "a b", "-a", "a/b", None, 1, "a" * 300])
def test_what_cannot_be_a_namespace(value: object) -> None:
    assert not is_namespace(value)


def test_pattern_matches_one_namespace_alone() -> None:
    uid = "6f1c0f0e-3a55-4a0e-9d1f-2a5b7f1c9e11"
    found = re.compile(pattern(uid))
    assert found.search(f"{uid}@tiny@tp_rank:0")
    for other in (f"x{uid}@tiny", f"{uid}x@tiny", f"tiny@{uid}@", uid):
        assert not found.search(other)
    assert not re.search(pattern("a.b"), "axb@tiny")
    with pytest.raises(ValueError, match="namespace"):
        pattern("")


def test_log_lines_are_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(data) or len(data))
    jsonlog.log("gate", state="open", text="two\nlines", other=Path("/x"))
    assert written[0].count(b"\n") == 1
    line = json.loads(written[0])
    assert (line["event"], line["state"], line["text"], line["other"]) == ("gate", "open", "two\nlines", "/x")
