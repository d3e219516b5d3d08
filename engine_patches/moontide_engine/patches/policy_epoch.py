"""Patch ``policy-epoch``: the policy's epoch is part of every block hash, so blocks of another epoch cannot be found.

The epoch is a string (PolicyVersion UID and number). It is put before the request's own ``cache_salt``, which vLLM
hashes into the first block of the chain, so it reaches every later block, the local prefix cache and every store keyed
by block hash. An empty epoch leaves hashes byte for byte as stock.

The first bytes of each hash are the epoch's tag, so that a store's keys tell their epoch and the wiper can collect
those of old ones (``moontide_engine.namespace``). 24 of SHA-256's 32 bytes remain; shorter hashes become longer. The
tag comes first because vLLM's KV events with integer hashes keep only the last eight bytes.

``switch`` runs in EngineCore's thread, between two steps, and deals with every request there is:

- *waiting*: hashed again under the new epoch; what a lookup promised is forgotten.
- *waiting for a load*, or holding what one brought: the loaded blocks are dropped when the load ends, and the request
  is looked up again under the new epoch.
- *running*: goes on with what it has. Blocks that are computed keep their hashes, later ones get hashes nobody else can
  have (a nonce), so what it still stores is never found. If it is preempted it starts over in the new epoch.
- *on its way from the API server*: hashed in the input thread, and again in ``add_request`` if the epoch has changed.

The caller makes the switch atomic with a change of weights: to an epoch of its own before the first new weight, to the
final one after the last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from moontide_engine.jsonlog import log
from moontide_engine.namespace import TAG_BYTES, tag
from moontide_engine.patches import Patch, replace
from moontide_engine.patches.probe import CORE, SCHEDULER, STORE

SEPARATOR = "\x1f"
# EngineCore's copy by name: the one that is called.
_HASHER = "vllm.v1.engine.core:get_request_block_hasher"
_UPDATE = "vllm.v1.request:Request.update_block_hashes"
_MARK = f"moontide{SEPARATOR}"
_HASH_BYTES = 32
# Epochs whose hashers are kept; requests of others get a new one.
_KEPT_HASHERS = 8

# Connectors whose keys are vLLM's block hashes, tested here with the epoch in them.
KNOWN = frozenset({"MooncakeStoreConnector"})
_TOKENS = "hashes tokens itself, so the epoch does not reach its keys"
_PAIRS = "hands KV from request to request without block hashes"
REFUSED = {
    "ExampleConnector": _TOKENS,
    "HF3FSKVConnector": _TOKENS,
    "LMCacheConnectorV1": _TOKENS,
    "SharedStorageConnector": _TOKENS,
    "MooncakeConnector": _PAIRS,
    "NixlConnector": _PAIRS,
    "P2pNcclConnector": _PAIRS,
}


class FenceUnsupported(RuntimeError):
    """A connector of this engine keeps KV where the epoch does not reach; the message names it and says why."""


@dataclasses.dataclass
class Switch:
    """What one switch did to the requests it found, and the seconds it took."""

    epoch: str
    waiting: int = 0
    loads: int = 0
    running: int = 0
    seconds: float = 0.0


def unsupported(transfer: Any) -> str:
    """Why an engine with this KVTransferConfig (None: no connector) cannot fence; empty if it can."""
    if transfer is None or not transfer.kv_connector:
        return ""
    names = [str(transfer.kv_connector)]
    if names == ["MultiConnector"]:
        children = (transfer.kv_connector_extra_config or {}).get("connectors") or []
        names = [str(child.get("kv_connector")) for child in children]
    faults = [f"{n} {REFUSED.get(n, 'is not known to key by block hash')}" for n in names if n not in KNOWN]
    return "; ".join(faults)


def compose(epoch: str, salt: str | None) -> str | None:
    """``cache_salt`` under an epoch: different for any two pairs of epoch and salt."""
    if not epoch and not (salt or "").startswith(_MARK):
        return salt
    return f"{_MARK}{len(epoch)}{SEPARATOR}{epoch}{SEPARATOR}{salt or ''}"


def epoch_in(cache_salt: str | None) -> str:
    """The epoch that ``compose`` put into a ``cache_salt``; empty if none."""
    if not cache_salt or not cache_salt.startswith(_MARK):
        return ""
    length, _, rest = cache_salt[len(_MARK) :].partition(SEPARATOR)
    return rest[: int(length)]


def tagged(function: Callable[[Any], bytes], epoch: str) -> Callable[[Any], bytes]:
    """``function`` with the epoch's tag in front of its hashes."""
    head, rest = tag(epoch), _HASH_BYTES - TAG_BYTES

    def hash_with_tag(value: Any) -> bytes:
        return head + function(value)[:rest]

    return hash_with_tag


def rehash(request: Any, epoch: str) -> None:
    """Hash all of a request again under ``epoch``.

    In a list of its own: saves that are queued read the old one, and the worker of an engine without ranks lives in
    EngineCore's process.
    """
    request.cache_salt = compose(epoch, request.moontide_salt)
    request.moontide_epoch = epoch
    request._block_hasher = getattr(request, "moontide_hasher", request._block_hasher)
    request.block_hashes = []
    request.update_block_hashes()


def make_private(request: Any, hash_block_size: int) -> None:
    """Keep the hashes of blocks that are computed; give every later one a hash that only this request has."""
    hasher = getattr(request, "moontide_hasher", request._block_hasher)
    nonce = os.urandom(16)

    def private(of: Any) -> list[Any]:
        return [type(value)(hashlib.sha256(nonce + value).digest()[: len(value)]) for value in hasher(of)]

    request.moontide_hasher = hasher
    request._block_hasher = private
    del request.block_hashes[request.num_computed_tokens // hash_block_size :]
    request.update_block_hashes()


def switch(core: Any, epoch: str) -> dict[str, Any]:
    """Utility of EngineCore: everything that begins from now on belongs to ``epoch``. Raises FenceUnsupported."""
    began = time.perf_counter()
    scheduler = core.scheduler
    done = Switch(epoch)
    if reason := unsupported(core.vllm_config.kv_transfer_config):
        raise FenceUnsupported(reason)
    if epoch != _epoch_of(scheduler):
        scheduler.moontide_epoch = epoch
        status = importlib.import_module("vllm.v1.request").RequestStatus
        for request in list(scheduler.requests.values()):
            if request.is_finished() or request._block_hasher is None:
                continue
            if request.status == status.RUNNING:
                make_private(request, scheduler.kv_cache_manager.block_pool.hash_block_size)
                done.running += 1
                continue
            rehash(request, epoch)
            _forget(scheduler.connector, request.request_id)
            if request.status == status.WAITING_FOR_REMOTE_KVS:
                done.loads += 1
                _drop_load(scheduler, request)
            elif request.num_computed_tokens:
                # Its load has ended and it has not been scheduled yet: back to the state in which vLLM gives up a load.
                done.loads += 1
                request.status = status.WAITING_FOR_REMOTE_KVS
                scheduler.finished_recving_kv_req_ids.add(request.request_id)
                _drop_load(scheduler, request)
            else:
                done.waiting += 1
    done.seconds = time.perf_counter() - began
    return dataclasses.asdict(done)


def start_over(core: Any) -> bool:
    """Utility of EngineCore: whatever runs is preempted, so that its KV is computed anew. True when nothing runs.

    The local cache is emptied as far as nothing holds it. What may hold some of it after a ``switch`` are loads that
    were dropped, and saves: neither is read in the new epoch, and while EngineCore keeps requests it takes no step in
    which it could hear of their end.
    """
    scheduler = core.scheduler
    try:
        scheduler.reset_prefix_cache(True, False)
    except RuntimeError as error:
        # vLLM has preempted what runs before it says so.
        log("blocks-held", message=str(error))
    return not scheduler.running


def _epoch_of(scheduler: Any) -> str:
    epoch: str = getattr(scheduler, "moontide_epoch", "")
    return epoch


def _drop_load(scheduler: Any, request: Any) -> None:
    # vLLM's own way for a load that failed: when the worker reports the end of it, the blocks are freed.
    request.num_computed_tokens = 0
    request.moontide_dropped = True
    scheduler.failed_recving_kv_req_ids.add(request.request_id)


def _forget(connector: Any, request_id: str) -> None:
    for child in getattr(connector, "_connectors", None) or [connector]:
        store = getattr(child, "connector_scheduler", None)
        if store is not None and hasattr(store, "load_specs"):
            store.load_specs.pop(request_id, None)
            # Old releases ask the store and wait, so no answer can be on its way.
            if hasattr(store.client, "discard"):
                store.client.discard(request_id)


def _hasher_maker(original: Any) -> Any:
    def get_request_block_hasher(hash_block_size: int, caching_hash_fn: Callable[[Any], bytes], *more: Any) -> Any:
        # ``more``: from 0.33 on, how many tokens after its block a hash covers, too.
        made = {"": original(hash_block_size, caching_hash_fn, *more)}

        def request_block_hasher(request: Any) -> Any:
            epoch = epoch_in(request.cache_salt)
            hasher = made.get(epoch)
            if hasher is None:
                while len(made) > _KEPT_HASHERS:
                    # The first is stock's, the second the oldest; the input thread may have been here before us.
                    made.pop(list(made)[1], None)
                hasher = made[epoch] = original(hash_block_size, tagged(caching_hash_fn, epoch), *more)
            if request._block_hasher is request_block_hasher:
                # It is called for every token, so from here on without us. ``rehash`` puts us back.
                request.moontide_hasher, request._block_hasher = request_block_hasher, hasher
                request.moontide_block = hash_block_size
            return hasher(request)

        return request_block_hasher

    return get_request_block_hasher


def _update(original: Any) -> Any:
    def update_block_hashes(self: Any) -> None:
        # Called for every token; most end no block, and the hasher would say so.
        if (len(self.block_hashes) + 1) * self.moontide_block <= len(self._all_token_ids):
            original(self)

    return update_block_hashes


def _preprocess(original: Any) -> Any:
    def preprocess_add_request(self: Any, request: Any) -> Any:
        epoch, salt = _epoch_of(self.scheduler), request.cache_salt
        request.cache_salt = compose(epoch, salt)
        made, wave = original(self, request)
        made.moontide_epoch, made.moontide_salt = epoch, salt
        return made, wave

    return preprocess_add_request


def _add(original: Any) -> Any:
    def add_request(self: Any, request: Any, request_wave: int = 0) -> Any:
        _catch_up(self.scheduler, request)
        return original(self, request, request_wave)

    return add_request


def _preempt(original: Any) -> Any:
    def preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        _catch_up(self, request)
        return result

    return preempt


def _catch_up(scheduler: Any, request: Any) -> None:
    epoch = _epoch_of(scheduler)
    if request._block_hasher is not None and getattr(request, "moontide_epoch", epoch) != epoch:
        rehash(request, epoch)


def _install() -> None:
    replace(_HASHER, _hasher_maker)
    request = importlib.import_module("vllm.v1.request").Request
    # Of those that never met our hasher.
    request.moontide_block = 0
    replace(_UPDATE, _update)
    replace(f"{CORE}.preprocess_add_request", _preprocess)
    replace(f"{CORE}.add_request", _add)
    replace(f"{SCHEDULER}._preempt_request", _preempt)
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    core.moontide_switch, core.moontide_start_over = switch, start_over


PATCH = Patch(
    name="policy-epoch",
    summary="block hashes carry the policy's epoch",
    references=(
        f"{CORE}.preprocess_add_request",
        f"{CORE}.add_request",
        f"{SCHEDULER}._preempt_request",
        f"{SCHEDULER}.reset_prefix_cache",
        f"{SCHEDULER}._update_waiting_for_remote_kv",
        f"{SCHEDULER}._handle_blocked_waiting_request",
        f"{SCHEDULER}._try_promote_blocked_waiting_request",
        _HASHER,
        "vllm.v1.core.kv_cache_utils:get_request_block_hasher",
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        "vllm.v1.core.block_pool:BlockPool.__init__",
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
        "vllm.v1.request:Request.__init__",
        _UPDATE,
        f"{STORE}.scheduler:MooncakeStoreScheduler.get_num_new_matched_tokens",
        f"{STORE}.scheduler:MooncakeStoreScheduler.build_connector_meta",
        f"{STORE}.data:ReqMeta.from_request_tracker",
        f"{STORE}.worker:LookupKeyClient.discard",
    ),
    install=_install,
    optional=True,
)
