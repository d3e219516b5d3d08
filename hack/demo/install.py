"""From a prepared machine to a fleet that serves: cluster, images, CRDs, chart, examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from hack.cluster import access, binaries, kind
from hack.cluster import settings as cluster_settings
from hack.cluster.access import Access
from hack.cluster.progress import Progress
from hack.cluster.settings import repository_root
from hack.demo import elsewhere
from hack.demo.elsewhere import Choice
from hack.demo.fleet import Fleet
from hack.demo.kube import Kube, KubeError, Object, conditions, holds, is_current, moment, names, wait
from hack.demo.reach import Direct, Forwarded, Reach
from hack.demo.say import Voice
from hack.images.cli import references as image_references
from hack.setup import steps
from moontide import naming

RELEASE = "moontide"
SYSTEM_NAMESPACE = "moontide-system"
NAMESPACE = "moontide-demo"
VOLUME = "moontide-demo-models"
CLAIM = "tiny-models"
EXAMPLES = repository_root() / "examples" / "demo"
KINDS = "kvp,ifd,polv"
READY_SECONDS = 420.0
PULLED_SECONDS = 1800.0
"""The same where a node may have to pull 5 GB first."""
ENGINE_IMAGE = "moontide.local/engine-cpu:dev"


@dataclass(frozen=True)
class Source:
    """How images reach the nodes of a cluster elsewhere: through a registry, or ``loaded`` by whoever runs it."""

    registry: str | None = None
    loaded: bool = False
    base_image: str | None = None


@dataclass(frozen=True)
class Target:
    """A cluster to install into. ``mode`` is local, kind or context.

    ``references`` are the names of the images there; empty: those of examples/demo/values.yaml.
    """

    mode: str
    access: Access
    references: Mapping[str, str] = field(default_factory=dict)

    @property
    def elsewhere(self) -> bool:
        """Whether its nodes are not this machine: they see none of its folders, and it none of their pods."""
        return self.mode != "local"

    @property
    def foreign(self) -> bool:
        """Whether somebody else made it, for something else."""
        return self.mode == "context"

    @property
    def engine_image(self) -> str:
        """What the demo's engines run, and the cold engine with them."""
        return self.references[elsewhere.ENGINE] if self.references else ENGINE_IMAGE

    @property
    def claim(self) -> str | None:
        """Where the weights are; None: in the engine's image."""
        return None if self.elsewhere else CLAIM

    @property
    def kube(self) -> Kube:
        """kubectl on it."""
        return Kube(self.access)

    def reach(self) -> Reach:
        """How pods are reached from this machine."""
        return Direct() if self.mode == "local" else Forwarded(self.kube)


def cluster(chosen: Choice, kubeconfig: Path | None, voice: Voice) -> Target:
    """Bring a cluster of ours up, or find the one that was named; says which one it is."""
    voice.say(f"cluster ({chosen})")
    if chosen.mode == "context":
        target = Target(chosen.mode, access.named(chosen.context, kubeconfig))
    else:
        command = [sys.executable, "-m", "hack.cluster", "up", "--cluster", chosen.mode]
        target = Target(chosen.mode, access.resolve(Path(_call(command).strip().splitlines()[-1])))
    voice.say(f"context {target.access.context} of {target.access.kubeconfig}, server {target.access.server}")
    if target.elsewhere:
        elsewhere.refuse_what_is_there(target.kube, (SYSTEM_NAMESPACE, NAMESPACE))
    return target


def images(target: Target, voice: Voice, source: Source = Source()) -> Target:
    """Bring the images to the nodes; the target with the names that they have there. Raises KubeError."""
    if not target.elsewhere:
        voice.say("images")
        _call([sys.executable, "-m", "hack.images", "build", "--cluster", target.mode])
        return target
    elsewhere.check_nodes(target.kube, built_here=not source.loaded)
    references = image_references(elsewhere.IMAGES, source.base_image, source.registry)
    if source.loaded:
        voice.say(f"images: loaded already are {', '.join(references.values())}")
        elsewhere.until_loaded(target.kube, list(references.values()))
    elif source.registry is not None:
        voice.say(f"images: pushed to {source.registry}")
        where = ("--cluster", "none", "--registry", source.registry)
        elsewhere.known(references, _call(elsewhere.build_command(references, where, source.base_image)))
    elif target.mode == "kind":
        if elsewhere.missing(elsewhere.nodes(target.kube), list(references.values())):
            voice.say("images: built, and loaded by kind")
            _call(elsewhere.build_command(references, ("--cluster", "kind"), source.base_image))
        else:
            voice.say("images: the nodes have them")
    else:
        raise KubeError("say how images reach the nodes: --registry HOST/PATH, or --images-loaded")
    return replace(target, references=references)


def helm(target: Target, *arguments: str) -> str:
    """Run Helm on the cluster; returns its output. Raises KubeError."""
    program = binaries.program("helm", Progress(quiet=True))
    command = [str(program), f"--kubeconfig={target.access.kubeconfig}", f"--kube-context={target.access.context}"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=300
    )
    if done.returncode != 0:
        raise KubeError(f"helm {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def operator(target: Target, voice: Voice) -> None:
    """CRDs with kubectl, then the chart without CRDs; returns when the operator is ready."""
    if target.elsewhere:
        target.kube.apply(*elsewhere.crds(), elsewhere.namespace(SYSTEM_NAMESPACE))
    else:
        target.kube.run("apply", "--server-side", "--force-conflicts", "--filename", str(repository_root() / "crds"))
    voice.say(f"CRDs applied; Helm release {RELEASE} in {SYSTEM_NAMESPACE}")
    chart = str(repository_root() / "charts" / "moontide")
    options = ["--namespace", SYSTEM_NAMESPACE, "--create-namespace"]
    options += elsewhere.values(target.references) if target.references else []
    helm(target, "upgrade", "--install", RELEASE, chart, *options, "--values", str(EXAMPLES / "values.yaml"))
    # An image may have to come through the network first.
    seconds = 600 if target.elsewhere else 120
    # The tag of a local image stays the same when its content changes.
    target.kube.run("rollout", "restart", "deployment", "--namespace", SYSTEM_NAMESPACE)
    for deployment in target.kube.list("deployment", SYSTEM_NAMESPACE):
        name = deployment["metadata"]["name"]
        target.kube.run(
            *("rollout", "status", f"deployment/{name}", "--namespace", SYSTEM_NAMESPACE),
            *(f"--timeout={seconds}s",),
            timeout=seconds + 30,
        )
        voice.say(f"operator: deployment/{name} is ready")


def manifests(models: Path | None) -> list[Object]:
    """Every object of examples/demo, with the weights' folder put into the volume where one is given."""
    found: list[Object] = []
    for path in sorted(EXAMPLES.glob("[0-9]*.yaml")):
        found += [each for each in yaml.safe_load_all(path.read_text()) if each]
    for each in found:
        if each["kind"] == "PersistentVolume" and models is not None:
            each["spec"]["hostPath"]["path"] = str(models)
    return found


def examples(target: Target, voice: Voice) -> Fleet:
    """Apply the demo's objects; does not wait for them."""
    if target.elsewhere:
        objects = elsewhere.fitted(manifests(None))
    else:
        objects = manifests(steps.models_dir())
        _clear_stale_volume(target, objects, voice)
    target.kube.apply(*objects)
    voice.say(f"applied {', '.join(names(objects))}")
    return Fleet(target.kube, target.reach(), NAMESPACE)


def kept_fleet() -> Fleet | None:
    """The fleet that a demo with --keep has left in the local cluster; None where there is no such cluster."""
    found = cluster_settings.load(cluster_settings.DEFAULT_NAME)
    if found is None:
        return None
    target = Target("local", access.resolve(found.kubeconfig))
    return Fleet(target.kube, target.reach(), NAMESPACE)


def _clear_stale_volume(target: Target, objects: list[Object], voice: Voice) -> None:
    """A volume of an earlier run whose claim is gone, or with other weights, cannot be changed, only made anew."""
    wanted = next((each for each in objects if each["kind"] == "PersistentVolume"), None)
    text = target.kube.run("get", "pv", VOLUME, "--ignore-not-found", "--output", "json")
    if wanted is None or not text.strip():
        return
    there = json.loads(text)
    same = there["spec"].get("hostPath", {}).get("path") == wanted["spec"]["hostPath"]["path"]
    if not same or there["status"].get("phase") in ("Released", "Failed"):
        voice.say("an earlier run left a volume that does not fit; its objects are removed first")
        remove(target, voice)


def rewind(fleet: Fleet, version: str, voice: Voice) -> None:
    """Where an earlier demo left engines with other weights, push the first ones back; a new fleet needs nothing."""
    if fleet.kube.find("secret", naming.admin_secret(fleet.deployment), fleet.namespace) is None:
        return
    for replica in fleet.replicas():
        try:
            loaded = replica.look("/weight_info")["weight_version"]
        except (httpx.HTTPError, OSError):
            continue
        if loaded != version:
            replica.push_weights("/models/policy-a", version)
            voice.say(f"{replica.name}: weights {loaded!r} of an earlier run replaced by {version!r}")


def ready(fleet: Fleet, version: str, voice: Voice, seconds: float = READY_SECONDS) -> None:
    """Wait until pool, fleet and policy say that they serve ``version``; every change seen meanwhile is printed."""
    seen: dict[str, str] = {}
    events: set[str] = set()
    began = time.time() - 30.0

    def note(key: str, text: str, more: str = "") -> None:
        # What follows after `text` counts seconds and the like: it is shown, but its change alone is no news.
        if seen.get(key) != text:
            seen[key] = text
            voice.say(f"  {key}: {text} {more}".rstrip())

    def look() -> bool:
        objects = {each["kind"]: each for each in fleet.kube.list(KINDS, fleet.namespace)}
        for kind_name, each in objects.items():
            for found in conditions(each):
                detail = f" ({found['reason']})" if found.get("reason") else ""
                note(f"{kind_name} {found['type']}", f"{found['status']}{detail}", found.get("message", ""))
        for pod in fleet.kube.list("pods", fleet.namespace):
            note(f"pod {pod['metadata']['name']}", pod_state(pod))
        for event in fleet.kube.list("events", fleet.namespace):
            key = event["metadata"]["uid"] + str(event.get("count", ""))
            at = event.get("lastTimestamp") or event.get("eventTime")
            news = key not in events and at is not None and moment(at) >= began
            if news and event.get("type") == "Warning" and "Unhealthy" not in event.get("reason", ""):
                voice.say(f"  warning: {event['involvedObject']['name']}: {event['reason']}: {event['message'][:200]}")
            events.add(key)
        return (
            len(objects) == 3
            and holds(objects["KVCachePool"], "Ready")
            and is_current(objects["PolicyVersion"], version)
            and _all_serve(objects["InferenceDeployment"])
            and len(fleet.pods()) == int(objects["InferenceDeployment"]["spec"]["replicas"])
        )

    def last() -> str:
        return "\n".join(f"{key}: {text}" for key, text in seen.items())

    wait(lambda: look() or None, seconds, f"pool, fleet and policy at version {version}", every=2.0, last=last)


def _all_serve(deployment: Object) -> bool:
    """Whether every replica is ready and open: a Deployment is Available, and a policy Current, with fewer."""
    status, wanted = deployment.get("status", {}), deployment["spec"]["replicas"]
    counted = status.get("readyReplicas") == status.get("currentReplicas") == wanted
    return counted and all(holds(deployment, kind_) for kind_ in ("Available", "PolicyCurrent", "KVCacheAttached"))


def pod_state(pod: Object) -> str:
    """One line on a pod: phase, ready containers, restarts, and why it waits."""
    statuses: list[dict[str, Any]] = pod["status"].get("containerStatuses", [])
    up = sum(bool(each.get("ready")) for each in statuses)
    restarts = sum(int(each.get("restartCount", 0)) for each in statuses)
    waiting = [each["state"]["waiting"].get("reason", "") for each in statuses if "waiting" in each.get("state", {})]
    ending = ", ending" if "deletionTimestamp" in pod["metadata"] else ""
    text = f"{pod['status'].get('phase')} {up}/{len(pod['spec']['containers'])} ready, {restarts} restarts{ending}"
    return f"{text} {' '.join(waiting)}".rstrip()


def remove(target: Target, voice: Voice) -> None:
    """Take away what `examples` applied."""
    target.kube.run("delete", KINDS, "--all", "--namespace", NAMESPACE, "--timeout=120s", timeout=150)
    target.kube.run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s", timeout=150)
    if not target.elsewhere:
        target.kube.run("delete", "pv", VOLUME, "--ignore-not-found", "--timeout=60s")
    voice.say("the demo's objects are gone")


def withdraw(target: Target, voice: Voice) -> None:
    """Take away from somebody else's cluster all that the demo put there, operator and CRDs included.

    Raises KubeError, and leaves what is shared, where somebody has begun to use it.
    """
    names_ = [each["metadata"]["name"] for each in elsewhere.crds()]
    there = [name for name in names_ if target.kube.find("crd", name, "default") is not None]
    if len(there) == len(names_):
        remove(target, voice)
        if others := elsewhere.strangers(target.kube, NAMESPACE):
            raise KubeError(f"operator and CRDs stay, for these are not the demo's: {', '.join(others)}")
    helm(target, "uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--ignore-not-found")
    for namespace in (NAMESPACE, SYSTEM_NAMESPACE):
        target.kube.run("delete", "namespace", namespace, "--ignore-not-found", "--timeout=120s", timeout=150)
    for name in there:
        target.kube.run("delete", "crd", name, "--ignore-not-found", "--timeout=60s")
    voice.say("operator, CRDs and both namespaces are gone")


def end(target: Target, voice: Voice) -> None:
    """End a cluster that was made here."""
    _call([sys.executable, "-m", "hack.cluster", "down", "--cluster", target.mode])
    voice.say("the cluster is down")


def is_up(chosen: Choice) -> bool:
    """Whether the cluster is there before we touch it; one that is not ours always is."""
    if chosen.mode == "context":
        return True
    if chosen.mode == "kind":
        return kind.exists()
    done = subprocess.run([sys.executable, "-m", "hack.cluster", "status"], capture_output=True, check=False)
    return done.returncode == 0


def _call(command: list[str]) -> str:
    """Run one of our own commands; its progress goes straight to the terminal. Raises KubeError."""
    environment = {**os.environ, "PYTHONPATH": str(repository_root())}
    done = subprocess.run(
        command,
        cwd=repository_root(),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise KubeError(f"`{' '.join(command)}` ended with {done.returncode}")
    return done.stdout
