"""What one call to an engine costs the caller, by HTTP client: ``python -m bench.call_cost``.

The operator's client (moontide.engines.wire), aiohttp's and httpx's each ask the same fake engines
(bench/fake_engines.py, a process of its own) for their status, all at once, in the clear, on kept connections, and read
the answer to its end. Clients take turns. Counted is the CPU of the asking process, without what the operator does
around a call. httpx is asked with fewer peers only: it looks through its connections at each request.

Prints a table. Absolute figures are this machine's; compare ratios.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import httpx
from bench.fake_engines import PORT
from bench.fakes import Fakes

from moontide.engines.client import new_http_client

SIZES = (64, 1000)
ROUNDS = 15
HTTPX_UP_TO = 64
HEADERS = {"authorization": "Bearer token"}
Ask = Callable[[str], Awaitable[bytes]]


async def clients(stack: AsyncExitStack, size: int) -> dict[str, Ask]:
    """Each as a function of a URL."""
    ours = await stack.enter_async_context(new_http_client())
    connector = aiohttp.TCPConnector(limit=0)
    general = await stack.enter_async_context(
        aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    slow = await stack.enter_async_context(httpx.AsyncClient(limits=limits, trust_env=False, timeout=60))

    async def wire(url: str) -> bytes:
        return (await ours.ask("GET", url, HEADERS))[1]

    async def by_aiohttp(url: str) -> bytes:
        async with general.get(url, headers=HEADERS, allow_redirects=False) as answer:
            return await answer.read()

    async def by_httpx(url: str) -> bytes:
        return (await slow.get(url, headers=HEADERS)).content

    found: dict[str, Ask] = {"moontide.engines.wire": wire, "aiohttp": by_aiohttp}
    return {**found, "httpx": by_httpx} if size <= HTTPX_UP_TO else found


async def measure(urls: list[str]) -> dict[str, float]:
    """Medians of CPU microseconds a call."""
    spent: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        asking = await clients(stack, len(urls))
        for _ in range(ROUNDS):
            for name, ask in asking.items():
                began = time.process_time()
                answers = await asyncio.gather(*(ask(url) for url in urls))
                spent.setdefault(name, []).append((time.process_time() - began) / len(urls) * 1e6)
                assert all(json.loads(answer)["engineVersion"] == "fake" for answer in answers)
    # The first round makes the connections.
    return {name: statistics.median(each[1:]) for name, each in spent.items()}


def main() -> int:
    """0 when all fakes answered."""
    print("| peers | client | CPU a call | times ours |")
    print("| --- | --- | --- | --- |")
    for count in SIZES:
        fakes = Fakes(count, with_status=True)
        try:
            urls = [f"http://{address}:{PORT}/moontide/v1/status" for address in fakes.addresses]
            found = asyncio.run(measure(urls))
        finally:
            fakes.close()
        ours = found["moontide.engines.wire"]
        for name, cost in found.items():
            print(f"| {count} | {name} | {cost:.0f} µs | {cost / ours:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
