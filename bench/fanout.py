"""What a change of policy costs as the fleet grows: ``python -m bench.fanout`` (``make bench`` runs it, too).

A real API server, the operator as a process, real Pod objects, and behind each of them a fake engine
(bench/fake_engines.py) whose delays a seed decides: the network of one rack (LAN), 1 % slow replicas (50 times the
delay), 0.1 % hung ones. Each change goes through the PolicyVersion. In the same run, against the same fakes with the
same delays: a loop, one replica after the other; the plain fan-out, all replicas at once, step by step; and the same
two steps by bare sockets on which all but the last byte was written before, which is the least that these fakes on this
machine allow. The floor is the longest sum of a healthy replica's own calls: nothing that waits for all replicas can be
faster. The bound is the sum of each step's longest call: nobody may be admitted before all are quiesced, so no barrier
can be faster.

``--against REVISION`` measures the operator of that commit, too, in the same run.

Prints tables, writes bench/results/fanout.json. Absolute times are this machine's; compare ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from bench.fakes import Fakes, bare

from moontide import labels
from tests.integration.conftest import (
    Kubectl,
    Operator,
    chart_rights,
    released_lease,
    service_account_kubeconfig,
)
from tests.integration.stage import proxied

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "fanout.json"
NAMESPACE = "fanout"
POLICY, FLEET = "policy", "chat"
API = f"/apis/moontide.dev/v1alpha1/namespaces/{NAMESPACE}"
MERGE = {"content-type": "application/merge-patch+json"}
SIZES = (2, 8, 64, 256, 1000, 2000)
TIMEOUT_SECONDS = 10
"""The policy's ``replicaTimeoutSeconds``."""
MIXES = {"LAN": (0.0, 0.0), "slow 1 %": (0.01, 0.0), "slow, hung 0.1 %": (0.01, 0.001)}
COUNTED = ("policyversions", "inferencedeployments", "kvcachepools", "pods", "events")
"""Resources whose requests are counted: nobody but the operator and this program asks for them."""
Json = dict[str, Any]


class Site:
    """The API server, one fleet of pods, and an operator."""

    def __init__(self, kubectl: Kubectl, tools: Path, folder: Path, http: aiohttp.ClientSession, port: int) -> None:
        self.kubectl = kubectl
        self.tools = tools
        self.folder = folder
        self._http = http
        self._base = f"http://127.0.0.1:{port}"
        self._watch: asyncio.Task[None] | None = None
        self._policy: Json = {}
        self._seen = asyncio.Event()

    async def api(self, method: str, path: str, body: object = None) -> Json:
        """One request to the API server; AssertionError with what it said when it is no success."""
        headers = MERGE if method == "PATCH" else {}
        async with self._http.request(method, self._base + path, json=body, headers=headers) as answer:
            text = await answer.text()
            assert answer.status < 300, f"{method} {path}: {answer.status} {text}"
            return json.loads(text) if text.startswith("{") else {"text": text}

    async def prepare(self) -> None:
        """CRDs, the namespace, the operator's rights."""
        for command in (
            ("apply", "-f", str(ROOT / "crds")),
            ("wait", "--for=condition=Established", "--timeout=30s", "-f", str(ROOT / "crds")),
        ):
            self.kubectl(*command)
        self.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": NAMESPACE},
        }
        self.kubectl.apply(account)
        rights = chart_rights(self.tools, f"watchNamespace={NAMESPACE}", namespace=NAMESPACE)
        self.kubectl("apply", "-f", "-", stdin=rights)

    async def fleet(self, addresses: list[str]) -> None:
        """A PolicyVersion, an InferenceDeployment, and a running Pod an address."""
        with contextlib.suppress(AssertionError):
            await self.api("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods")
            await self.api("DELETE", f"{API}/policyversions/{POLICY}")
            await self.api("DELETE", f"{API}/inferencedeployments/{FLEET}")
        while (await self.api("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?limit=1"))["items"]:
            await self.api("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods?gracePeriodSeconds=0")
            await asyncio.sleep(0.2)
        version = "moontide.dev/v1alpha1"
        spec = {"version": "1", "weights": "Unchecked", "replicaTimeoutSeconds": TIMEOUT_SECONDS}
        metadata = {"namespace": NAMESPACE}
        await self.api(
            "POST",
            f"{API}/policyversions",
            {"apiVersion": version, "kind": "PolicyVersion", "metadata": {**metadata, "name": POLICY}, "spec": spec},
        )
        model = {"source": "pvc://weights/model", "version": "1", "servedName": "m"}
        await self.api(
            "POST",
            f"{API}/inferencedeployments",
            {
                "apiVersion": version,
                "kind": "InferenceDeployment",
                "metadata": {**metadata, "name": FLEET},
                "spec": {"policyRef": {"name": POLICY}, "replicas": len(addresses), "model": model},
            },
        )
        limit = asyncio.Semaphore(16)

        async def pod(number: int, address: str) -> None:
            name = f"{FLEET}-{number:04d}"
            body = {
                "metadata": {"name": name, "labels": labels.engine_labels(FLEET)},
                "spec": {"automountServiceAccountToken": False, "containers": [{"name": "engine", "image": "fake"}]},
            }
            state = {"running": {"startedAt": "2026-11-28T08:00:00Z"}}
            engine = {"name": "engine", "image": "fake", "imageID": "fake", "ready": True, "restartCount": 0}
            status = {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "containerStatuses": [{**engine, "state": state, "containerID": f"fake://{name}"}],
            }
            async with limit:
                await self.api("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", body)
                await self.api("PATCH", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/status", {"status": status})

        await asyncio.gather(*(pod(number, address) for number, address in enumerate(addresses)))

    @contextlib.contextmanager
    def operator(self, tree: Path) -> Iterator[Operator]:
        """The operator of the source tree ``tree``."""
        self.kubectl("delete", "lease", "moontide-operator", "-n", NAMESPACE, "--ignore-not-found")
        self.kubectl.apply(released_lease(NAMESPACE))
        config = service_account_kubeconfig(self.kubectl, self.folder, NAMESPACE)
        environ = {
            "PYTHONPATH": str(tree / "operator"),
            "MOONTIDE_RESYNC_SECONDS": "3600",
            "MOONTIDE_LEASE_SECONDS": "120",
        }
        log = self.folder / f"operator-{time.monotonic():.0f}.log"
        running = Operator(config, log, NAMESPACE, NAMESPACE, environ)
        running.start()
        try:
            yield running
        finally:
            running.stop()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """The PolicyVersion as a watch sees it: no requests that would be counted."""

        async def watch() -> None:
            path = f"{self._base}{API}/policyversions?watch=1&fieldSelector=metadata.name%3D{POLICY}"
            while True:
                async with self._http.get(path, timeout=aiohttp.ClientTimeout()) as answer:
                    async for line in answer.content:
                        self._policy = json.loads(line)["object"]
                        self._seen.set()

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until_current(self, version: str, seconds: float) -> None:
        """Wait until the policy is current at ``version`` and all that follows is over."""
        async with asyncio.timeout(seconds):
            while not _is_current(self._policy, version):
                self._seen.clear()
                await self._seen.wait()

    async def patch(self, **spec: object) -> None:
        """Change the policy's spec."""
        await self.api("PATCH", f"{API}/policyversions/{POLICY}", {"spec": spec})

    async def requests(self) -> int:
        """Requests that the API server has answered, of the resources in :data:`COUNTED`; watches not counted."""
        text = (await self.api("GET", "/metrics"))["text"]
        found = 0
        for line in text.splitlines():
            counted = line.startswith("apiserver_request_total{") and 'verb="WATCH"' not in line
            if counted and any(f'resource="{resource}"' in line for resource in COUNTED):
                found += int(float(line.rpartition(" ")[2]))
        return found

    @property
    def generation_of_status(self) -> int:
        """Writes of the policy so far, as far as the watch saw them."""
        return int(self._policy["metadata"]["resourceVersion"])


def _is_current(body: Json, version: str) -> bool:
    status = body.get("status") or {}
    said = {each["type"]: each for each in status.get("conditions") or ()}
    current = said.get("Current") or {}
    generation = body.get("metadata", {}).get("generation")
    good = current.get("status") == "True" and current.get("observedGeneration") == generation
    return bool(good and status.get("version") == version)


def usage(pid: int) -> tuple[float, float]:
    """CPU seconds and resident MB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def bump(site: Site, fakes: Fakes, pid: int, version: str, strategy: str, seconds: float) -> Json:
    """One change through the PolicyVersion, measured."""
    fakes("clear")
    asked, before = await site.requests(), usage(pid)
    began = time.monotonic()
    await site.patch(version=version, strategy=strategy)
    await site.until_current(version, seconds)
    took = time.monotonic() - began
    found = fakes("report")
    # Old keys are collected and the last status is written after it.
    await asyncio.sleep(1.0)
    after = usage(pid)
    return {
        **found,
        "current": took,
        "cpu": after[0] - before[0],
        "rss": after[1],
        "requests": await site.requests() - asked - 1,
    }


async def by_hand(fakes: Fakes, epoch: int, *, loop: bool) -> Json:
    """The same steps without an operator: a loop over the replicas, or all at once; no look, no record, no proof."""
    fakes("clear")
    steps: tuple[tuple[str, Json], ...] = (
        ("quiesce", {"mode": "keep", "requestsDuringBarrier": "Queue", "ttlSeconds": 60, "timeoutSeconds": 3}),
        ("admit", {"version": "x", "salt": f"x/{epoch}"}),
        ("resume", {}),
    )
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout(3)) as http:

        async def call(address: str, step: str, more: Json) -> None:
            body = {"term": 0, "epoch": epoch, "bootId": "x", **more}
            url = f"http://{address}:8001/moontide/v1/{step}"
            with contextlib.suppress(TimeoutError):
                async with http.post(url, json=body) as answer:
                    await answer.read()

        for step, more in steps:
            if loop:
                for address in fakes.addresses:
                    await call(address, step, more)
            else:
                await asyncio.gather(*(call(address, step, more) for address in fakes.addresses))
    return fakes("report")


def hears_status(tree: Path) -> bool:
    """Whether the plugin of that time sent a status with its answers: its operator reads it."""
    return "def _said(" in (tree / "operator" / "moontide" / "engines" / "client.py").read_text()


async def measure(site: Site, fakes: Fakes, tree: Path, options: argparse.Namespace) -> dict[str, list[Json]]:
    """All changes of one fleet with the operator of ``tree``: rows by mix and strategy."""
    rows: dict[str, list[Json]] = {}
    fakes.mix(0, 0, options.seed)
    with site.operator(tree) as operator:
        async with site.watched():
            number = 1
            await site.until_current(str(number), 600)
            await asyncio.sleep(2.0)
            for mix in options.mixes:
                slow, hung = MIXES[mix]
                hangs = round(len(fakes.addresses) * hung)
                if (slow and not round(len(fakes.addresses) * slow)) or (hung and not hangs):
                    continue
                for strategy in ("Barrier", "Fence"):
                    for _ in range(1 if hung else options.bumps):
                        fakes.mix(slow, hung, options.seed)
                        number += 1
                        row = await bump(site, fakes, operator.pid, str(number), strategy, 900)
                        rows.setdefault(f"{mix}/{strategy}", []).append(row)
                        if hung:
                            fakes.mix(slow, 0, options.seed)
                            await asyncio.sleep(8.0)
    return rows


def median(rows: list[Json], key: str) -> float:
    """Of a column."""
    return float(statistics.median(row[key] for row in rows))


def ratio(rows: list[Json]) -> float:
    """Of the pause's window to the floor of the same change."""
    return float(statistics.median(row["window"] / row["floor"] for row in rows))


def against_bound(rows: list[Json]) -> str:
    """The same to the bound."""
    return f"{statistics.median(row['window'] / row['bound'] for row in rows):.2f}"


def show(size: int, arms: dict[str, dict[str, list[Json]]], hands: dict[str, Json]) -> None:
    """One size's table."""
    print(f"\n{size} replicas", flush=True)
    print(
        f"  {'delays':18}{'way':22}{'floor':>9}{'pause':>10}{'/floor':>8}{'/bound':>8}{'current':>9}"
        f"{'CPU':>8}{'RSS':>8}{'requests':>9}"
    )
    for mix in MIXES:
        for name, arm in arms.items():
            for strategy in ("Barrier", "Fence"):
                rows = arm.get(f"{mix}/{strategy}")
                if not rows:
                    continue
                pause = median(rows, "window") if strategy == "Barrier" else median(rows, "longest")
                against = ratio(rows) if strategy == "Barrier" else pause / median(rows, "floor")
                print(
                    f"  {mix:18}{f'{name} {strategy}':22}{median(rows, 'floor') * 1e3:7.0f}ms{pause * 1e3:8.0f}ms"
                    f"{against:8.2f}{against_bound(rows) if strategy == 'Barrier' else '':>8}"
                    f"{median(rows, 'current'):8.2f}s{median(rows, 'cpu'):7.2f}s"
                    f"{median(rows, 'rss'):6.0f}MB{median(rows, 'requests'):9.0f}"
                )
        for way in ("bare sockets", "all at once", "a loop"):
            found = hands.get(f"{mix}/{way}")
            if found:
                print(
                    f"  {mix:18}{way:22}{found['floor'] * 1e3:7.0f}ms{found['window'] * 1e3:8.0f}ms"
                    f"{found['window'] / found['floor']:8.2f}{against_bound([found]):>8}"
                )
    sys.stdout.flush()


async def run(kubectl: Kubectl, tools: Path, folder: Path, options: argparse.Namespace) -> Json:
    """Every size."""
    results: Json = {"seed": options.seed, "bumps": options.bumps, "sizes": {}}
    connector = aiohttp.TCPConnector(limit=0)
    with proxied(kubectl) as proxy:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as http:
            site = Site(kubectl, tools, folder, http, proxy.port)
            await site.prepare()
            for size in options.sizes:
                arms: dict[str, dict[str, list[Json]]] = {}
                hands: dict[str, Json] = {}
                for name, tree in options.trees.items():
                    fakes = Fakes(size, hears_status(tree), options.spread)
                    try:
                        await site.fleet(fakes.addresses)
                        arms[name] = await measure(site, fakes, tree, options)
                        if name == "now":
                            for mix in options.mixes:
                                slow, hung = MIXES[mix]
                                if f"{mix}/Barrier" not in arms[name]:
                                    continue
                                fakes.mix(slow, hung, options.seed)
                                hands[f"{mix}/all at once"] = await by_hand(fakes, 10**6, loop=False)
                                if not hung:
                                    tries = [bare(fakes, 10**6 + more) for more in (2, 3, 4)]
                                    hands[f"{mix}/bare sockets"] = sorted(tries, key=lambda each: each["window"])[1]
                                if size <= options.loop_up_to:
                                    hands[f"{mix}/a loop"] = await by_hand(fakes, 10**6 + 1, loop=True)
                    finally:
                        fakes.close()
                show(size, arms, hands)
                results["sizes"][size] = {"arms": arms, "by hand": hands}
    return results


@contextlib.contextmanager
def trees(against: str | None) -> Iterator[dict[str, Path]]:
    """Source trees: this one, and the one of the commit ``against``."""
    if against is None:
        yield {"now": ROOT}
        return
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(other), against], check=True, capture_output=True)
        try:
            yield {"before": other, "now": ROOT}
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True, capture_output=True)


def main() -> int:
    """0 when every change became current."""
    parser = argparse.ArgumentParser(prog="python -m bench.fanout", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--bumps", type=int, default=3, help="changes of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--against", metavar="REVISION")
    parser.add_argument("--spread", type=int, default=1, help="processes of fake engines (default: %(default)s)")
    parser.add_argument(
        "--loop-up-to", type=int, default=2000, help="largest fleet for the loop (default: %(default)s)"
    )
    options = parser.parse_args()
    command = [sys.executable, "-m", "hack.cluster"]
    done = subprocess.run([*command, "bin-dir"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    tools = Path(done.stdout.strip().splitlines()[-1])
    name = f"bench-{os.getpid()}"
    up = [*command, "up", "--name", name, "--control-plane-only", "--quiet"]
    try:
        done = subprocess.run(up, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        kubectl = Kubectl(tools / "kubectl", Path(done.stdout.strip().splitlines()[-1]))
        with tempfile.TemporaryDirectory() as folder, trees(options.against) as options.trees:
            results = asyncio.run(run(kubectl, tools, Path(folder), options))
    finally:
        subprocess.run([*command, "down", "--name", name, "--quiet"], cwd=ROOT, check=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten: {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
