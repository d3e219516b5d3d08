"""What the patch two-phase-allocation costs: the time of allocate_new_computed_blocks with it over that without.

Run it with the engine's Python, from the repository's root; a vLLM before 0.24 comes first on PYTHONPATH, since later
ones need no patch and their function is another one:

    PYTHONPATH=<folder of vLLM 0.22.1> VLLM_TARGET_DEVICE=cpu \\
        ~/.cache/moontide/engine-env-*/bin/python bench/two_phase_cost.py

Real managers and pools with plenty of free blocks, so that both do the same work. Both are measured in turn in one
run of short rounds. Prints the medians over the rounds in microseconds per call, and the median of the rounds' ratios,
which a machine that is busy with other things disturbs less; asserts nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "engine_patches"), str(ROOT / "tests" / "component" / "engine" / "scheduler")]
os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import vllm  # noqa: E402
from blockkit import BLOCK, Blocks, full, lookup, sliding, tokens  # noqa: E402
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager  # noqa: E402

from moontide_engine.patches import two_phase  # noqa: E402

WINDOW = 64 * BLOCK
SCENES: dict[str, tuple[tuple[Any, ...], int, int, bool]] = {
    "one group, 128 hits, 16 external": ((full(),), 128, 16, True),
    "three groups without caching, 16 external": ((full(), sliding(WINDOW), sliding(2 * WINDOW)), 0, 16, False),
    "full + sliding, 128 hits, none external": ((full(), sliding(WINDOW)), 128, 0, True),
    "full + sliding, no hits, 16 external": ((full(), sliding(WINDOW)), 0, 16, True),
    "full + sliding, 128 hits, 16 external": ((full(), sliding(WINDOW)), 128, 16, True),
    "full + 2 sliding, 128 hits, 16 external": ((full(), sliding(WINDOW), sliding(2 * WINDOW)), 128, 16, True),
    "2 full + sliding, 128 hits, 16 external": ((full(), full(), sliding(WINDOW)), 128, 16, True),
}
"""Groups, hits and external blocks of each group, and whether prefixes are cached."""


class Scene:
    """A request that is given its blocks and freed, over and over; its hits are free, and the last to be evicted."""

    def __init__(self, specs: tuple[Any, ...], hits: int, external: int, caching: bool) -> None:
        prompt = tokens(1, (hits + external + 1) * BLOCK)
        self.blocks = Blocks(specs, 1 + len(specs) * 4 * (hits + external + 1), {"enable_caching": caching})
        if hits:
            self.blocks.take("old", prompt[: hits * BLOCK])
            self.blocks.finish("old")
        self.prompt = prompt
        self.local = hits * BLOCK
        self.external = external * BLOCK

    def timed(self, function: Any, times: int) -> float:
        """Microseconds of one call; the lookup before it and the end of the request are not in it."""
        manager = self.blocks.manager
        coordinator = manager.coordinator
        request = self.blocks.request("new", self.prompt)
        spent = 0.0
        for _ in range(times):
            # Without external tokens every hit is used, also those that external ones push out of a window.
            hits, local = lookup(manager, request)
            coordinator.allocate_new_computed_blocks("old", hits.blocks, local, 0)
            coordinator.free("old")
            assert local == self.local
            began = time.perf_counter()
            function(coordinator, "new", hits.blocks, local, self.external)
            spent += time.perf_counter() - began
            coordinator.free("new")
        return spent / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--times", type=int, default=20, help="calls in a round")
    options = parser.parse_args()
    if not hasattr(SingleTypeKVCacheManager, "allocate_new_computed_blocks"):
        sys.exit(f"vLLM {vllm.__version__} allocates in two phases by itself")
    stock = KVCacheCoordinator.allocate_new_computed_blocks
    two_phase.PATCH.install()
    patched = KVCacheCoordinator.allocate_new_computed_blocks
    print(f"vLLM {vllm.__version__}, medians of {options.rounds} rounds of {options.times} calls")
    for name, arguments in SCENES.items():
        scene = Scene(*arguments)
        for function in (stock, patched):
            scene.timed(function, options.times)
        times: dict[Any, list[float]] = {stock: [], patched: []}
        for number in range(options.rounds):
            # Each goes first every other time.
            for function in (stock, patched) if number % 2 else (patched, stock):
                times[function].append(scene.timed(function, options.times))
        off, on = statistics.median(times[stock]), statistics.median(times[patched])
        ratio = statistics.median(b / a for a, b in zip(times[stock], times[patched], strict=True))
        print(f"{name:45} off {off:7.2f} us  on {on:7.2f} us  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
