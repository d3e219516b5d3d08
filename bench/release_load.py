"""Load on one vLLM release, as it is and with the patches: hits after a reset, blocks given out twice, crashes.

Run it with the Python of an environment in which that release serves, from the repository's root:

    python3 -m hack.setup --engine 0.22.1
    ~/.cache/moontide/engine-0.22.1-env-*/bin/python bench/release_load.py

Two replicas of a tiny model with sliding windows (three groups of KV blocks), one Mooncake master, few blocks, so that
requests evict one another's. Conversations whose turns go to the replicas at random (a turn's prefix is in the other
one's memory or in the store) run for a while; then both replicas reset their caches, the external one too, and the same
prompts come once more. Prints one row an arm; asserts nothing. The arms run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "component" / "engine")]

import enginekit as kit  # noqa: E402

MASTER, METRICS = 18180, 18181
NUMBERS = (61, 62)
"""Of the replicas, which name their ports: others than those of the tests."""
CLIENTS = 4
TURNS = 5
LIVE = 2
"""Conversations that a client has at a time."""
WORDS = 16
"""Of one turn; a byte-level tokenizer makes about three tokens of each."""
LENGTH = 640
BLOCKS = 88


@dataclass
class Arm:
    """What one arm came to."""

    name: str
    requests: int = 0
    failed: int = 0
    external: float = 0.0
    """Prompt tokens that hit in the store under load."""
    after: dict[str, float] = field(default_factory=dict)
    """Hits of the same prompts after the reset."""
    reset: str = ""
    blocks: list[dict[str, int]] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def command(model: Path, number: int) -> list[str]:
    """The kit's replica with a short context and few blocks."""
    made = kit.engine_command(model, number)
    made += ["--max-model-len", str(LENGTH), "--num-gpu-blocks-override", str(BLOCKS)]
    return [*made, "--no-disable-hybrid-kv-cache-manager"]


def environment(folder: Path, number: int, patched: bool) -> dict[str, str]:
    """The kit's environment with the watch, and with our plugin's patches or without."""
    made = kit.engine_environment(folder, number)
    made |= {"PYTHONPATH": f"{folder / 'plugins'}:{ROOT / 'engine_patches'}"}
    made |= {"BLOCK_WATCH_FILE": str(folder / f"blocks{number}.json"), "MOONTIDE_ENABLED": "1" if patched else "0"}
    return made


def ask(url: str, prompt: str) -> int:
    """HTTP status of one completion; 0: no answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120, verify=False).status_code
    except httpx.HTTPError:
        return 0


def load(urls: list[str], seconds: float, arm: Arm) -> list[str]:
    """Conversations for so long; the prompts that were answered."""
    until, lock = time.monotonic() + seconds, threading.Lock()
    answered: list[str] = []

    def client(number: int) -> None:
        # Each turn waits for those of other conversations, so its prefix is an old one here and there.
        chance, count = random.Random(number), 0
        live: list[list[str]] = []
        while time.monotonic() < until:
            if len(live) < LIVE:
                count += 1
                live.append([f"client {number} conversation {count}"])
            turns = live.pop(0)
            turns.append(" ".join(f"{count} {len(turns)} {word}" for word in range(WORDS)))
            status = ask(chance.choice(urls), " ".join(turns))
            with lock:
                arm.requests += 1
                arm.failed += status != 200
                if status == 200:
                    answered.append(" ".join(turns))
            if len(turns) <= TURNS:
                live.append(turns)
            if status != 200:
                time.sleep(0.5)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    return answered


def reset(fleet: kit.Fleet, patched: bool) -> str:
    """Reset both caches of both replicas by vLLM's own route; what it answered."""
    said = []
    for replica in fleet.replicas:
        url = replica.admin if patched else replica.inference
        headers = {"authorization": f"Bearer {kit.TOKEN}"}
        target = f"{url}/reset_prefix_cache?reset_external=true"
        try:
            answer = httpx.post(target, headers=headers, timeout=60, verify=False)
            said.append(f"{answer.status_code} {answer.text[:120]}".strip())
        except httpx.HTTPError as error:
            said.append(type(error).__name__)
    return "; ".join(dict.fromkeys(said))


def run(name: str, patched: bool, model: Path, seconds: float, folder: Path) -> None:
    """One arm, from the start of its processes to their end; its row is printed."""
    arm = Arm(name)
    for module in (kit.ROOT / "tests/component/engine/stock_on_cpu.py", ROOT / "bench/block_watch.py"):
        kit.vllm_plugin(folder / "plugins", module)
    kit.store_config(folder, MASTER)
    master = kit.Master(folder, MASTER, METRICS)
    master.start()
    processes = []
    try:
        for number in NUMBERS:
            log = folder / f"engine{number}.log"
            processes.append(kit.spawn(command(model, number), environment(folder, number, patched), log))
        replicas = [kit.Replica(number, process) for number, process in zip(NUMBERS, processes, strict=True)]
        for replica in replicas:
            health = f"{replica.inference}/health"
            kit.wait_for(f"engine {replica.number}", lambda u=health: kit.get(u), kit.START_SECONDS, replica.process)
        with ThreadPoolExecutor(4) as pool:
            fleet = kit.Fleet(folder, {"a": model, "b": model}, master, (replicas[0], replicas[1]), pool)
            if patched:
                for replica in replicas:
                    replica.boot_id = replica.status()["bootId"]
                fleet.bump(wipe=False, salted=True)
            began = time.monotonic()
            prompts = load([replica.inference for replica in replicas], seconds, arm)
            arm.seconds = time.monotonic() - began
            finish(fleet, arm, prompts, patched)
        for number, process in zip(NUMBERS, processes, strict=True):
            path = folder / f"blocks{number}.json"
            arm.blocks.append(json.loads(path.read_text()) if path.exists() else {})
            if process.popen.poll() is not None or "EngineDeadError" in process.tail(2000):
                arm.crashed.append(f"engine {number}: {reason(process)}")
        # Engines can take long to end.
        report(arm)
    finally:
        for process in processes:
            process.end(20)
        if master.process is not None:
            master.process.end(10)


def finish(fleet: kit.Fleet, arm: Arm, prompts: list[str], patched: bool) -> None:
    """The reset, and the same prompts once more; nothing where an engine has died."""
    try:
        arm.external = sum(replica.counters()["external"] for replica in fleet.replicas)
        time.sleep(2)
        arm.reset = reset(fleet, patched)
        before = [replica.counters() for replica in fleet.replicas]
        # One turn of each conversation, so that none can hit what was asked after the reset.
        last = {" ".join(prompt.split()[:4]): prompt for prompt in prompts}
        for index, prompt in enumerate(list(last.values())[:20]):
            ask(fleet.replicas[index % 2].inference, prompt)
        after = [replica.counters() for replica in fleet.replicas]
        arm.after = {key: sum(a[key] - b[key] for a, b in zip(after, before, strict=True)) for key in before[0]}
    except httpx.HTTPError as error:
        arm.reset = arm.reset or type(error).__name__


def reason(process: kit.Process) -> str:
    """The last line of its log that names an error."""
    lines = [line for line in process.log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-160:] if lines else f"ended with {process.popen.poll()}"


def report(arm: Arm) -> None:
    """Its row."""
    total = {key: sum(each.get(key, 0) for each in arm.blocks) for key in ("allocations", "twice", "unreferenced")}
    print(
        f"{arm.name:8} {arm.requests} requests in {arm.seconds:.0f} s, {arm.failed} failed; hits through the store "
        f"{arm.external:.0f} tokens; {total['allocations']} allocations, {total['twice']} left a block with two "
        f"owners and {total['unreferenced']} one without a reference; crashes {len(arm.crashed)}"
    )
    print(f"{'':8} reset said: {arm.reset}; the same prompts after it hit {json.dumps(arm.after)}")
    for text in arm.crashed:
        print(f"{'':8} {text}")
    sys.stdout.flush()


def main() -> int:
    """Command line."""
    import vllm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--arm", choices=("stock", "patched"), action="append")
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = options.keep or Path(scratch)
        model = home / "model" / "tiny"
        maker: list[Any] = [sys.executable, kit.MAKER, model, "1", "--hybrid"]
        subprocess.run([str(part) for part in maker], check=True, capture_output=True, env=dict(os.environ))
        print(f"vllm {vllm.__version__}: {CLIENTS} clients, two replicas with {BLOCKS} blocks each", flush=True)
        for name in options.arm or ("stock", "patched"):
            folder = home / name
            folder.mkdir(parents=True)
            run(name, name == "patched", model, options.seconds, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
