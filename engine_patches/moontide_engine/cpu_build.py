"""What vLLM's CPU build lacks to run with the store at all, and to start quickly. A GPU build is not touched by it."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
BIND = "VLLM_CPU_OMP_THREADS_BIND"


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


def prepare(start_method: str = "") -> None:
    """All of it; in each process, before the engine starts."""
    torch = importlib.import_module("torch")
    ask_for_amx(torch)
    give_events(torch)
    if start_method == "fork" and importlib.import_module("vllm.platforms").current_platform.is_cpu():
        fork()


def fork() -> None:
    """Let vLLM start EngineCore and its workers by a fork.

    Its CPU build always spawns, so that each of three processes imports everything anew: most of the CPU time of a
    start. It does so because it gives each worker cores of its own by a setting that OpenMP reads once a process. So
    it stays with that unless ``VLLM_CPU_OMP_THREADS_BIND=nobind`` says that no core is given to anybody.
    """
    if os.environ.get(BIND) != "nobind":
        logging.getLogger("moontide").warning("%s is not nobind, so vLLM's processes are spawned, not forked", BIND)
        return
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, *args: Any, **kwargs: Any) -> None:
        original(cls, *args, **kwargs)
        os.environ[START_METHOD] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)


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
