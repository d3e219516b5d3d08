"""Which weights an engine starts with, and where they come from."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from moontide.api.v1alpha1.common import Api, Name, ObjectName, Quantity, no_climbing, rule, validations

_SOURCES = (
    "^(hf://[^/\\\\s]+/[^/\\\\s]+|pvc://[^/\\\\s]+/[^\\\\s]+|s3://[^/\\\\s]+/[^\\\\s]*[^/\\\\s]|file:///[^\\\\s]*)$",
    "model.source names no place Moontide can load from; write pvc://CLAIM/FOLDER, hf://ORG/NAME, s3://BUCKET/PREFIX "
    "or file:///PATH",
)


class SecretKey(Api):
    """One key of a Secret in the same namespace."""

    name: Name
    key: Annotated[str, Field(min_length=1, max_length=253)]


class ModelCache(Api):
    """Where fetched weights are kept: on a claim, for every pod of the fleet, or in each pod."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "has(self.claim) != has(self.size)",
                "model.cache is either a claim or a size; write cache.claim for a PersistentVolumeClaim of yours, or "
                "cache.size for at most so much of each node's disk",
            ),
        )
    )

    claim: Name | None = None
    """A PersistentVolumeClaim. Pods on several nodes need one that is ReadWriteMany."""
    size: Quantity | None = None
    """The most that a pod may keep on its node's disk."""


class Model(Api):
    """Which weights an engine process starts with."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(f"self.source.matches('{_SOURCES[0]}')", _SOURCES[1]),
            no_climbing("self.source", "model.source"),
            rule(
                "!has(self.revision) || self.source.startsWith('hf://')",
                "model.revision is of a repository; remove it, or write model.source: hf://ORG/NAME",
            ),
            rule(
                "!has(self.tokenSecretRef) || self.source.startsWith('hf://')",
                "model.tokenSecretRef is a Hugging Face token; remove it, or write model.source: hf://ORG/NAME (for "
                "s3://: model.credentialsSecretRef)",
            ),
            rule(
                "!(has(self.credentialsSecretRef) || has(self.endpoint) || has(self.region)) || "
                "self.source.startsWith('s3://')",
                "model.credentialsSecretRef, endpoint and region are of an object store; remove them, or write "
                "model.source: s3://BUCKET/PREFIX (for hf://: model.tokenSecretRef)",
            ),
            rule(
                "!has(self.cache) || self.source.startsWith('hf://') || self.source.startsWith('s3://')",
                "model.cache keeps what is fetched, and pvc:// and file:// fetch nothing; remove it",
            ),
        )
    )

    source: Annotated[str, Field(min_length=1, max_length=1024)]
    """``pvc://CLAIM/FOLDER`` (mounted read-only), ``hf://ORG/NAME`` (fetched by the engine), ``s3://BUCKET/PREFIX``
    (fetched before the engine starts), or ``file:///PATH`` (in the image, or on a volume that the pods have)."""
    served_name: Annotated[str, Field(min_length=1, max_length=253)]
    """The model name that clients send."""
    version: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")] = "default"
    """The policy version these weights are; a replica that restarts comes back with it."""
    revision: Annotated[str | None, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] = None
    """Branch, tag or commit of an ``hf://`` repository."""
    token_secret_ref: SecretKey | None = None
    """The Hugging Face token: ``HF_TOKEN`` of the engine. The operator never reads it."""
    credentials_secret_ref: ObjectName | None = None
    """A Secret with ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY`` for an ``s3://`` source. The engine does not
    get it. Without it the pod's own identity is used."""
    endpoint: Annotated[str | None, Field(max_length=512, pattern=r"^https?://[^/\s]+$")] = None
    """URL of an object store other than AWS's."""
    region: Annotated[str | None, Field(max_length=64, pattern=r"^[a-z0-9-]+$")] = None
    """Its region."""
    cache: ModelCache | None = None
    """Where fetched weights are kept; without it in each pod, without a limit."""

    @property
    def path(self) -> str:
        """What follows ``SCHEME://``."""
        return self.source.partition("://")[2]

    @property
    def scheme(self) -> str:
        return self.source.partition("://")[0]
