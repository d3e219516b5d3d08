"""TLS to admin planes and wipers: whom the operator trusts, and what it says when a peer is not to be trusted.

A peer is verified by a name that follows from what the operator looks for (a fleet, the Service of a pool's master),
not by the address at which it was found.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from yarl import URL

logger = logging.getLogger(__name__)

REASON = "TLSHandshake"
"""Why there was no answer: the peer could not prove who it is, or does not speak TLS."""
LOOK_SECONDS = 5.0
"""Between two looks at the authorities' file."""
BUFFER_BYTES = 32 * 1024
"""What each connection reads into: two records of TLS. asyncio takes 256 KiB a connection and writes to all of it: with
a thousand engines that is half of the memory that the chart gives the operator."""
HANDSHAKES = 64
"""How many begin at once. Each takes a millisecond of CPU: of thousands side by side none would end in time."""
HANDSHAKE_SECONDS = 0.1
"""After which the next may begin: whoever does not answer keeps nobody waiting for longer."""

_EXPIRED, _NOT_YET, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 62, 64
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")


class Trust:
    """Whom to trust: the public authorities and those of a file, which may come, change and go."""

    def __init__(self, authorities: str = "") -> None:
        """``authorities``: path of the file (PEM); empty: the public ones alone."""
        self._file = Path(authorities) if authorities else None
        self._context: ssl.SSLContext | None = None
        self._known: bytes | None = None
        self._refused: bytes | None = None
        self._again = 0.0

    def context(self) -> ssl.SSLContext:
        """Of the authorities as they are now. Where they are others than before, it is another one."""
        if self._context is not None and time.monotonic() < self._again:
            return self._context
        self._again = time.monotonic() + LOOK_SECONDS
        found = self._read()
        if self._context is not None and found in (self._known, self._refused):
            return self._context
        context = httpx.create_ssl_context(trust_env=False)
        # It cannot be said for some connections alone: those to the API server read in smaller pieces, too.
        SSLProtocol.max_size = BUFFER_BYTES
        # Authorities that people make themselves often lack what Python 3.13 asks for in strict mode.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            if found:
                context.load_verify_locations(cadata=found.decode())
        except (ssl.SSLError, UnicodeDecodeError) as error:
            self._refused = found
            logger.error("%s holds no certificates (PEM): %s; what was trusted before is trusted on", self._file, error)
            if self._context is not None:
                return self._context
        else:
            if self._context is not None:
                logger.info("the authorities of admin ports were replaced")
            self._known = found
        self._context = context
        return context

    def _read(self) -> bytes:
        try:
            return self._file.read_bytes() if self._file is not None else b""
        except OSError:
            # What the chart names may come later.
            return b""


class Turns:
    """Handshakes one after the other, :data:`HANDSHAKES` at once."""

    def __init__(self) -> None:
        self._left = asyncio.Semaphore(HANDSHAKES)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """While a handshake is made. Whoever takes longer than :data:`HANDSHAKE_SECONDS` lets the next one begin."""
        await self._left.acquire()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._left.release()

        late = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, release)
        try:
            yield
        finally:
            late.cancel()
            release()


def refusal(error: BaseException, url: str, server_name: str) -> str | None:
    """Why the peer at ``url`` is not trusted, as a sentence that says what to do; None where TLS is not the reason.

    ``server_name``: see :meth:`moontide.engines.wire.Session.ask`.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if found is None:
        return None
    name = server_name or URL(url).host
    if not isinstance(found, ssl.SSLCertVerificationError):
        if any(each in str(found) for each in _NO_TLS):
            return (
                f"what answers at {url} speaks plain HTTP, and is sent nothing: it has to serve TLS with a certificate "
                f"for {name}"
            )
        return f"{url} and the operator agree on no TLS: {found.reason or found}"
    code = found.verify_code
    if code in (_EXPIRED, _NOT_YET):
        when = "has expired" if code == _EXPIRED else "does not hold yet"
        return (
            f"the certificate at {url}, or its authority's, {when}: renew it in its Secret; an engine that runs takes "
            "the new one within about a minute"
        )
    if code in (_OTHER_NAME, _OTHER_ADDRESS):
        return f"the certificate at {url} is not for {name}: make one with that name among its dnsNames"
    if code in _UNKNOWN_AUTHORITY:
        return (
            f"the certificate at {url} is of no authority that the operator trusts: put the authority's certificate "
            "into a ConfigMap or Secret of the operator's namespace, under the key ca.crt, and write its name into the "
            "chart's value adminTLS.caConfigMap or adminTLS.caSecret"
        )
    return f"the certificate at {url} is not valid: {found.verify_message}"
