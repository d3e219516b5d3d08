"""Loads through memory of our own: what reaches the blocks, and when."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Sequence

import pytest

from moontide_engine import transfers
from moontide_engine.transfers import TRANSFER_FAIL, StagedLoads, bounded, chunks, default_environment

SIZE = 8


class Blocks:
    """Where loads are to arrive."""

    def __init__(self, count: int) -> None:
        self.memory = ctypes.create_string_buffer(b"." * SIZE * count, SIZE * count)
        base = ctypes.addressof(self.memory)
        self.keys = [str(number) for number in range(count)]
        self.addresses = [[base + number * SIZE, base + number * SIZE + 4] for number in range(count)]
        self.sizes = [[4, 4]] * count


def arrive(addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> None:
    for row, lengths in zip(addresses, sizes, strict=True):
        for address, length in zip(row, lengths, strict=True):
            ctypes.memset(address, ord("x"), length)


def test_what_was_loaded_reaches_the_blocks_and_what_failed_does_not() -> None:
    blocks = Blocks(3)

    def get(keys: Sequence[str], addresses: transfers.Buffers, sizes: transfers.Buffers) -> list[int]:
        arrive(addresses, sizes)
        return [SIZE, -704, SIZE]

    loads = StagedLoads(get, 5)
    assert loads.load(blocks.keys, blocks.addresses, blocks.sizes) == [SIZE, -704, SIZE]
    assert blocks.memory.raw == b"x" * SIZE + b"." * SIZE + b"x" * SIZE


def test_a_load_that_is_lost_never_reaches_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "MAX_SLOTS", 2)
    blocks, release, calls = Blocks(2), threading.Event(), []

    def get(keys: Sequence[str], addresses: transfers.Buffers, sizes: transfers.Buffers) -> list[int]:
        calls.append(addresses[0][0])
        if len(calls) < 3:
            release.wait(30)
        arrive(addresses, sizes)
        return [SIZE] * len(keys)

    loads = StagedLoads(get, 0.05)
    lost = [TRANSFER_FAIL] * 2
    assert loads.load(blocks.keys, blocks.addresses, blocks.sizes) == lost
    assert loads.load(blocks.keys, blocks.addresses, blocks.sizes) == lost
    assert calls[0] != calls[1]
    # No memory is left that nobody may write to.
    assert loads.load(blocks.keys, blocks.addresses, blocks.sizes) == lost
    assert len(calls) == 2
    release.set()
    patience = time.monotonic() + 30
    while loads.lost < 2 and time.monotonic() < patience:
        time.sleep(0.01)
    assert loads.lost == 2
    assert blocks.memory.raw == b"." * SIZE * 2
    assert loads.load(blocks.keys, blocks.addresses, blocks.sizes) == lost
    monkeypatch.setattr(transfers, "MAX_SLOTS", 3)
    assert loads.load(blocks.keys, blocks.addresses, blocks.sizes) == [SIZE] * 2
    assert blocks.memory.raw == b"x" * SIZE * 2


def test_the_loads_of_a_client_share_a_thread_which_ends_with_it() -> None:
    threads = set()

    class Client:
        def batch_get_into_multi_buffers(self, keys: Sequence[str], *more: object) -> list[int]:
            threads.add(threading.current_thread())
            return [SIZE] * len(keys)

    blocks, client = Blocks(1), bounded(Client, 5, staged=True)()
    for _ in range(3):
        assert client.batch_get_into_multi_buffers(blocks.keys, blocks.addresses, blocks.sizes) == [SIZE]
    (thread,) = threads
    assert thread is not threading.current_thread()
    del client
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_an_error_of_the_client_is_the_callers() -> None:
    blocks = Blocks(1)

    def get(keys: Sequence[str], addresses: transfers.Buffers, sizes: transfers.Buffers) -> list[int]:
        raise RuntimeError("closed")

    loads = StagedLoads(get, 5)
    for _ in range(transfers.MAX_SLOTS + 1):
        with pytest.raises(RuntimeError, match="closed"):
            loads.load(blocks.keys, blocks.addresses, blocks.sizes)


def test_chunks_have_few_keys_and_few_bytes() -> None:
    many = [[1]] * (transfers.CHUNK_KEYS + 1)
    assert [(part.start, part.stop) for part in chunks(many)] == [(0, len(many) - 1), (len(many) - 1, len(many))]
    half = transfers.CHUNK_BYTES // 2
    assert [(part.start, part.stop) for part in chunks([[half], [half], [1], [3 * half]])] == [(0, 2), (2, 3), (3, 4)]
    assert list(chunks([])) == []


class Store:
    """A client that fails the transfers of some keys."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], addresses: object, sizes: object, config: object = None
    ) -> list[int]:
        self.asked += keys
        return [TRANSFER_FAIL if key == "bad" else 0 for key in keys]

    def batch_get_into_multi_buffers(self, keys: Sequence[str], addresses: object, sizes: object) -> list[int]:
        return self.batch_put_from_multi_buffers(keys, addresses, sizes)


@pytest.mark.parametrize("call", ["batch_put_from_multi_buffers", "batch_get_into_multi_buffers"])
def test_after_a_transfer_that_failed_the_rest_is_not_tried(call: str) -> None:
    store = bounded(Store, 5, staged=False)()
    keys = ["good"] * (transfers.CHUNK_KEYS - 1) + ["bad"] + ["later"] * 5
    codes = getattr(store, call)(keys, [[0]] * len(keys), [[1]] * len(keys))
    assert codes == [0] * (transfers.CHUNK_KEYS - 1) + [TRANSFER_FAIL] * 6
    assert "later" not in store.asked


def test_keys_with_groups_are_saved_in_one_call() -> None:
    class Config:
        group_ids = ("g",)

    store = bounded(Store, 5, staged=False)()
    keys = ["bad"] + ["later"] * transfers.CHUNK_KEYS
    codes = store.batch_put_from_multi_buffers(keys, [[0]] * len(keys), [[1]] * len(keys), Config())
    assert codes == [TRANSFER_FAIL] + [0] * transfers.CHUNK_KEYS


def test_time_limits_that_someone_has_set_stay() -> None:
    env = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "30"}
    default_environment(env)
    assert env["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "30"
    assert env["MC_TCP_STATUS_TIMEOUT_SEC"] == "3"
