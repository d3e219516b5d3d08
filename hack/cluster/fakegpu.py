"""Keeps advertising GPUs that do not exist on one node: `python3 -m hack.cluster.fakegpu --help`.

The capacity of an extended resource is set in the node's status; kubelet derives what is allocatable from it, and sets
it to zero when it registers the node again, so it is looked at again and again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from pathlib import Path

from hack.cluster.apiclient import ApiClient

RESOURCE = "nvidia.com/gpu"


def advertise(client: ApiClient, node: str, count: int) -> bool:
    """Set the capacity if it is not what it should be; tells whether anything had to be changed."""
    path = f"/api/v1/nodes/{node}"
    status, body = client.request("GET", path)
    if status != 200:
        raise OSError(f"GET {path}: {status}")
    if json.loads(body)["status"].get("capacity", {}).get(RESOURCE) == str(count):
        return False
    patch = {"status": {"capacity": {RESOURCE: str(count)}, "allocatable": {RESOURCE: str(count)}}}
    status, body = client.request("PATCH", f"{path}/status", patch, "application/strategic-merge-patch+json")
    if status != 200:
        raise OSError(f"PATCH {path}/status: {status} {body[:200]!r}")
    return True


def main() -> int:
    """Run until killed; what goes wrong is printed once a change and tried again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--pki", type=Path, required=True, help="folder with ca.crt, admin.crt and admin.key")
    parser.add_argument("--node", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks")
    options = parser.parse_args()
    pki: Path = options.pki
    client = ApiClient(options.server, pki / "ca.crt", pki / "admin.crt", pki / "admin.key")
    last = ""
    while True:
        try:
            message = last
            if advertise(client, options.node, options.count):
                message = f"advertised {options.count} x {RESOURCE}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"waiting: {error}"
        if message != last:
            print(message, flush=True)
            last = message
        time.sleep(options.interval)


if __name__ == "__main__":
    sys.exit(main())
