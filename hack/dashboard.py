"""The Grafana dashboard of the chart: `python3 -m hack.dashboard` writes charts/moontide/files/dashboard.json."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from hack.cluster.settings import repository_root

PATH = "charts/moontide/files/dashboard.json"
_WIDTH = 24


@dataclass(frozen=True)
class Panel:
    """One panel. ``queries``: PromQL and legend; ``kind``: stat or timeseries."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    text: str = ""


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))",
            f"{legend}p{q * 100:g}",
        )
        for q in (0.5, 0.95)
    )


_FLEET = 'namespace=~"$namespace"'
_BY_FLEET = "sum by (moontide_dev_deployment) "
_OF_FLEET = "{{moontide_dev_deployment}}"


def _rate(metric: str) -> str:
    """A counter of engines, by fleet."""
    return f"{_BY_FLEET}(rate({metric}{{{_FLEET}}}[$__rate_interval]))"


PANELS = (
    Panel("Leaders", (("sum(moontide_leader)", ""),), kind="stat", width=4, height=4),
    Panel("Policies current", ((f'sum(moontide_condition{{kind="PolicyVersion", type="Current", {_FLEET}}})', ""),),
          kind="stat", width=4, height=4),
    Panel("Policies degraded", ((f'sum(moontide_condition{{kind="PolicyVersion", type="Degraded", {_FLEET}}})', ""),),
          kind="stat", width=4, height=4),
    Panel("Replicas current", ((f'sum(moontide_policy_replicas{{state="current", {_FLEET}}})', ""),),
          kind="stat", width=4, height=4),
    Panel("Replicas closed", ((f'sum(moontide_policy_replicas{{state="closed", {_FLEET}}})', ""),),
          kind="stat", width=4, height=4),
    Panel("Pools serving", ((f'sum(moontide_condition{{kind="KVCachePool", type="Ready", {_FLEET}}})', ""),),
          kind="stat", width=4, height=4),
    Panel("Epoch of each policy", ((f"moontide_policy_epoch{{{_FLEET}}}", "{{namespace}}/{{policy}}"),),
          text="A step is a change of policy."),
    Panel("Change under way, since",
          ((f"moontide_policy_change_age_seconds{{{_FLEET}}}", "{{namespace}}/{{policy}}"),), "s"),
    Panel("Pause of a change", _quantiles("moontide_pause_seconds"), "s",
          text="The longest pause of any replica, for each change."),
    Panel("From the beginning of a change to each stage, p95", _quantiles("moontide_change_seconds", "stage")[1:], "s"),
    Panel("Calls to engines and wipers, p95", _quantiles("moontide_step_seconds", "step")[1:], "s"),
    Panel("Calls to engines and wipers that failed",
          (('sum by (step) (rate(moontide_steps_total{outcome="failed"}[$__rate_interval]))', "{{step}}"),), "cps"),
    Panel("Replicas by state", ((f"sum by (state) (moontide_policy_replicas{{{_FLEET}}})", "{{state}}"),)),
    Panel("Closed replicas by reason",
          ((f"sum by (reason) (moontide_deployment_closed_replicas{{{_FLEET}}})", "{{reason}}"),)),
    Panel("Requests held by gates", ((f"{_BY_FLEET}(moontide_engine_requests_held{{{_FLEET}}})", _OF_FLEET),),
          text="Engines' own metrics: they wait for a resume."),
    Panel("Requests refused by gates", ((_rate("moontide_engine_requests_refused_total"), _OF_FLEET),), "reqps",
          text="Answered 503: closed, or too many waited."),
    Panel("Hits in the external cache, of tokens looked up",
          ((f"{_rate('vllm:external_prefix_cache_hits_total')} / {_rate('vllm:external_prefix_cache_queries_total')}",
            _OF_FLEET),), "percentunit"),
    Panel("Keys of older epochs removed", (("sum by (step) (increase(moontide_keys_removed_total[$__rate_interval]))",
          "{{step}}"),)),
    Panel("Keys in each pool", ((f"moontide_pool_keys{{{_FLEET}}}", "{{namespace}}/{{pool}}"),)),
    Panel("Fill of each pool", ((f'moontide_pool_bytes{{kind="allocated", {_FLEET}}} / ignoring(kind) '
          f'moontide_pool_bytes{{kind="capacity", {_FLEET}}}', "{{namespace}}/{{pool}}"),), "percentunit"),
    Panel("Reconciles", (("sum by (kind, outcome) (rate(moontide_reconcile_total[$__rate_interval]))",
          "{{kind}} {{outcome}}"),), "cps"),
    Panel("Age of the queue and of the longest reconcile", (("max(moontide_queue_age_seconds)", "queue"),
          ("max(moontide_reconcile_age_seconds)", "reconcile")), "s"),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    panels, x, y, row = [], 0, 0, 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > _WIDTH:
            x, y, row = 0, y + row, 0
        targets = [
            {"refId": chr(65 + index), "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ]
        panels.append(
            {
                "id": number,
                "type": panel.kind,
                "title": panel.title,
                "description": panel.text,
                "datasource": {"type": "prometheus", "uid": "$datasource"},
                "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
        x, row = x + panel.width, max(row, panel.height)
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    namespace = {
        "name": "namespace",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": "label_values(moontide_condition, namespace)",
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "moontide",
        "title": "Moontide",
        "tags": ["moontide"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, namespace]},
        "panels": panels,
    }


def rendered() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    """Write the file."""
    (repository_root() / PATH).write_text(rendered())
    print(f"{PATH}: {len(PANELS)} panels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
