"""What the memory of an engine's pod adds up to, against its limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec, quantity_bytes

POD_FLOOR = 512 * 2**20
RANK_FLOOR = 512 * 2**20
"""Less than any engine was seen to need: for the API server and the scheduler of a pod, and for each worker."""
_RANKS = {
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "-pp": "pipeline",
    "--data-parallel-size": "data",
    "-dp": "data",
}
_DEFAULT_CPU_KV_GIB = "1"
"""``VLLM_CPU_KVCACHE_SPACE`` where the spec sets none, as :mod:`moontide.resources.engine` does."""


@dataclass(frozen=True)
class Part:
    """One summand."""

    words: str
    bytes: int


def ranks(args: Sequence[str]) -> int:
    """Worker processes of one pod, by the parallel sizes in vLLM's flags; the last of each kind counts.

    A value that is no number counts as 1: vLLM itself refuses it with better words.
    """
    sizes = {"tensor": 1, "pipeline": 1, "data": 1}
    for place, flag in enumerate(args):
        name, equals, value = flag.partition("=")
        kind = _RANKS.get(name)
        if kind is None:
            continue
        text = value if equals else (args[place + 1] if place + 1 < len(args) else "")
        if text.isdigit() and int(text) > 0:
            sizes[kind] = int(text)
    return sizes["tensor"] * sizes["pipeline"] * sizes["data"]


def pod_ranks(spec: InferenceDeploymentSpec) -> int:
    """Worker processes of one pod of the fleet."""
    return spec.parallelism.pod_gpus if spec.parallelism is not None else ranks(spec.engine.args)


def parts(spec: InferenceDeploymentSpec, pool: KVCachePoolSpec | None, device: str) -> list[Part]:
    """What one pod of the fleet uses of its host's memory when its segment and its shared memory are full.

    Raises ValueError for a size that is no amount of memory.
    """
    count = pod_ranks(spec)
    each = f"{count} x " if count > 1 else ""
    found = []
    # Huge pages are counted apart from a container's memory.
    if pool is not None and pool.transport.hugepages is None:
        lent, buffer = quantity_bytes(pool.memory.per_replica), quantity_bytes(pool.memory.local_buffer)
        if lent:
            found.append(Part(f"{each}the pool's memory.perReplica ({mib(lent)})", count * lent))
        found.append(Part(f"{each}its memory.localBuffer ({mib(buffer)})", count * buffer))
    found.append(Part("sharedMemory", quantity_bytes(spec.shared_memory)))
    if device == "cpu":
        set_by = {each.name: each.value for each in spec.engine.env}
        space = set_by.get("VLLM_CPU_KVCACHE_SPACE", _DEFAULT_CPU_KV_GIB)
        if space.isdigit():
            found.append(Part(f"{each}VLLM_CPU_KVCACHE_SPACE ({space} GiB)", count * int(space) * 2**30))
    found.append(Part("at least for the processes", POD_FLOOR + count * RANK_FLOOR))
    return found


def too_small(spec: InferenceDeploymentSpec, pool: KVCachePoolSpec | None, device: str) -> str | None:
    """Why a pod of the fleet must be killed for its memory, in words; None where it need not be, or has no limit."""
    limit = spec.resources.limits.get("memory") if spec.resources is not None else None
    if limit is None:
        return None
    given, wanted = quantity_bytes(str(limit)), parts(spec, pool, device)
    total = sum(part.bytes for part in wanted)
    if total <= given:
        return None
    said = " + ".join(f"{mib(part.bytes)} {part.words}" for part in wanted)
    return (
        f"spec.resources.limits.memory is {mib(given)}, and a pod needs {mib(total)} when its memory is in use, so it "
        f"would be killed: {said}; write limits.memory: {-(-total // 2**20)}Mi or more, or make one of these smaller"
    )


def mib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**20:.0f} MiB"
