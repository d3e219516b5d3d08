"""Old keys of one namespace, as a master's listing names them: taken in beside whoever waits, kept on disk.

A master needs seconds to list a million keys, and tens of seconds where cores are few: longer than one call to the
wiper may take. So a listing outlives the call that began it, and the next one goes on where that one stopped.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterable

from moontide_engine.namespace import is_of_another_epoch

STALE_SECONDS = 60.0
"""A listing that nobody asked for is forgotten. The operator asks at least every 30 seconds."""


class Listing:
    """The keys of ``namespace`` of all epochs but those of ``tags``. One caller at a time; :meth:`close` it."""

    def __init__(self, keys: Callable[[], Iterable[str]], namespace: str, tags: frozenset[str]) -> None:
        """``keys``: reads a master's keys from the first on; raises OSError and HTTPException."""
        self._keys = keys
        self._namespace = namespace
        self.tags = tags
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._read = threading.Event()
        self._closed = threading.Event()
        self._whole = False
        self._at = 0
        self.began = self._used = time.monotonic()
        self.error: Exception | None = None
        """Why it is not whole."""
        self.found = 0
        """Keys so far; all of them once it :attr:`is_whole`."""
        self.removed = 0
        """What its callers have removed of these."""
        threading.Thread(target=self._take_in, daemon=True).start()

    def _take_in(self) -> None:
        try:
            for key in self._keys():
                if self._closed.is_set():
                    return
                if is_of_another_epoch(key, self._namespace, self.tags):
                    self._file.write(f"{key}\n")
                    self.found += 1
            self._file.seek(0)
            self._whole = True
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.error = error
        finally:
            self._read.set()
            if self._closed.is_set():
                self._discard()

    def wait(self, seconds: float) -> None:
        """Until it is whole, or has failed, or ``seconds`` are over."""
        self._used = time.monotonic()
        self._read.wait(max(seconds, 0.0))

    @property
    def is_whole(self) -> bool:
        """The master has named every key."""
        return self._whole

    def batch(self, size: int) -> list[str]:
        """The next keys of what :attr:`is_whole`, ``size`` at most. Nobody gets them again."""
        batch = [line.rstrip("\n") for line in itertools.islice(iter(self._file.readline, ""), size)]
        self._at += len(batch)
        self._used = time.monotonic()
        return batch

    @property
    def is_done(self) -> bool:
        """Every key was taken."""
        return self.is_whole and self._at == self.found

    @property
    def is_stale(self) -> bool:
        """Nobody has asked for it lately."""
        return time.monotonic() - self._used > STALE_SECONDS

    def close(self) -> None:
        """Forget it. What is being taken in is given up with its next key."""
        self._closed.set()
        if self._read.is_set():
            self._discard()

    def _discard(self) -> None:
        # On a full disk, closing what was written fails again.
        with contextlib.suppress(OSError):
            self._file.close()
