"""Continuous greedy load from a fixed number of clients, every answer kept."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from hack.demo.fleet import Answer, Replica

_PAUSE_AFTER_FAILURE_SECONDS = 0.1


class Load:
    """Clients that ask one prompt after another, each of them every replica in turn, until the end of the block.

    ``replicas`` may be a function: it is asked before each request which ones may be sent to. Every answer is recorded,
    failures too. ``hold`` keeps clients from sending anything new.
    """

    def __init__(
        self,
        replicas: Sequence[Replica] | Callable[[], Sequence[Replica]],
        model: str,
        prompts: dict[int, str],
        *,
        clients: int = 4,
        seed: int = 1,
    ) -> None:
        fixed = [] if callable(replicas) else list(replicas)
        self._choose = replicas if callable(replicas) else lambda: fixed
        self._model = model
        self._prompts = prompts
        self._seed = seed
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._stop = threading.Event()
        self._go = threading.Event()
        self._go.set()
        self._busy = 0
        self._idle = threading.Condition(self._lock)
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join()

    @property
    def answers(self) -> list[Answer]:
        """What has come so far."""
        with self._lock:
            return list(self._answers)

    def hold(self, seconds: float = 120.0) -> None:
        """Send nothing new, and return when nothing is under way. Raises TimeoutError."""
        self._go.clear()
        with self._idle:
            if not self._idle.wait_for(lambda: self._busy == 0, seconds):
                raise TimeoutError(f"{self._busy} requests are still under way after {seconds:g} s")

    def release(self) -> None:
        """Go on."""
        self._go.set()

    def until(self, count: int, seconds: float) -> list[Answer]:
        """Wait for ``count`` more good answers; returns what came meanwhile, fewer when the time is over."""
        before = len(self.answers)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            came = self.answers[before:]
            if sum(answer.status == 200 for answer in came) >= count:
                break
            time.sleep(0.05)
        return self.answers[before:]

    def _client(self, number: int) -> None:
        source = random.Random(f"{self._seed}/{number}")
        for turn in itertools.count(number):
            self._go.wait()
            if self._stop.is_set():
                break
            replicas = self._choose()
            if not replicas:
                time.sleep(_PAUSE_AFTER_FAILURE_SECONDS)
                continue
            with self._idle:
                if not self._go.is_set():
                    continue
                self._busy += 1
            prompt = source.choice(list(self._prompts))
            replica = replicas[turn % len(replicas)]
            answer = replica.ask(self._model, prompt, self._prompts[prompt])
            with self._idle:
                self._answers.append(answer)
                self._busy -= 1
                self._idle.notify_all()
            if answer.status != 200:
                time.sleep(_PAUSE_AFTER_FAILURE_SECONDS)
