"""The driver of bench/gpu: the operator's own reconcile over real gates, without a cluster."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.operator import doubles
from tests.unit.operator.paperhttp import session

ROOT = Path(__file__).parents[3]
UID = "5f0c6f6e-2f0b-4a8e-9b59-3d1b6a1c7d10"


def load(name: str) -> Any:
    """A module of bench/gpu, which is no package."""
    spec = importlib.util.spec_from_file_location(f"bench_gpu_{name}", ROOT / "bench" / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


drive = load("drive")


def network(folder: Path) -> doubles.Network:
    """Two engines that share a store."""
    made = doubles.Network()
    for number in (1, 2):
        made.engines[f"10.0.0.{number}:8001"] = doubles.Engine(folder, f"boot-{number}", "secret", UID, store=True)
    return made


def test_a_change_is_the_planners_and_leaves_its_steps(tmp_path: Path) -> None:
    net = network(tmp_path)
    urls = [f"http://{place}" for place in net.engines]
    with drive.Driver(urls, "http://10.0.0.9:9004", UID, "secret", session(net)) as driver:
        driver.change(10, version="7", onReplicaFailure="Isolate")
        assert [engine.state for engine in net.engines.values()] == [("open", 1)] * 2
        assert {host for host, _ in net.wiped} == {"kv-master.paper.svc"}
        for engine in net.engines.values():
            engine.idle.weights = "8"
            engine.heard.clear()
        status = driver.change(10, version="8")
        assert status["lastUpdate"]["version"] == "8"
        assert status["lastUpdate"]["epoch"] == 2
        assert net.engines["10.0.0.1:8001"].heard[0] == "quiesce"
        assert any("quiesce 10.0.0.1:8001: done" in line for line in driver.steps.lines)
        assert driver.settle(10)["lastUpdate"]["wipedAt"]


def test_a_preparation_is_finished_when_engines_stand_still_and_then_when_it_is_committed(tmp_path: Path) -> None:
    net = network(tmp_path)
    urls = [f"http://{place}" for place in net.engines]
    with drive.Driver(urls, "http://10.0.0.9:9004", UID, "secret", session(net)) as driver:
        driver.change(10, version="7")
        driver.change(10, preparing="8")
        assert {engine.state[0] for engine in net.engines.values()} == {"paused"}
        for engine in net.engines.values():
            engine.idle.weights = "8"
        driver.change(10, version="8", preparing=None)
        assert {engine.state[0] for engine in net.engines.values()} == {"open"}


def test_a_change_that_cannot_finish_says_why(tmp_path: Path) -> None:
    net = network(tmp_path)
    urls = [f"http://{place}" for place in net.engines]
    with drive.Driver(urls, "http://10.0.0.9:9004", UID, "secret", session(net)) as driver:
        driver.change(10, version="7")
        with pytest.raises(TimeoutError, match="WaitingForWeights"):
            driver.change(0.5, version="9")


@pytest.mark.parametrize(
    ("text", "found"),
    [("strategy=Fence", ("strategy", "Fence")), ("deadlineSeconds=9", ("deadlineSeconds", 9)), ("a=", ("a", ""))],
)
def test_settings_of_the_command_line(text: str, found: tuple[str, object]) -> None:
    assert drive.setting(text) == found


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(drive.argparse.ArgumentTypeError, match="strategy=Fence"):
        drive.setting("strategy")
