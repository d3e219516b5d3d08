"""What external-match-lifecycle costs a schedule() call: patched over unpatched, both measured in turn in one run.

Run it with the engine's Python, from the repository's root:

    ~/.cache/moontide/engine-env-*/bin/python bench/match_cost.py

Real EngineCore, scheduler and Mooncake scheduler half with a simulated store. *blocked*: the first of N waiting
requests has a match and no room for its blocks, so each call looks it up, and does not schedule it. *admitted*: N
requests come at once, each with a match, and one call takes them all. *no connector*: N running requests, to see that
nothing is in the way of engines that have none. The first two with lookup-economy, too, which remembers lookups by
itself. Prints medians over the rounds and their ratio; asserts nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "engine_patches"), str(ROOT / "tests" / "component" / "engine" / "scheduler")]
os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import corekit as kit  # noqa: E402

from moontide_engine.patches import lookup_economy, match_lifecycle  # noqa: E402

WAITING = (1, 16, 64)
STEPS = 100
BATCHES = 11


def spent_in(core: kit.Core) -> Callable[[], list[float]]:
    """Seconds of each schedule() call from now on."""
    schedule = core.scheduler.schedule
    spent: list[float] = []

    def measured(*args: object) -> object:
        began = time.perf_counter()
        try:
            return schedule(*args)
        finally:
            spent.append(time.perf_counter() - began)

    core.scheduler.schedule = measured
    return lambda: spent


def blocked(model: Path, store: kit.SimStore, waiting: int) -> float:
    """Microseconds of a call that cannot schedule the first of so many requests."""
    core = kit.Core(model, store=store, num_gpu_blocks_override=44, max_model_len=640, max_num_batched_tokens=640)
    core.add("first", kit.prompt(1000, 400), STEPS + 50)
    core.step(3)
    for number in range(waiting):
        core.add(f"r{number}", kit.prompt(number, 300))
    core.step(3)
    spent = spent_in(core)
    core.step(STEPS)
    assert len(core.scheduler.running) == 1
    return statistics.median(spent()) * 1e6


def admitted(model: Path, store: kit.SimStore, waiting: int) -> float:
    """Microseconds of a call that starts the loads of so many requests: the fastest of some, as there are few."""
    core = kit.Core(model, store=store, num_gpu_blocks_override=4096)
    spent = spent_in(core)
    first: list[float] = []
    for batch in range(BATCHES):
        for number in range(waiting):
            core.add(f"r{batch}-{number}", kit.prompt(number, 300), 1)
        before, loaded = len(spent()), store.loaded
        core.run()
        core.settle()
        assert store.loaded - loaded == waiting * 18
        first.append(spent()[before])
        core.scheduler.reset_prefix_cache()
    return min(first) * 1e6


def plain(model: Path, store: kit.SimStore, waiting: int) -> float:
    """Microseconds of a call with so many running requests and no connector."""
    core = kit.Core(model, num_gpu_blocks_override=4096)
    for number in range(waiting):
        core.add(f"r{number}", kit.prompt(number, 64), STEPS + 50)
    core.step(20)
    spent = spent_in(core)
    core.step(STEPS)
    return statistics.median(spent()) * 1e6


def compare(name: str, rounds: int, measure: Callable[[], float]) -> None:
    """Off and on in turn; which of them is first changes with the rounds."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for on in (bool(number % 2), not number % 2):
            with kit.installed(match_lifecycle.PATCH, on=on):
                found[on].append(measure())
    off, on_ = statistics.median(found[False]), statistics.median(found[True])
    print(f"{name:52} off {off:9.1f} us   on {on_:9.1f} us   ratio {on_ / off:.3f}", flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each figure (default 9)")
    rounds = parser.parse_args().rounds
    os.environ["MOONTIDE_LOOKUP_MEMO_SECONDS"] = "300"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        maker = ROOT / "hack" / "tinymodels" / "make.py"
        subprocess.run([sys.executable, str(maker), str(model), "1"], check=True, capture_output=True)
        store = kit.SimStore()
        seed = kit.Core(model, store=store, num_gpu_blocks_override=4096)
        for number in range(max(WAITING)):
            seed.add(f"r{number}", kit.prompt(number, 300))
        seed.run()
        seed.settle()
        for economy in (False, True):
            beside = ", lookup-economy" if economy else ""
            with kit.installed(lookup_economy.PATCH, on=economy):
                for waiting in WAITING:
                    compare(f"blocked, {waiting} waiting{beside}", rounds, lambda n=waiting: blocked(model, store, n))
                for waiting in WAITING:
                    compare(f"admitted, {waiting} at once{beside}", rounds, lambda n=waiting: admitted(model, store, n))
        for waiting in WAITING:
            compare(f"no connector, {waiting} running", rounds, lambda n=waiting: plain(model, store, n))
    return 0


if __name__ == "__main__":
    sys.exit(main())
