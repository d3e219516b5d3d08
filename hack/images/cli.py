"""The command line: `python3 -m hack.images --help`."""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hack.cluster import kind
from hack.cluster import settings as defaults
from hack.cluster.cluster import Cluster
from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.selfcheck import load_busybox
from hack.cluster.settings import cache_root, repository_root
from hack.images import bare, base, sbom
from hack.images.builder import Builder, choose
from hack.images.catalogue import (
    CUDA_IMAGE,
    DEMO_IMAGE,
    IMAGES,
    PREFIX,
    RELEASE_IMAGES,
    Image,
    by_name,
    input_files,
    key_of,
    with_parents,
)
from hack.images.layouts import Layout

_REGISTRY = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+")


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    top = argparse.ArgumentParser(
        prog="python3 -m hack.images", description="The project's images, without a registry."
    )
    commands = top.add_subparsers(dest="command", required=True)
    names = [image.name for image in IMAGES]
    more = [image.name for image in RELEASE_IMAGES if image.loaded] + [DEMO_IMAGE.name, f"{CUDA_IMAGE.name} (CUDA)"]
    build = commands.add_parser("build", help="Build what has changed, and load it into the cluster.")
    build.add_argument("images", nargs="*", help=f"default: all of {', '.join(names)}; also {', '.join(more)}")
    build.add_argument("--cluster", choices=("local", "kind", "none"), default="local", help="where to load them")
    build.add_argument("--registry", metavar="HOST/PATH", help="with --cluster none: push them there")
    build.add_argument(
        "--archives",
        type=Path,
        metavar="FOLDER",
        help="with --cluster none: write NAME.tar of each there",
    )
    build.add_argument("--name", default=defaults.DEFAULT_NAME, help="the local cluster's name (default: %(default)s)")
    build.add_argument("--builder", choices=("auto", "buildah", "docker"), default="auto")
    build.add_argument("--base-image", help="use this base image instead of one made of Debian packages")
    build.add_argument("--quiet", action="store_true", help="print no progress")
    keys = commands.add_parser("keys", help="Print each image's name with the key of its present content.")
    keys.add_argument("--base-image", help="as for build")
    bill = commands.add_parser("sbom", help="Print what a built image holds, as CycloneDX JSON.")
    bill.add_argument("image", help="one of ours, as it was last built, or HOST/PATH:TAG that the builder holds")
    bill.add_argument("--builder", choices=("auto", "buildah", "docker"), default="auto")
    test = commands.add_parser("busybox", help="Load a busybox test image into the local cluster and print its name.")
    test.add_argument("--name", default=defaults.DEFAULT_NAME, help="the local cluster's name (default: %(default)s)")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 is success."""
    options = parser().parse_args(arguments)
    try:
        if options.command == "build":
            _build(options)
        elif options.command == "keys":
            keys = image_keys(with_parents(image.name for image in IMAGES), options.base_image or base.key())
            for name, key in keys.items():
                print(f"{name} {key}")
        elif options.command == "sbom":
            print(_sbom(options), end="")
        else:
            print(load_busybox(_cluster(options.name, Progress())))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def image_keys(images: list[Image], base_key: str) -> dict[str, str]:
    """Key of each image by its name; parents come before what is built on them."""
    keys: dict[str, str] = {"base": base_key}
    for image in images:
        keys[image.name] = key_of(image, keys[image.parent[1]] if image.parent[1] else image.parent[0])
    del keys["base"]
    return keys


def references(names: Sequence[str], base_image: str | None = None, registry: str | None = None) -> dict[str, str]:
    """What the present content of these images is called, in a registry or (None) where archives are loaded."""
    keys = image_keys(with_parents(names), base_image or base.key())
    prefix = PREFIX if registry is None else registry_prefix(registry)
    return {name: f"{prefix}/{name}:{keys[name]}" for name in names}


def registry_prefix(text: str) -> str:
    """HOST/PATH as it stands in images' names. Raises ClusterError for what could not be one."""
    if not _REGISTRY.fullmatch(text):
        raise ClusterError(
            f"--registry {text}: write HOST/PATH or HOST:PORT/PATH in lower case, as in registry.example/me/demo"
        )
    return text


def _cluster(name: str, progress: Progress) -> Cluster:
    stored = defaults.load(name)
    if stored is None or stored.control_plane_only:
        raise ClusterError(f"there is no cluster {name!r} to load images into; bring it up, or use --cluster none")
    return Cluster(stored, progress)


def _build(options: argparse.Namespace) -> None:
    progress = Progress(quiet=options.quiet)
    if options.cluster != "none" and (options.registry or options.archives):
        raise ClusterError("--registry and --archives go with --cluster none")
    if options.registry:
        registry_prefix(options.registry)
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / "images.lock").open("w") as stream:
        # Two builds at a time would make the same image twice, and one would remove what the other is about to send.
        fcntl.flock(stream, fcntl.LOCK_EX)
        _build_locked(options, progress)


def _build_locked(options: argparse.Namespace, progress: Progress) -> None:
    wanted = options.images or [image.name for image in IMAGES]
    images = with_parents(wanted)
    cluster = _cluster(options.name, progress) if options.cluster == "local" else None
    builder = choose(progress, options.builder)
    base_reference = options.base_image
    if base_reference is None and any(image.parent[1] == "base" for image in images):
        base_reference = base.ensure(builder, progress)
    keys = image_keys(images, options.base_image or base.key())
    for image in images:
        _build_one(image, keys, base_reference, builder, progress)
    for image in [each for each in images if each.name in wanted and (each.loaded or options.cluster == "none")]:
        if cluster is not None:
            _send(image, keys[image.name], builder, cluster, progress)
        elif options.cluster == "kind":
            with tempfile.TemporaryDirectory(dir=cache_root()) as folder:
                archive = Path(folder) / f"{image.name}.tar"
                _archive(image, keys[image.name], builder, archive)
                kind.load_image(archive, progress)
        else:
            _deliver(image, keys[image.name], builder, options, progress)


def _deliver(image: Image, key: str, builder: Builder, options: argparse.Namespace, progress: Progress) -> None:
    """Push and write what was asked for; the name that pods then use goes to standard output."""
    if options.registry:
        destination = f"{registry_prefix(options.registry)}/{image.name}:{key}"
        with progress.step(f"{destination} is in the registry"):
            builder.push(image.keyed(key), destination)
        print(destination, flush=True)
    if options.archives:
        options.archives.mkdir(parents=True, exist_ok=True)
        with progress.step(f"{image.name}.tar written"):
            _archive(image, key, builder, options.archives / f"{image.name}.tar")
        print(image.keyed(key), flush=True)


def _archive(image: Image, key: str, builder: Builder, output: Path) -> None:
    """One file that containerd and Docker import: the image by the name of its content, and by the name for all."""
    with tempfile.TemporaryDirectory(dir=cache_root()) as folder:
        Layout(Path(folder)).archive(builder, image.keyed(key), [image.reference, image.keyed(key)], output)


def _build_one(image: Image, keys: dict[str, str], base_reference: str, builder: Builder, progress: Progress) -> None:
    keyed = image.keyed(keys[image.name])
    held = builder.references()
    if keyed in held:
        progress.say(f"{image.reference}: unchanged")
    else:
        argument, parent = image.parent
        arguments = dict(image.arguments)
        if parent is not None:
            arguments[argument] = base_reference if parent == "base" else image_reference(parent, keys)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="context-", dir=cache_root()) as context:
            _stage(image, Path(context))
            builder.build(Path(context), Path(context) / image.dockerfile, keyed, arguments)
        if image.bare:
            try:
                bare.check(builder, keyed)
            except ClusterError:
                builder.remove(keyed)
                raise
        progress.say(f"{image.reference}: built in {time.monotonic() - began:.1f} s")
    builder.tag(keyed, image.reference)
    for old in held:
        if old.startswith(image.keyed("")) and old not in (keyed, image.reference):
            builder.remove(old)


def _sbom(options: argparse.Namespace) -> str:
    """The SBOM of an image as it was last built, or of any that the builder holds by this name."""
    ours = "/" not in options.image
    reference = by_name(options.image).reference if ours else options.image
    builder = choose(Progress(quiet=True), options.builder)
    if not builder.has(reference):
        command = f"python3 -m hack.images build {options.image} --cluster none"
        raise ClusterError(
            f"{reference} is not built; run: {command}" if ours else f"{builder.name} holds no image {reference}"
        )
    return sbom.document(builder, reference)


def image_reference(name: str, keys: dict[str, str]) -> str:
    """Name of one of our images with the key of its present content."""
    return f"{with_parents([name])[-1].keyed(keys[name])}"


def _stage(image: Image, context: Path) -> None:
    """Copy just the image's inputs, so that nothing else can get into it."""
    root = repository_root()
    for source in input_files(root, (image.dockerfile, *image.inputs)):
        target = context / source.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        # The umask of whoever checked the files out must not decide what the image's user can read.
        target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
    for folder in (context, *(path for path in context.rglob("*") if path.is_dir())):
        folder.chmod(0o755)


def _send(image: Image, key: str, builder: Builder, cluster: Cluster, progress: Progress) -> None:
    keyed = image.keyed(key)
    digests = cluster.runtime.image_digests()
    if keyed in digests:
        if digests.get(image.reference) != digests[keyed]:
            cluster.runtime.tag(keyed, image.reference)
        progress.say(f"{image.reference}: the cluster has it")
    else:
        layout = Layout(cache_root() / "layouts" / image.name)
        done = layout.send(builder, keyed, [image.reference, keyed], cluster.runtime)
        progress.say(
            f"{image.reference}: {done.image_bytes / 1e6:.0f} MB in {done.layers} layers; "
            f"sent {done.sent_layers} of them ({done.sent_bytes / 1e6:.1f} MB) in {done.seconds:.1f} s"
        )
    for old in digests:
        if old.startswith(image.keyed("")) and old not in (keyed, image.reference):
            cluster.runtime.remove_image(old)
