"""What a wiper knows of a pool with several masters: who leads, and whether a removal has reached the operation log.

A master answers a removal before the log in etcd has it: if that master ends first, the next one replays a log without
the removal, and what was removed is there again. A master that was frozen also answers removals that its successor
never hears of. So a removal counts only when a key that was put after it is found in the log: the log keeps the order,
and only its leader can write it.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

READ_SECONDS = 2.0
POLL_SECONDS = 0.01
SLOWER = 1.5
LONGEST_POLL_SECONDS = 0.25
BATCHES_AT_ONCE = 200
SCHEMA = 1
"""Of the log's records; another one is not understood, so nothing is proven."""


class Unproven(Exception):
    """It is not known that this master leads, or that the log has a removal: ``reason`` for the answer."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class View:
    """One election: who won it."""

    address: str
    revision: str
    """Of etcd, when it was won. A master that wins again has another one."""


@dataclass(frozen=True)
class Position:
    """How far the log is written."""

    view: View
    batch: int


class Log:
    """Reads the elections and the operation log of one pool from etcd, through its HTTP gateway."""

    def __init__(self, endpoints: tuple[str, ...], cluster: str, master: str) -> None:
        """``endpoints``: of etcd, as ``host:port``; ``cluster``: the masters' cluster id; ``master``: the address that
        the master beside this wiper stands for election with."""
        self._endpoints = endpoints
        self._cluster = cluster
        self._master = master

    @classmethod
    def from_env(cls, env: Mapping[str, str], master: str) -> Log | None:
        """None where there is one master, and no log. Raises KeyError without a cluster id."""
        endpoints = tuple(part for part in env.get("MOONTIDE_ETCD_ENDPOINTS", "").split(";") if part)
        return cls(endpoints, env["MC_STORE_CLUSTER_ID"], master) if endpoints else None

    def begin(self) -> Position:
        """Where the log ends now. Raises Unproven where another master leads, or etcd does not say."""
        view = self._view()
        if view.address != self._master:
            who = view.address or "nobody"
            raise Unproven("NotLeader", f"{who} leads the pool's masters, not {self._master}")
        return Position(view, self._written())

    def prove(self, since: Position, marker: str, deadline: float) -> None:
        """Wait until the log has ``marker``, a key that was put after ``since``.

        Raises Unproven where it does not come before ``deadline`` (of the monotonic clock), or another election was won
        meanwhile.
        """
        read = since.batch
        pause = POLL_SECONDS
        while True:
            written = self._written()
            while read < written:
                upto = min(written, read + BATCHES_AT_ONCE)
                if self._has(marker, read + 1, upto):
                    self._same(since)
                    return
                read = upto
            if time.monotonic() + pause > deadline:
                self._same(since)
                raise Unproven("NotLogged", "the masters' operation log in etcd did not take the removal in time")
            time.sleep(pause)
            pause = min(pause * SLOWER, LONGEST_POLL_SECONDS)

    def _same(self, since: Position) -> None:
        view = self._view()
        if view != since.view:
            raise Unproven("LeaderChanged", f"{view.address or 'nobody'} leads the pool's masters since the removal")

    def _view(self) -> View:
        found = self._range(f"mooncake-store/{self._cluster}/master_view")
        if not found:
            return View("", "")
        _, value, revision = found[0]
        return View(value.decode(errors="replace"), revision)

    def _written(self) -> int:
        """The last batch that standbys may replay."""
        found = self._range(f"/oplog/{self._cluster}/durable_prefix")
        if not found:
            return 0
        try:
            said = json.loads(found[0][1])
            if said["schema_version"] == SCHEMA:
                return int(said["batch_id"])
        except (ValueError, KeyError, TypeError):
            pass
        raise Unproven("LogUnreadable", f"the masters' operation log is not understood: {found[0][1][:100]!r}")

    def _has(self, marker: str, first: int, last: int) -> bool:
        prefix = f"/oplog/{self._cluster}/batches/"
        wanted = json.dumps(marker).encode()
        return any(wanted in value for _, value, _ in self._range(f"{prefix}{first:020d}", f"{prefix}{last + 1:020d}"))

    def _range(self, key: str, end: str = "") -> list[tuple[str, bytes, str]]:
        """Key, value and the revision that made it, of one key, or of all from ``key`` up to before ``end``."""
        query = {"key": _coded(key), **({"range_end": _coded(end)} if end else {})}
        trouble = "no endpoint is known"
        for endpoint in self._endpoints:
            request = urllib.request.Request(f"http://{endpoint}/v3/kv/range", json.dumps(query).encode())
            try:
                with urllib.request.urlopen(request, timeout=READ_SECONDS) as response:
                    said = json.load(response)
                return [
                    (_decoded(each["key"]).decode(), _decoded(each.get("value", "")), str(each["create_revision"]))
                    for each in said.get("kvs", [])
                ]
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                trouble = f"{endpoint}: {error or type(error).__name__}"
        raise Unproven("EtcdUnavailable", f"etcd cannot be read: {trouble}")


def removal(log: Log | None, remove: Callable[[], int], put: Callable[[str], int], deadline: float, marker: str) -> int:
    """What ``remove`` returns, once it is proven that no later leader can bring back what it removed.

    ``put`` is called with ``marker``, a key that was never used, after the removal. Without a log there is one master,
    whose keys end with it: nothing need be proven. Raises Unproven, and what the calls raise.
    """
    if log is None:
        return remove()
    start = log.begin()
    removed = remove()
    put(marker)
    log.prove(start, marker, deadline)
    return removed


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)
