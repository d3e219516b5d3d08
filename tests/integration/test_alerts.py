"""The chart's alerts as Prometheus reads them: promtool plays series through them. No API server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.progress import Progress
from hack.setup import prometheus

ROOT = Path(__file__).resolve().parents[2]
POLICY = 'namespace="rl", policy="chat"'
FLEET = 'namespace="rl", deployment="chat"'


def _leader(namespace: str = "moontide-system", release: str = "") -> str:
    return f'moontide_leader{{namespace="{namespace}", pod="{release}moontide-operator-5d7f9c-x2b4q"}}'


OTHERS = {
    _leader("elsewhere"): "1x20",
    _leader(release="b-"): "1x20",
    _leader(release="moontide-operator-"): "1x20",
}
"""Operators of other releases that lead all the time, two of them in the same namespace."""


@pytest.fixture(scope="session", name="promtool")
def _promtool() -> Path:
    prometheus.ensure(Progress(quiet=True))
    return prometheus.program("promtool")


@pytest.fixture(scope="module", name="rules")
def _rules(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The groups of the PrometheusRule that the chart renders."""
    command = [str(tools / "helm"), "template", "moontide", str(ROOT / "charts/moontide")]
    command += ["-n", "moontide-system", "--set", "monitoring.rules.enabled=true", "-s", "templates/monitoring.yaml"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (rule,) = [each for each in yaml.safe_load_all(made) if each and each["kind"] == "PrometheusRule"]
    path = tmp_path_factory.mktemp("rules") / "rules.json"
    path.write_text(json.dumps(rule["spec"]))
    return path


def _check(promtool: Path, *arguments: str) -> str:
    done = subprocess.run([str(promtool), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_every_rule(promtool: Path, rules: Path) -> None:
    count = sum(len(group["rules"]) for group in json.loads(rules.read_text())["groups"])
    assert count > 0
    assert f"SUCCESS: {count} rules found" in _check(promtool, "check", "rules", str(rules))


def _condition(kind: str, type: str) -> str:
    return f'moontide_condition{{kind="{kind}", namespace="rl", name="chat", type="{type}"}}'


# Series with a sample a minute (`AxB`: A and B times more), the alert, and the minutes at which it fires, and does not.
CASES: list[tuple[str, dict[str, str], str, list[int], list[int]]] = [
    ("a standby alone", {_leader(): "1x5 0x10"}, "MoontideOperatorDown", [9], [4, 6]),
    ("nobody, and other releases lead", {_leader(): "1x5 0x10", **OTHERS}, "MoontideOperatorDown", [9], [4, 6]),
    ("it leads, and other releases", {_leader(): "1x20", **OTHERS}, "MoontideOperatorDown", [], [9]),
    ("no target", OTHERS, "MoontideOperatorDown", [3], [1]),
    (
        "engines wait",
        {_leader(): "0x10", 'moontide_engine_state{state="paused", pod="a"}': "0x4 1x10"},
        "MoontideEnginesWaitForOperator",
        [7],
        [3],
    ),
    (
        "engines wait, and other releases lead",
        {_leader(): "0x10", 'moontide_engine_state{state="paused", pod="a"}': "0x4 1x10", **OTHERS},
        "MoontideEnginesWaitForOperator",
        [7],
        [3],
    ),
    (
        "nobody serves",
        {
            f'moontide_deployment_replicas{{{FLEET}, state="current"}}': "2x4 0x10",
            f'moontide_deployment_replicas{{{FLEET}, state="wanted"}}': "2x14",
        },
        "MoontideNobodyServes",
        [8],
        [4, 6],
    ),
    (
        "nobody is wanted",
        {
            f'moontide_deployment_replicas{{{FLEET}, state="current"}}': "0x14",
            f'moontide_deployment_replicas{{{FLEET}, state="wanted"}}': "0x14",
        },
        "MoontideNobodyServes",
        [],
        [14],
    ),
    (
        "one of three is closed",
        {
            f'moontide_policy_replicas{{{POLICY}, state="closed"}}': "0x2 1x20",
            f'moontide_policy_replicas{{{POLICY}, state="current"}}': "3x2 2x20",
        },
        "MoontideReplicasClosed",
        [14],
        [2, 10],
    ),
    (
        "a long change",
        {f"moontide_policy_change_age_seconds{{{POLICY}}}": "0+60x20"},
        "MoontideChangeStuck",
        [13],
        [10],
    ),
    (
        "a pool is away",
        {_condition("KVCachePool", "Ready"): "1x4 0x10"},
        "MoontidePoolNotReady",
        [11],
        [4, 8],
    ),
    (
        "memory is lost",
        {'moontide_pool_degraded{namespace="rl", pool="kv", reason="ClientsDropped"}': "1x20"},
        "MoontidePoolDegraded",
        [11],
        [9],
    ),
    (
        "a store is full",
        {'moontide_pool_degraded{namespace="rl", pool="kv", reason="FillAboveWatermark"}': "1x60"},
        "MoontidePoolDegraded",
        [],
        [60],
    ),
    (
        "wipes fail",
        {'moontide_steps_total{step="wipe", outcome="failed"}': "0x4 1+1x20"},
        "MoontideWipesFail",
        [20],
        [4],
    ),
]


@pytest.mark.parametrize(("name", "series", "alert", "fires", "silent"), CASES, ids=[case[0] for case in CASES])
def test_an_alert_fires_when_it_should_and_not_before(
    promtool: Path,
    rules: Path,
    tmp_path: Path,
    name: str,
    series: dict[str, str],
    alert: str,
    fires: list[int],
    silent: list[int],
) -> None:
    queries = [
        {
            "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": "{}", "value": int(minute in fires)}],
        }
        for minute in sorted([*fires, *silent])
    ]
    given = [{"series": each, "values": values} for each, values in series.items()]
    test: dict[str, Any] = {"interval": "1m", "input_series": given, "promql_expr_test": queries}
    path = tmp_path / "test.json"
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    _check(promtool, "test", "rules", str(path))
