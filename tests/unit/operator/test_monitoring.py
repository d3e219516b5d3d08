"""Alerts, dashboard and runbook speak of metrics that exist, and of each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hack import dashboard
from moontide.metrics import GAUGES, Metrics
from moontide_engine.exposition import exposition
from moontide_engine.gate import Gate
from moontide_engine.middleware import GateMiddleware

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts/moontide"
OF_VLLM = ("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total")
# What the Prometheus operator puts on each sample of a pod.
OF_TARGETS = {"namespace", "pod", "moontide_dev_deployment"}
ALERTS = yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"][0]["rules"]
QUERIES = [query for panel in dashboard.PANELS for query, _ in panel.queries]


async def _nothing(*_: Any) -> None:
    raise AssertionError("the app behind the gate is not called")


def _known() -> dict[str, set[str]]:
    """Every metric that the operator and an engine can show, by the names that a query uses, with its labels."""
    known = {name: set(labels) for name, (_, labels) in GAUGES.items()} | {name: set() for name in OF_VLLM}
    for collector in Metrics().registry._collector_to_names:
        if hasattr(collector, "_labelnames"):
            name, kind, labels = collector._name, collector._type, set(collector._labelnames)  # type: ignore[attr-defined]
            names = {"counter": [f"{name}_total"], "histogram": [f"{name}_{s}" for s in ("bucket", "sum", "count")]}
            known |= dict.fromkeys(names.get(kind, [name]), labels | {"le"})
    gate = Gate("boot", lambda: 0.0)
    gate.admit(1, "v")
    page = exposition(gate, GateMiddleware(_nothing, gate, 1)).decode()
    for family in text_string_to_metric_families(page):
        known |= {sample.name: set(sample.labels) for sample in family.samples}
    return known


KNOWN = _known()


def trouble(query: str) -> list[str]:
    """What a query names that does not exist."""
    found = []
    for name, selector in re.findall(r"((?:moontide|vllm)[\w:]*)(?:\{([^}]*)\})?", query):
        if name in OF_TARGETS:
            continue
        if name not in KNOWN:
            found.append(name)
            continue
        labels = set(re.findall(r"(\w+) *(?:=~|!~|!=|=)", selector))
        found += [f"{name}{{{label}}}" for label in sorted(labels - KNOWN[name] - OF_TARGETS)]
    grouped = {label for group in re.findall(r"(?:by|on|ignoring) *\(([^)]*)\)", query) for label in group.split(",")}
    known = set().union(*KNOWN.values()) | OF_TARGETS
    return found + sorted({label.strip() for label in grouped} - known - {""})


def test_the_check_itself() -> None:
    assert trouble("sum by (kind, nonsense) (moontide_leader)") == ["nonsense"]
    assert trouble('moontide_steps{step="x"} or moontide_steps_total{stage="x"}') == [
        "moontide_steps",
        "moontide_steps_total{stage}",
    ]
    assert trouble('rate(moontide_pause_seconds_bucket{le="1"}[5m])') == []


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_of_what_there_is(rule: dict[str, Any]) -> None:
    assert trouble(rule["expr"]) == []
    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    kept = set(re.findall(r"by *\(([^)]*)\)", rule["expr"]))
    for label in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
        names = re.findall(r"moontide\w+", rule["expr"])
        assert any(label in group for group in kept) if kept else any(label in KNOWN[name] for name in names), label


def test_each_alert_has_its_section_in_the_runbook_and_each_section_its_alert() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in ALERTS]


@pytest.mark.parametrize("query", QUERIES)
def test_a_panel_is_of_what_there_is(query: str) -> None:
    assert trouble(query) == []


def test_the_chart_has_the_dashboard_as_it_is_generated() -> None:
    assert (CHART / "files/dashboard.json").read_text() == dashboard.rendered()
    panels = json.loads(dashboard.rendered())["panels"]
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({(place["x"], place["y"]) for place in places}) == len(panels)
