"""Who is woken by what."""

from __future__ import annotations

from typing import Any

import pytest

from moontide import labels
from moontide.handlers.loops import Key
from moontide.handlers.routes import Routes

FLEET = Key("InferenceDeployment", "ns", "chat")
POLICY = Key("PolicyVersion", "ns", "policy")
POOL = Key("KVCachePool", "ns", "kv")


class Ledger:
    """Stands where Loops would: writes down what it is told."""

    def __init__(self) -> None:
        self.started: list[Key] = []
        self.woken: list[Key] = []
        self.retired: list[Key] = []

    def start(self, key: Key) -> None:
        self.started.append(key)

    def wake(self, key: Key) -> None:
        self.woken.append(key)

    def retire(self, key: Key) -> None:
        self.retired.append(key)

    def clear(self) -> None:
        self.started, self.woken, self.retired = [], [], []


def _body(spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, generation: int = 1) -> Any:
    return {"metadata": {"uid": "u", "generation": generation}, "spec": spec or {}, "status": status or {}}


FLEET_SPEC = {"policyRef": {"name": "policy"}, "kvCache": {"poolRef": {"name": "kv"}}}


@pytest.fixture(name="ledger")
def _ledger() -> Ledger:
    return Ledger()


@pytest.fixture(name="routes")
def _routes(ledger: Ledger) -> Routes:
    routes = Routes(ledger)  # type: ignore[arg-type]
    routes.resource("InferenceDeployment", "ns", "chat", _body(FLEET_SPEC), deleted=False)
    assert ledger.started == [FLEET]
    assert set(ledger.woken) == {POLICY, POOL}
    ledger.clear()
    return routes


def test_own_status_write_wakes_nobody(routes: Routes, ledger: Ledger) -> None:
    routes.resource("InferenceDeployment", "ns", "chat", _body(FLEET_SPEC, {"ready": "1/1"}), deleted=False)
    assert ledger.started + ledger.woken == []


def test_new_spec_wakes_the_fleet_and_whom_it_named_before_and_names_now(routes: Routes, ledger: Ledger) -> None:
    spec = {"policyRef": {"name": "other"}}
    routes.resource("InferenceDeployment", "ns", "chat", _body(spec, generation=2), deleted=False)
    assert ledger.started == [FLEET]
    assert set(ledger.woken) == {POLICY, POOL, Key("PolicyVersion", "ns", "other")}


def test_pod_wakes_its_fleet_and_the_policy_but_not_the_pool(routes: Routes, ledger: Ledger) -> None:
    routes.child("ns", labels.engine_labels("chat"))
    assert set(ledger.woken) == {FLEET, POLICY}
    assert ledger.started == []


def test_pod_of_another_namespace_wakes_no_policy_here(routes: Routes, ledger: Ledger) -> None:
    routes.child("elsewhere", labels.engine_labels("chat"))
    assert set(ledger.woken) == {Key("InferenceDeployment", "elsewhere", "chat")}


def test_master_pod_wakes_its_pool(routes: Routes, ledger: Ledger) -> None:
    routes.child("ns", labels.store_labels("kv"))
    assert ledger.woken == [POOL]


def test_policy_wakes_its_followers_when_something_they_read_changes(routes: Routes, ledger: Ledger) -> None:
    routes.resource("PolicyVersion", "ns", "policy", _body(), deleted=False)
    assert ledger.started == [POLICY]
    assert ledger.woken == [FLEET]
    ledger.clear()
    routes.resource("PolicyVersion", "ns", "policy", _body(status={"epoch": 1}), deleted=False)
    assert (ledger.started, ledger.woken) == ([], [FLEET])
    ledger.clear()
    routes.resource("PolicyVersion", "ns", "policy", _body(status={"epoch": 1, "failures": []}), deleted=False)
    assert (ledger.started, ledger.woken) == ([], [])


def test_pool_wakes_its_fleets_when_ready_flips(routes: Routes, ledger: Ledger) -> None:
    routes.resource("KVCachePool", "ns", "kv", _body(), deleted=False)
    ledger.clear()
    routes.resource("KVCachePool", "ns", "kv", _body(status={"keys": 5}), deleted=False)
    assert (ledger.started, ledger.woken) == ([], [])
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    routes.resource("KVCachePool", "ns", "kv", _body(status=ready), deleted=False)
    assert (ledger.started, ledger.woken) == ([], [FLEET])


def test_deletion_retires_and_wakes_whom_it_concerns(routes: Routes, ledger: Ledger) -> None:
    routes.resource("PolicyVersion", "ns", "policy", _body(), deleted=True)
    assert (ledger.retired, ledger.woken) == ([POLICY], [FLEET])
    ledger.clear()
    routes.resource("InferenceDeployment", "ns", "chat", _body(FLEET_SPEC), deleted=True)
    assert ledger.retired == [FLEET]
    assert set(ledger.woken) == {POLICY, POOL}
    ledger.clear()
    routes.child("ns", labels.engine_labels("chat"))
    assert ledger.woken == [FLEET]
    ledger.clear()
    routes.resource("InferenceDeployment", "ns", "chat", _body(FLEET_SPEC), deleted=False)
    assert ledger.started == [FLEET]


def test_a_policy_and_fleets_of_other_namespaces_wake_each_other(routes: Routes, ledger: Ledger) -> None:
    far = Key("InferenceDeployment", "far", "chat")
    spec = {"policyRef": {"name": "policy", "namespace": "ns"}, "kvCache": {"poolRef": {"name": "kv"}}}
    routes.resource("InferenceDeployment", "far", "chat", _body(spec), deleted=False)
    assert set(ledger.woken) == {POLICY, Key("KVCachePool", "far", "kv")}
    ledger.clear()
    routes.resource("PolicyVersion", "ns", "policy", _body({"allowedNamespaces": ["far"]}), deleted=False)
    assert set(ledger.woken) == {FLEET, far}
    ledger.clear()
    routes.resource("PolicyVersion", "ns", "policy", _body({}, generation=2), deleted=False)
    assert set(ledger.woken) == {FLEET, far}
    ledger.clear()
    routes.child("far", labels.engine_labels("chat"))
    assert set(ledger.woken) == {far, POLICY}
    ledger.clear()
    routes.resource("PolicyVersion", "far", "policy", _body(), deleted=False)
    assert ledger.woken == []


def test_a_wish_for_another_token_wakes_the_fleet_at_once(routes: Routes, ledger: Ledger) -> None:
    body = _body(FLEET_SPEC)
    body["metadata"]["annotations"] = {"unrelated": "x"}
    routes.resource("InferenceDeployment", "ns", "chat", body, deleted=False)
    assert ledger.started == []
    body["metadata"]["annotations"] = {labels.ROTATE_TOKEN: "november"}
    routes.resource("InferenceDeployment", "ns", "chat", body, deleted=False)
    assert ledger.started == [FLEET]
