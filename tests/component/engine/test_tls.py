"""A real engine whose admin port serves TLS: nothing else gets in, and a renewed certificate costs no restart."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import enginekit as kit
import httpx
import pytest

from tests.component.certificates import Authority

NAME = "chat.rl.svc"
URL = "https://127.0.0.1:18118/moontide/v1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, models: dict[str, Path]
) -> Iterator[tuple[Path, kit.Process]]:
    """The folder of an engine's certificate, and the engine. It has no store."""
    folder = tmp_path_factory.mktemp("secured")
    kit.store_config(folder)
    authority.issue(folder, NAME)
    command = kit.engine_command(models["a"], 8)
    at = command.index("--kv-transfer-config")
    env = {**kit.engine_environment(folder, 8), "MOONTIDE_KEY_NAMESPACE": "", "MOONTIDE_ADMIN_TLS": str(folder)}
    process = kit.spawn([*command[:at], *command[at + 2 :]], env, folder / "engine8.log")
    try:
        kit.wait_for("engine 8", lambda: kit.get("http://127.0.0.1:18108/health"), kit.START_SECONDS, process)
        yield folder, process
    finally:
        process.end()


def client(authority: Authority) -> httpx.Client:
    headers = {"authorization": f"Bearer {kit.TOKEN}"}
    context = ssl.create_default_context(cafile=authority.certificate)
    return httpx.Client(verify=context, headers=headers, trust_env=False, timeout=kit.PATIENCE)


def ask(http: httpx.Client, method: str, path: str, body: object = None) -> httpx.Response:
    return http.request(method, f"{URL}/{path}", json=body, extensions={"sni_hostname": NAME})


def serial(authority: Authority) -> object:
    """Of the certificate that a new connection gets."""
    with client(authority) as http, http.stream("GET", f"{URL}/status", extensions={"sni_hostname": NAME}) as answer:
        assert answer.status_code == 200
        found = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        return found["serialNumber"]


def test_it_is_admitted_and_serves_and_its_port_takes_nothing_in_the_clear(
    secured: tuple[Path, kit.Process], authority: Authority
) -> None:
    with client(authority) as http:
        boot = ask(http, "GET", "status").json()["bootId"]
        position = {"term": 1, "epoch": 1, "bootId": boot}
        for command, more in (("admit", {"version": "v1", "salt": "policy/1"}), ("resume", {})):
            answer = ask(http, "POST", command, {**position, **more}).json()
            assert answer["success"], answer
        assert ask(http, "GET", "status").json()["state"] == "open"
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    served = httpx.post("http://127.0.0.1:18108/v1/completions", json=body, timeout=60, trust_env=False)
    assert (served.status_code, served.headers["x-moontide-epoch"]) == (200, "1")
    with pytest.raises(httpx.TransportError):
        httpx.get(URL.replace("https", "http") + "/status", timeout=kit.PATIENCE, trust_env=False)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"), client(authority) as http:
        http.get(f"{URL}/status")


def test_it_takes_a_renewed_certificate_and_is_the_same_process(
    secured: tuple[Path, kit.Process], authority: Authority
) -> None:
    folder, process = secured
    with client(authority) as kept:
        boot = ask(kept, "GET", "status").json()["bootId"]
        first = serial(authority)
        (folder / "tls.key").write_text("no key")
        kit.wait_for("the refusal", lambda: "certificate-refused" in process.log.read_text(), 60, process)
        assert serial(authority) == first
        authority.issue(folder, NAME)
        kit.wait_for("the new certificate", lambda: serial(authority) != first, 60, process)
        # Connections that were there go on.
        assert ask(kept, "GET", "status").json()["bootId"] == boot
        with client(authority) as http:
            assert ask(http, "GET", "status").json()["bootId"] == boot
