"""In the manner of prime-rl: a trainer saves the weights of each step to a folder that engines share; an orchestrator,
which never stops asking for rollouts, has the engines load them. How to run it: README.md in this folder."""

from __future__ import annotations

import argparse
import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import tiny

from moontide.trainer import Engine, policy_update


def train(models: Path, steps: range, saved: queue.Queue[tuple[int, str]]) -> None:
    """The trainer: one folder a step."""
    for step in steps:
        saved.put((step, tiny.save(models, step)))


def push(engine: Engine, path: str, version: str) -> None:
    """Load weights into a running engine through vLLM's own routes, and label them."""
    with httpx.Client(base_url=engine.url, headers=engine.headers, timeout=300, trust_env=False) as admin:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        admin.post("/collective_rpc", json=body).raise_for_status()
        admin.post("/update_weight_version", json={"new_version": version}).raise_for_status()


def ask(url: str, done: threading.Event, seen: Counter[str]) -> None:
    """The orchestrator's rollouts: they wait while the policy changes, and say which version they are of."""
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        number = 0
        while not done.is_set():
            body = {"model": "tiny", "prompt": f"the tide comes in {number % 8}", "max_tokens": 16}
            answer = client.post("/v1/completions", json=body)
            good = answer.status_code == 200
            seen[answer.headers.get("x-moontide-version", "none") if good else f"HTTP {answer.status_code}"] += 1
            number += 1


def main(arguments: list[str] | None = None) -> Counter[str]:
    """Run some steps; gives the number of rollouts by version."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", type=Path, required=True, help="the folder that engines know as /models")
    options.add_argument("--url", required=True, help="where to ask for rollouts")
    options.add_argument("--policy", default="policy")
    options.add_argument("--namespace", default="moontide-demo")
    options.add_argument("--first", type=int, default=101, help="number of the first step")
    options.add_argument("--steps", type=int, default=3)
    chosen = options.parse_args(arguments)
    steps = range(chosen.first, chosen.first + chosen.steps)
    saved: queue.Queue[tuple[int, str]] = queue.Queue(maxsize=1)
    done, seen = threading.Event(), Counter[str]()
    with ThreadPoolExecutor(max_workers=64) as pool:
        rollouts = [pool.submit(ask, chosen.url, done, seen) for _ in range(2)]
        training = pool.submit(train, chosen.models, steps, saved)
        try:
            for _ in steps:
                step, path = saved.get(timeout=600)
                with policy_update(chosen.policy, step, namespace=chosen.namespace) as update:
                    list(pool.map(lambda each: push(each, path, update.version), update.engines))  # noqa: B023
                print(f"step {step}: {update.replicas} replicas, epoch {update.epoch}, paused {update.pause_seconds} s")
        finally:
            done.set()
        for each in (training, *rollouts):
            each.result()
    print("rollouts by version:", dict(seen))
    return seen


if __name__ == "__main__":
    main()
