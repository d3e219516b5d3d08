"""Where clients may send to: the replicas that say they are ready, as a Service would have them."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import httpx

from hack.demo.fleet import Replica
from hack.demo.kube import KubeError
from moontide import naming

POLL_SECONDS = 0.4
REFRESH_SECONDS = 3.0
READY_PATH = "/moontide/v1/ready"


class Router:
    """Asks every replica again and again whether it is ready. ``pods`` lists the replicas that there are.

    A replica that does not answer within a second is not sent to until it does: who serves through a Service sees the
    same, a little later.
    """

    def __init__(self, pods: Callable[[], Sequence[Replica]], path: str = READY_PATH) -> None:
        self._pods = pods
        self._path = path
        self._lock = threading.Lock()
        self._all: list[Replica] = []
        self._ready: list[Replica] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> Router:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def all(self) -> list[Replica]:
        """Replicas whose pods run, as of the last seconds."""
        with self._lock:
            return list(self._all)

    def ready(self) -> list[Replica]:
        """Those that may be sent to."""
        with self._lock:
            return list(self._ready)

    def _follow(self) -> None:
        looked = 0.0
        with httpx.Client(timeout=1.0, trust_env=False) as http:
            while not self._stop.wait(POLL_SECONDS):
                every = REFRESH_SECONDS if len(self.ready()) < len(self.all) or not self.all else 10 * REFRESH_SECONDS
                if time.monotonic() - looked >= every:
                    self._refresh()
                    looked = time.monotonic()
                ready = [each for each in self.all if self._answers(http, each)]
                with self._lock:
                    self._ready = ready

    def _refresh(self) -> None:
        try:
            found = list(self._pods())
        except (KubeError, OSError, ValueError, subprocess.SubprocessError):
            return  # The API server is one of the things that are stopped here.
        with self._lock:
            self._all = found

    def _answers(self, http: httpx.Client, replica: Replica) -> bool:
        try:
            return http.get(f"{replica.inference}{self._path}").status_code == 200
        except (httpx.HTTPError, OSError):
            return False


class Stock(Replica):
    """An engine without the plugin: its admin routes are on the inference port, for everybody."""

    @property
    def admin(self) -> str:
        """Base URL of the inference port, where vLLM's dev mode puts them."""
        return self._reach.url(self.pod, naming.INFERENCE_PORT)
