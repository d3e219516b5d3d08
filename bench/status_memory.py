"""Whether the operator's memory grows with patches of a status that it watches.

Run `python3 -m hack.cluster up --control-plane-only`, then `python3 bench/status_memory.py KUBECONFIG`. CRDs are
applied; a namespace with one PolicyVersion is made, and deleted in the end.

Prints the operator's resident memory as the patches go on; fails when the second half of them costs more than 2 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from kubernetes.aio import client as k8s
from kubernetes.aio import config
from kubernetes.aio.client.exceptions import ApiException

ROOT = Path(__file__).resolve().parents[1]
GROUP, VERSION, PLURAL = "moontide.dev", "v1alpha1", "policyversions"
MERGE = "application/merge-patch+json"
GROWTH_LIMIT_KB = 2048


def resident(pid: int) -> int:
    """Kilobytes of memory that the process has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise ValueError(f"process {pid} says nothing of its memory")


async def patch(policies: k8s.CustomObjectsApi, namespace: str, numbers: range) -> None:
    """Patch the status once for each number, four at a time: what kopf is told of and keeps of an object."""

    async def some(mine: range) -> None:
        for number in mine:
            # Of a size as a real status has it.
            failures = [
                {
                    "replica": f"r-{index}",
                    "step": "reset",
                    "reason": f"R{number}",
                    "message": "x" * 500,
                    "since": "2026-11-28T08:00:00.000000Z",
                }
                for index in range(4)
            ]
            body = {"status": {"failures": failures}}
            await policies.patch_namespaced_custom_object_status(
                GROUP, VERSION, namespace, PLURAL, "policy", body, _content_type=MERGE
            )

    await asyncio.gather(*(some(numbers[start::4]) for start in range(4)))


async def measure(kubeconfig: str, patches: int, steps: int) -> int:
    """0 when memory is flat."""
    await config.load_kube_config(kubeconfig)
    namespace = f"status-memory-{uuid.uuid4().hex[:8]}"
    async with k8s.ApiClient() as api:
        core, policies = k8s.CoreV1Api(api), k8s.CustomObjectsApi(api)
        await core.create_namespace({"metadata": {"name": namespace}})
        metadata = {"name": "policy", "namespace": namespace}
        policy = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "PolicyVersion",
            "metadata": metadata,
            "spec": {"version": 1},
        }
        await policies.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, policy)
        environ = {**os.environ, "KUBECONFIG": kubeconfig, "MOONTIDE_NAMESPACE": namespace}
        environ |= {
            "MOONTIDE_WATCH_NAMESPACE": namespace,
            "MOONTIDE_LEASE_SECONDS": "600",
            "MOONTIDE_LOG_LEVEL": "ERROR",
        }
        environ |= {"MOONTIDE_LIVENESS_PORT": "18080", "MOONTIDE_METRICS_PORT": "18081", "MOONTIDE_POD_UID": "bench"}
        environ |= {"MOONTIDE_POD_NAME": "bench"}
        lease = {"metadata": {"name": "moontide-operator"}, "spec": {"leaseTransitions": 1}}
        await k8s.CoordinationV1Api(api).create_namespaced_lease(namespace, lease)
        with tempfile.TemporaryFile() as log:
            operator = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "moontide", env=environ, stdout=log, stderr=log
            )
            try:
                while True:
                    found = await policies.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, "policy")
                    if found.get("status", {}).get("epoch"):
                        break
                    if operator.returncode is not None:
                        raise SystemExit("the operator has ended")
                    await asyncio.sleep(0.5)
                seen = []
                for step in range(steps):
                    began = time.monotonic()
                    await patch(policies, namespace, range(step * patches // steps, (step + 1) * patches // steps))
                    took = time.monotonic() - began
                    await asyncio.sleep(1)
                    seen.append(resident(operator.pid))
                    each = took / (patches // steps) * 1000
                    print(
                        f"{(step + 1) * patches // steps:6} patches: {seen[-1] / 1024:.1f} MB ({each:.1f} ms each)",
                        flush=True,
                    )
            finally:
                operator.kill()
                await operator.wait()
                try:
                    await core.delete_namespace(namespace)
                except ApiException as error:
                    print(f"{namespace} is left: {error.reason}", file=sys.stderr)
    growth = seen[-1] - seen[steps // 2 - 1]
    print(f"the second half of the patches cost {growth} kB")
    return int(growth > GROWTH_LIMIT_KB)


def main() -> int:
    """0 when memory is flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kubeconfig")
    parser.add_argument("--patches", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=10, help="measurements (default: %(default)s)")
    options = parser.parse_args()
    subprocess.run(["kubectl", f"--kubeconfig={options.kubeconfig}", "apply", "-f", str(ROOT / "crds")], check=True)
    return asyncio.run(measure(options.kubeconfig, options.patches, options.steps))


if __name__ == "__main__":
    sys.exit(main())
