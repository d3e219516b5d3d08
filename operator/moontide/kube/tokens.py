"""Tokens of admin planes and wipers: derived, so that the operator reads no Secret but its own root key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Iterable

from kubernetes.aio import client as k8s

from moontide import labels
from moontide.errors import Retry
from moontide.kube.client import Kube

ROOT_KEY_SECRET = "moontide-root-key"
ROOT_KEY_FIELD = "key"
REMEMBERED_TOKENS = 4096
"""A fleet's token is asked for with each command to each of its replicas."""
_BYTES = 32


class Tokens:
    """Derives tokens from one root key. Its ``repr`` does not show the key."""

    def __init__(self, root_key: bytes) -> None:
        if len(root_key) < _BYTES:
            raise ValueError(f"the root key must have at least {_BYTES} bytes")
        self._root_key = root_key
        self._derived: dict[str, str] = {}

    def derive(self, uid: str, rotation: str = "") -> str:
        """The token of the resource with this uid, in one of its rotations: hex HMAC-SHA256."""
        if not uid:
            raise ValueError("a token is derived from the uid of a resource, and this one is empty")
        text = f"{uid}/{rotation}" if rotation else uid
        found = self._derived.get(text)
        if found is None:
            if len(self._derived) >= REMEMBERED_TOKENS:
                self._derived.clear()
            found = self._derived[text] = hmac.new(self._root_key, text.encode(), hashlib.sha256).hexdigest()
        return found

    def each(self, uid: str, rotations: Iterable[str]) -> tuple[str, ...]:
        """The tokens of several rotations, in their order."""
        return tuple(self.derive(uid, rotation) for rotation in rotations)


async def load(kube: Kube, namespace: str) -> Tokens | None:
    """The tokens of the root key in ``namespace``, or None when there is none yet.

    Raises :class:`Retry` when the Secret cannot be read, or holds no usable key.
    """
    secret = await kube.read_secret(namespace, ROOT_KEY_SECRET)
    if secret is None:
        return None
    try:
        return Tokens(base64.b64decode((secret.data or {}).get(ROOT_KEY_FIELD, ""), validate=True))
    except ValueError as error:
        raise Retry(10.0, f"Secret {namespace}/{ROOT_KEY_SECRET} holds no usable key: {error}") from error


async def load_or_create(kube: Kube, namespace: str) -> Tokens:
    """As :func:`load`; makes the key at the first start. Raises :class:`Retry` when it cannot be made, too."""
    found = await load(kube, namespace)
    if found is not None:
        return found
    key = secrets.token_bytes(_BYTES)
    metadata = k8s.V1ObjectMeta(name=ROOT_KEY_SECRET, namespace=namespace, labels={labels.MANAGED_BY: labels.MANAGER})
    data: dict[str, bytes | str] = {ROOT_KEY_FIELD: base64.b64encode(key).decode()}
    secret = k8s.V1Secret(api_version="v1", kind="Secret", metadata=metadata, type="Opaque", data=data)
    await kube.create_secret(namespace, secret)
    return Tokens(key)
