"""A checkpoint is loaded whole, on every rank, or it is an error; on a model and layers that are made up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moontide_engine.engine import EngineFault, VllmEngine
from moontide_engine.patches import weights_load
from moontide_engine.plugin import PATCHES


class Info:
    """What vLLM knows of a layer while it loads."""

    def __init__(self, prepared: bool, kernel: object = "kernel") -> None:
        self.prepared = prepared
        self.kernel_tensors = kernel

    def can_load(self) -> bool:
        return self.prepared

    def reset(self) -> None:
        self.prepared = False


class Model:
    """Two layers with a parameter each."""

    def __init__(self) -> None:
        self.layers = ["first", "second"]
        self.names: set[str] | None = {"first.weight", "second.weight"}

    def named_parameters(self) -> list[tuple[str, object]]:
        return [("first.weight", 1), ("second.base_layer.weight", 2)]

    def modules(self) -> list[str]:
        return self.layers

    def load_weights(self, weights: object) -> set[str] | None:
        return self.names


class Worker:
    """One rank."""

    rank = 3

    def __init__(self) -> None:
        self.model = Model()
        self.loaded: list[str] = []
        self.fault: Exception | None = None
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))

    def get_model(self) -> Model:
        return self.model

    def reload_weights(self, weights_path: str) -> None:
        self.loaded.append(weights_path)
        self.model.load_weights([])
        if self.fault is not None:
            raise self.fault


@pytest.fixture(name="layers")
def _layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Info]]:
    """vLLM's memory of layers: the second is prepared for a load."""
    infos = {"first": Info(False), "second": Info(True)}
    module: Any = ModuleType(f"{weights_load.RELOAD}.layerwise")
    module.placed = []
    module.get_layerwise_info = infos.__getitem__
    module._place_kernel_tensors = lambda layer, info: module.placed.append((layer, info.prepared))
    module.LOADING_LAYERS = {"second"}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield infos
    for layer, prepared in module.placed:
        assert (layer, prepared) == ("second", True)


def test_all_of_it(tmp_path: Path) -> None:
    worker = Worker()
    assert weights_load.moontide_load(worker, str(tmp_path)) == {"rank": 3, "error": ""}
    assert worker.loaded == [str(tmp_path)]
    assert "load_weights" not in vars(worker.model)


def test_a_repository_is_no_folder() -> None:
    worker = Worker()
    assert weights_load.moontide_load(worker, "org/name")["error"] == ""
    assert worker.loaded == ["org/name"]


def test_a_folder_that_is_not_there_touches_nothing(tmp_path: Path) -> None:
    worker = Worker()
    answer = weights_load.moontide_load(worker, f"{tmp_path}/gone")
    assert answer == {"rank": 3, "error": f"{tmp_path}/gone is not a folder in the engine's pod"}
    assert worker.loaded == []


def test_what_fails_half_way_is_undone(layers: dict[str, Info]) -> None:
    worker = Worker()
    worker.fault = ValueError("shapes")
    answer = weights_load.moontide_load(worker, "org/name")
    assert answer == {"rank": 3, "error": "ValueError: shapes"}
    assert not layers["second"].prepared
    module: Any = sys.modules[f"{weights_load.RELOAD}.layerwise"]
    assert module.placed == [("second", True)]
    assert not module.LOADING_LAYERS
    assert "load_weights" not in vars(worker.model)


def test_a_layer_that_had_no_tensors_yet_gets_none_back(layers: dict[str, Info]) -> None:
    layers["second"].kernel_tensors = None
    worker = Worker()
    worker.fault = ValueError()
    assert weights_load.moontide_load(worker, "org/name")["error"] == "ValueError"
    module: Any = sys.modules[f"{weights_load.RELOAD}.layerwise"]
    assert module.placed == []
    assert not layers["second"].prepared


@pytest.mark.usefixtures("layers")
def test_what_is_lacking_is_an_error_that_names_it() -> None:
    worker = Worker()
    worker.model.names = {"first.weight"}
    answer = weights_load.moontide_load(worker, "org/name")
    assert answer["error"] == "Incomplete: org/name has no weights for second.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda worker: setattr(worker.model, "names", None),
        lambda worker: setattr(worker.vllm_config.model_config, "quantization", "fp8"),
    ],
    ids=["a model that does not say", "a quantized model"],
)
def test_where_names_tell_nothing_none_is_lacking(change: Callable[[Worker], None]) -> None:
    worker = Worker()
    worker.model.names = {"first.weight"}
    change(worker)
    assert weights_load.moontide_load(worker, "org/name")["error"] == ""


class Client:
    """vLLM's client of two engine cores with two workers each."""

    def __init__(self, *errors: str) -> None:
        parallel = SimpleNamespace(world_size=2, data_parallel_size=2)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
        self.engine_core = self
        self.core_engines = [0, 1]
        self.errors = errors
        self.calls: list[tuple[object, ...]] = []

    async def _call_utility_async(self, *call: object, engine: int) -> list[dict[str, Any]]:
        self.calls.append((*call, engine))
        answers = [{"rank": rank, "error": error} for rank, error in enumerate(self.errors)]
        return answers[2 * engine :][:2]


async def test_every_worker_of_every_core_is_asked() -> None:
    client = Client("", "", "", "")
    await VllmEngine(client, "0").load_weights("hf://org/name")
    assert client.calls == [("collective_rpc", "moontide_load", None, ("org/name",), {}, core) for core in (0, 1)]


async def test_a_release_that_cannot_load_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATCHES._table, "weights-load", "not-applicable")
    with pytest.raises(EngineFault, match=r"^vLLM 0\.22\.1 cannot load weights by itself: push them"):
        await VllmEngine(Client("", "", "", ""), "0.22.1").load_weights("/models/a")


async def test_ranks_that_fail_alike_are_named_once() -> None:
    with pytest.raises(EngineFault, match=r"^rank 1: gone; rank 3: other$"):
        await VllmEngine(Client("", "gone", "gone", "other"), "0").load_weights("/models/a")


async def test_a_rank_that_says_nothing_is_no_success() -> None:
    with pytest.raises(EngineFault, match="3 of 4 ranks answered"):
        await VllmEngine(Client("", "", ""), "0").load_weights("/models/a")
