"""What vLLM's CPU build lacks to run with the store at all. A GPU build is not touched by any of it."""

from __future__ import annotations

import importlib
import logging
from typing import Any


class Event:
    """Stand-in for ``torch.cuda.Event``: the CPU build computes in line, so what was recorded is over."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        """Nothing to mark."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always over."""
        return True


def prepare() -> None:
    """All of it; in each process, before the engine starts."""
    torch = importlib.import_module("torch")
    ask_for_amx(torch)
    give_events(torch)


def ask_for_amx(torch: Any) -> None:
    """Ask the kernel for the AMX tiles that vLLM's CPU attention uses.

    vLLM leaves that to the first large matrix product. When the first request is short there was none yet, and the
    worker dies of an illegal instruction (seen on 0.32.0).
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logging.getLogger("moontide").warning("the kernel refuses AMX tiles; a short first request may end the worker")


def give_events(torch: Any) -> None:
    """Before 0.27 the store's worker makes a CUDA event in each step that saves, without CUDA too, and dies of it."""
    if not torch.cuda.is_available():
        torch.cuda.Event = Event
