"""The certificate that an admin port or a wiper serves, from a folder whose files may be replaced at any time."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from pathlib import Path
from typing import Any

from moontide_engine.jsonlog import log

LOOK_SECONDS = 5.0
"""Between two looks at the files. A kubelet needs a minute to bring a renewed Secret."""


class CertificateError(ValueError):
    """The folder holds no certificate with its key; the message says which."""


class Certificate:
    """``tls.crt`` (with the certificates between it and its authority) and ``tls.key`` of a folder."""

    def __init__(self, folder: str) -> None:
        """Raises CertificateError."""
        self._files = Path(folder) / "tls.crt", Path(folder) / "tls.key"
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._digest = b""
        self._refused = ""
        self._load()

    def look(self) -> None:
        """Serve new connections with what the files hold now. What is no certificate is logged once and left.

        Where several threads make connections it has to run in the one that accepts them.
        """
        try:
            if self._load():
                log("certificate-replaced", file=str(self._files[0]))
            self._refused = ""
        except CertificateError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log("certificate-refused", message=f"goes on with the old certificate: {error}")

    def _load(self) -> bool:
        try:
            digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in self._files)).digest()
            if digest == self._digest:
                return False
            # A context whose load fails midway has lost what it had.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files, password=_no_password)
            self.context.load_cert_chain(*self._files, password=_no_password)
        except (OSError, ValueError) as error:
            raise CertificateError(
                f"{self._files[0]} and {self._files[1].name} are no certificate with its key (PEM, no password): "
                f"{error}; a Secret of type kubernetes.io/tls has both"
            ) from None
        self._digest = digest
        return True

    async def keep(self) -> None:
        """Look at the files again and again, in the event loop that accepts the connections."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()


def secure(config: Any, served: Certificate) -> None:
    """Have a uvicorn ``Config`` that is not loaded yet serve the certificate, whatever it is replaced with."""
    config.load()
    config.ssl = served.context


def _no_password() -> str:
    # Without this OpenSSL asks at the terminal.
    raise ValueError("the key has a password")


def certificate(folder: str) -> Certificate | None:
    """Of ``folder``; None for no folder, which means plain HTTP. Raises CertificateError."""
    return Certificate(folder) if folder else None
