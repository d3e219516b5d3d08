"""The hook against a real API server: who may do what, and a trainer that has nothing but a token and a URL.

A leader and a standby share a namespace; each serves the hook. The engine is the real gate over an idle engine.
"""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from moontide.trainer import ApiError, PrepareFailed, policy_update, policy_update_async
from moontide.trainer.cli import DONE, main

API = "moontide.dev/v1alpha1"
ADMIN_PORT = 8001
DOUBLE = Path(__file__).parent / "engine_double.py"
ROOT = Path(__file__).resolve().parents[2]


class Site:
    """A namespace with operators, trainers and a fleet of one that serves version 7."""

    def __init__(self, kubectl: Any, namespace: str, wait_for: Callable[..., Any]) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.wait_for = wait_for
        self.hooks: dict[str, str] = {}
        self.operators: dict[str, Any] = {}

    def token(self, account: str, *options: str) -> str:
        made = ("create", "token", account, "-n", self.namespace, *(options or ("--audience=moontide",)))
        return str(self.kubectl(*made)).strip()

    def ask(self, method: str, more: str = "", *, token: str, by: str = "leader", **body: object) -> httpx.Response:
        url = f"{self.hooks[by]}/hook/v1/namespaces/{self.namespace}/policies/policy{more}"
        headers = {"authorization": f"Bearer {token}"} if token else {}
        sent = {"json": body} if method in ("POST", "PATCH") else {}
        return httpx.request(method, url, headers=headers, timeout=90, trust_env=False, **sent)  # type: ignore[arg-type]

    def options(self, token: str, by: str = "leader") -> dict[str, Any]:
        found = {"hook": self.hooks[by], "token": token, "namespace": self.namespace}
        return {**found, "prepare_timeout": 90, "timeout": 90}

    def policy(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.must_get("polv", "policy", self.namespace)
        return found


def chart(tools: Path, namespace: str) -> str:
    """The chart's rights with the hook, and its Role for trainers."""
    roles = f"namespace={namespace}", "policies[0]=policy", "fleets[0]=chat"
    values = [f"watchNamespace={namespace}", "hook.enabled=true", *(f"trainer.roles[0].{each}" for each in roles)]
    command = [str(tools / "helm"), "template", "moontide", str(ROOT / "charts/moontide"), "-n", namespace]
    command += ["-s", "templates/rbac.yaml", "-s", "templates/trainers.yaml"]
    sets = [part for value in values for part in ("--set", value)]
    done = subprocess.run([*command, *sets], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", name="site")
def _site(kubectl: Any, tools: Path, kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    namespace = f"hook-{random.randrange(16**8):08x}"
    folder = tmp_path_factory.mktemp("hook")
    kubectl.make_namespace(namespace)
    kubectl.apply(kit.released_lease(namespace))
    kubectl("apply", "-f", "-", stdin=chart(tools, namespace))
    site = Site(kubectl, namespace, kit.wait_for)
    for account in ("trainer", "reader", "nobody"):
        kubectl("create", "serviceaccount", account, "-n", namespace)
    role = ("create", "rolebinding", "trainer", "-n", namespace, "--role=moontide-trainer")
    kubectl(*role, f"--serviceaccount={namespace}:trainer")
    kubectl("create", "role", "reader", "-n", namespace, "--verb=get", "--resource=policyversions.moontide.dev")
    kubectl("create", "rolebinding", "reader", "-n", namespace, "--role=reader", f"--serviceaccount={namespace}:reader")
    kubeconfig = kit.kubeconfig(kubectl, folder, namespace)
    engine: subprocess.Popen[bytes] | None = None
    try:
        for name in ("leader", "standby"):
            port = kit.free_port()
            environ = {"MOONTIDE_POD_NAME": name, "MOONTIDE_LEASE_SECONDS": "60", "MOONTIDE_HOOK_PORT": str(port)}
            running = kit.Operator(kubeconfig, folder / f"{name}.log", namespace, namespace, environ)
            site.operators[name], site.hooks[name] = running, f"http://127.0.0.1:{port}"
            running.start()
            if name == "leader":
                kit.wait_for("it leads", lambda: kubectl.get("secret", "moontide-root-key", namespace), 60)
        engine = serve(site, folder)
        yield site
    finally:
        if engine is not None:
            engine.kill()
            engine.wait()
        for running in site.operators.values():
            running.stop()
        kubectl("delete", "namespace", namespace, "--wait=false")
        kubectl("delete", "clusterrole,clusterrolebinding", f"moontide-operator-{namespace}-hook", "--ignore-not-found")


def serve(site: Site, folder: Path) -> subprocess.Popen[bytes]:
    """A fleet of one under a policy; returns when it serves version 7."""
    kubectl, namespace, wait_for = site.kubectl, site.namespace, site.wait_for
    policy = {"apiVersion": API, "kind": "PolicyVersion", "metadata": {"namespace": namespace, "name": "policy"}}
    fleet = {"apiVersion": API, "kind": "InferenceDeployment", "metadata": {"namespace": namespace, "name": "chat"}}
    model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
    kubectl.apply(
        {**policy, "spec": {"version": 7, "weights": "Unchecked"}},
        {**fleet, "spec": {"model": model, "policyRef": {"name": "policy"}}},
    )
    secret = wait_for("its token", lambda: kubectl.get("secret", "chat-admin", namespace))
    (folder / "token").write_bytes(base64.b64decode(secret["data"]["token"]))
    address = f"127.{random.randint(16, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
    with (folder / "engine.log").open("wb") as log:
        command = [sys.executable, str(DOUBLE), address, str(ADMIN_PORT), str(folder / "token")]
        engine = subprocess.Popen(command, stdout=log, stderr=log)
    pod = wait_for("its pod", lambda: kubectl("get", "pods", "-n", namespace, "-o", "name").split())[0]
    # No kubelet runs here, so the test says what it would say.
    running = {"running": {"startedAt": "2026-11-28T08:00:00Z"}}
    container = {"name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0, "state": running}
    status = {"phase": "Running", "podIP": address, "containerStatuses": [{**container, "containerID": "x://1"}]}
    kubectl("patch", pod, "-n", namespace, "--subresource=status", "-p", json.dumps({"status": status}))

    def serves() -> bool:
        # A policy is current before its first replica has come up, too.
        status = site.policy().get("status") or {}
        return status.get("version") == "7" and (status.get("replicas") or {}).get("current") == 1

    wait_for("it serves", serves, 90)
    return engine


def test_who_is_nobody(site: Site) -> None:
    good = site.token("trainer")
    # The last one is for the API server's own audience.
    for token in ("", "garbage", "a.b.c", f"{good[:-8]}AAAAAAAA", site.token("trainer", "--duration=1h")):
        answer = site.ask("GET", token=token)
        assert answer.status_code == 401, answer.text
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert "--audience moontide" in answer.json()["message"]
    assert site.ask("GET", token=good).status_code == 200


def test_a_token_ends_with_its_account(site: Site) -> None:
    site.kubectl("create", "serviceaccount", "brief", "-n", site.namespace)
    token = site.token("brief")
    assert site.ask("GET", token=token).status_code == 403
    site.kubectl("delete", "serviceaccount", "brief", "-n", site.namespace)
    site.wait_for("it is nobody's", lambda: site.ask("GET", token=token).status_code == 401)


def test_who_may_not_is_told_what_to_write(site: Site) -> None:
    before = site.policy()["spec"]
    nobody, reader = site.token("nobody"), site.token("reader")
    refused = site.ask("GET", token=nobody)
    assert (refused.status_code, refused.json()["reason"]) == (403, "Forbidden")
    assert "may not get policyversions.moontide.dev" in refused.json()["message"]
    assert site.ask("GET", token=reader).json()["current"]
    refused = site.ask("POST", "/bump", token=reader, version=8)
    assert refused.status_code == 403
    message = refused.json()["message"]
    assert "may not patch policyversions.moontide.dev" in message
    assert "nor bump it" in message
    assert site.policy()["spec"] == before
    commands = message.partition("write a Role and bind it: ")[2].split(" && ")
    for command in commands:
        site.kubectl(*command.split()[1:])
    allowed = site.wait_for(
        "the Role is there", lambda: (a := site.ask("POST", "/reset", token=reader)).status_code == 200 and a
    )
    assert allowed.json()["spec"]["resetNonce"]
    site.kubectl("delete", "rolebinding", "moontide-trainer-policyversions", "-n", site.namespace)
    site.wait_for("it is withdrawn", lambda: site.ask("POST", "/reset", token=reader).status_code == 403)
    log = site.operators["leader"].log()
    assert f"system:serviceaccount:{site.namespace}:reader" in log
    assert reader not in log


@pytest.mark.parametrize("by", ["leader", "standby"])
def test_a_bump_changes_the_object_whoever_is_asked(site: Site, by: str) -> None:
    version = f"bumped-by-{by}"
    answer = site.ask("POST", "/bump?wait=60", token=site.token("trainer"), by=by, version=version)
    assert (answer.status_code, answer.json()["current"]) == (200, True), answer.text
    policy = site.policy()
    assert policy["spec"]["version"] == policy["status"]["version"] == version
    user = f"system:serviceaccount:{site.namespace}:trainer"
    lines = [json.loads(line) for line in site.operators[by].log().splitlines()]
    (line,) = [each for each in lines if each["message"] == f"changed: spec.version is {version}"]
    wanted = (user, "bump", f"PolicyVersion/{site.namespace}/policy")
    assert (line["user"], line["verb"], line["resource"]) == wanted


@pytest.mark.parametrize("by", ["leader", "standby"])
def test_an_update_through_the_hook(site: Site, by: str) -> None:
    options = site.options(site.token("trainer"), by)
    with policy_update("policy", f"pushed-by-{by}", **options) as update:
        (engine,) = update.engines
        answer = httpx.get(f"{engine.url}/moontide/v1/status", headers=engine.headers, trust_env=False, timeout=60)
        answer.raise_for_status()
        assert answer.json()["state"] == "paused"
    assert update.replicas == "1/1"
    assert site.policy()["status"]["version"] == f"pushed-by-{by}"
    with policy_update("policy", f"pushed-by-{by}", **options) as again:
        assert again.already_current
    for running in site.operators.values():
        assert engine.token not in running.log()
        assert options["token"] not in running.log()


async def test_an_update_that_fails_goes_back_and_the_next_one_works(site: Site) -> None:
    options = site.options(site.token("trainer"))

    async def fail() -> None:
        async with policy_update_async("policy", "second-try", **options):
            raise RuntimeError("the push failed")

    with pytest.raises(RuntimeError, match="the push failed"):
        await fail()
    assert "preparing" not in site.policy()["spec"]
    async with policy_update_async("policy", "second-try", **options) as update:
        assert len(update.engines) == 1
    assert site.policy()["status"]["version"] == "second-try"


def test_two_trainers(site: Site) -> None:
    options = site.options(site.token("trainer"))
    with policy_update("policy", "first-of-two", **options):
        with pytest.raises(PrepareFailed) as busy:
            with policy_update("policy", "second-of-two", **site.options(site.token("trainer"), "standby")):
                raise AssertionError
        assert busy.value.reason == "Busy"
        assert site.policy()["spec"]["preparing"] == "first-of-two"
    assert site.policy()["status"]["version"] == "first-of-two"


def test_a_trainer_that_may_not_read_the_engines_token(site: Site) -> None:
    account = "no-secrets"
    site.kubectl("create", "serviceaccount", account, "-n", site.namespace)
    role = ("--verb=get,patch", "--resource=policyversions.moontide.dev", "--resource-name=policy")
    site.kubectl("create", "role", account, "-n", site.namespace, *role)
    binding = (f"--role={account}", f"--serviceaccount={site.namespace}:{account}")
    site.kubectl("create", "rolebinding", account, "-n", site.namespace, *binding)
    token = site.token(account)
    site.wait_for("its Role is there", lambda: site.ask("GET", token=token).status_code == 200)
    with pytest.raises(ApiError, match=r"may not get secrets \"chat-admin\""):
        with policy_update("policy", "never", **site.options(token)):
            raise AssertionError
    assert "preparing" not in site.policy()["spec"]


def test_a_trainer_that_may_bump_through_the_hook_cannot_patch_the_spec(site: Site, tools: Path) -> None:
    account, kubectl = "hook-only", site.kubectl
    role = {"namespace": site.namespace, "name": account, "policies": ["policy"], "fleets": ["chat"], "via": "hook"}
    values = yaml.safe_dump({"hook": {"enabled": True}, "trainer": {"roles": [role]}})
    command = [str(tools / "helm"), "template", "moontide", str(ROOT / "charts/moontide"), "--values", "-"]
    made = subprocess.run(
        [*command, "-s", "templates/trainers.yaml"], input=values, capture_output=True, text=True, check=True
    )
    kubectl("apply", "-f", "-", stdin=made.stdout)
    kubectl("create", "serviceaccount", account, "-n", site.namespace)
    binding = (f"--role={account}", f"--serviceaccount={site.namespace}:{account}")
    kubectl("create", "rolebinding", account, "-n", site.namespace, *binding)
    token = site.token(account)
    site.wait_for("its Role is there", lambda: site.ask("GET", token=token).status_code == 200, 30)
    answer = site.ask("POST", "/bump?wait=60", token=token, version="by-hook-only")
    assert (answer.status_code, answer.json()["current"]) == (200, True), answer.text
    with policy_update("policy", "pushed-by-hook-only", **site.options(token, "standby")) as update:
        assert update.engines
    before = site.policy()["spec"]
    assert before["version"] == "pushed-by-hook-only"
    assert site.ask("PATCH", token=token, spec={"suspend": True}).status_code == 400
    mine = (f"--as=system:serviceaccount:{site.namespace}:{account}", "-n", site.namespace, "--type=merge")
    for spec in ({"version": "x"}, {"allowedNamespaces": ["*"]}, {"suspend": True}):
        refused = kubectl.run("patch", "polv", "policy", *mine, "-p", json.dumps({"spec": spec}), check=False)
        assert refused.returncode != 0
        assert "cannot patch resource" in refused.stderr
    assert site.policy()["spec"] == before


def test_a_wait_ends_when_the_policy_changes(site: Site) -> None:
    token = site.token("trainer")
    site.wait_for("it rests", lambda: site.ask("GET", "?wait=2", token=token).status_code == 202, 60)
    # Said, so that a request that comes late waits for the same change.
    seen = site.policy()["metadata"]["resourceVersion"]
    done: list[tuple[float, httpx.Response]] = []

    def wait() -> None:
        answer = site.ask("GET", f"?wait=50&after={seen}", token=token, by="standby")
        done.append((time.monotonic(), answer))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(2)
    assert not done
    began = time.monotonic()
    assert site.ask("POST", "/reset", token=token).status_code == 200
    waiting.join()
    ((ended, answer),) = done
    assert answer.status_code == 200
    print(f"a standby's wait ended {ended - began:.2f} s after the change was asked of the leader")
    # Without the change it is 48 s, and the answer 202.
    assert ended - began < 40


def test_commands_through_the_hook(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text(site.token("trainer"))
    where = ("-n", site.namespace, "--hook", site.hooks["standby"], "--hook-token-file", str(tmp_path / "token"))
    assert main(["prepare", "policy", "by-command", "--wait", "--timeout", "90s", *where]) == DONE
    assert main(["commit", "policy", "--wait", *where]) == DONE
    assert main(["status", "policy", *where]) == DONE
    assert "  version      by-command\n" in capsys.readouterr().out


def test_a_leader_that_stops_in_the_middle_of_an_update(site: Site) -> None:
    """The last one: from here on the standby leads alone."""
    with policy_update("policy", "taken-over", **site.options(site.token("trainer"), "standby")) as update:
        assert site.operators["leader"].stop() == 0
        assert len(update.engines) == 1
    assert update.replicas == "1/1"
    assert site.policy()["status"]["version"] == "taken-over"
