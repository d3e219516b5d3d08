"""The fake engines of benches (bench/fake_engines.py) as processes, and the least that their two calls can take."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from bench.fake_engines import PORT

ROOT = Path(__file__).resolve().parents[1]
Json = dict[str, Any]
ANSWER_SECONDS = 30.0
"""For the next answer of any fake."""


class Fakes:
    """So many fake engines, in one process or spread over several, which may have cores of their own."""

    def __init__(self, count: int, with_status: bool = True, spread: int = 1) -> None:
        base = ipaddress.IPv4Address(f"127.{random.randint(200, 250)}.0.1")
        self.addresses = [str(base + number) for number in range(count)]
        self._slices = [range(count * part // spread, count * (part + 1) // spread) for part in range(spread)]
        self._processes = []
        for part in self._slices:
            command = [sys.executable, "-m", "bench.fake_engines", self.addresses[part.start], str(len(part))]
            command += ["--after", str(part.start), *([] if with_status else ["--no-status"])]
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
                )
            )
        for part, process in zip(self._slices, self._processes, strict=True):
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"ready": len(part)}

    def __call__(self, do: str, **more: object) -> Json:
        """One order to all, and what they answer together."""
        return self._ask([{"do": do, **more}] * len(self._processes))

    def mix(self, slow: float, hung: float, seed: int) -> None:
        """Decide who is slow and who hangs: exactly these shares of all, rounded."""
        order = list(range(len(self.addresses)))
        random.Random(seed).shuffle(order)
        hangs, slows = round(len(order) * hung), round(len(order) * slow)
        chosen = {"hung": set(order[:hangs]), "slow": set(order[hangs : hangs + slows])}
        self._ask(
            [
                {
                    "do": "mix",
                    **{kind: [n - part.start for n in sorted(who) if n in part] for kind, who in chosen.items()},
                }
                for part in self._slices
            ]
        )

    def _ask(self, orders: list[Json]) -> Json:
        for order, process in zip(orders, self._processes, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        answers: list[Json] = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        return _together(answers) if "replicas" in answers[0] else answers[0]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()


def _together(parts: list[Json]) -> Json:
    """One report of several processes. They share the machine's clock."""
    slowest: dict[str, float] = {}
    calls: dict[str, int] = {}
    for part in parts:
        for step, seconds in part["slowest"].items():
            slowest[step] = max(slowest.get(step, 0.0), seconds)
        for step, count in part["calls"].items():
            calls[step] = calls.get(step, 0) + count
    moved = [part for part in parts if part["moved"]]
    return {
        **{key: sum(part[key] for part in parts) for key in ("replicas", "moved", "healthy", "open", "connections")},
        "epochs": sorted({epoch for part in parts for epoch in part["epochs"]}),
        "window": max((part["last"] for part in moved), default=0.0)
        - min((part["first"] for part in moved), default=0.0),
        **{key: max(part[key] for part in parts) for key in ("floor", "longest", "beyond")},
        "bound": sum(slowest.values()),
        "calls": calls,
    }


def bare(fakes: Fakes, epoch: int) -> Json:
    """A barrier's two calls by plain sockets: connected, written but for the last byte, and no answer is looked into.
    No client in Python does it in less, and what it takes beyond the bound are the fakes and the kernel."""
    sockets = {}
    for address in fakes.addresses:
        one = socket.create_connection((address, PORT))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[one.fileno()] = one
    poll = select.epoll()
    for number in sockets:
        poll.register(number, select.EPOLLIN)
    common = {"term": 0, "epoch": epoch, "bootId": "x"}
    pause = {"mode": "keep", "requestsDuringBarrier": "Queue", "ttlSeconds": 60, "timeoutSeconds": 3}
    requests = []
    for step, more in (("quiesce", pause), ("admit", {"version": "x", "salt": f"x/{epoch}", "resume": True})):
        data = json.dumps({**common, **more}).encode()
        head = f"POST /moontide/v1/{step} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        requests.append(head + data)
    fakes("clear")
    begun, last = b"", b""
    for number, request in enumerate([*requests, b""]):
        last, begun = begun[-1:], request
        for one in sockets.values():
            one.send(last + request[:-1])
        if not number:
            # Nobody is paused yet.
            time.sleep(0.2)
            continue
        left, heard = len(sockets), dict.fromkeys(sockets, b"")
        while left:
            for file, _ in poll.poll(ANSWER_SECONDS) or _silent(left):
                heard[file] += sockets[file].recv(65536) or _silent(left)
                head, mark, body = heard[file].partition(b"\r\n\r\n")
                if mark and len(body) >= int(head.rpartition(b"content-length: ")[2]):
                    left -= 1
    poll.close()
    for one in sockets.values():
        one.close()
    found = fakes("report")
    assert (found["open"], found["moved"]) == (len(sockets), len(sockets)), found
    return found


def _silent(left: int) -> NoReturn:
    raise AssertionError(f"{left} fakes have not answered within {ANSWER_SECONDS:g} s, or have closed")
