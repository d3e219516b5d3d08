from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hack.cluster import settings
from hack.cluster.errors import ClusterError
from hack.cluster.settings import Ports, Settings, free_ports, load, load_last


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a/b", "a b", "x" * 33])
def test_a_name_that_does_not_fit_a_path_or_a_context_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="cluster name"):
        Settings(name=name)


def test_a_full_cluster_and_a_control_plane_share_neither_address_nor_context_nor_folder() -> None:
    full, plane = Settings(), Settings(name="it", control_plane_only=True, ports=free_ports())
    assert (full.context, plane.context) == ("moontide-local", "moontide-local-it")
    assert full.server == "https://172.30.99.1:6443"
    assert plane.server == f"https://127.0.0.1:{plane.ports.apiserver}"
    assert full.run_dir != plane.run_dir
    assert full.state_dir != plane.state_dir


def test_what_is_saved_is_loaded(cache: Path) -> None:
    saved = Settings(name="it", control_plane_only=True, controller_manager=False, gpus=0, ports=Ports(1, 2, 3, 4, 5))
    assert load("it") is None
    saved.save()
    assert load("it") == saved
    assert saved.run_dir == cache / "run" / "it"
    assert saved.run_dir.stat().st_mode & 0o077 == 0


def test_settings_outlive_the_run_folder_for_the_check_after_down() -> None:
    saved = Settings(name="it", control_plane_only=True)
    saved.save()
    saved.settings_file.unlink()
    assert load("it") is None
    assert load_last("it") == saved


def test_free_ports_are_distinct_and_can_be_bound() -> None:
    ports = free_ports()
    numbers = [ports.etcd, ports.etcd_peer, ports.apiserver, ports.controller_manager, ports.scheduler]
    assert len(set(numbers)) == 5
    for number in numbers:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", number))


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MOONTIDE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings.cache_root() == tmp_path / "home" / ".cache" / "moontide"
