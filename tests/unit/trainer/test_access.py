"""Which API server is used, and who we are to it."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moontide.trainer import AccessError, ApiUnavailable, policy_update
from moontide.trainer.access import find
from moontide.trainer.steps import Target
from tests.unit.trainer.cluster import kubeconfig

Config = dict[str, Any]


def write(path: Path, config: Config) -> Path:
    path.write_text(json.dumps(config))
    return path


def service_account(folder: Path) -> Path:
    folder.mkdir()
    (folder / "token").write_text("one\n")
    (folder / "namespace").write_text("rl\n")
    return folder


def test_a_pods_service_account_is_read_for_each_request(tmp_path: Path) -> None:
    folder = service_account(tmp_path / "sa")
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "HOME": str(tmp_path)}
    access = find(environ=environ, service_account=folder)
    assert (access.server, access.namespace) == ("https://10.96.0.1:443", "rl")
    assert access.headers() == {"authorization": "Bearer one"}
    (folder / "token").write_text("two")
    assert access.headers() == {"authorization": "Bearer two"}
    (folder / "token").unlink()
    with pytest.raises(AccessError, match="token cannot be read"):
        access.headers()


def test_addresses_of_ip_version_6_are_bracketed(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "HOME": str(tmp_path)}
    access = find(environ=environ, service_account=service_account(tmp_path / "sa"))
    assert access.server == "https://[fd00::1]:443"


def test_the_order(tmp_path: Path) -> None:
    folder = service_account(tmp_path / "sa")
    (tmp_path / ".kube").mkdir()
    write(tmp_path / ".kube" / "config", kubeconfig("https://home"))
    named, given = write(tmp_path / "a", kubeconfig("https://env")), write(tmp_path / "b", kubeconfig("https://given"))
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOME": str(tmp_path)}
    home = {"HOME": str(tmp_path)}
    assert find(given, environ={**pod, "KUBECONFIG": str(named)}, service_account=folder).server == "https://given"
    assert find(environ={**pod, "KUBECONFIG": str(named)}, service_account=folder).server == "https://env"
    assert find(environ=pod, service_account=folder).server == "https://10.96.0.1:443"
    assert find(None, "here", environ=pod, service_account=folder).server == "https://home"
    assert find(environ=home, service_account=folder).server == "https://home"


def test_no_cluster_at_all(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="set KUBECONFIG"):
        find(environ={"HOME": str(tmp_path)}, service_account=tmp_path)


def test_a_kubeconfig_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(
        "current-context: here\ncontexts:\n- {name: here, context: {cluster: c, user: u}}\n"
        "clusters:\n- {name: c, cluster: {server: https://yaml}}\nusers: [{name: u, user: {token: t}}]\n"
    )
    access = find(path)
    assert (access.server, access.namespace, access.headers()["authorization"]) == (
        "https://yaml",
        "default",
        "Bearer t",
    )
    assert "Bearer" not in repr(access)


def test_yaml_without_a_parser_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config"
    path.write_text("current-context: here\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(AccessError, match="pip install pyyaml"):
        find(path)


def test_several_kubeconfigs_are_one(tmp_path: Path) -> None:
    first, second = kubeconfig("https://first"), kubeconfig("https://second")
    first["contexts"][0]["name"] = first["current-context"] = "one"
    first["users"] = []
    second["current-context"] = "here"
    paths = [write(tmp_path / "1", first), tmp_path / "missing", write(tmp_path / "2", second)]
    environ = {"KUBECONFIG": ":".join(str(path) for path in paths)}
    access = find(environ=environ)
    assert (access.server, access.headers()) == ("https://first", {"authorization": "Bearer secret"})
    assert find(None, "here", environ=environ).namespace == "rl"


def test_files_are_relative_to_the_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "tok").write_text("from-file")
    access = find(write(tmp_path / "config", kubeconfig("https://x", tokenFile="tok", token="inline")))
    assert access.headers() == {"authorization": "Bearer from-file"}


def certificate(folder: Path) -> tuple[bytes, bytes]:
    """A certificate of its own authority, and its key."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(folder / "key"), "-out", str(folder / "crt"), "-subj", "/CN=test", "-days", "2"]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "crt").read_bytes(), (folder / "key").read_bytes()


def test_certificates_inline_and_in_files(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path)
    inline = {"client-certificate-data": base64.b64encode(crt).decode(), "client-key": "key"}
    config = kubeconfig("https://x", **inline)
    config["clusters"][0]["cluster"]["certificate-authority"] = "crt"
    config["clusters"][0]["cluster"] |= {"tls-server-name": "kubernetes", "proxy-url": "http://proxy:3128"}
    access = find(write(tmp_path / "config", config))
    assert access.tls is not None
    assert [each["subject"] for each in access.tls.get_ca_certs()] == [((("commonName", "test"),),)]
    assert (access.tls_name, access.proxy) == ("kubernetes", "http://proxy:3128")
    assert key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"users": [{"name": "u", "user": {"exec": {"command": "aws"}}}]},
            r"`exec` \(aws\) are not supported; use a tok",
        ),
        ({"users": [{"name": "u", "user": {"username": "me"}}]}, "`username` are not supported"),
        ({"current-context": ""}, "has no current context; name one of: here"),
        ({"current-context": "there"}, "has no context 'there'; name one of: here"),
        ({"clusters": []}, "has no server"),
        ({"users": [{"name": "u", "user": {"client-certificate": "missing"}}]}, "client-certificate cannot be read"),
        ({"users": [{"name": "u", "user": {"client-certificate-data": "!"}}]}, "client-certificate cannot be read"),
        (
            {"users": [{"name": "u", "user": {"client-certificate-data": "eA==", "client-key-data": "eA=="}}]},
            "is it PEM",
        ),
    ],
)
def test_what_cannot_be_used_says_why(tmp_path: Path, change: Config, says: str) -> None:
    with pytest.raises(AccessError, match=says):
        find(write(tmp_path / "config", {**kubeconfig("https://x"), **change}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"- a\n", "no mapping"),
        (b"just text", "no mapping"),
        (b"{a: [}", "while parsing a flow"),
        (b"\xff\xfe", "not text"),
        (b"contexts: 5", "contexts is no list of {name, context}"),
        (b"clusters: [5]", "clusters is no list of {name, cluster}"),
        (b"users: [{name: a, user: 5}]", "users is no list of {name, user}"),
    ],
)
def test_what_is_no_kubeconfig_says_what_to_write(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "config"
    path.write_bytes(text)
    said = f"{path} is no kubeconfig ({why}"
    with pytest.raises(AccessError, match=f"^{re.escape(said)}.*; write --kubeconfig FILE with one, as "):
        find(path)


def test_a_server_that_nobody_listens_at(tmp_path: Path) -> None:
    path = write(tmp_path / "config", kubeconfig("http://127.0.0.1:1"))
    with pytest.raises(ApiUnavailable, match=r"127\.0\.0\.1:1: ConnectError"):
        with policy_update("policy", 2, kubeconfig=path, prepare_timeout=0.05):
            raise AssertionError


def test_a_server_that_is_no_url(tmp_path: Path) -> None:
    path = write(tmp_path / "config", kubeconfig("ftp://x"))
    with pytest.raises(AccessError, match="write https://host:port"):
        with policy_update("policy", 2, kubeconfig=path, prepare_timeout=0.05):
            raise AssertionError


def test_the_words_for_a_target() -> None:
    target = Target("rl", "policy")
    assert str(target) == "PolicyVersion rl/policy"
    assert target.command("wait", " --for prepared") == "kubectl moontide wait policy -n rl --for prepared"


def test_a_hook_comes_before_what_the_environment_says_else(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOME": str(tmp_path)}
    folder = service_account(tmp_path / "sa")
    named = {**pod, "MOONTIDE_HOOK": "https://hook:8082/", "MOONTIDE_HOOK_TOKEN_FILE": str(tmp_path / "token")}
    access = find(environ=named, service_account=folder)
    assert (access.server, access.namespace, access.hook) == ("https://hook:8082", "rl", True)
    assert access.headers() == {"authorization": "Bearer one"}
    (tmp_path / "token").write_text("two")
    assert access.headers() == {"authorization": "Bearer two"}
    target = access.target("policy")
    assert target.path == "/hook/v1/namespaces/rl/policies/policy"
    assert target.patience > 0
    given = find(hook="http://other", token="three", environ=named, service_account=folder)
    assert (given.server, given.tls, given.headers()) == ("http://other", None, {"authorization": "Bearer three"})
    assert "three" not in repr(given)
    path = write(tmp_path / "config", kubeconfig("https://given"))
    assert find(path, environ=named, service_account=folder).server == "https://given"
    assert not find(path, environ=named, service_account=folder).hook


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hook": "hook:8082", "token": "t"}, "write https://host:port"),
        ({"hook": "http://hook"}, r"kubectl create token SERVICEACCOUNT -n NAMESPACE --audience moontide"),
        ({"hook": "http://hook", "token": "t", "kubeconfig": "x"}, "give one of them"),
        ({"hook": "http://hook", "token": "t", "context": "x"}, "give one of them"),
        ({"token": "t"}, "give the hook's URL, too"),
        ({"token_file": "t"}, "give the hook's URL, too"),
        ({"hook": "https://hook", "token": "t", "ca_file": "/nowhere"}, "authority cannot be read"),
    ],
)
def test_a_hook_that_cannot_be_used_says_why(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(AccessError, match=says):
        find(**options, environ={"HOME": str(tmp_path)}, service_account=tmp_path)


def test_a_hook_is_of_no_namespace(tmp_path: Path) -> None:
    access = find(hook="http://hook", token="t", environ={}, service_account=tmp_path)
    with pytest.raises(AccessError, match="with -n"):
        access.target("policy")
    assert access.target("policy", "rl").namespace == "rl"
