"""Carries the steps of a trainer out with the operator's own rights, and waits for changes with a watch."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client as k8s
from kubernetes.aio.client.exceptions import ApiException

from moontide.kube.client import MERGE
from moontide.trainer.kube import carry_out
from moontide.trainer.policy import Object
from moontide.trainer.steps import POLL_SECONDS, Answer, Call, Steps

T = TypeVar("T")

MANAGER = "moontide-hook"
Changed = Callable[[Object], None]


class Carrier:
    """The API server, as :mod:`moontide.trainer.steps` wants it."""

    def __init__(self, api: k8s.ApiClient, closing: asyncio.Event) -> None:
        """Nothing is waited for once ``closing`` is set."""
        self._api = api
        self._closing = closing

    async def run(self, steps: Steps[T], changed: Changed = lambda _: None) -> T:
        """Carry the steps out; ``changed`` hears of each change of a spec that was made. Raises what they raise."""

        async def call(wanted: Call) -> Answer:
            if wanted.patch is None:
                return await self._look(wanted)
            answer = await self._ask("PATCH", f"{wanted.path}?fieldManager={MANAGER}", wanted.seconds, wanted.patch)
            seen = (wanted.patch.get("metadata") or {}).get("resourceVersion")
            if answer.status == 200 and _revision(answer) != seen:
                changed(wanted.patch.get("spec") or {})
            return answer

        return await carry_out(steps, call)

    async def _look(self, wanted: Call) -> Answer:
        answer = await self._ask("GET", wanted.path, wanted.seconds)
        if not wanted.after or answer.status != 200 or _revision(answer) != wanted.after:
            return answer
        await self._until_changed(wanted)
        return await self._ask("GET", wanted.path, wanted.seconds)

    async def _until_changed(self, wanted: Call) -> None:
        """Return when the object may have changed, when the time is over, or when the process is about to end."""
        watching = asyncio.create_task(self._watch(wanted))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait((watching, closing), timeout=wanted.wait, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watching, closing):
                task.cancel()
            await asyncio.gather(watching, closing, return_exceptions=True)

    async def _watch(self, wanted: Call) -> None:
        """Return when a watch says anything, or after a moment where there is none."""
        folder, _, name = wanted.path.rpartition("/")
        only = f"{folder}?fieldSelector=metadata.name%3D{name}"
        # The object's own resourceVersion may be too old to watch from; the list's is not.
        found = await self._ask("GET", only, wanted.seconds)
        if [each["metadata"]["resourceVersion"] for each in found.body.get("items") or ()] == [wanted.after]:
            query = f"{only}&watch=1&resourceVersion={_revision(found)}&timeoutSeconds={int(wanted.wait) + 1}"
            with contextlib.suppress(ApiException, aiohttp.ClientError, TimeoutError, OSError):
                answer = await self._send("GET", query, wanted.wait + wanted.seconds)
                try:
                    if answer.status == 200 and await answer.response.content.readany():
                        return
                finally:
                    answer.response.close()
        await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, method: str, path: str, seconds: float, body: Object | None = None) -> Answer:
        try:
            response = await self._send(method, path, seconds, body)
            text = (await response.read()).decode(errors="replace")
        except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as error:
            return Answer(0, text=f"{type(error).__name__} {error}".strip())
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        read = found if isinstance(found, dict) else {}
        if response.status in (401, 403):
            # The user may; the operator may not, or not yet: its chart gives it the right with hook.enabled.
            text = f"the operator has no right to do this: {read.get('message') or response.reason}"
            return Answer(503, text=text)
        after = str(response.headers.get("Retry-After", ""))
        return Answer(
            response.status, read, f"HTTP {response.status} {text[:200]}", float(after) if after.isdigit() else 0.0
        )

    async def _send(self, method: str, path: str, seconds: float, body: Object | None = None) -> Any:
        headers = {"Accept": "application/json", **({"Content-Type": MERGE} if body is not None else {})}
        request = await self._api.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        return await self._api.call_api(*request, _request_timeout=seconds)


def _revision(answer: Answer) -> str:
    return str((answer.body.get("metadata") or {}).get("resourceVersion", ""))
