"""Engines that started without their pool are made anew once it is there: one at a time, and not at once.

The operator, its API server, the gates and admin planes are real; the master's two pages are a double's.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from tests.integration.stage import RESOLVING

READY_SECONDS = 4
SOONER = f"import moontide.planning.reattach as reattach\nreattach.READY_SECONDS = {READY_SECONDS}.0\n"
"""In place of a minute."""


def _said(stage: Any, kind: str, name: str, of: str) -> dict[str, str]:
    """A condition as it is now; empty texts while it is absent."""
    body = stage.api("GET", stage.path(kind, name))
    found = (body.get("status") or {}).get("conditions") or ()
    absent = {"status": "", "reason": "", "message": ""}
    return next(({**absent, **each} for each in found if each["type"] == of), absent)


def _events(stage: Any) -> list[dict[str, Any]]:
    found = stage.api("GET", f"/api/v1/namespaces/{stage.namespace}/events")["items"]
    return sorted((each for each in found if each["reason"] == "Reattaching"), key=lambda each: each["firstTimestamp"])


def _kubelet(stage: Any, uid: str) -> set[str]:
    """Start an engine in each pod that has none, and call every pod ready. Returns their names."""
    names: set[str] = stage.start_pods("chat", uid, True, "1")
    stage.call_ready(names)
    return names


def test_engines_that_fell_back_are_made_anew_one_at_a_time(make_stage: Any, wait_for: Any) -> None:
    with make_stage() as (stage, make_operator):
        code = SOONER + RESOLVING.format(services=stage.services)
        make_operator("reattaching", {"MOONTIDE_RESYNC_SECONDS": "1"}, code).start()
        stage.pool()
        stage.fleet("chat", fences=True)
        stage.wait_current("chat", 1)
        uid = stage.api("GET", stage.path("InferenceDeployment", "chat"))["metadata"]["uid"]
        first = _kubelet(stage, uid)
        stage.double("change", names=sorted(first), fell_back="nobody there")

        def attached() -> dict[str, str]:
            return _said(stage, "InferenceDeployment", "chat", "KVCacheAttached")

        def complete() -> bool:
            return _said(stage, "InferenceDeployment", "chat", "Progressing")["reason"] == "Complete"

        wait_for("both fell back", lambda: all(name in attached()["message"] for name in first))
        wait_for("every replica is there", complete)
        assert attached()["reason"] == "Fallback"
        assert _said(stage, "KVCachePool", "kv", "Ready")["status"] == "False"
        assert {pod["metadata"]["name"] for pod in stage.pods("chat")} == first

        stage.double("master", host=stage.services, capacity=1 << 30, bytes_a_key=1 << 20)
        (left,) = wait_for("one is made anew", lambda: _one(first & _names(stage)))
        (event,) = wait_for("an Event", lambda: _events(stage))
        (gone,) = first - {left}
        assert gone in event["message"]
        ready = dt.datetime.fromisoformat(_said(stage, "KVCachePool", "kv", "Ready")["lastTransitionTime"])
        waited = dt.datetime.fromisoformat(event["firstTimestamp"]) - ready
        assert waited >= dt.timedelta(seconds=READY_SECONDS)

        # The new pod has no engine yet: the other one, which serves, is left alone.
        stage.double("kill", name=gone)
        wait_for("it waits", lambda: "made anew when every replica serves" in attached()["message"])
        assert left in attached()["message"]
        assert left in _names(stage)
        assert _events(stage) == [event]

        # Its ReplicaSet may not have made the new pod yet.
        wait_for("a pod in its place", lambda: _two(_kubelet(stage, uid)))
        wait_for("the other is made anew", lambda: not first & _names(stage))
        # Both may be of the same second.
        events = wait_for("its Event", lambda: [each for each in _events(stage) if each != event])
        assert [left in each["message"] for each in events] == [True]
        stage.double("kill", name=left)
        last = wait_for("two again", lambda: _two(_kubelet(stage, uid)))
        wait_for("all are attached", lambda: attached()["status"] == "True" and complete())
        assert _names(stage) == last
        assert len(_events(stage)) == 2


def _names(stage: Any) -> set[str]:
    return {pod["metadata"]["name"] for pod in stage.pods("chat")}


def _one(names: set[str]) -> set[str] | None:
    return names if len(names) == 1 else None


def _two(names: set[str]) -> set[str] | None:
    return names if len(names) == 2 else None
