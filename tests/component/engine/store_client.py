"""A process with one store client and one piece of memory, as ``peers.py`` runs it: a command a line, an answer a line.

``python store_client.py MASTER SEGMENT_BYTES PORTION KEYS stock|bounded``
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from typing import Any

MARK = 0xA5


def main() -> None:
    """Serve until the input ends."""
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    from moontide_engine import transfers

    master, segment, portion, count, kind = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    client: Any = MooncakeDistributedStore
    if kind == "bounded":
        transfers.prepare()
        client = transfers.bounded(client, 5.0, staged=True)
    store = client()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", master) == 0
    memory = mmap.mmap(-1, portion * count)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert store.register_buffer(base, len(memory)) == 0
    addresses = [[base + number * portion] for number in range(count)]
    sizes = [[portion]] * count

    def answer(command: str, name: str) -> dict[str, Any]:
        if command == "mark":
            ctypes.memset(base, MARK, len(memory))
            return {}
        if command == "changed":
            return {"bytes": len(memory) - memory[:].count(bytes([MARK]))}
        keys = [f"{name}-{number}" for number in range(count)]
        began = time.monotonic()
        if command == "put":
            ctypes.memset(base, ord(name[0]), len(memory))
            codes = store.batch_put_from_multi_buffers(keys, addresses, sizes, ReplicateConfig())
        else:
            codes = store.batch_get_into_multi_buffers(keys, addresses, sizes)
        seconds = time.monotonic() - began
        codes = list(codes)
        right = memory[:] == name[0].encode() * len(memory)
        lost = getattr(getattr(store, "moontide_loads", None), "lost", 0)
        return {"seconds": seconds, "codes": {code: codes.count(code) for code in set(codes)}, "all": right} | {
            "lost": lost
        }

    out = os.fdopen(os.dup(1), "w")
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), file=out, flush=True)
    os._exit(0)


main()
