"""How this machine reaches a port of a pod: straight in the local cluster, through kubectl elsewhere."""

from __future__ import annotations

import re
import subprocess
import threading
from typing import Protocol

from hack.demo.kube import Kube, NotInTime, Object

_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ->")


class Reach(Protocol):
    """Gives the base URL of a port of a pod."""

    def url(self, pod: Object, port: int) -> str:
        """``http://host:port`` without a slash at the end."""

    def close(self) -> None:
        """End what was started for it."""


class Direct:
    """Pod addresses are routed on this machine: the local cluster's node is this machine."""

    def url(self, pod: Object, port: int) -> str:
        """The pod's own address."""
        return f"http://{pod['status']['podIP']}:{port}"

    def close(self) -> None:
        """Nothing was started."""


class Forwarded:
    """One ``kubectl port-forward`` a port, kept until the end."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._lock = threading.Lock()
        self._processes: dict[tuple[str, int], tuple[subprocess.Popen[str], int]] = {}

    def url(self, pod: Object, port: int) -> str:
        """A port of 127.0.0.1 that kubectl forwards; started again if it has ended."""
        key = (str(pod["metadata"]["uid"]), port)
        with self._lock:
            process, local = self._processes.get(key, (None, 0))
            if process is None or process.poll() is not None:
                process, local = self._start(pod, port)
                self._processes[key] = (process, local)
        return f"http://127.0.0.1:{local}"

    def _start(self, pod: Object, port: int) -> tuple[subprocess.Popen[str], int]:
        meta = pod["metadata"]
        command = [*self._kube.access.kubectl, "port-forward", "--address", "127.0.0.1"]
        command += ["--namespace", meta["namespace"], f"pod/{meta['name']}", f":{port}"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        found = _FORWARDED.search(process.stdout.readline())
        if found is None:
            process.kill()
            process.wait()
            raise NotInTime(f"kubectl forwards no port to {meta['name']}:{port}")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        return process, int(found[1])

    def close(self) -> None:
        """End every forwarding."""
        for process, _ in self._processes.values():
            process.terminate()
            process.wait()
