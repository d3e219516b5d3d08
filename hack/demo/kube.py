"""kubectl on one cluster, and what is read from the objects it gives."""

from __future__ import annotations

import base64
import datetime as dt
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from hack.cluster.access import Access

Object = dict[str, Any]
T = TypeVar("T")


class KubeError(Exception):
    """kubectl failed; the message is what it said."""


class NotInTime(Exception):
    """Something that was waited for did not come; the message says what was last seen."""


@dataclass(frozen=True)
class Kube:
    """kubectl, bound to one context and no other."""

    access: Access

    def run(self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 120.0) -> str:
        """Standard output of one kubectl command; raises KubeError when it fails and ``check`` is set."""
        done = subprocess.run(
            [*self.access.kubectl, *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise KubeError(f"kubectl {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def get(self, kind: str, name: str, namespace: str) -> Object:
        """One object. Raises KubeError when it is not there."""
        return json.loads(self.run("get", kind, name, "--namespace", namespace, "--output", "json"))  # type: ignore[no-any-return]

    def find(self, kind: str, name: str, namespace: str) -> Object | None:
        """One object, or None when it is not there."""
        text = self.run("get", kind, name, "--namespace", namespace, "--output", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        """Objects of a kind (or kinds, joined by commas) in a namespace."""
        text = self.run("get", kind, "--namespace", namespace, "--selector", selector, "--output", "json")
        return list(json.loads(text)["items"])

    def apply(self, *objects: Object) -> None:
        """Server-side apply."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.run("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=text)

    def merge(self, kind: str, name: str, namespace: str, patch: Object) -> Object:
        """Merge-patch one object and return it."""
        arguments = ("--namespace", namespace, "--type", "merge", "--patch", json.dumps(patch), "--output", "json")
        return json.loads(self.run("patch", kind, name, *arguments))  # type: ignore[no-any-return]

    def secret(self, name: str, key: str, namespace: str) -> str:
        """One value of a Secret, decoded."""
        return base64.b64decode(self.get("secret", name, namespace)["data"][key]).decode()

    @contextmanager
    def watch(self, kind: str, name: str, namespace: str, seconds: float) -> Iterator[Iterator[Object]]:
        """The states of one object from now on, for ``seconds`` at most.

        One process that waits: kubectl in a loop takes most of a core, which the fleet being watched then lacks.
        """
        command = [*self.access.kubectl, "get", kind, name, "--namespace", namespace, "--output", "json", "--watch"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            yield _json_stream(iter(process.stdout.readline, ""))
        finally:
            timer.cancel()
            timer.join()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _json_stream(lines: Iterator[str]) -> Iterator[Object]:
    """Objects out of indented JSON documents that follow one another."""
    gathered: list[str] = []
    for line in lines:
        gathered.append(line)
        if line.rstrip() == "}":
            yield json.loads("".join(gathered))
            gathered.clear()


def conditions(found: Object) -> list[Object]:
    """An object's conditions, in its own order."""
    return list(found.get("status", {}).get("conditions", []))


def condition(found: Object, kind: str) -> Object:
    """One condition of an object; of status Unknown and without a reason where it has none."""
    for each in conditions(found):
        if each["type"] == kind:
            return dict(each)
    return {"type": kind, "status": "Unknown", "reason": "", "message": "no such condition yet"}


def holds(found: Object, kind: str) -> bool:
    """Whether a condition is True and speaks of the object's present spec."""
    seen = condition(found, kind)
    fresh = seen.get("observedGeneration") in (None, found["metadata"]["generation"])
    return seen["status"] == "True" and fresh


def is_current(policy: Object, version: str) -> bool:
    """Whether a PolicyVersion says that every replica serves ``version``."""
    return holds(policy, "Current") and str(policy.get("status", {}).get("version")) == version


def moment(text: str) -> float:
    """A Kubernetes timestamp as seconds since 1970."""
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def wait(
    look: Callable[[], T | None], seconds: float, what: str, *, every: float = 0.5, last: Callable[[], str] = lambda: ""
) -> T:
    """The first value that ``look`` gives; raises NotInTime, with what ``last`` says, when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        if time.monotonic() >= deadline:
            raise NotInTime(f"{what}: not within {seconds:g} s. {last()}".rstrip())
        time.sleep(every)


def names(objects: Sequence[Object]) -> list[str]:
    """``kind/name`` of each, for messages."""
    return [f"{each['kind']}/{each['metadata']['name']}" for each in objects]
