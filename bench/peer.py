"""LeaderWorkerSet's controller, a peer written in Go, measured as :mod:`bench.scale` does: one StatefulSet for each."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

import yaml
from bench.apiserver import Object, Plane, plane, resident_mib
from bench.scale import Subject, say

SYSTEM, ACCOUNT = "lws-system", "lws-manager"
USER = f"system:serviceaccount:{SYSTEM}:{ACCOUNT}"
SETS = "/apis/leaderworkerset.x-k8s.io/v1"
CONFIG = """
apiVersion: config.lws.x-k8s.io/v1alpha1
kind: Configuration
leaderElection: {leaderElect: true, resourceNamespace: lws-system, resourceName: lws, resourceLock: leases}
internalCertManagement: {enable: false}
metrics: {bindAddress: "0"}
health: {healthProbeBindAddress: "0"}
"""
"""Without its webhooks: nothing calls them here, and defaults are written out."""


def body(name: str, value: str) -> Object:
    """A set of one group of one pod."""
    env = [{"name": "ROUND", "value": value}]
    pod = {"spec": {"containers": [{"name": "c", "image": "engine.test/moontide:1", "env": env}]}}
    rolling = {"maxUnavailable": 1, "maxSurge": 0, "partition": 0}
    spec = {
        "replicas": 1,
        "leaderWorkerTemplate": {"size": 1, "workerTemplate": pod, "restartPolicy": "RecreateGroupOnPodRestart"},
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": spec,
    }


def settle(made: Plane, count: int, value: str, seconds: float) -> list[float]:
    """Wait until every set has its StatefulSet with this value, or the time is up; as :meth:`World.settle`."""
    began, times = time.monotonic(), dict[str, float]()
    while time.monotonic() - began < seconds:
        done = set()
        for each in made.api("GET", "/apis/apps/v1/statefulsets")["items"]:
            env = each["spec"]["template"]["spec"]["containers"][0].get("env") or []
            if any(one.get("value") == value for one in env):
                done.add(each["metadata"]["uid"])
        for uid in done:
            times.setdefault(uid, time.monotonic() - began)
        if len(done) == count:
            break
        time.sleep(0.25)
    return sorted(times.values())


def account(made: Plane, folder: Path) -> Path:
    """A kubeconfig of its service account, which may do everything."""
    kubectl = made.kubectl
    kubectl("create", "namespace", SYSTEM)
    kubectl("create", "serviceaccount", ACCOUNT, "-n", SYSTEM)
    bound = f"--serviceaccount={SYSTEM}:{ACCOUNT}"
    kubectl("create", "clusterrolebinding", ACCOUNT, "--clusterrole=cluster-admin", bound)
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": kubectl("create", "token", ACCOUNT, "-n", SYSTEM, "--duration=2h").strip()}
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    return folder / "kubeconfig"


def measure(binary: Path, crds: Path, options: argparse.Namespace, folder: Path) -> Object:
    """As many sets as there are fleets, in as many namespaces."""
    folder.mkdir()
    print("LeaderWorkerSet:", flush=True)
    row: Object = {"label": "LeaderWorkerSet", "objects": options.fleets}
    with plane(f"scale-{os.getpid()}", folder) as made:
        made.kubectl("apply", "--server-side", "-f", str(crds))
        while made.kubectl.run("get", "leaderworkersets", "-A", check=False).returncode:
            time.sleep(0.5)
        spaces = [f"team-{number}" for number in range(options.namespaces)]
        for each in spaces:
            made.kubectl("create", "namespace", each)
        sets = [(spaces[number % len(spaces)], f"set-{number}") for number in range(options.fleets)]
        (folder / "config.yaml").write_text(CONFIG)
        environ = {**os.environ, "KUBECONFIG": str(account(made, folder)), "ENABLE_WEBHOOKS": "false"}
        command = [str(binary), f"--config={folder}/config.yaml", "--zap-log-level=error"]
        with (folder / "peer.log").open("wb") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=folder)
        try:
            time.sleep(10)
            if process.poll() is not None:
                raise SystemExit(f"it has ended: {(folder / 'peer.log').read_text()[-2000:]}")
            row["idle_mib"] = resident_mib(process.pid)
            subject = Subject(made, process.pid, USER)

            def path(namespace: str, name: str = "") -> str:
                return f"{SETS}/namespaces/{namespace}/leaderworkersets{name and '/'}{name}"

            def creating() -> list[float]:
                made.api.each("POST", [(path(where), body(name, "0")) for where, name in sets])
                return settle(made, len(sets), "0", options.patience)

            def changing() -> list[float]:
                spec = body("", "1")["spec"]["leaderWorkerTemplate"]
                made.api.each("PATCH", [(path(*one), {"spec": {"leaderWorkerTemplate": spec}}) for one in sets])
                return settle(made, len(sets), "1", options.patience)

            def resting() -> list[float]:
                time.sleep(options.rest)
                return []

            for name, work, objects in (("create", creating, len(sets)), ("change", changing, len(sets))):
                row[name] = subject.measured(work, objects)
                say(name, row[name])
            time.sleep(options.calm)
            row["rest"] = subject.measured(resting, len(sets))
            say("rest", row["rest"])
        finally:
            process.kill()
            process.wait()
    return row
