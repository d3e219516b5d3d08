from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hack.cluster import network, render
from hack.cluster.pki import certificates
from hack.cluster.settings import Ports, Settings

BIN = Path("/programs")
FULL = Settings()
PLANE = Settings(name="it", control_plane_only=True, ports=Ports(1, 2, 3, 4, 5))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONTIDE_CACHE", "/cache")


def test_containerd_is_configured_for_a_machine_without_the_right_to_lower_oom_scores() -> None:
    cri = tomllib.loads(render.containerd_config(FULL, "pause:1"))["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"] is True
    assert cri["sandbox_image"] == "pause:1"
    assert cri["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is False


def test_images_live_outside_what_down_removes() -> None:
    config = tomllib.loads(render.containerd_config(FULL, "pause:1"))
    assert config["root"] == "/cache/containerd"
    assert not config["root"].startswith(str(FULL.run_dir))
    assert config["state"].startswith(f"{FULL.state_dir}/")


def test_kubelet_neither_evicts_nor_collects_for_a_full_disk() -> None:
    config = render.kubelet_config(FULL)
    assert config["evictionHard"]["nodefs.available"] == "1%"
    assert config["imageGCHighThresholdPercent"] == 100
    assert config["failCgroupV1"] is False
    assert config["authentication"]["anonymous"] == {"enabled": False}


def test_kube_proxy_leaves_the_limits_of_conntrack_alone() -> None:
    assert render.proxy_config(FULL)["conntrack"]["maxPerCore"] == 0
    assert render.proxy_config(FULL)["mode"] == "nftables"


@pytest.mark.parametrize("settings", [FULL, PLANE], ids=["full", "control plane"])
def test_nothing_listens_on_every_address(settings: Settings) -> None:
    commands = [
        render.etcd(settings, BIN),
        render.apiserver(settings, BIN),
        render.controller_manager(settings, BIN),
        render.scheduler(settings, BIN),
    ]
    for command in commands:
        assert not any("0.0.0.0" in argument for argument in command)
    assert f"--bind-address={settings.address}" in render.apiserver(settings, BIN)


def test_a_control_plane_uses_its_own_ports_and_publishes_no_endpoint() -> None:
    command = render.apiserver(PLANE, BIN)
    assert "--secure-port=3" in command
    assert "--etcd-servers=http://127.0.0.1:1" in command
    assert "--endpoint-reconciler-type=none" in command
    assert not any("kubelet" in argument for argument in command)


def test_requests_are_logged_only_where_a_policy_asks_for_it() -> None:
    assert not any(argument.startswith("--audit") for argument in render.apiserver(PLANE, BIN))
    command = render.apiserver(replace(PLANE, audit_policy="/policy"), BIN)
    assert "--audit-policy-file=/policy" in command
    assert f"--audit-log-path={PLANE.audit_log}" in command


def test_admission_keeps_the_default_plugins() -> None:
    for settings in (FULL, PLANE):
        assert not any(argument.startswith("--disable-admission") for argument in render.apiserver(settings, BIN))


def test_the_guard_names_every_network_of_the_cluster() -> None:
    rules = render.guard_rules()
    for network_name in ("172.30.99.1", "10.244.0.0/16", "10.96.0.0/16"):
        assert network_name in rules
    assert rules.index("delete table ip moontide-local") < rules.index("chain incoming"), "it must replace itself"


def test_dns_answers_for_the_cluster_and_asks_nobody_else() -> None:
    assert "kubernetes cluster.local" in render.COREFILE
    assert "forward" not in render.COREFILE
    objects = {item["kind"]: item for item in render.dns_objects("coredns:1")}
    assert objects["Service"]["spec"]["clusterIP"] == render.kubelet_config(FULL)["clusterDNS"][0]
    assert objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] == "coredns:1"


def test_certificates_cover_what_each_side_asks_for() -> None:
    by_name = {certificate.name: certificate for certificate in certificates(FULL)}
    assert "IP:10.96.0.1" in by_name["apiserver"].alternative_names
    assert "IP:172.30.99.1" in by_name["apiserver"].alternative_names
    assert by_name["kubelet"].subject == "/O=system:nodes/CN=system:node:node1"
    assert "kubelet" not in {certificate.name for certificate in certificates(PLANE)}


def test_a_kubeconfig_has_one_context() -> None:
    content = json.loads(render.as_json(render.kubeconfig("https://h:1", "c", "u", "QQ==", "Qg==", "Qw==")))
    assert [context["name"] for context in content["contexts"]] == ["c"] == [content["current-context"]]
    assert content["clusters"][0]["cluster"]["server"] == "https://h:1"


HOOK = "type filter hook forward priority filter; policy"


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("table ip nat {\n}\n", False),
        (f"table ip filter {{\n\tchain FORWARD {{\n\t\t{HOOK} accept;\n\t}}\n}}\n", False),
        (f"table ip filter {{\n\tchain FORWARD {{\n\t\t{HOOK} drop;\n\t}}\n}}\n", True),
        ("table ip filter {\n\tchain X {\n\t\tip saddr 1.2.3.4 drop\n\t}\n}\n", True),
    ],
    ids=["empty", "only base chains", "a policy that drops", "a rule"],
)
def test_only_tables_without_any_effect_count_as_empty(listing: str, expected: bool) -> None:
    assert network._has_rules(listing) is expected
