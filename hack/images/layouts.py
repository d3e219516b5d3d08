"""Images on their way from the builder to a cluster: a folder in OCI layout, of which only what is new travels."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hack.cluster.archives import write_oci_archive
from hack.cluster.errors import ClusterError
from hack.cluster.runtime import Runtime
from hack.images.builder import Builder

# Blobs from this size on are dropped from the layout once the cluster has them: the builder's store has them too.
LARGE_BYTES = 32 << 20


@dataclass(frozen=True)
class Transfer:
    """What one image's way took."""

    image_bytes: int
    sent_bytes: int
    sent_layers: int
    layers: int
    seconds: float


class Layout:
    """The folder of one image."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes_file = folder / "large.json"

    def send(self, builder: Builder, reference: str, names: Sequence[str], runtime: Runtime) -> Transfer:
        """Give the image to a runtime under these names. Blobs that it holds already are neither written nor sent."""
        began = time.monotonic()
        held = runtime.content()
        self._stand_in_for(held)
        self._forget_images()
        try:
            builder.to_layout(reference, self._folder)
            manifest, config, layers = self._read()
            architecture = self._architecture(config)
            missing = [digest for digest in (config, *layers) if digest not in held]
            runtime.import_stream(lambda stream: self._write(stream, names, manifest, missing, architecture))
            return Transfer(
                image_bytes=sum(layers.values()),
                sent_bytes=sum(self._blob(digest).stat().st_size for digest in missing),
                sent_layers=sum(1 for digest in missing if digest in layers),
                layers=len(layers),
                seconds=time.monotonic() - began,
            )
        finally:
            self._drop_large()

    def archive(self, builder: Builder, reference: str, names: Sequence[str], output: Path) -> None:
        """Write the whole image into a file."""
        self._forget_images()
        builder.to_layout(reference, self._folder)
        manifest, config, layers = self._read()
        with output.open("wb") as stream:
            self._write(stream, names, manifest, [config, *layers], self._architecture(config))

    def _forget_images(self) -> None:
        """Keep the blobs of what was written before, but not its name: the layout holds one image at a time."""
        (self._folder / "index.json").unlink(missing_ok=True)

    def _stand_in_for(self, held: set[str]) -> None:
        """Put an empty file of the right size where a large blob was, so that the builder sees no need to write it."""
        if not self._sizes_file.exists():
            return
        for digest, size in json.loads(self._sizes_file.read_text()).items():
            if digest in held and not self._blob(digest).exists():
                with self._blob(digest).open("wb") as stream:
                    stream.truncate(size)

    def _drop_large(self) -> None:
        """Forget what the builder can write again, stand-ins above all: they must never pass for the blobs."""
        sizes = {}
        for path in (self._folder / "blobs" / "sha256").glob("*"):
            if path.stat().st_size >= LARGE_BYTES:
                sizes[f"sha256:{path.name}"] = path.stat().st_size
                path.unlink()
        if sizes:
            self._sizes_file.write_text(json.dumps(sizes))

    def _read(self) -> tuple[bytes, str, dict[str, int]]:
        """The image's manifest, its config's digest, and its layers' digests with sizes; anything else is removed."""
        index = json.loads((self._folder / "index.json").read_text())
        if len(index["manifests"]) != 1:
            raise ClusterError(f"{self._folder} holds {len(index['manifests'])} images, not one")
        digest = str(index["manifests"][0]["digest"])
        manifest = self._blob(digest).read_bytes()
        content = json.loads(manifest)
        config = str(content["config"]["digest"])
        layers = {str(layer["digest"]): int(layer["size"]) for layer in content["layers"]}
        for path in (self._folder / "blobs" / "sha256").glob("*"):
            if f"sha256:{path.name}" not in {digest, config, *layers}:
                path.unlink()
        return manifest, config, layers

    def _architecture(self, config: str) -> str:
        """What the image is made for, by its own config: whoever imports it goes by the index."""
        return str(json.loads(self._blob(config).read_bytes()).get("architecture", "amd64"))

    def _write(
        self, stream: IO[bytes], names: Sequence[str], manifest: bytes, digests: Sequence[str], architecture: str
    ) -> None:
        with contextlib.ExitStack() as stack:
            blobs = [(digest, stack.enter_context(self._blob(digest).open("rb"))) for digest in digests]
            write_oci_archive(stream, names, manifest, blobs, architecture)

    def _blob(self, digest: str) -> Path:
        return self._folder / "blobs" / Path(*digest.split(":"))
