"""Parts of the epoch in the hashes that need no engine. The rest: tests/component/engine/scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide_engine.namespace import TAG_BYTES, is_of_another_epoch, tag
from moontide_engine.patches.policy_epoch import compose, epoch_in, tagged, unsupported

texts = st.text(alphabet="ab\x1f0123/", max_size=12)


@given(texts.filter(bool), texts, texts.filter(bool), texts)
def test_no_two_pairs_of_epoch_and_salt_give_one_salt(epoch: str, salt: str, other: str, more: str) -> None:
    assert (compose(epoch, salt) == compose(other, more)) == ((epoch, salt) == (other, more))


def test_no_epoch_leaves_the_salt_as_it_is() -> None:
    assert compose("", None) is None
    assert compose("", "mine") == "mine"
    assert compose("e", None) == compose("e", "")


@given(texts, texts)
def test_the_epoch_is_read_back(epoch: str, salt: str) -> None:
    assert epoch_in(compose(epoch, salt)) == epoch


@given(texts.filter(bool), texts)
def test_a_client_cannot_name_an_epoch(epoch: str, salt: str) -> None:
    forged = compose(epoch, salt)
    assert epoch_in(compose("", forged)) == ""
    assert epoch_in(compose("mine", forged)) == "mine"


@pytest.mark.parametrize("length", [16, 32])
def test_hashes_begin_with_the_tag_and_end_as_they_did(length: int) -> None:
    found = tagged(lambda value: bytes(value), "p/1")(range(length))
    assert found == tag("p/1") + bytes(range(24))[:length]
    assert not is_of_another_epoch(f"ns@model@tp_rank:0@{found.hex()}", "ns", {tag("p/1").hex()})
    assert is_of_another_epoch(f"ns@model@tp_rank:0@{found.hex()}", "ns", {tag("p/2").hex()})
    assert len(tag("p/1")) == TAG_BYTES


def transfer(name: str | None, *children: str) -> SimpleNamespace:
    extra = {"connectors": [{"kv_connector": child} for child in children]} if children else None
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)


def test_connectors_that_key_by_block_hash_can_fence() -> None:
    assert unsupported(None) == ""
    assert unsupported(transfer(None)) == ""
    assert unsupported(transfer("MooncakeStoreConnector")) == ""
    assert unsupported(transfer("MultiConnector", "MooncakeStoreConnector", "MooncakeStoreConnector")) == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LMCacheConnectorV1", "hashes tokens itself"),
        ("NixlConnector", "from request to request"),
        ("SomethingNew", "is not known to key by block hash"),
    ],
)
def test_others_are_refused_by_name_with_the_reason(name: str, why: str) -> None:
    for refused in (transfer(name), transfer("MultiConnector", "MooncakeStoreConnector", name)):
        said = unsupported(refused)
        assert said.startswith(name)
        assert why in said
        assert "MooncakeStoreConnector" not in said
