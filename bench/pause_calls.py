"""A pause by its calls alone: ``python -m bench.pause_calls`` (``--spread 8`` where there are cores for the fakes).

The reconcile of a policy, as the operator runs it, over a double of the API server that holds everything in memory, and
fake engines (bench/fake_engines.py) that answer after a rack's delays. So there is no API server that needs a core, and
with ``--spread`` the fakes have cores of their own, as replicas do. Beside it, in turn, the same two calls by bare
sockets (bench/fakes.py). bench/fanout.py has the whole: API server, Pods, operator process.

Prints a table. ``--json`` writes the rows, too. Absolute times are this machine's; compare ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine_patches"))

from bench.fakes import Fakes, bare

from moontide.engines.client import new_http_client
from moontide.reconcile import policyversion
from moontide.reconcile.context import utc_now
from tests.unit.operator.doubles import Cluster

SIZES = (2, 8, 64, 256, 1000, 2000)
MIXES = {"rack": 0.0, "slow 1 %": 0.01}
MODEL = {"source": "pvc://weights/model", "version": "1", "servedName": "m"}
Json = dict[str, Any]


class World(Cluster):
    """One fleet of fakes that follows one policy."""

    def __init__(self, folder: Path, fakes: Fakes) -> None:
        super().__init__(folder)
        self.client = new_http_client()
        self.ctx = replace(self.ctx, http=self.client, now=utc_now)
        self.version = 1
        self.put()
        fleet = self.kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL, "policyRef": {"name": "policy"}})
        for number, address in enumerate(fakes.addresses):
            self.pod(fleet, f"chat-{number}", address)

    def put(self) -> None:
        """The policy, at the version that is wanted."""
        self.kube.put("PolicyVersion", "rl", "policy", {"version": self.version, "weights": "Unchecked"})

    async def reconcile(self) -> None:
        """Until the policy is current."""
        for _ in range(20):
            await policyversion.reconcile(self.ctx, "rl", "policy")
            if self.kube.condition("PolicyVersion", "rl", "policy", "Current")[0] == "True":
                return
        raise AssertionError(self.kube.status("PolicyVersion", "rl", "policy"))

    async def change(self, fakes: Fakes) -> Json:
        """One change, as the fakes saw it."""
        self.version += 1
        self.put()
        fakes("clear")
        await self.reconcile()
        return fakes("report")


async def measure(size: int, options: argparse.Namespace) -> dict[str, dict[str, list[Json]]]:
    """Rows by mix and way. The ways take turns."""
    rows: dict[str, dict[str, list[Json]]] = {}
    fakes = Fakes(size, spread=min(options.spread, size))
    try:
        with tempfile.TemporaryDirectory() as folder:
            world = World(Path(folder), fakes)
            async with world.client:
                fakes.mix(0, 0, options.seed)
                await world.reconcile()
                await world.change(fakes)
                for mix, slow in MIXES.items():
                    if slow and not round(size * slow):
                        continue
                    fakes.mix(slow, 0, options.seed)
                    ways = rows.setdefault(mix, {"Barrier": [], "bare sockets": []})
                    for _ in range(options.bumps):
                        ways["Barrier"].append(await world.change(fakes))
                        # What else asks engines waits for the next change.
                        await asyncio.sleep(0.3)
                        ways["bare sockets"].append(bare(fakes, world.version * 10**6))
                        # The engines have gone further, and the policy's status is as if it had taken them there.
                        world.kube.objects["PolicyVersion", "rl", "policy"]["status"]["epoch"] = world.version * 10**6
                        await world.change(fakes)
    finally:
        fakes.close()
    return rows


def show(size: int, rows: dict[str, dict[str, list[Json]]]) -> None:
    """One size's lines."""
    for mix, ways in rows.items():
        for way, found in ways.items():
            floor, bound, window = (
                statistics.median(row[key] for row in found) for key in ("floor", "bound", "window")
            )
            to_floor, to_bound = (
                statistics.median(row["window"] / row[key] for row in found) for key in ("floor", "bound")
            )
            print(
                f"{size:6}  {mix:10}{way:14}{floor * 1e3:7.1f}ms{bound * 1e3:7.1f}ms{window * 1e3:8.1f}ms"
                f"{to_floor:9.2f}{to_bound:9.2f}",
                flush=True,
            )


def main() -> None:
    """Every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--bumps", type=int, default=9, help="changes of each kind (default: %(default)s)")
    parser.add_argument("--spread", type=int, default=1, help="processes of fake engines (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # As the operator's process does (moontide/__main__.py).
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    print(f"{os.cpu_count()} cores, fakes in {options.spread} processes; medians of {options.bumps} changes")
    print(f"{'':8}{'delays':10}{'way':14}{'floor':>9}{'bound':>9}{'pause':>10}{'/floor':>9}{'/bound':>9}")
    results: Json = {"cores": os.cpu_count(), "spread": options.spread, "bumps": options.bumps, "sizes": {}}
    for size in options.sizes:
        found = results["sizes"][str(size)] = asyncio.run(measure(size, options))
        show(size, found)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written: {options.json}")


if __name__ == "__main__":
    main()
