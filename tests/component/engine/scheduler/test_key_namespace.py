"""Patch key-namespace: what the worker calls a block in the store. Off must fail before 0.24, on must pass."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import corekit as kit
import pytest

from moontide_engine.namespace import is_of_another_epoch, pattern
from moontide_engine.patches import key_namespace
from moontide_engine.patches.probe import STORE

NAMESPACE = "5f0c6f6e-2f0b-4a8e-9b59-3d1b6a1c7d10"
UNKNOWN = kit.off("cache_prefix is ignored", patch=key_namespace.PATCH)


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[bool]:
    with kit.installed(key_namespace.PATCH, on=request.param):
        yield request.param


def key_of(prefix: str | None) -> str:
    """Key of one block by a worker whose connector has this ``cache_prefix``; the store itself is out of reach."""
    module: Any = importlib.import_module(f"{STORE}.worker")
    data: Any = importlib.import_module(f"{STORE}.data")
    extra = {} if prefix is None else {"cache_prefix": prefix}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    fields = {field.name for field in dataclasses.fields(data.KeyMetadata)}
    worker = object.__new__(module.MooncakeStoreWorker)
    # This configuration has nothing else, so it does not get as far as the store.
    with pytest.raises(AttributeError, match="model_config"):
        worker.__init__(config, None)
    given = {"cache_prefix": prefix or ""} if "cache_prefix" in fields else {}
    metadata = data.KeyMetadata(model_name="tiny", tp_rank=0, pcp_rank=0, dcp_rank=0, pp_rank=0, **given)
    key: str = data.PoolKey(metadata, "ab" * 32).to_string()
    return key


@pytest.mark.parametrize("patched", [UNKNOWN, kit.ON], indirect=True)
def test_keys_begin_with_the_namespace(patched: bool) -> None:
    key = key_of(NAMESPACE)
    assert key.startswith(f"{NAMESPACE}@tiny@")
    assert re.search(pattern(NAMESPACE), key), "what a reset removes"
    assert is_of_another_epoch(key, NAMESPACE, ()), "what a collection may take"


@pytest.mark.parametrize("patched", [kit.ON], indirect=True)
@pytest.mark.parametrize("prefix", [None, ""])
def test_without_a_namespace_keys_are_as_ever(patched: bool, prefix: str | None) -> None:
    assert key_of(prefix).startswith("tiny@tp_rank:0@")
