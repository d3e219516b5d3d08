"""What a model's source adds to the engine's pod: arguments, variables, volumes, a container that fetches. Pure."""

from __future__ import annotations

from kubernetes.aio import client as k8s

from moontide.api.v1alpha1.common import CLIMBS
from moontide.api.v1alpha1.model import Model
from moontide.resources import common

MODELS_FOLDER = "/models"
CACHE_FOLDER = "/model-cache"
FETCH_CONTAINER = "fetch"
_REMOTE = "source"
_FETCH = (
    'rclone copy "$0" "$1" --transfers=8 --stats=30s --stats-one-line --verbose && '
    '{ [ -n "$(ls -A "$1" 2>/dev/null)" ] || { echo "there is nothing at $0" >&2; exit 4; }; }'
)
"""For rclone a prefix under which there is nothing is no error."""


def check(model: Model) -> None:
    """Raises ValueError for a source that leads out of the place that it names: older CRDs take one."""
    if ".." in model.path.split("/"):
        raise ValueError(f"model.source {CLIMBS}")


def path(model: Model) -> str:
    """What ``--model`` gets."""
    if model.scheme == "pvc":
        return f"{MODELS_FOLDER}/{model.path.partition('/')[2]}"
    if model.scheme == "s3":
        return f"{CACHE_FOLDER}/s3/{model.path}"
    return model.path


def arguments(model: Model) -> list[str]:
    """The engine's arguments that say which weights it loads."""
    more = ["--revision", model.revision] if model.revision is not None else []
    return ["--model", path(model), *more]


def environment(model: Model) -> list[k8s.V1EnvVar]:
    """The engine's variables: where it keeps what it fetches, and the token that it fetches with."""
    made = []
    if model.scheme == "hf" and model.cache is not None:
        made.append(k8s.V1EnvVar(name="HF_HOME", value=f"{CACHE_FOLDER}/huggingface"))
    if model.token_secret_ref is not None:
        ref = k8s.V1SecretKeySelector(name=model.token_secret_ref.name, key=model.token_secret_ref.key)
        made.append(k8s.V1EnvVar(name="HF_TOKEN", value_from=k8s.V1EnvVarSource(secret_key_ref=ref)))
    return made


def claims(model: Model) -> list[str]:
    """The PersistentVolumeClaims that must exist."""
    found = [model.path.partition("/")[0]] if model.scheme == "pvc" else []
    return [*found, *([model.cache.claim] if model.cache is not None and model.cache.claim is not None else [])]


def secrets(model: Model) -> list[str]:
    """The Secrets that must exist."""
    refs = (model.token_secret_ref, model.credentials_secret_ref)
    return [ref.name for ref in refs if ref is not None]


def _has_cache(model: Model) -> bool:
    return model.scheme == "s3" or model.cache is not None


def mounts(model: Model) -> list[k8s.V1VolumeMount]:
    """Of the engine's container. It only reads what another container has fetched."""
    made = []
    if model.scheme == "pvc":
        made.append(k8s.V1VolumeMount(name="models", mount_path=MODELS_FOLDER, read_only=True))
    if _has_cache(model):
        read_only = True if model.scheme == "s3" else None
        made.append(k8s.V1VolumeMount(name="model-cache", mount_path=CACHE_FOLDER, read_only=read_only))
    return made


def volumes(model: Model) -> list[k8s.V1Volume]:
    """Of the engine's pod."""
    made = []
    if model.scheme == "pvc":
        made.append(_claimed("models", claims(model)[0], read_only=True))
    if _has_cache(model):
        cache = model.cache
        if cache is not None and cache.claim is not None:
            made.append(_claimed("model-cache", cache.claim))
        else:
            made.append(common.empty_dir("model-cache", limit=cache.size if cache is not None else None))
    return made


def _claimed(name: str, claim: str, read_only: bool | None = None) -> k8s.V1Volume:
    source = k8s.V1PersistentVolumeClaimVolumeSource(claim_name=claim, read_only=read_only)
    return k8s.V1Volume(name=name, persistent_volume_claim=source)


def fetchers(model: Model, image: str) -> list[k8s.V1Container] | None:
    """What must run before the engine: rclone (``image``), which copies an ``s3://`` source; None for other sources.

    What is there already, with the size and time that the store says, is not copied again. Files appear whole, so pods
    that share a claim may fetch at the same time.
    """
    if model.scheme != "s3":
        return None
    prefix = f"RCLONE_CONFIG_{_REMOTE.upper()}"
    values = {
        "HOME": "/tmp",
        f"{prefix}_TYPE": "s3",
        f"{prefix}_PROVIDER": "Other" if model.endpoint is not None else "AWS",
        f"{prefix}_ENV_AUTH": "true",
    }
    if model.endpoint is not None:
        values[f"{prefix}_ENDPOINT"] = model.endpoint
    if model.region is not None:
        values[f"{prefix}_REGION"] = model.region
    credentials = model.credentials_secret_ref
    source = k8s.V1EnvFromSource(secret_ref=k8s.V1SecretEnvSource(name=credentials.name)) if credentials else None
    return [
        k8s.V1Container(
            name=FETCH_CONTAINER,
            image=image,
            command=["sh", "-c", _FETCH, f"{_REMOTE}:{model.path}", path(model)],
            env=common.env(values),
            env_from=[source] if source is not None else None,
            security_context=common.container_security(),
            # The last lines of the log say what is wrong, and the operator repeats them in the fleet's status.
            termination_message_policy="FallbackToLogsOnError",
            volume_mounts=[
                k8s.V1VolumeMount(name="tmp", mount_path="/tmp"),
                k8s.V1VolumeMount(name="model-cache", mount_path=CACHE_FOLDER),
            ],
        )
    ]
