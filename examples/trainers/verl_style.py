"""In the manner of verl: phases that take turns in one asyncio loop: new weights, a push of them into the engines,
rollouts. How to run it: README.md in this folder."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import httpx
import tiny

from moontide.trainer import Engine, policy_update_async


async def rollout_phase(url: str, step: int) -> list[str]:
    """A batch of rollouts; gives the version that each answer says it is of."""
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        bodies = [{"model": "tiny", "prompt": f"step {step} of {n}", "max_tokens": 16} for n in range(8)]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    for answer in answers:
        answer.raise_for_status()
    return [answer.headers["x-moontide-version"] for answer in answers]


async def update_phase(models: Path, step: int) -> str:
    """New weights, saved where engines can load them."""
    return await asyncio.to_thread(tiny.save, models, step)


async def push(engine: Engine, path: str, version: str) -> None:
    """Load weights into a running engine through vLLM's own routes, and label them."""
    async with httpx.AsyncClient(base_url=engine.url, headers=engine.headers, timeout=300, trust_env=False) as admin:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        (await admin.post("/collective_rpc", json=body)).raise_for_status()
        (await admin.post("/update_weight_version", json={"new_version": version})).raise_for_status()


async def train(chosen: argparse.Namespace) -> list[set[str]]:
    """All phases of all steps; gives the versions of each phase's rollouts."""
    versions: list[set[str]] = []
    for step in range(chosen.first, chosen.first + chosen.steps):
        path = await update_phase(chosen.models, step)
        async with policy_update_async(chosen.policy, step, namespace=chosen.namespace) as update:
            await asyncio.gather(*(push(engine, path, update.version) for engine in update.engines))
        versions.append(set(await rollout_phase(chosen.url, step)))
        print(f"step {step}: {update.replicas} replicas in epoch {update.epoch}; rollouts are of {versions[-1]}")
    return versions


def main(arguments: list[str] | None = None) -> list[set[str]]:
    """Run some steps."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", type=Path, required=True, help="the folder that engines know as /models")
    options.add_argument("--url", required=True, help="where to ask for rollouts")
    options.add_argument("--policy", default="policy")
    options.add_argument("--namespace", default="moontide-demo")
    options.add_argument("--first", type=int, default=201, help="number of the first step")
    options.add_argument("--steps", type=int, default=3)
    return asyncio.run(train(options.parse_args(arguments)))


if __name__ == "__main__":
    main()
