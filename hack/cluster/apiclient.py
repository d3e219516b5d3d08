"""A few HTTPS calls to the API server and to the health ports of the other components."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class ApiClient:
    """One connection a call, with a client certificate or a token; proxies of the environment are never used."""

    def __init__(
        self,
        server: str,
        authority: Path | None,
        certificate: Path | None = None,
        key: Path | None = None,
        token: str = "",
    ) -> None:
        """Without an authority the server's certificate is not checked: fit only for health ports on loopback."""
        parts = urlsplit(server)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{server!r} names no host and port")
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._context = ssl.create_default_context(cafile=str(authority) if authority else None)
        if authority is None:
            self._context.check_hostname = False
            self._context.verify_mode = ssl.CERT_NONE
        if certificate is not None:
            self._context.load_cert_chain(certificate, key)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float = 10.0,
        accept: str = "application/json",
    ) -> tuple[int, bytes]:
        """Status and body of one request; network errors are raised as OSError or http.client.HTTPException."""
        connection: http.client.HTTPConnection
        if self._tls:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body)
            headers = {**self._headers, "Content-Type": content_type, "Accept": accept}
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ok(self, path: str, timeout: float = 5.0) -> bool:
        """Whether a GET is answered with 200."""
        try:
            return self.request("GET", path, timeout=timeout)[0] == 200
        except (OSError, http.client.HTTPException):
            return False
