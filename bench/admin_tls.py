"""What TLS on admin ports costs the operator: ``python -m bench.admin_tls``.

The operator's own client asks fake engines (bench/fake_engines.py, a process of its own) for their status, all at once,
in the clear and over TLS, on new connections and on kept ones. Counted are CPU time and memory of the asking process,
which is a fresh one for each line.

Prints a table. Absolute figures are this machine's; compare ratios.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from moontide.engines.client import Unanswered, engine_status, fan_out, new_http_client
from moontide.engines.wire import Session
from tests.component.certificates import Authority

ROOT = Path(__file__).resolve().parents[1]
SIZES = (64, 1000)
ROUNDS = 9
LOOKS = 5
"""On kept connections, after the one that makes them."""
NAME = "chat.rl.svc"


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def look(http: Session, urls: list[str], name: str) -> float:
    """CPU milliseconds a call of one look at all."""
    began = time.process_time()
    answers = await fan_out(urls, lambda url: engine_status(http, url, "token", 30.0, name))
    spent = time.process_time() - began
    silent = [each.message for each in answers if isinstance(each, Unanswered)]
    if silent:
        raise RuntimeError(f"{len(silent)} of {len(urls)} did not answer: {silent[0]}")
    return spent / len(urls) * 1000


async def looks(urls: list[str], authorities: str, name: str) -> tuple[float, float, float]:
    """Medians on new connections and on kept ones, and KiB a connection."""
    new, kept, taken = [], [], []
    for _ in range(ROUNDS):
        async with new_http_client(authorities) as http:
            # The first call over TLS reads the authorities.
            await look(http, urls[:1], name)
            before = resident()
            new.append(await look(http, urls[1:], name))
            kept += [await look(http, urls[1:], name) for _ in range(LOOKS)]
            taken.append((resident() - before) / (len(urls) - 1) / 1024)
    return statistics.median(new), statistics.median(kept), taken[0]


def measure(urls: list[str], authorities: str, name: str) -> tuple[float, float, float]:
    """See :func:`looks`."""
    return asyncio.run(looks(urls, authorities, name))


def main() -> int:
    """0 when all fakes answered."""
    print("| replicas | scheme | new connections (ms a call) | kept (ms a call) | KiB a connection |")
    print("| --- | --- | --- | --- | --- |")
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        authority.issue(Path(folder), NAME)
        for count in SIZES:
            for scheme, more, name in (("http", [], ""), ("https", ["--tls", folder], NAME)):
                first = f"127.{random.randint(200, 250)}.0.1"
                command = [sys.executable, "-m", "bench.fake_engines", first, str(count + 1), *more]
                with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as fakes:
                    assert fakes.stdout is not None
                    assert json.loads(fakes.stdout.readline()) == {"ready": count + 1}
                    base = ipaddress.IPv4Address(first)
                    urls = [f"{scheme}://{base + number}:8001" for number in range(count + 1)]
                    with ProcessPoolExecutor(1, fresh) as asking:
                        new, kept, taken = asking.submit(measure, urls, str(authority.certificate), name).result()
                    fakes.terminate()
                print(f"| {count} | {scheme} | {new:.2f} | {kept:.2f} | {taken:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
