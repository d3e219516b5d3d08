"""What the engine patches cost on the hot path: patched over unpatched, both measured in turn in one run.

Run it with the engine's Python, from the repository's root:

    ~/.cache/moontide/engine-env-*/bin/python bench/epoch_cost.py

Real EngineCore, scheduler and Mooncake scheduler half; the worker is simulated (tests/component/engine/scheduler), so a
step here is the scheduler's work without a model. Prints medians over the rounds and their ratio; asserts nothing.
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
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import corekit as kit  # noqa: E402

from moontide_engine.patches import Patch, load_retry, policy_epoch, resume_safety  # noqa: E402

PATCHES: tuple[Patch, ...] = (policy_epoch.PATCH, resume_safety.PATCH, load_retry.PATCH)
LENGTHS = (512, 8192, 32768)
STEPS = 200


def timed(work: Callable[[], object], times: int) -> float:
    """Microseconds of one call."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times * 1e6


def fenced(core: kit.Core, on: bool) -> None:
    if on:
        core.core.moontide_switch("policy/1")


def hashing(model: Path, length: int, on: bool) -> float:
    """Request from the API server to hashed request, in the input thread."""
    core = kit.Core(model)
    fenced(core, on)
    text = kit.prompt(1, length)
    return timed(lambda: core.core.preprocess_add_request(core.request("r", text)), max(3, 100_000 // length))


def step(model: Path, on: bool) -> float:
    """One engine step with 64 running requests and the store's connector."""
    core = kit.Core(model, store=kit.SimStore(), num_gpu_blocks_override=2048, max_num_batched_tokens=8192)
    fenced(core, on)
    for number in range(64):
        core.add(f"r{number}", kit.prompt(number, 64), STEPS + 50)
    core.step(5)
    schedule = core.scheduler.schedule
    spent = 0.0

    def measured(*args: object) -> object:
        nonlocal spent
        began = time.perf_counter()
        result = schedule(*args)
        spent += time.perf_counter() - began
        return result

    core.scheduler.schedule = measured
    core.step(STEPS)
    return spent / STEPS * 1e6


def switch(model: Path, requests: int) -> list[float]:
    """Microseconds of each of 20 switches, in EngineCore, with so many requests running and as many waiting."""
    core = kit.Core(model, store=kit.SimStore(), num_gpu_blocks_override=4096, max_num_seqs=64)
    for number in range(2 * requests):
        core.add(f"r{number}", kit.prompt(number, 520), 400)
    core.step(60)
    return [core.core.moontide_switch(f"policy/{number}")["seconds"] * 1e6 for number in range(20)]


def compare(name: str, rounds: int, measure: Callable[[bool], float]) -> None:
    """Off and on in turn."""
    off, on = [], []
    for _ in range(rounds):
        off.append(measure(False))
        with kit.installed(*PATCHES):
            on.append(measure(True))
    a, b = statistics.median(off), statistics.median(on)
    print(f"{name:42} stock {a:10.1f} us   patched {b:10.1f} us   ratio {b / a:.3f}", flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each figure (default 7)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        maker = ROOT / "hack" / "tinymodels" / "make.py"
        subprocess.run([sys.executable, str(maker), str(model), "1"], check=True, capture_output=True)
        for length in LENGTHS:
            compare(f"hashing a request of {length} tokens", rounds, lambda on, n=length: hashing(model, n, on))
        compare("schedule(), 64 running", rounds, lambda on: step(model, on))
        with kit.installed(*PATCHES):
            for requests in (0, 32):
                each = switch(model, requests)
                name = "idle" if not requests else f"{requests} running, {requests} waiting (520 tokens each)"
                print(f"switch, {name}: median {statistics.median(each):.1f} us, worst {max(each):.1f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
