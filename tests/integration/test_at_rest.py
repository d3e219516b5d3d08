"""A fleet and a pool that stand as they should cost the API server nothing, and are repaired all the same."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

API = "moontide.dev/v1alpha1"
QUIET_SECONDS = 6
"""Longer than a reconcile waits by itself while a master starts."""


@pytest.fixture(name="serving")
def _serving(operators_of: Callable[[str], Any], namespace: str, released_lease: None) -> Iterator[Any]:
    # Resyncs of an hour: what happens here is not their doing.
    operator = operators_of(namespace)("at-rest", {"MOONTIDE_RESYNC_SECONDS": "3600"})
    operator.start()
    yield operator
    assert operator.stop() == 0, operator.log()[-4000:]


def _asked(operator: Any) -> float:
    """Requests so far, but those of the watches and the Lease."""
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(float(each) for each in re.findall(r"^moontide_api_requests_total\{.*\} (\S+)$", text, re.MULTILINE))


def test_at_rest_nothing_is_asked_for_and_drift_is_repaired(
    kubectl: Any, serving: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    pool = {"apiVersion": API, "kind": "KVCachePool", "metadata": {"name": "kv", "namespace": namespace}, "spec": {}}
    model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
    spec = {"model": model, "replicas": 0, "kvCache": {"poolRef": {"name": "kv"}}}
    fleet = {"apiVersion": API, "kind": "InferenceDeployment", "metadata": {"name": "chat", "namespace": namespace}}
    kubectl.apply(pool, {**fleet, "spec": spec})
    wait_for("a status", lambda: condition(kubectl.get("ifd", "chat", namespace), "Progressing")[0], 90)
    wait_for("the last child", lambda: kubectl.get("poddisruptionbudget", "chat", namespace))

    def quiet() -> bool:
        before = _asked(serving)
        time.sleep(QUIET_SECONDS)
        return before == _asked(serving)

    # The pool's master does not answer, so it is looked at every second.
    wait_for("no request", quiet, 90)
    before = _asked(serving)
    assert before > 0
    changed = '{"data": {"mooncake.json": "{}"}}'
    kubectl("patch", "configmap", "chat-mooncake", "-n", namespace, "--type=merge", "-p", changed)
    kubectl("delete", "service", "chat", "-n", namespace)
    kubectl("scale", "deployment", "chat", "-n", namespace, "--replicas=3")
    wait_for("the Service", lambda: kubectl.get("service", "chat", namespace))
    wait_for(
        "the ConfigMap", lambda: kubectl.get("configmap", "chat-mooncake", namespace)["data"]["mooncake.json"] != "{}"
    )
    wait_for("the Deployment", lambda: kubectl.get("deployment", "chat", namespace)["spec"]["replicas"] == 0)
    assert _asked(serving) > before
    wait_for("no request again", quiet, 90)
