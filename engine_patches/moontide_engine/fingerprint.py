"""Fingerprints of the functions that patches replace or rely on."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
from typing import Any


class Missing(LookupError):
    """A function that a patch needs does not exist in this release."""


def resolve(target: str) -> tuple[Any, str, Any]:
    """Owner, attribute name and object of ``package.module:Qualified.name``. Raises Missing."""
    module, _, qualified = target.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        *path, name = qualified.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, name, vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise Missing(f"{target} is not there: {error}") from error


def fingerprint(obj: Any) -> str:
    """sha256 of the dedented source. Source, not its tree: what ``ast.dump`` gives varies with Python's version."""
    raw = obj.__func__ if isinstance(obj, classmethod | staticmethod) else obj
    raw = getattr(raw, "__moontide_original__", raw)
    try:
        source = inspect.getsource(raw)
    except (OSError, TypeError) as error:
        raise Missing(f"no source of {obj!r}: {error}") from error
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()
