"""Store clients in processes of their own, to freeze one and look at the other. No engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ENGINE_PATCHES = Path(__file__).parents[3] / "engine_patches"
PORTION, KEYS = 32 << 10, 100


class Peer:
    """One client. ``segment`` bytes are what it lends; ``kind`` is ``stock`` or ``bounded``."""

    def __init__(self, log: Path, port: int, segment: int = 0, kind: str = "stock", keys: int = KEYS) -> None:
        env = {
            **os.environ,
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MC_RPC_CONNECT_TIMEOUT_MS": "500",
            "MC_RPC_TIMEOUT_MS": "2000",
            "PYTHONPATH": str(ENGINE_PATCHES),
        }
        arguments = [f"127.0.0.1:{port}", str(segment), str(PORTION), str(keys), kind]
        with log.open("wb") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("store_client.py")), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
            )
        assert self._popen.stdout is not None
        while (line := self._popen.stdout.readline()) != "ready\n":
            assert line, log.read_text(errors="replace")[-2000:]

    def ask(self, command: str, name: str = "") -> dict[str, Any]:
        """The answer to one command: ``put`` and ``get`` of all keys of a name, ``mark`` and ``changed`` of memory."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps([command, name]) + "\n")
        self._popen.stdin.flush()
        while not (line := self._popen.stdout.readline()).startswith("{"):
            assert line, "the client ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def freeze(self) -> None:
        """Stop the process: its kernel still accepts connections for it."""
        self._popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._popen.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGKILL."""
        self._popen.kill()
        self._popen.wait()
        for end in (self._popen.stdin, self._popen.stdout):
            if end is not None:
                end.close()
