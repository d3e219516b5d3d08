"""Why there is no disk tier: the released store brings wiped keys back from it. Exit status 1 if it does so no more.

~/.cache/moontide/engine-env-*/bin/python bench/disk_tier.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "component" / "engine"), str(ROOT)]

import enginekit as kit  # noqa: E402
import poolkit  # noqa: E402
from poolkit import MIB  # noqa: E402

COUNT = 40
SPILLING = """
import os, signal, sys, threading
from mooncake.store import MooncakeDistributedStore
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
store = MooncakeDistributedStore()
setup = ("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", sys.argv[1], None, True, sys.argv[2])
assert store.setup(*setup) == 0
while not stop.wait(0.1):
    pass
os._exit(0)
"""


def _value(number: int) -> bytes:
    return (b"%08d" % number) * (MIB // 32)


def _served(client: object, count: int = COUNT) -> int:
    return sum(client.get(f"a@tiny@{i:06d}") == _value(i) for i in range(count))  # type: ignore[attr-defined]


def returned(tmp_path: Path) -> tuple[int, int]:
    """Wiped keys that a new master lists, and those of them that are served, of :data:`COUNT`."""
    files = tmp_path / "files"
    files.mkdir()
    environment = {
        **poolkit.NATIVE,
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(files),
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 * MIB),
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "10",
    }
    with poolkit.pool(tmp_path, "-enable_offload=true", "-default_kv_lease_ttl=500") as pool:
        command = [sys.executable, "-c", SPILLING, f"127.0.0.1:{poolkit.PORT}", str(files)]
        spilling = kit.spawn(command, environment, tmp_path / "spilling.log")
        try:
            kit.wait_for("a segment", pool.segments, 30, spilling)
            client = pool.client()
            assert sum(client.put(f"a@tiny@{i:06d}", _value(i)) == 0 for i in range(COUNT)) == COUNT
            # What does not fill a bucket of ten keys may stay in memory alone.
            half = COUNT * len(_value(0)) / 2
            kit.wait_for("the files", lambda: pool.metric("master_allocated_file_size_bytes") >= half, 30, spilling)
            assert client.remove_by_regex("^a@", True) == COUNT
            assert pool.keys("a@") == []
            assert _served(client) == 0
            time.sleep(2)
            assert pool.keys("a@") == []
            pool.kill()
            pool.start()
            ends = time.monotonic() + 60
            while time.monotonic() < ends and not (pool.keys("a@") and _served(client)):
                time.sleep(0.5)
            return len(pool.keys("a@")), _served(client)
        finally:
            spilling.end(10)


def main() -> int:
    """Command line."""
    with tempfile.TemporaryDirectory() as folder:
        listed, served = returned(Path(folder))
    print(f"{COUNT} keys were wiped; with the next master {listed} are listed and {served} are served from disk")
    return 0 if served else 1


if __name__ == "__main__":
    sys.exit(main())
