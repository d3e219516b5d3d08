"""Reads of one API server, and of engines where they can be reached. Changes nothing."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import httpx

from moontide.api.v1alpha1 import API_VERSION
from moontide.cli.errors import CliError, Denied, NotInstalled
from moontide.engines.client import Unanswered, engine_status, fan_out, new_http_client
from moontide.planning.model import EngineStatus
from moontide.trainer.access import Access
from moontide.trainer.errors import AccessError, ApiUnavailable
from moontide.trainer.kube import http_options
from moontide.trainer.policy import Object

REQUEST_SECONDS = 15.0
ENGINE_SECONDS = 1.5
"""For the answer of an engine: where pods cannot be reached from here, nobody waits long to be told."""
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

    def engines(self, asked: Sequence[tuple[str, str]]) -> list[Engine]:
        """What the engines at (address, token) say of themselves, side by side."""

    def now(self) -> dt.datetime:
        """The time of day, aware."""


class Cluster:
    """The API server of a kubeconfig."""

    def __init__(self, access: Access) -> None:
        self._access = access
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
        options: dict[str, Any] = {"headers": {"accept": "application/json, */*", **self._access.headers()}}
        if self._access.tls_name:
            options["extensions"] = {"sni_hostname": self._access.tls_name}
        method = "GET" if body is None else "POST"
        try:
            answer = self._http.request(
                method, path, params=dict(params or {}), json=body, timeout=REQUEST_SECONDS, **options
            )
        except httpx.UnsupportedProtocol as error:
            raise AccessError(f"{self.server} is no URL; write https://host:port") from error
        except httpx.TransportError as error:
            raise ApiUnavailable(
                f"no answer from {self.server}: {type(error).__name__} {error}; is the cluster up, and is it the right "
                "context?"
            ) from error
        try:
            parsed = answer.json()
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return Reply(answer.status_code, parsed)
        return Reply(answer.status_code, {}, answer.text)

    def engines(self, asked: Sequence[tuple[str, str]]) -> list[Engine]:
        async def all_of_them() -> list[Engine]:
            async with new_http_client() as http:

                async def one(each: tuple[str, str]) -> Engine:
                    return await engine_status(http, each[0], each[1], ENGINE_SECONDS)

                found: list[Engine] = await fan_out(list(asked), one)
                return found

        return asyncio.run(all_of_them()) if asked else []


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
