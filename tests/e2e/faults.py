"""Faults from outside: signals to processes of pods, which are processes of this machine in the local cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.demo.kube import Object


def pids(pod: Object, needle: str) -> list[int]:
    """Processes of a pod whose command line holds ``needle``; found by the pod's UID in their control group."""
    uid: str = pod["metadata"]["uid"]
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            groups = (folder / "cgroup").read_text()
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if (uid in groups or uid.replace("-", "_") in groups) and needle in line:
            found.append(int(folder.name))
    return sorted(found)


def found(pod: Object, needle: str) -> list[int]:
    """Those processes. Raises LookupError when there is none."""
    targets = pids(pod, needle)
    if not targets:
        raise LookupError(f"no process of {pod['metadata']['name']} has {needle!r} in its command line")
    return targets


def signal_all(targets: list[int], number: signal.Signals) -> None:
    """Signal processes; one that has ended meanwhile is let be."""
    for pid in targets:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def send(pod: Object, needle: str, number: signal.Signals) -> list[int]:
    """Signal those processes; returns them. Raises LookupError when there is none."""
    targets = found(pod, needle)
    signal_all(targets, number)
    return targets


@contextmanager
def frozen(pod: Object, needle: str) -> Iterator[None]:
    """Stop those processes for the length of the block; one that ended meanwhile is let be."""
    targets = send(pod, needle, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(targets, signal.SIGCONT)
