"""That an image has no shell and no package manager: looked up in its layers, as they lie on top of each other."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.cluster.settings import cache_root, repository_root
from hack.images import sbom
from hack.images.builder import Builder

STRIP = repository_root() / "images" / "operator" / "strip.py"


def check(builder: Builder, reference: str) -> None:
    """Raises ClusterError, with their paths, if the image has any of what images/operator/strip.py calls unwanted."""
    unwanted: Callable[[Iterable[str]], list[str]] = runpy.run_path(str(STRIP))["unwanted"]
    with tempfile.TemporaryDirectory(prefix="bare-", dir=cache_root()) as folder:
        builder.to_layout(reference, Path(folder))
        left = unwanted(paths(sbom.layers(Path(folder))))
    if left:
        raise ClusterError(
            f"{reference} must have no shell and no package manager, and has {', '.join(left)}: its base image brings "
            "them; remove them in images/operator/strip.py, or give another --base-image"
        )


def paths(tars: Iterable[Path]) -> list[str]:
    """Files and links, by path from the root, as the layers leave them."""
    return list(sbom.merged(tars, lambda _, member, __: None if member.isdir() else ""))
