"""Which images there are, what goes into each, and the key that names their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.cluster.settings import repository_root
from hack.setup.steps import engine_release, further_engines

PREFIX = "moontide.local"
_IGNORED_FOLDERS = frozenset({"__pycache__", "build", "dist", "node_modules"})
_IGNORED_SUFFIXES = (".pyc", ".egg-info")


@dataclass(frozen=True)
class Image:
    """An image made by a Dockerfile from files of the repository, on top of another image.

    `parent` is the build argument that names the image below, and which image of ours that is ("base" for the one made
    of Debian packages, None for one that only a registry has).
    """

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    parent: tuple[str, str | None]
    loaded: bool = True
    arguments: tuple[tuple[str, str], ...] = ()
    """More build arguments, with their values."""
    bare: bool = False
    """Whether it must have no shell and no package manager."""

    @property
    def reference(self) -> str:
        """The name that pods use."""
        return f"{PREFIX}/{self.name}:dev"

    def keyed(self, key: str) -> str:
        """The name of one content of it."""
        return f"{PREFIX}/{self.name}:{key}"


IMAGES = (
    Image(
        "operator",
        "images/operator/Dockerfile",
        (
            "operator",
            "pyproject.toml",
            "README.md",
            "LICENSE",
            "requirements/operator-image.txt",
            "images/operator/strip.py",
        ),
        ("BASE_IMAGE", "base"),
        bare=True,
    ),
    Image(
        "mooncake",
        "images/mooncake/Dockerfile",
        ("engine_patches", "requirements/mooncake.txt", "requirements/build.txt"),
        ("BASE_IMAGE", "base"),
    ),
    Image("etcd", "images/etcd/Dockerfile", (), ("BASE_IMAGE", "base")),
    Image(
        "engine-cpu-env",
        "images/engine/Dockerfile.cpu-env",
        (
            "requirements/engine-cpu.txt",
            "requirements/engine-cpu.overrides.txt",
            "requirements/build.txt",
            "images/engine/trim-cpu-env.sh",
        ),
        ("BASE_IMAGE", "base"),
        loaded=False,
    ),
    Image("engine-cpu", "images/engine/Dockerfile.cpu", ("engine_patches",), ("ENV_IMAGE", "engine-cpu-env")),
)


def _of_release(release: str) -> tuple[Image, Image]:
    """The CPU engine of one vLLM release, and its environment."""
    pins = "engine-cpu" if release == engine_release() else f"engine-cpu-{release}"
    name = f"engine-cpu-vllm{release}"
    environment = Image(
        f"{name}-env",
        "images/engine/Dockerfile.cpu-env",
        (
            f"requirements/{pins}.txt",
            f"requirements/{pins}.overrides.txt",
            "requirements/build.txt",
            "images/engine/trim-cpu-env.sh",
        ),
        ("BASE_IMAGE", "base"),
        loaded=False,
        arguments=(("PINS", pins),),
    )
    return environment, Image(
        name, "images/engine/Dockerfile.cpu", ("engine_patches",), ("ENV_IMAGE", environment.name)
    )


# Made only on demand.
RELEASE_IMAGES = tuple(image for release in (engine_release(), *further_engines()) for image in _of_release(release))
# Made only on demand: the engine with the demo's weights, where nodes cannot see this machine's files.
DEMO_IMAGE = Image(
    "engine-cpu-demo", "images/engine/Dockerfile.cpu-demo", ("hack/tinymodels/make.py",), ("ENGINE_IMAGE", "engine-cpu")
)
# Made only on demand: its base comes from a registry.
CUDA_IMAGE = Image(
    "engine",
    "images/engine/Dockerfile",
    (
        "engine_patches",
        "requirements/build.txt",
        "requirements/mooncake-cuda12.txt",
        "requirements/mooncake-cuda13.txt",
    ),
    ("BASE_IMAGE", None),
    loaded=False,
)


def by_name(name: str) -> Image:
    """The image of that name."""
    every = {image.name: image for image in (*IMAGES, *RELEASE_IMAGES, DEMO_IMAGE, CUDA_IMAGE)}
    if name not in every:
        raise ClusterError(f"there is no image {name!r}: {', '.join(every)}")
    return every[name]


def with_parents(names: Iterable[str]) -> list[Image]:
    """The images of these names, each after the one that it is built on."""
    ordered: list[Image] = []

    def add(image: Image) -> None:
        parent = image.parent[1]
        if parent not in (None, "base"):
            add(by_name(str(parent)))
        if image not in ordered:
            ordered.append(image)

    for name in names:
        add(by_name(name))
    return ordered


def input_files(root: Path, inputs: Iterable[str]) -> Iterator[Path]:
    """Every file behind the inputs, sorted; what tools leave behind is no input."""
    for given in inputs:
        start = root / given
        if not start.exists():
            raise ClusterError(f"{given} is missing, which an image is made of")
        files = [start] if start.is_file() else sorted(path for path in start.rglob("*") if path.is_file())
        for path in files:
            parts = path.relative_to(root).parts
            if not _IGNORED_FOLDERS.intersection(parts) and not any(p.endswith(_IGNORED_SUFFIXES) for p in parts):
                yield path


def key_of(image: Image, parent_key: str, root: Path | None = None) -> str:
    """Hash of everything that the image is made of: names, modes and content of files, and the image below."""
    top = root or repository_root()
    digest = hashlib.sha256(f"{image.name}\0{image.parent}\0{parent_key}\0".encode())
    for name, value in image.arguments:
        digest.update(f"{name}={value}\0".encode())
    for path in input_files(top, (image.dockerfile, *image.inputs)):
        executable = bool(path.stat().st_mode & 0o100)
        digest.update(f"{path.relative_to(top)}\0{executable}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
