"""What other clients of the store feel while old keys are removed: one removal by pattern against batches.

Run it with the engine's Python: ``~/.cache/moontide/engine-env-*/bin/python bench/collect.py 2>/dev/null``. A real
Mooncake master on this machine; one client fills it and then, in a process of its own, measures a put and a lookup
again and again, while the wiper removes the first keys. Prints milliseconds of put and lookup together, and how often
the worst of each is that of the quiet run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine_patches"))

from moontide_engine.namespace import tag
from moontide_engine.wiper import Wiper

NAMESPACE = "5f0c6f6e-2f0b-4a8e-9b59-3d1b6a1c7d10"
WAYS = ("quiet", "wipe", "collect")
ENV = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_RPC_CONNECT_TIMEOUT_MS": "500", "GLOG_minloglevel": "3"}


def free_port() -> int:
    """A port of the loopback interface that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def master() -> Iterator[tuple[str, str]]:
    """A master of its own: its address and the URL of its metrics."""
    rpc, metrics = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("mooncake_master")), f"-rpc_port={rpc}", f"-metrics_port={metrics}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{metrics}"
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1):
                break
            time.sleep(0.05)
        yield f"127.0.0.1:{rpc}", url
    finally:
        process.kill()
        process.wait()


def client(address: str, keys: int, seconds: float) -> None:
    """The other client: fill, say so, measure, print the figures, in milliseconds, as one line of JSON."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 30, 16 << 20, "tcp", "", address) == 0
    old = tag("policy/1").hex()
    for number in range(keys):
        store.put(f"{NAMESPACE}@m@group:0@{old}{hashlib.sha256(str(number).encode()).hexdigest()[:48]}", b"x")
    print("filled", flush=True)
    sys.stdin.readline()
    took = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        began = time.perf_counter()
        assert store.put(f"other@{len(took)}", b"x") == 0
        assert store.is_exist(f"other@{len(took)}") == 1
        took.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.001)
    took.sort()
    figures = {"median": statistics.median(took), "p99": took[len(took) * 99 // 100], "worst": took[-1]}
    print(json.dumps(figures), flush=True)
    os._exit(0)


def measure(way: str, keys: int, seconds: float) -> dict[str, float]:
    """One way: what the other client measured, and how long the removal took."""
    with master() as (address, metrics), tempfile.TemporaryFile() as noise:
        command = [sys.executable, __file__, "--client", address, "--keys", str(keys), "--seconds", str(seconds)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": noise}
        with subprocess.Popen(command, env={**os.environ, **ENV}, text=True, **pipes) as other:  # type: ignore[call-overload]
            while (line := other.stdout.readline()).strip() != "filled":
                assert line, "the client ended early"
            wiper = Wiper(address)
            wiper.warm()
            other.stdin.write("go\n")
            other.stdin.flush()
            time.sleep(1)
            answer: dict[str, object] = {"removed": 0, "seconds": 0.0}
            if way == "wipe":
                answer = wiper.wipe(NAMESPACE, seconds)
            elif way == "collect":
                answer = wiper.collect(metrics, NAMESPACE, ["policy/2"], seconds)
            assert answer["removed"] == (0 if way == "quiet" else keys), answer
            lines = [line for line in other.stdout.read().splitlines() if line.startswith("{")]
            wiper.close()
    return {**json.loads(lines[-1]), "took": float(str(answer["seconds"]))}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the other client measures")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client, arguments.keys, arguments.seconds)
        return
    os.environ.update(ENV)
    print(f"{arguments.keys:,} old keys; put and lookup of another client, ms")
    quiet = 0.0
    for way in WAYS:
        found = measure(way, arguments.keys, arguments.seconds)
        quiet = quiet or found["worst"]
        print(
            f"{way:8} median {found['median']:6.2f}  p99 {found['p99']:7.2f}  worst {found['worst']:8.1f} "
            f"({found['worst'] / quiet:.0f} times quiet)  removal took {found['took']:.2f} s"
        )


if __name__ == "__main__":
    main()
