"""The demo on a cluster that was not made here: which one is meant, what must hold there, what is taken away again."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from hack.cluster.settings import repository_root
from hack.demo.kube import Kube, KubeError, NotInTime, Object, wait

MARK = {"moontide.dev/made-by": "demo"}
"""On the CRDs and namespaces that the demo makes elsewhere: only what bears it may be changed or taken away."""
IMAGES = ("operator", "mooncake", "engine-cpu-demo")
ENGINE = "engine-cpu-demo"
MODEL = "file:///models/policy-a"
"""Where the demo's engine image has the first set of weights."""
# A kubelet lists so many images of its node at most, so that one it does not list may be there all the same.
_LISTED_IMAGES = 50
# It looks for new images twice a minute.
_SEEN_SECONDS = 75.0
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_KINDS = "kvp,ifd,polv"


@dataclass(frozen=True)
class Choice:
    """What ``--cluster`` says. ``mode`` is local, kind or context; ``context`` None then means the current one."""

    mode: str
    context: str | None = None

    def __str__(self) -> str:
        if self.mode != "context":
            return self.mode
        return "current" if self.context is None else f"context:{self.context}"


def choice(text: str) -> Choice:
    """Read ``--cluster``. Raises ArgumentTypeError with what could be written instead."""
    if text in ("local", "kind"):
        return Choice(text)
    if text == "current":
        return Choice("context")
    kind, found, name = text.partition(":")
    if kind == "context" and found and name:
        return Choice("context", name)
    raise argparse.ArgumentTypeError(f"{text!r}: write local, kind, context:NAME (of your kubeconfig) or current")


def crds() -> list[Object]:
    """The CRDs of this checkout, with the demo's mark."""
    found: list[Object] = []
    for path in sorted((repository_root() / "crds").glob("*.yaml")):
        found += [each for each in yaml.safe_load_all(path.read_text()) if each]
    for each in found:
        each["metadata"].setdefault("labels", {}).update(MARK)
    return found


def namespace(name: str) -> Object:
    """A namespace with the demo's mark."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(MARK)}}


def fitted(objects: Sequence[Object]) -> list[Object]:
    """The demo's objects for nodes that have neither a folder of this machine nor GPUs to pretend with.

    The weights are in the engine's image, so that no volume is needed and any node will do.
    """
    found = [each for each in json.loads(json.dumps(list(objects))) if not each["kind"].startswith("PersistentVolume")]
    for each in found:
        if each["kind"] == "Namespace":
            each["metadata"].setdefault("labels", {}).update(MARK)
        if each["kind"] == "InferenceDeployment":
            each["spec"]["model"]["source"] = MODEL
            each["spec"]["resources"].get("limits", {}).pop("nvidia.com/gpu", None)
    return found


def values(references: Mapping[str, str]) -> list[str]:
    """Options of Helm that name the images."""
    named = {
        "image": references["operator"],
        "defaults.mooncake.image": references["mooncake"],
        "defaults.engine.image": references[ENGINE],
    }
    return [part for key, reference in named.items() for part in ("--set-string", f"{key}={reference}")]


def refuse_what_is_there(kube: Kube, namespaces: Sequence[str]) -> None:
    """Raise KubeError if Moontide, or a namespace of the demo's names, is there and was not made by the demo."""
    wanted = [("crd", each["metadata"]["name"]) for each in crds()] + [("namespace", name) for name in namespaces]
    for kind, name in wanted:
        found = kube.find(kind, name, "default")
        if found is not None and not is_marked(found):
            what = "Moontide's CRD" if kind == "crd" else "the namespace"
            raise KubeError(
                f"{what} {name} is on this cluster already and was not made by the demo. The demo would change what is "
                "there, and does nothing: use a cluster without Moontide, for example --cluster kind"
            )


def is_marked(found: Object) -> bool:
    """Whether the demo made it."""
    labels = found["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in MARK.items())


def usable(nodes: Sequence[Object]) -> list[Object]:
    """Nodes on which an ordinary pod may start: ready, running Linux, neither cordoned nor tainted against it."""
    return [each for each in nodes if _takes_pods(each)]


def _takes_pods(node: Object) -> bool:
    spec, status = node.get("spec", {}), node.get("status", {})
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", []))
    tainted = any(each["effect"] in ("NoSchedule", "NoExecute") for each in spec.get("taints") or [])
    linux = status.get("nodeInfo", {}).get("operatingSystem", "linux") == "linux"
    return ready and linux and not tainted and not spec.get("unschedulable")


def unfit(nodes: Sequence[Object], machine: str | None) -> str:
    """What stands against running images on these nodes, made on a ``machine`` as uname calls it; empty: nothing.

    None: it is not known where they were made.
    """
    fit = usable(nodes)
    if not fit:
        return "no node of this cluster is ready and takes ordinary pods"
    if machine is None:
        return ""
    wanted = _MACHINES.get(machine, machine)
    others = [
        f"{each['metadata']['name']} ({each['status']['nodeInfo']['architecture']})"
        for each in fit
        if each["status"]["nodeInfo"]["architecture"] != wanted
    ]
    if not others:
        return ""
    return (
        f"images are made for this machine, {wanted}, and these nodes are something else: {', '.join(others)}. "
        "Cordon them while the demo runs, or run the demo on a machine of theirs"
    )


def missing(nodes: Sequence[Object], references: Sequence[str]) -> dict[str, list[str]]:
    """Images that a usable node surely does not have, by the node's name."""
    found: dict[str, list[str]] = {}
    for node in usable(nodes):
        listed = node["status"].get("images") or []
        held = {name for each in listed for name in each.get("names") or []}
        absent = [each for each in references if each not in held]
        if absent and len(listed) < _LISTED_IMAGES:
            found[node["metadata"]["name"]] = absent
    return found


def until_loaded(kube: Kube, references: Sequence[str]) -> None:
    """Wait until every usable node lists the images; raises KubeError that names what is to be loaded where."""
    lacking: dict[str, list[str]] = {}

    def loaded() -> bool | None:
        nonlocal lacking
        lacking = missing(nodes(kube), references)
        return None if lacking else True

    try:
        wait(loaded, _SEEN_SECONDS, "the images", every=5.0)
    except NotInTime:
        shown = "; ".join(f"{node} lacks {', '.join(names)}" for node, names in lacking.items())
        command = f"python3 -m hack.images build {' '.join(IMAGES)} --cluster none --archives FOLDER"
        raise KubeError(
            f"{shown}. `{command}` writes archives to load into every node; or give --registry HOST/PATH"
        ) from None


def nodes(kube: Kube) -> list[Object]:
    """The cluster's nodes."""
    return kube.list("nodes", "default")


def check_nodes(kube: Kube, *, built_here: bool) -> None:
    """Raise KubeError where the nodes cannot run the images."""
    if reason := unfit(nodes(kube), platform.machine() if built_here else None):
        raise KubeError(reason)


def strangers(kube: Kube, own: str) -> list[str]:
    """Pools, fleets and policies outside the demo's namespace: somebody has begun to use what the demo installed."""
    text = kube.run("get", _KINDS, "--all-namespaces", "--output", "json")
    found = [each for each in json.loads(text)["items"] if each["metadata"]["namespace"] != own]
    return [f"{each['kind']} {each['metadata']['namespace']}/{each['metadata']['name']}" for each in found]


def build_command(references: Mapping[str, str], where: Sequence[str], base_image: str | None) -> list[str]:
    """The command that builds these images and brings them ``where``."""
    command = [sys.executable, "-m", "hack.images", "build", *references, *where]
    return [*command, "--base-image", base_image] if base_image else command


def known(references: Mapping[str, str], printed: str) -> None:
    """Raise KubeError unless a build has pushed what the pods will ask for: a file may have changed in between."""
    absent = set(references.values()) - set(printed.split())
    if absent:
        raise KubeError(f"the build did not push {', '.join(sorted(absent))}: did a file change meanwhile?")
