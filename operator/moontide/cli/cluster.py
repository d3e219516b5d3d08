"""Reads of one API server, and of engines: through it, or directly. Changes nothing."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import httpx

from moontide import naming
from moontide.api.v1alpha1 import API_VERSION
from moontide.cli.errors import CliError, Denied, NotInstalled
from moontide.engines.client import Unanswered, engine_status, fan_out, new_http_client, status_of
from moontide.planning.model import EngineStatus
from moontide.trainer.access import Access
from moontide.trainer.errors import AccessError, ApiUnavailable
from moontide.trainer.kube import http_options
from moontide.trainer.policy import Object

REQUEST_SECONDS = 15.0
ENGINE_SECONDS = 1.5
"""For the answer of an engine: where pods cannot be reached from here, nobody waits long to be told."""
AT_ONCE = 64
"""Engines that are asked side by side through the API server."""
AGAIN_SECONDS = 10.0
"""Engines of a namespace that cannot be asked through the API server are not asked again for so long."""
REFUSED = "Refused"
"""The reason where the API server passes nothing on to an engine."""
PAGE = 500
GROUP = f"/apis/{API_VERSION}"
Engine = EngineStatus | Unanswered


@dataclass(frozen=True)
class Reply:
    """What the API server said. ``text``: of an answer that is no JSON object."""

    status: int
    body: Object = field(default_factory=dict)
    text: str = ""

    @property
    def message(self) -> str:
        """The server's sentence."""
        return str(self.body.get("message") or self.text or f"HTTP {self.status}").strip()


@dataclass(frozen=True)
class Door:
    """The admin port of an engine. ``address``: host:port, or a URL; ``pod``: its name, empty where it is of none."""

    address: str
    token: str = field(repr=False)
    namespace: str = ""
    pod: str = ""


class Reader(Protocol):
    """An API server and engines, or a recording of them."""

    @property
    def namespace(self) -> str:
        """Where things are that are named without one."""

    @property
    def server(self) -> str:
        """What is asked, for people."""

    def ask(self, path: str, params: Mapping[str, str] | None = None, body: Object | None = None) -> Reply:
        """GET, or POST of a review where there is a ``body``. Raises ApiUnavailable, AccessError."""

    @property
    def direct(self) -> bool:
        """Whether engines are asked at their addresses, and not through the API server, which reaches pods alone."""

    def engines(self, asked: Sequence[Door]) -> list[Engine]:
        """What engines of one fleet say of themselves, side by side."""

    def now(self) -> dt.datetime:
        """The time of day, aware."""


class Cluster:
    """The API server of a kubeconfig, or of the pod that this is.

    With ``direct``, and in a pod, engines are sent their token at their addresses, in clear where they serve no TLS.
    Elsewhere such an address may be another host's: there they are asked through the API server's proxy of pods.
    """

    def __init__(self, access: Access, *, direct: bool = False) -> None:
        self._access = access
        self.direct = direct or access.in_cluster
        self._passed: set[str] = set()
        """Namespaces of which the API server has passed something on to an engine."""
        self._shut: dict[str, tuple[float, Unanswered]] = {}
        """Those of which no engine could be asked: until when that counts, and why."""
        self._http = httpx.Client(**http_options(access))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    @property
    def namespace(self) -> str:
        return self._access.namespace or "default"

    @property
    def server(self) -> str:
        return f"{self._access.server} ({self._access.origin})"

    def now(self) -> dt.datetime:
        return dt.datetime.now(dt.UTC)

    def ask(self, path: str, params: Mapping[str, str] | None = None, body: Object | None = None) -> Reply:
        try:
            return self._reply("GET" if body is None else "POST", path, params=dict(params or {}), json=body)
        except httpx.UnsupportedProtocol as error:
            raise AccessError(f"{self.server} is no URL; write https://host:port") from error
        except httpx.TransportError as error:
            raise ApiUnavailable(
                f"no answer from {self.server}: {type(error).__name__} {error}; is the cluster up, and is it the right "
                "context?"
            ) from error

    def _reply(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float = REQUEST_SECONDS,
        **more: Any,
    ) -> Reply:
        """Raises httpx.TransportError, AccessError."""
        sent = {"accept": "application/json, */*", **(headers or {}), **self._access.headers()}
        if self._access.tls_name:
            more["extensions"] = {"sni_hostname": self._access.tls_name}
        answer = self._http.request(method, path, headers=sent, timeout=seconds, **more)
        try:
            parsed = answer.json()
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return Reply(answer.status_code, parsed)
        return Reply(answer.status_code, {}, answer.text)

    def engines(self, asked: Sequence[Door]) -> list[Engine]:
        if not asked:
            return []
        return asyncio.run(_directly(asked)) if self.direct else self._through_the_server(asked)

    def _through_the_server(self, asked: Sequence[Door]) -> list[Engine]:
        """One refusal is enough: the others are not asked then."""
        namespace = asked[0].namespace
        until, why = self._shut.get(namespace, (0.0, Unanswered("", "")))
        if time.monotonic() < until:
            return [why] * len(asked)
        found: list[Engine] = []
        if namespace not in self._passed:
            first = self._proxied(asked[0])
            if isinstance(first, Unanswered) and first.reason == REFUSED:
                self._shut[namespace] = (time.monotonic() + AGAIN_SECONDS, first)
                return [first] * len(asked)
            found.append(first)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found += threads.map(self._proxied, asked[len(found) :])
        silent = [each for each in found if isinstance(each, Unanswered) and each.reason == "Timeout"]
        if len(silent) == len(found):
            self._shut[namespace] = (time.monotonic() + AGAIN_SECONDS, silent[0])
        else:
            self._passed.add(namespace)
        return found

    def _proxied(self, door: Door) -> Engine:
        """What one engine says through the API server, which keeps ``Authorization`` for itself."""
        scheme = "https:" if door.address.startswith("https://") else ""
        path = f"{core('pods', door.namespace, f'{scheme}{door.pod}:{naming.ADMIN_PORT}')}/proxy/moontide/v1/status"
        header = {"x-admin-authorization": f"Bearer {door.token}"}
        try:
            reply = self._reply("GET", path, headers=header, seconds=ENGINE_SECONDS)
        except httpx.TimeoutException:
            return Unanswered("Timeout", f"no answer from pod {door.pod} within {ENGINE_SECONDS:.1f} s")
        except httpx.TransportError as error:
            return Unanswered("Unreachable", f"{self.server}: {type(error).__name__} {error}")
        if reply.body.get("kind") != "Status":
            return status_of(door.pod, reply.status, reply.body)
        # The API server's own answer.
        if reply.status == 403:
            return Unanswered(REFUSED, f"you may not get pods/proxy in {door.namespace}")
        if reply.status == 504:
            return Unanswered("Timeout", reply.message)
        if reply.status == 404 or reply.status >= 500:
            return Unanswered("Unreachable", reply.message)
        return Unanswered(REFUSED, f"the API server does not pass it on: {reply.message}")


async def _directly(asked: Sequence[Door]) -> list[Engine]:
    async with new_http_client() as http:

        async def one(door: Door) -> Engine:
            return await engine_status(http, door.address, door.token, ENGINE_SECONDS)

        return await fan_out(list(asked), one)


def get(reader: Reader, path: str, params: Mapping[str, str] | None = None) -> Object:
    """One object. Raises Denied, NotInstalled, CliError."""
    reply = reader.ask(path, params)
    if reply.status != 200:
        raise refusal(reader, reply, path)
    return reply.body


def find(reader: Reader, path: str) -> Object | None:
    """One object, or None where there is none. Raises Denied, NotInstalled, CliError."""
    reply = reader.ask(path)
    if reply.status == 404 and (reply.body.get("details") or {}).get("name"):
        return None
    if reply.status != 200:
        raise refusal(reader, reply, path)
    return reply.body


def items(reader: Reader, path: str, params: Mapping[str, str] | None = None) -> list[Object]:
    """All objects of a list, by namespace and name. Raises Denied, NotInstalled, CliError."""
    found: list[Object] = []
    more: dict[str, str] = {**(params or {}), "limit": str(PAGE)}
    while True:
        page = get(reader, path, more)
        found += page.get("items") or []
        token = str((page.get("metadata") or {}).get("continue") or "")
        if not token:
            return sorted(found, key=lambda each: (each["metadata"].get("namespace", ""), each["metadata"]["name"]))
        more["continue"] = token


def refusal(reader: Reader, reply: Reply, path: str) -> CliError:
    """Why there is nothing, as a sentence."""
    if reply.status == 401:
        return CliError(f"{reader.server} does not know the credentials: {reply.message}; log in again")
    if reply.status == 403:
        return Denied(f"{reply.message}; ask for the right, or use a context that has it")
    if reply.status == 404 and path.startswith(GROUP):
        return NotInstalled(
            f"the cluster at {reader.server} does not know Moontide's kinds: install the CRDs (kubectl apply -f crds/, "
            "or the chart), and look with: kubectl moontide doctor"
        )
    if reply.status == 404:
        return CliError(f"{reader.server} has no {path}: {reply.message}")
    return CliError(f"{reader.server} answers {reply.status} to {path}: {reply.message}")


def where(kind: str, namespace: str | None, name: str = "") -> str:
    """The path of custom objects of a kind (``policyversions``); of all namespaces where it is None."""
    middle = f"/namespaces/{namespace}" if namespace is not None else ""
    return f"{GROUP}{middle}/{kind}" + (f"/{name}" if name else "")


def core(kind: str, namespace: str | None, name: str = "") -> str:
    """The same, of objects of the core group."""
    middle = f"/namespaces/{namespace}" if namespace is not None else ""
    return f"/api/v1{middle}/{kind}" + (f"/{name}" if name else "")
