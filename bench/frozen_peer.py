"""What a replica that stands still costs the clients that load from it and save to it, stock and bounded.

    ~/.cache/moontide/engine-env-*/bin/python bench/frozen_peer.py

Store clients of Mooncake and a master of this machine, no engine. The owner of all memory is stopped (SIGSTOP) while
the other one loads a hundred keys that it holds, or saves as many; then it goes on. Prints how long the call took, and
how many bytes of the caller's memory changed after the load was reported as failed: blocks that others use by then.
Asserts nothing. Takes six minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "component" / "engine")]

import enginekit as kit  # noqa: E402
import peers  # noqa: E402

PORT, METRICS = 18190, 18191
SETTLE = 5.0
FEW = 3
"""Keys of a load from an owner that the client has not met: stock waits a minute for each."""


def measure(folder: Path, kind: str, what: str) -> tuple[float, Any, int]:
    """Seconds, codes and bytes written afterwards, of one call in a fleet of its own."""
    folder.mkdir()
    master = kit.Master(folder, PORT, METRICS)
    ends: list[peers.Peer] = []
    try:
        master.start()
        keys = FEW if what == "load, never met" else peers.KEYS
        for name, segment, which in (("owner", 64 << 20, "stock"), ("user", 0, kind)):
            ends.append(peers.Peer(folder / f"{name}.log", PORT, segment, which, keys))
        owner, user = ends
        owner.ask("put", "x")
        if what != "load, never met":
            user.ask("get", "x")
        owner.freeze()
        answer = user.ask("put", "y") if what == "save" else user.ask("get", "x")
        user.ask("mark")
        owner.thaw()
        time.sleep(SETTLE)
        changed = user.ask("changed")["bytes"]
        return float(answer["seconds"]), answer["codes"], int(changed)
    finally:
        for end in ends:
            end.end()
        if master.process is not None:
            master.process.end(10)


def main() -> int:
    """Always 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("stock", "bounded"), help="one of both")
    options = parser.parse_args()
    print(f"{'client':<10} {'call':<18} {'seconds':>8}  {'written afterwards':>18}  codes", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for kind in (options.only,) if options.only else ("stock", "bounded"):
            for number, what in enumerate(("load", "load, never met", "save")):
                seconds, codes, changed = measure(Path(temporary) / f"{kind}{number}", kind, what)
                print(f"{kind:<10} {what:<18} {seconds:>8.1f}  {changed:>18,}  {codes}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
