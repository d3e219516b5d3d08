"""An authority and the certificates that it gives out, made by openssl."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """A self-signed certificate in a folder of its own."""

    def __init__(self, folder: Path, name: str = "tests") -> None:
        self._folder = folder
        self._key = folder / "ca.key"
        self.certificate = folder / "ca.crt"
        made = ("-keyout", self._key, "-out", self.certificate, "-days", "2", "-subj", f"/CN={name}")
        _openssl("req", "-x509", *_KEY, *made)

    def issue(self, folder: Path, *names: str, days: int = 2) -> None:
        """``tls.crt`` and ``tls.key`` for DNS names or addresses, into ``folder``, where both are replaced.

        With negative ``days`` it has expired.
        """
        request, key, made = (self._folder / each for each in ("leaf.csr", "leaf.key", "leaf.crt"))
        wanted = ",".join(f"{'IP' if name[-1].isdigit() else 'DNS'}:{name}" for name in names)
        more = ("-addext", f"subjectAltName={wanted}") if names else ()
        _openssl("req", *_KEY, "-keyout", key, "-out", request, "-subj", "/CN=moontide", *more)
        signed = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", str(days))
        _openssl("x509", "-req", "-in", request, "-out", made, "-copy_extensions", "copyall", *signed)
        os.replace(made, folder / "tls.crt")
        os.replace(key, folder / "tls.key")


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
