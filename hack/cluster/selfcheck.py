"""Proof on a living cluster: pods, Services, DNS, probes, volumes, restricted security, GPU scheduling, exec, logs."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hack.cluster import network
from hack.cluster.archives import SmallImage, write_small_image
from hack.cluster.cluster import Cluster
from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import Settings
from hack.cluster.shell import run

NAMESPACE = "moontide-self-check"
PORT = 8080
# An address kept for documentation: nobody has it.
OUTSIDE = "203.0.113.1"
BUSYBOX = Path("/bin/busybox")
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_PATIENCE_SECONDS = 30.0
_SETTLE_SECONDS = 15.0


def busybox_image() -> tuple[str, SmallImage]:
    """Name and content of a test image made of the machine's static busybox."""
    if not BUSYBOX.exists():
        raise ClusterError("busybox-static is not installed (see `python3 -m hack.cluster prerequisites`)")
    applets = run([str(BUSYBOX), "--list"]).split()
    links = {f"/bin/{applet}": "/bin/busybox" for applet in applets if applet != "busybox"}
    image = SmallImage(("/bin/sh",), {"/bin/busybox": BUSYBOX}, links)
    return f"moontide.local/busybox:{image.key()}", image


def load_busybox(cluster: Cluster) -> str:
    """Make sure that the node holds the test image; returns its name."""
    name, image = busybox_image()
    if name not in cluster.runtime.images():
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "busybox.tar"
            write_small_image(image, name, archive)
            cluster.runtime.import_file(archive)
    return name


def server_objects(image: str, host_folder: Path) -> list[dict[str, Any]]:
    """Two web servers behind a Service, each with a GPU, a volume of the host's and one in memory."""
    labels = {"app": "web"}
    serve = (
        f"mkdir -p /tmp/www && cp /host/greeting /tmp/www/index.html && {{ httpd -f -p {PORT} -h /tmp/www & wait; }}"
    )
    container = {
        "name": "web",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", serve],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1},
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "32Mi"}},
        "securityContext": _RESTRICTED,
        "volumeMounts": [
            {"name": "host", "mountPath": "/host", "readOnly": True},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
    }
    pod = {
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [
            {"name": "host", "persistentVolumeClaim": {"claimName": "host"}},
            {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        ],
    }
    volume = {
        "capacity": {"storage": "1Mi"},
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": NAMESPACE,
        "hostPath": {"path": str(host_folder), "type": "Directory"},
        "claimRef": {"namespace": NAMESPACE, "name": "host"},
    }
    claim = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": NAMESPACE,
        "volumeName": NAMESPACE,
        "resources": {"requests": {"storage": "1Mi"}},
    }
    here = {"namespace": NAMESPACE}
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": enforce}},
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": NAMESPACE}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "host", **here}, "spec": claim},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web", **here},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", **here},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": PORT}]},
        },
    ]


def run_all(
    cluster: Cluster, progress: Progress, meanwhile: Callable[[list[str]], None] | None = None, leave: bool = False
) -> None:
    """Run every check; the first that fails raises. What it made is removed again in either case, unless `leave`.

    `meanwhile` is called while two pods run, with the beginning of a kubectl command for their namespace.
    """
    host_folder = Path(tempfile.mkdtemp(prefix="moontide-self-check-"))
    greeting = f"hello {host_folder.name}"
    (host_folder / "greeting").write_text(greeting)
    (host_folder / "greeting").chmod(0o644)
    host_folder.chmod(0o755)
    kubectl = [*cluster.kubectl, "--namespace", NAMESPACE]
    try:
        with progress.step("test image loaded"):
            image = load_busybox(cluster)
        with progress.step("two pods of a Deployment with hostPath volume, memory volume and GPU are ready"):
            objects = server_objects(image, host_folder)
            run([*cluster.kubectl, "apply", "-f", "-"], stdin=json.dumps(_list(objects)))
            run([*kubectl, "rollout", "status", "deployment/web", "--timeout=60s"])
        _check_traffic(kubectl, greeting, progress)
        if meanwhile is not None:
            meanwhile(kubectl)
            _check_traffic(kubectl, greeting, progress)
        with progress.step("GPUs: one more pod than there are stays pending for want of them"):
            _check_gpus(cluster, kubectl)
        with progress.step("a killed container is restarted"):
            _check_restart(kubectl, _pods(kubectl)[0])
    finally:
        if not leave:
            with progress.step("self-check removed"):
                run([*cluster.kubectl, "delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s"])
                run([*cluster.kubectl, "delete", "persistentvolume", NAMESPACE, "--ignore-not-found", "--timeout=60s"])
        shutil.rmtree(host_folder)


def _pods(kubectl: list[str]) -> list[str]:
    return run([*kubectl, "get", "pods", "--selector=app=web", "-o", "name"]).split()


def _check_traffic(kubectl: list[str], greeting: str, progress: Progress) -> None:
    pod = _pods(kubectl)[0]
    for host in ("web", f"web.{NAMESPACE}", f"web.{NAMESPACE}.svc.cluster.local"):
        with progress.step(f"a pod reaches the Service by the name {host}"):
            fetch = [*kubectl, "exec", pod, "--", "wget", "-q", "-O", "-", f"http://{host}/"]
            _expect(greeting, _retry(fetch))
    with progress.step("a name outside the cluster does not resolve"):
        answer = _retry([*kubectl, "exec", pod, "--", "sh", "-c", "nslookup example.com || true"])
        if "NXDOMAIN" not in answer:
            raise ClusterError(f"expected NXDOMAIN, got {answer!r}")
    with progress.step("a pod reaches nothing outside the machine"):
        before = network.refused_packets()
        command = f"nc -w 2 {OUTSIDE} 80 </dev/null >/dev/null 2>&1 && echo reached || echo refused"
        _expect("refused", run([*kubectl, "exec", pod, "--", "sh", "-c", command]).strip())
        if network.refused_packets() <= before:
            raise ClusterError("the guard has not seen the packet that a pod sent outside")


def smoke(settings: Settings, progress: Progress) -> None:
    """A cluster's whole life on a machine that has none; raises at the first thing that is not as it should be."""
    cluster = Cluster(settings, progress)

    def kill_components(kubectl: list[str]) -> None:
        before = _identities(kubectl)
        for name in ("kube-apiserver", "kubelet", "containerd"):
            with progress.step(f"{name} killed and started again"):
                cluster.stop(name, signal.SIGKILL)
                cluster.up()
        # A restarted kubelet looks at each pod anew; give it the time to find one that it would not keep.
        time.sleep(_SETTLE_SECONDS)
        run([*kubectl, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=60s"])
        if _identities(kubectl) != before:
            raise ClusterError(f"pods did not live through it: {before} became {_identities(kubectl)}")

    cluster.up()
    try:
        run_all(cluster, progress, meanwhile=kill_components, leave=True)
    finally:
        # With pods running, and it raises when anything is left.
        cluster.down()


def _identities(kubectl: list[str]) -> list[tuple[str, int]]:
    """Each pod's uid with the restarts of its container."""
    pods = json.loads(run([*kubectl, "get", "pods", "--selector=app=web", "-o", "json"]))["items"]
    return sorted((pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in pods)


def _check_gpus(cluster: Cluster, kubectl: list[str]) -> None:
    wanted = cluster.settings.gpus + 1
    run([*kubectl, "scale", "deployment/web", f"--replicas={wanted}"])
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        pods = json.loads(run([*kubectl, "get", "pods", "--selector=app=web", "-o", "json"]))["items"]
        pending = [pod for pod in pods if pod["status"]["phase"] == "Pending"]
        messages = [
            condition.get("message", "") for pod in pending for condition in pod["status"].get("conditions", [])
        ]
        if len(pods) == wanted and len(pending) == 1 and any("Insufficient nvidia.com/gpu" in m for m in messages):
            break
        if time.monotonic() > deadline:
            raise ClusterError(f"{len(pods)} pods, {len(pending)} pending: {messages}")
        time.sleep(0.5)
    run([*kubectl, "scale", "deployment/web", "--replicas=2"])


def _check_restart(kubectl: list[str], pod: str) -> None:
    run([*kubectl, "exec", pod, "--", "sh", "-c", "kill -KILL $(pidof httpd)"])
    count = "jsonpath={.status.containerStatuses[0].restartCount}"
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while run([*kubectl, "get", pod, "-o", count]).strip() == "0":
        if time.monotonic() > deadline:
            raise ClusterError(f"{pod} was not restarted")
        time.sleep(0.5)
    run([*kubectl, "wait", "--for=condition=Ready", pod, "--timeout=30s"])


def _retry(command: list[str]) -> str:
    """The first lookup right after CoreDNS came up can fail; a few seconds are allowed for it."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return run(command).strip()
        except ClusterError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def _expect(wanted: str, got: str) -> None:
    if got != wanted:
        raise ClusterError(f"expected {wanted!r}, got {got!r}")


def _list(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": objects}
