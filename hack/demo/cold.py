"""What a cold engine answers: the reference that every answer of the fleet is held against."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.demo.fleet import MAX_TOKENS, Answer
from hack.demo.kube import Kube, KubeError, Object, wait
from hack.demo.say import Voice

LOGPROB_TOLERANCE = 0.001
"""Allowed difference of log-probs. The demo's engines compute in float32: in bfloat16 one step of rounding is 0.0156,
and another batch or another split of a prompt into blocks moves right answers by up to three such steps."""
_POD = "cold-engine"
_SECONDS = 400.0
# The same, where a node may have to pull its image first.
_PULLED_SECONDS = 1800.0


@dataclass(frozen=True)
class Cold:
    """Tokens and their log-probs of one answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def equals(self, answer: Answer) -> bool:
        """Token for token. An answer without tokens equals nothing."""
        return bool(answer.tokens) and answer.tokens == self.tokens

    def distance(self, answer: Answer) -> float:
        """The largest difference of log-probs; infinite where the tokens differ."""
        if not self.equals(answer) or len(answer.logprobs) != len(self.logprobs):
            return float("inf")
        return max(abs(one - other) for one, other in zip(answer.logprobs, self.logprobs, strict=True))


References = dict[str, tuple[Cold, ...]]
"""By name of the weights, in the order of the prompts."""


def answers(
    kube: Kube,
    namespace: str,
    image: str,
    claim: str | None,
    models: Mapping[str, str],
    prompts: Sequence[str],
    voice: Voice,
) -> References:
    """Run a cold engine for each set of weights in a pod of its own: no prefix cache, no store, no plugin.

    ``models`` maps names to folders below /models, where ``claim`` is mounted; None: the image has them there. Raises
    KubeError or NotInTime.
    """
    request = {
        "models": dict(models),
        "prompts": list(prompts),
        "tokens": MAX_TOKENS,
        "settings": {"max_model_len": 2048, "block_size": 32, "dtype": "float32", "enforce_eager": True},
    }
    script = Path(__file__).with_name("cold_engine.py").read_text()
    remove(kube, namespace)
    data = {"cold_engine.py": script, "request.json": json.dumps(request)}
    kube.apply(_config(namespace, data), _pod(namespace, image, claim))
    voice.say(f"cold engine: pod {_POD} computes {len(models)} x {len(prompts)} reference answers")
    seen = 0

    def finished() -> Object | None:
        nonlocal seen
        pod = kube.get("pod", _POD, namespace)
        notes = [line for line in _log(kube, namespace) if line.startswith("COLD-NOTE ")]
        for note in notes[seen:]:
            voice.say(f"  cold engine: {note.removeprefix('COLD-NOTE ')}")
        seen = len(notes)
        return pod if pod["status"].get("phase") in ("Succeeded", "Failed") else None

    seconds = _PULLED_SECONDS if claim is None else _SECONDS
    pod = wait(finished, seconds, "the cold engine", every=2.0, last=lambda: "\n".join(_log(kube, namespace)[-5:]))
    lines = _log(kube, namespace)
    if pod["status"]["phase"] != "Succeeded":
        raise KubeError("the cold engine failed:\n" + "\n".join(lines[-20:]))
    found: dict[str, dict[int, Cold]] = {name: {} for name in models}
    for line in lines:
        if line.startswith("COLD {"):
            row = json.loads(line.removeprefix("COLD "))
            found[row["model"]][int(row["prompt"])] = Cold(tuple(row["tokens"]), tuple(row["logprobs"]))
    for name, rows in found.items():
        if sorted(rows) != list(range(len(prompts))):
            raise KubeError(f"the cold engine answered {len(rows)} of {len(prompts)} prompts with {name}")
    remove(kube, namespace)
    return {name: tuple(rows[number] for number in range(len(prompts))) for name, rows in found.items()}


def save(references: References, path: Path) -> None:
    """Write them down for :func:`load`."""
    rows = {name: [[one.tokens, one.logprobs] for one in answers_] for name, answers_ in references.items()}
    path.write_text(json.dumps(rows))


def load(path: Path) -> References:
    """What :func:`save` wrote."""
    rows = json.loads(path.read_text())
    return {name: tuple(Cold(tuple(one), tuple(two)) for one, two in each) for name, each in rows.items()}


def remove(kube: Kube, namespace: str) -> None:
    """Take the pod away."""
    kube.run("delete", "pod,configmap", _POD, "--namespace", namespace, "--ignore-not-found", "--grace-period=1")


def _log(kube: Kube, namespace: str) -> list[str]:
    return kube.run("logs", _POD, "--namespace", namespace, check=False).splitlines()


def _config(namespace: str, data: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _POD, "namespace": namespace}, "data": data}


def _pod(namespace: str, image: str, claim: str | None) -> Object:
    environment = {
        "HOME": "/cache",
        "USER": "moontide",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    mounts = {"cold": "/cold", "tmp": "/tmp", "cache": "/cache", "shm": "/dev/shm"}
    volumes: list[Object] = [
        {"name": "cold", "configMap": {"name": _POD}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
    ]
    if claim is not None:
        mounts["models"] = "/models"
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    container = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "/cold/cold_engine.py"],
        # What a replica asks for: without it a node that is short of memory ends this pod first of all.
        "resources": {"requests": {"cpu": "300m", "memory": "2Gi"}},
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": name, "mountPath": place, "readOnly": name in ("models", "cold")} for name, place in mounts.items()
        ],
    }
    spec = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": _POD, "namespace": namespace}, "spec": spec}
