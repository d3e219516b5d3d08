"""Patch ``weights-load``: a method of every worker that loads a checkpoint, and says so if it did not load all of it.

vLLM's ``reload_weights`` loads; called from outside, it has three faults (0.32.0):

- an error of one rank leaves the answers of the others in their queues, and every later call gets those of the call
  before: here an error is an answer, so every rank is waited for;
- a load that fails half-way leaves layers prepared for it, with what they have buffered: the next load goes on from
  there, and old and new get mixed. Here such layers get their tensors back first;
- parameters that the checkpoint lacks keep their old values, and there is only a line in the log: here it is an error.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from moontide_engine.patches import Patch

RELOAD = "vllm.model_executor.model_loader.reload"
LISTED = 5
_OLD = "its reload is built another way, so engines of this release get their weights pushed and load none themselves"


class Incomplete(RuntimeError):
    """The checkpoint lacks parameters of the model; the message names some."""


def moontide_load(self: Any, source: str) -> dict[str, Any]:
    """Method of every worker: load the checkpoint at ``source``, a folder or the name of a Hugging Face repository.

    Answers ``rank`` and ``error``; the latter is empty if every parameter was loaded. Never raises.
    """
    answer: dict[str, Any] = {"rank": self.rank, "error": ""}
    if source.startswith("/") and not os.path.isdir(source):
        return {**answer, "error": f"{source} is not a folder in the engine's pod"}
    model = self.get_model()
    try:
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        loaded = _watched(model, lambda: self.reload_weights(weights_path=source))
        # The names in a quantized checkpoint are not those of the parameters.
        if self.vllm_config.model_config.quantization is None and loaded is not None and names - loaded:
            lacking = sorted(names - loaded)
            more = f" and {len(lacking) - LISTED} more" if len(lacking) > LISTED else ""
            raise Incomplete(f"{source} has no weights for {', '.join(lacking[:LISTED])}{more}")
    except Exception as error:
        _undo(model)
        answer["error"] = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return answer


def _watched(model: Any, load: Callable[[], None]) -> set[str] | None:
    """The names that ``model.load_weights`` says it has loaded while ``load`` ran; None if it does not say."""
    original: Callable[..., set[str] | None] = model.load_weights
    said: list[set[str] | None] = []

    def load_weights(*args: Any, **kwargs: Any) -> set[str] | None:
        said.append(original(*args, **kwargs))
        return said[-1]

    model.load_weights = load_weights
    try:
        load()
    finally:
        del model.load_weights
    known = [names for names in said if names is not None]
    return set().union(*known) if known else None


def _undo(model: Any) -> None:
    """Give layers that a load has prepared and not finished their tensors back, so that a next load begins anew."""
    layerwise = importlib.import_module(f"{RELOAD}.layerwise")
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


def _install() -> None:
    base = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    base.moontide_load = moontide_load


PATCH = Patch(
    name="weights-load",
    summary="a checkpoint is loaded whole, on every rank, or it is an error",
    references=(
        f"{RELOAD}.inplace:reload_weights",
        f"{RELOAD}.layerwise:get_layerwise_info",
        f"{RELOAD}.layerwise:initialize_layerwise_reload",
        f"{RELOAD}.layerwise:finalize_layerwise_processing",
        f"{RELOAD}.layerwise:_place_kernel_tensors",
        f"{RELOAD}.types:LayerReloadingInfo",
        "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version",
    ),
    install=_install,
    optional=True,
    inapplicable=dict.fromkeys(("0.22.1", "0.23.0", "0.24.0", "0.27.1"), _OLD),
)
