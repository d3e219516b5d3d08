"""Single objects of a cluster, read without a process for each: kubectl costs half a second of CPU a call, and what
polls with it takes the cores that the polled one needs.
"""

from __future__ import annotations

import base64
import http.client
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hack.cluster.apiclient import ApiClient
from hack.cluster.errors import ClusterError

_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_APPEARS_SECONDS = 3.0
"""A kind may be asked for this long before the API server lists it."""


class Reads:
    """Reads with the credentials of a kubectl command line: a client certificate or a token."""

    def __init__(self, kubectl: Sequence[str]) -> None:
        """``kubectl``: the program and the options that name a kubeconfig or a context."""
        self._kubectl = list(kubectl)
        self._client: ApiClient | None = None
        self._paths: dict[str, tuple[str, str, bool]] = {}
        """By every name of a kind: its API's path, its plural, and whether it lies in namespaces."""

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        """The object as kubectl shows it, without managedFields, or None. Kinds are named as it takes them.

        Raises ClusterError.
        """
        base, plural, spaced = self._kind(kind)
        where = f"{base}/namespaces/{namespace}/{plural}" if spaced else f"{base}/{plural}"
        status, body = self._ask(f"{where}/{name}")
        try:
            found: dict[str, Any] = json.loads(body)
        except ValueError:
            # Not the API server's own: there is no such API any more.
            self._paths.clear()
            raise ClusterError(f"get {kind} {name}: {status} {body[:200].decode(errors='replace')}") from None
        if status == 200:
            found["metadata"].pop("managedFields", None)
            return found
        if status == 404 and (found.get("details") or {}).get("name") == name:
            return None
        raise ClusterError(f"get {kind} {name}: {found.get('message') or status}")

    def refusal(self, body: dict[str, Any]) -> str:
        """What the API server says when it refuses to create ``body``; empty where it would take it."""
        group = body["apiVersion"].rpartition("/")[0]
        base, plural, spaced = self._kind(f"{body['kind'].lower()}.{group}")
        where = f"{base}/namespaces/{body['metadata']['namespace']}/{plural}" if spaced else f"{base}/{plural}"
        status, said = self._ask(f"{where}?dryRun=All&fieldValidation=Strict", "POST", body)
        return "" if status == 201 else str(json.loads(said).get("message") or status)

    def _kind(self, kind: str) -> tuple[str, str, bool]:
        ends = time.monotonic() + _APPEARS_SECONDS
        while kind not in self._paths:
            self._discover()
            if kind not in self._paths and time.monotonic() > ends:
                raise ClusterError(f"the server doesn't have a resource type {kind!r}")
        return self._paths[kind]

    def _discover(self) -> None:
        self._paths.clear()
        for root in ("/api", "/apis"):
            status, body = self._ask(root, accept=_DISCOVERY)
            if status != 200:
                raise ClusterError(f"{root}: {status} {body[:200].decode(errors='replace')}")
            for group in json.loads(body)["items"]:
                group_name = group["metadata"].get("name", "")
                # The first version is the one that the group prefers.
                for version in group["versions"][:1]:
                    path = f"{root}/{group_name}/{version['version']}" if group_name else f"{root}/{version['version']}"
                    for each in version.get("resources", ()):
                        plural, found = each["resource"], (path, each["resource"], each["scope"] == "Namespaced")
                        for known in (plural, each.get("singularResource", ""), *each.get("shortNames", ())):
                            self._paths.setdefault(known, found)
                            self._paths.setdefault(f"{known}.{group_name}", found)

    def _ask(self, path: str, method: str = "GET", body: Any = None, **more: str) -> tuple[int, bytes]:
        if self._client is None:
            self._client = self._connected()
        try:
            return self._client.request(method, path, body, timeout=60.0, **more)
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"{method} {path}: {type(error).__name__}: {error}") from error

    def _connected(self) -> ApiClient:
        command = [*self._kubectl, "config", "view", "--raw", "--minify", "--output", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode != 0:
            raise ClusterError(f"kubectl config view: {done.stderr.strip()}")
        config = json.loads(done.stdout)
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        with tempfile.TemporaryDirectory() as scratch:

            def file(of: dict[str, str], field: str) -> Path | None:
                if f"{field}-data" in of:
                    made = Path(scratch) / field
                    made.write_bytes(base64.b64decode(of[f"{field}-data"]))
                    return made
                return Path(of[field]) if field in of else None

            certificate, key = file(user, "client-certificate"), file(user, "client-key")
            if certificate is None and "token" not in user:
                raise ClusterError("the kubeconfig has neither a client certificate nor a token")
            authority = file(cluster, "certificate-authority")
            return ApiClient(cluster["server"], authority, certificate, key, token=user.get("token", ""))
