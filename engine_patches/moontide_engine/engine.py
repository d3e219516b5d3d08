"""What the admin plane asks of an engine, and how vLLM answers it.

Nothing here waits inside EngineCore: each call is one short utility on it. Bounds on time are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from moontide_engine import fallback
from moontide_engine.patches import APPLIED, policy_epoch
from moontide_engine.patches.reset_truth_front import everywhere


class EngineFault(Exception):
    """The engine answered a call with something that is not an answer."""


@dataclass(frozen=True)
class Probe:
    """One look at every engine core of the replica, summed over its data-parallel ranks."""

    running: int
    waiting: int
    settling: int
    paused: bool

    @property
    def idle(self) -> bool:
        """Whether no request is in any engine core."""
        return self.running == 0 and self.waiting == 0


@dataclass(frozen=True)
class RankQueue:
    """Store traffic of one worker: puts and loads that have not ended."""

    rank: int
    left: int
    loading: int
    attached: bool
    reason: str

    def as_json(self) -> dict[str, object]:
        """As the drain answer shows it."""
        return {"rank": self.rank, "left": self.left, "loading": self.loading}


class Engine(Protocol):
    """One replica, all its ranks."""

    @property
    def version(self) -> str:
        """Release of the engine."""

    @property
    def ranks(self) -> int:
        """Number of workers."""

    @property
    def store_configured(self) -> bool:
        """Whether the engine runs with a Mooncake store."""

    @property
    def fell_back(self) -> str:
        """Why the engine runs without the store that it was to have; empty if it does not."""

    @property
    def fence_unsupported(self) -> str:
        """Why block hashes cannot carry an epoch here; empty if they can."""

    @property
    def live_fence_unsupported(self) -> str:
        """Why the epoch cannot change while requests run; empty if it can."""

    async def switch(self, salt: str) -> None:
        """From now on ``salt`` is part of every block hash, on every rank. Raises EngineFault."""

    async def probe(self) -> Probe:
        """Count requests."""

    async def queues(self) -> list[RankQueue]:
        """Store traffic of every rank; empty without a store."""

    async def weights_version(self) -> str:
        """Version the engine says its weights have."""

    async def set_weights_version(self, version: str) -> None:
        """Tell the engine what its weights are."""

    async def load_weights(self, source: str) -> None:
        """Load a checkpoint on every rank and return when all are through. Raises EngineFault; then nobody knows what
        the weights are."""

    async def pause(self, mode: str) -> None:
        """Let no new request be scheduled. Those there are run on (``wait``), end (``abort``) or stop (``keep``). Never
        clears a cache."""

    async def resume(self) -> None:
        """Undo ``pause``."""

    async def reset_prefix(self, preempt: bool = False) -> bool:
        """Empty the local prefix cache of every rank, never the store. False while blocks are held.

        ``preempt``: requests that run start over; False while one of them still runs.
        """

    async def reset_encoder(self) -> None:
        """Empty the encoder cache of every rank."""

    async def reset_multimodal(self) -> None:
        """Empty the multi-modal caches, of the front end and of every rank."""


class VllmEngine:
    """The adapter onto vLLM's AsyncLLM."""

    def __init__(self, client: Any, version: str) -> None:
        self._client = client
        self._version = version
        self._config = client.vllm_config

    @property
    def version(self) -> str:
        """Release of vLLM."""
        return self._version

    @property
    def ranks(self) -> int:
        """Workers over tensor, pipeline and data parallelism."""
        parallel = self._config.parallel_config
        return int(parallel.world_size) * int(parallel.data_parallel_size)

    @property
    def store_configured(self) -> bool:
        """Whether a Mooncake store connector is configured, alone or inside a MultiConnector."""
        return bool(store_connectors(self._config.kv_transfer_config))

    @property
    def fell_back(self) -> str:
        """As it was decided in this process, which made the configuration."""
        return fallback.fell_back()

    @property
    def fence_unsupported(self) -> str:
        """From the connectors' names."""
        return policy_epoch.unsupported(self._client.vllm_config.kv_transfer_config)

    @property
    def live_fence_unsupported(self) -> str:
        """Outputs of a multi-modal encoder are kept by the picture's hash, in which there is no epoch."""
        if self.fence_unsupported:
            return self.fence_unsupported
        multimodal = bool(getattr(self._config.model_config, "is_multimodal_model", False))
        return "the model is multi-modal, and its encoder cache does not know of epochs" if multimodal else ""

    async def switch(self, salt: str) -> None:
        """``EngineCore.moontide_switch`` on every engine core: data-parallel ranks all switch, or it is no success."""
        reached = [str(answer["epoch"]) for answer in await self._all("moontide_switch", salt)]
        if any(epoch != salt for epoch in reached):
            raise EngineFault(f"the engine cores are in the epochs {reached}, not in {salt!r}")

    async def probe(self) -> Probe:
        """Sum of ``EngineCore.moontide_probe`` over the engine cores."""
        answers = await self._all("moontide_probe")
        return Probe(
            running=sum(int(a["running"]) for a in answers),
            waiting=sum(int(a["waiting"]) for a in answers),
            settling=sum(int(a["settling"]) for a in answers),
            paused=all(bool(a["paused"]) for a in answers),
        )

    async def queues(self) -> list[RankQueue]:
        """``WorkerBase.moontide_store_queue`` of every worker of every engine core."""
        if not self.store_configured:
            return []
        per_core = await self._all("collective_rpc", "moontide_store_queue", None, (), {})
        found: list[RankQueue] = []
        for core, answers in enumerate(per_core):
            for answer in answers:
                found.append(
                    RankQueue(
                        rank=core * len(answers) + int(answer["rank"]),
                        left=int(answer["left"]),
                        loading=int(answer["loading"]),
                        attached=bool(answer["attached"]),
                        reason=str(answer["reason"]),
                    )
                )
        if len(found) != self.ranks:
            raise EngineFault(f"{len(found)} of {self.ranks} ranks answered")
        return sorted(found, key=lambda queue: queue.rank)

    async def patches(self) -> list[dict[str, str]]:
        """Patch table of every engine core process."""
        return [dict(a["patches"]) for a in await self._all("moontide_probe")]

    async def weights_version(self) -> str:
        """Version all engine cores agree on."""
        return str(await self._client.get_weight_version())

    async def set_weights_version(self, version: str) -> None:
        """Set it on every engine core."""
        await self._client.update_weight_version(version)

    async def load_weights(self, source: str) -> None:
        """``WorkerBase.moontide_load`` on every worker of every engine core, none of which serves meanwhile."""
        from moontide_engine.plugin import PATCHES

        if PATCHES.table.get("weights-load", APPLIED) != APPLIED:
            raise EngineFault(f"vLLM {self._version} cannot load weights by itself: push them, or use a later release")
        name = source.removeprefix("hf://")
        per_core = await self._all("collective_rpc", "moontide_load", None, (name,), {})
        answers = [answer for core in per_core for answer in core]
        # Ranks that read the same source fail alike.
        errors = {str(answer["error"]): int(answer["rank"]) for answer in reversed(answers) if answer["error"]}
        if errors:
            raise EngineFault("; ".join(f"rank {rank}: {error}" for error, rank in sorted(errors.items())))
        if len(answers) != self.ranks:
            raise EngineFault(f"{len(answers)} of {self.ranks} ranks answered")

    async def pause(self, mode: str) -> None:
        """vLLM's pause with ``clear_cache=False``: its default cascades into a wipe of the store."""
        await self._client.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """vLLM's resume."""
        await self._client.resume_generation()

    async def reset_prefix(self, preempt: bool = False) -> bool:
        """The local part alone, on every engine core."""
        if preempt:
            return all(answer is True for answer in await self._all("moontide_start_over"))
        return all(answer is True for answer in await self._all("reset_prefix_cache", False, False))

    async def reset_encoder(self) -> None:
        """On every engine core, which fans out to its workers."""
        await self._all("reset_encoder_cache")

    async def reset_multimodal(self) -> None:
        """The front end's sender cache first, then every engine core."""
        await self._client.reset_mm_cache()

    async def _all(self, method: str, *args: object) -> list[Any]:
        answers = await everywhere(self._client.engine_core, method, *args)
        if not answers:
            raise EngineFault(f"no engine core answered {method}")
        return answers


def store_connectors(transfer: Any) -> list[dict[str, Any]]:
    """``kv_connector_extra_config`` of each Mooncake store connector in a KVTransferConfig (None: no connector)."""
    if transfer is None:
        return []
    extra = dict(transfer.kv_connector_extra_config or {})
    if transfer.kv_connector == "MooncakeStoreConnector":
        return [extra]
    if transfer.kv_connector != "MultiConnector":
        return []
    children = extra.get("connectors") or []
    return [
        dict(child.get("kv_connector_extra_config") or {})
        for child in children
        if child.get("kv_connector") == "MooncakeStoreConnector"
    ]
