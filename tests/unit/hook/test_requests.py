"""What is read from requests, and what is refused with a sentence."""

from __future__ import annotations

import json

import pytest

from moontide.hook.errors import Refusal
from moontide.hook.requests import Wait, body_of, patch_of, wait_of
from moontide.trainer import BadVersion


def test_waits() -> None:
    assert wait_of({}) == Wait(0)
    assert wait_of({"wait": "1.5", "after": "7"}) == Wait(1.5, "7")
    assert wait_of({"wait": "900", "for": "prepared"}) == Wait(60.0, "", "prepared")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"wait": "soon"}, "write seconds"),
        ({"wait": "-1"}, "write seconds"),
        ({"wait": "nan"}, "write seconds"),
        ({"for": "ready"}, "for=current or for=prepared"),
        ({"timeout": "3"}, "write wait=SECONDS"),
    ],
)
def test_waits_that_are_none(query: dict[str, str], says: str) -> None:
    with pytest.raises(Refusal, match=says) as raised:
        wait_of(query)
    assert raised.value.status == 400


def test_bodies() -> None:
    assert body_of("bump", b'{"version": 43}') == {"version": 43}
    assert body_of("commit", b"") == body_of("abort", b" ") == body_of("reset", b"{}") == {}
    assert body_of("reset", b'{"nonce": "x"}') == {"nonce": "x"}


@pytest.mark.parametrize(
    ("verb", "sent", "says"),
    [
        ("bump", b"", 'bump needs a version; send for example {"version": 43}'),
        ("bump", b"43", "no JSON object"),
        ("bump", b"{", "no JSON:"),
        ("bump", b"\xff", "no JSON:"),
        ("bump", b"[" * 16_000, "no JSON:"),
        ("prepare", b'{"preparing": 43}', "its body is a JSON object with: version"),
        ("reset", b'{"nonce": ""}', "a nonce is a text"),
        ("reset", b'{"nonce": 7}', "a nonce is a text"),
        ("delete", b"{}", "POST to one of: bump, prepare, commit, abort, reset"),
    ],
)
def test_bodies_that_are_none(verb: str, sent: bytes, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        body_of(verb, sent)


def test_a_version_that_is_none() -> None:
    for sent in (b'{"version": true}', b'{"version": 1.5}', b'{"version": null}', b'{"version": "a b"}'):
        with pytest.raises(BadVersion):
            body_of("bump", sent)


@pytest.mark.parametrize(
    ("spec", "verb"),
    [
        ({"version": 2}, "bump"),
        ({"preparing": "2"}, "prepare"),
        ({"version": 2, "preparing": None}, "commit"),
        ({"preparing": None}, "abort"),
        ({"resetNonce": "n"}, "reset"),
        ({}, "look"),
    ],
)
def test_patches(spec: dict[str, object], verb: str) -> None:
    body = {"spec": spec, "metadata": {"resourceVersion": "7"}}
    assert patch_of(json.dumps(body).encode()) == (verb, body)
    assert patch_of(json.dumps({"spec": spec}).encode())[0] == verb


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"spec": {"suspend": True}}, "spec.suspend is not changed through the hook"),
        ({"spec": {"version": 2, "preparing": 3}}, "a patch is one step"),
        ({"spec": {"version": 2, "resetNonce": "n"}}, "a patch is one step"),
        ({"spec": {"resetNonce": None}}, "a nonce is a text"),
        ({"spec": []}, "a patch is a JSON object"),
        ({"status": {}}, "a patch is a JSON object"),
        ({"metadata": {"labels": {}}}, "may hold a resourceVersion"),
        ({"metadata": {"resourceVersion": 7}}, "may hold a resourceVersion"),
    ],
)
def test_patches_that_are_none(body: dict[str, object], says: str) -> None:
    with pytest.raises(Refusal, match=says) as raised:
        patch_of(json.dumps(body).encode())
    assert raised.value.status == 400
