"""Carries the steps of :mod:`moontide.trainer.steps` out over HTTP: once blocking, once for asyncio."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

import httpx

from moontide.trainer.access import Access
from moontide.trainer.errors import AccessError, ApiUnavailable
from moontide.trainer.steps import Answer, Call, Sleep, Steps

T = TypeVar("T")


def http_options(access: Access) -> dict[str, Any]:
    """What a client of httpx needs.

    The environment's proxies are for hooks only: an API server is seldom behind one, and a kubeconfig names it.
    """
    return {
        "base_url": access.server,
        "verify": access.tls if access.tls is not None else True,
        "proxy": access.proxy,
        "trust_env": access.hook,
    }


def _arguments(access: Access, call: Call) -> dict[str, Any]:
    """What httpx needs for one call."""
    headers = {"accept": "application/json", **access.headers()}
    seconds = call.seconds + call.wait
    found: dict[str, Any] = {"url": call.path, "method": "GET", "headers": headers, "timeout": seconds}
    if call.after:
        found["params"] = {"after": call.after, "wait": f"{call.wait:.3f}"}
    if call.patch is not None:
        headers["content-type"] = "application/merge-patch+json"
        found |= {"method": "PATCH", "content": json.dumps(call.patch)}
    if access.tls_name:
        found["extensions"] = {"sni_hostname": access.tls_name}
    return found


def _answer(response: httpx.Response) -> Answer:
    try:
        body = response.json()
    except ValueError:
        body = None
    after = response.headers.get("retry-after", "")
    return Answer(
        response.status_code,
        body if isinstance(body, dict) else {},
        f"HTTP {response.status_code} {response.text[:200].strip()}".strip(),
        float(after) if after.isdigit() else 0.0,
    )


def _no_answer(access: Access, error: httpx.TransportError) -> Answer:
    """Raises AccessError for what trying again does not mend."""
    text = f"{type(error).__name__} {error}".strip()
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise AccessError(
            f"{access.origin}: the certificate of {access.server} is not to be trusted: {text}"
        ) from error
    if isinstance(error, httpx.UnsupportedProtocol):
        raise AccessError(f"{access.origin}: {access.server} is no URL; write https://host:port") from error
    return Answer(0, text=f"{access.server}: {text}")


class Api:
    """The API server, or a hook, for code that may block.

    Where not ``patient``, one that cannot be connected to is waited for only if it has answered before.
    """

    def __init__(self, access: Access, *, patient: bool = True) -> None:
        self._access = access
        self._patient = patient
        self._http = httpx.Client(**http_options(access))

    def __enter__(self) -> Api:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def run(self, steps: Steps[T]) -> T:
        """Carry the steps out and give what they come to. Raises AccessError, ApiUnavailable, and what they raise."""
        answer: Answer | None = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Sleep):
                time.sleep(step.seconds)
                answer = None
            else:
                answer = self._call(step)

    def _call(self, call: Call) -> Answer:
        try:
            answer = _answer(self._http.request(**_arguments(self._access, call)))
        except httpx.TransportError as error:
            answer = _no_answer(self._access, error)
            if not self._patient and isinstance(error, httpx.ConnectError):
                right = "reachable from here" if self._access.hook else "the right context"
                raise ApiUnavailable(
                    f"no answer from {self._access.origin}: {answer.text}; is it up, and is it {right}?"
                ) from error
            return answer
        self._patient = True
        return answer


async def carry_out(steps: Steps[T], call: Callable[[Call], Awaitable[Answer]]) -> T:
    """Carry the steps out, each call by ``call``, and give what they come to."""
    answer: Answer | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        if isinstance(step, Sleep):
            await asyncio.sleep(step.seconds)
            answer = None
        else:
            answer = await call(step)


class AsyncApi:
    """The API server, or a hook, for asyncio."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._http = httpx.AsyncClient(**http_options(access))

    async def __aenter__(self) -> AsyncApi:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def run(self, steps: Steps[T]) -> T:
        """Carry the steps out and give what they come to."""
        return await carry_out(steps, self._call)

    async def _call(self, call: Call) -> Answer:
        try:
            return _answer(await self._http.request(**_arguments(self._access, call)))
        except httpx.TransportError as error:
            return _no_answer(self._access, error)
