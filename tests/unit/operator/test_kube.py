"""What the API server's answers mean, and tokens."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import aiohttp
import pytest
from kubernetes.aio.client.exceptions import ApiException

from moontide.errors import InvalidSpec, Retry
from moontide.kube.client import parse
from moontide.kube.errors import found_or_none, mapped
from moontide.kube.kinds import POLICY
from moontide.kube.tokens import Tokens


class Answer:
    """An HTTP answer as the client's exception takes it."""

    def __init__(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self.status = status
        self.reason = "because"
        self.data = json.dumps(body).encode() if not isinstance(body, bytes) else body
        self.headers = headers or {}


def _raise(status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
    with mapped("apply Deployment ns/a"):
        raise ApiException(http_resp=Answer(status, body, headers))


@pytest.mark.parametrize(("status", "after"), [(409, 1.0), (403, 5.0), (500, 2.0), (503, 2.0), (404, 2.0)])
def test_what_may_pass_is_retried(status: int, after: float) -> None:
    with pytest.raises(Retry) as caught:
        _raise(status, {"message": "no"})
    assert caught.value.after == after
    assert caught.value.reason == f"apply Deployment ns/a: {status} no"


def test_too_many_requests_waits_as_long_as_asked() -> None:
    with pytest.raises(Retry) as caught:
        _raise(429, {"message": "slow down"}, {"Retry-After": "7"})
    assert caught.value.after == 7.0


@pytest.mark.parametrize("status", [400, 422])
def test_a_refused_object_is_an_invalid_spec(status: int) -> None:
    with pytest.raises(InvalidSpec) as caught:
        _raise(status, {"message": "quantities must match"})
    assert caught.value.reason == "RefusedByApiServer"
    assert "quantities must match" in caught.value.message


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]"])
def test_an_answer_without_a_status_object(body: bytes) -> None:
    with pytest.raises(Retry, match="500 because"):
        _raise(500, body)


@pytest.mark.parametrize("error", [aiohttp.ServerDisconnectedError(), TimeoutError(), ConnectionResetError("x")])
def test_no_answer_is_retried(error: Exception) -> None:
    with pytest.raises(Retry, match=type(error).__name__), mapped("list pods of ns"):
        raise error


async def test_what_is_not_there_is_none_and_no_other_refusal_is() -> None:
    async def asked(status: int, message: str = "no") -> str:
        if status:
            raise ApiException(http_resp=Answer(status, {"message": message}))
        return "it"

    assert await found_or_none("get Secret ns/a", asked(0)) == "it"
    assert await found_or_none("get Secret ns/a", asked(404)) is None
    assert await found_or_none("get Secret ns/a%", asked(400, 'Name parameter invalid: "a%": may not contain')) is None
    with pytest.raises(Retry, match="get Secret ns/a: 403 no"):
        await found_or_none("get Secret ns/a", asked(403))
    with pytest.raises(InvalidSpec, match="get Secret ns/a: 400 no"):
        await found_or_none("get Secret ns/a", asked(400))


def test_a_patch_that_is_no_object_of_its_kind_is_an_invalid_spec() -> None:
    said = "failed to create typed patch object (ns/a; apps/v1, Kind=Deployment): .spec.x: field not declared in schema"
    with pytest.raises(InvalidSpec, match="field not declared") as caught:
        _raise(500, {"message": said})
    assert caught.value.reason == "RefusedByApiServer"


def test_other_faults_pass_through() -> None:
    with pytest.raises(KeyError), mapped("x"):
        raise KeyError("bug")


def test_parse_ignores_a_newer_schema_and_refuses_what_it_cannot_read() -> None:
    metadata = {"name": "p", "namespace": "ns", "uid": "u", "generation": 3}
    resource = parse(POLICY, {"metadata": metadata, "spec": {"version": 7, "fromTheFuture": {"a": 1}}})
    assert resource.model.spec.label == "7"
    assert resource.meta.generation == 3
    assert resource.owner_reference().uid == "u"
    with pytest.raises(InvalidSpec, match="ns/p"):
        parse(POLICY, {"metadata": metadata, "spec": {}})


def test_tokens_are_the_hmac_of_the_uid() -> None:
    key = bytes(range(32))
    tokens = Tokens(key)
    assert tokens.derive("u-1") == hmac.new(key, b"u-1", hashlib.sha256).hexdigest()
    assert tokens.derive("u-1") != tokens.derive("u-2")
    rotated = tokens.derive("u-1", "november@20261101T000000Z")
    assert len({tokens.derive("u-1"), rotated, tokens.derive("u-2", "november@20261101T000000Z")}) == 3
    assert tokens.each("u-1", ("", "november@20261101T000000Z")) == (tokens.derive("u-1"), rotated)
    with pytest.raises(ValueError, match="empty"):
        tokens.derive("")
    with pytest.raises(ValueError, match="32 bytes"):
        Tokens(b"short")
    assert key.hex() not in repr(tokens)
    assert repr(key) not in repr(tokens)
