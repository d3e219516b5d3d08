"""Container images without a builder: OCI archives written by hand, and partial ones of images that exist elsewhere."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
NAME_ANNOTATION = "io.containerd.image.name"


@dataclass(frozen=True)
class SmallImage:
    """An image of one layer: files by their place in it, links (by hard link) to one of them, and how it starts."""

    entrypoint: tuple[str, ...]
    files: dict[str, Path]
    links: dict[str, str] = field(default_factory=dict)
    user: str = "10001:10001"

    def key(self) -> str:
        """Hash of what is inside: the same content has the same key."""
        digest = hashlib.sha256(repr((self.entrypoint, sorted(self.links.items()), self.user)).encode())
        for place, source in sorted(self.files.items()):
            digest.update(f"{place}\0".encode())
            with source.open("rb") as stream:
                for chunk in iter(lambda: stream.read(1 << 20), b""):
                    digest.update(chunk)
        return digest.hexdigest()[:12]


def small_layer(image: SmallImage) -> bytes:
    """The layer's tar; byte for byte the same for the same content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        passwd = b"root:x:0:0:root:/:/bin/sh\nmoontide:x:10001:10001:moontide:/tmp:/bin/sh\n"
        folders = {"etc", "tmp", "proc", "sys", "dev", "run"}
        for place in (*image.files, *image.links):
            parents = Path(place.lstrip("/")).parents
            folders.update(str(parent) for parent in parents if str(parent) != ".")
        for folder in sorted(folders):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        for name, content in (("etc/passwd", passwd), ("etc/group", b"root:x:0:\nmoontide:x:10001:\n")):
            _add(archive, name, content, 0o644)
        for place, source in sorted(image.files.items()):
            _add(archive, place.lstrip("/"), source.read_bytes(), 0o755)
        for place, target in sorted(image.links.items()):
            entry = tarfile.TarInfo(place.lstrip("/"))
            entry.type, entry.linkname, entry.mode = tarfile.LNKTYPE, target.lstrip("/"), 0o755
            archive.addfile(entry)
    return buffer.getvalue()


def write_small_image(image: SmallImage, name: str, output: Path) -> None:
    """Write an OCI archive that `ctr images import` takes, with the image's full name in it."""
    layer = small_layer(image)
    config = _encode(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(image.entrypoint), "Env": ["PATH=/bin"], "User": image.user},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]},
        }
    )
    manifest = _encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
            "layers": [{"mediaType": LAYER_TYPE, "digest": digest_of(layer), "size": len(layer)}],
        }
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as stream:
        write_oci_archive(stream, [name], manifest, [(digest_of(blob), io.BytesIO(blob)) for blob in (config, layer)])


def write_oci_archive(
    stream: IO[bytes],
    names: Sequence[str],
    manifest: bytes,
    blobs: Iterable[tuple[str, IO[bytes]]],
    architecture: str = "amd64",
) -> None:
    """Write an OCI archive as a stream. Blobs of the manifest that the receiver holds already may be left out."""
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [
            {
                "mediaType": MANIFEST_TYPE,
                "digest": digest_of(manifest),
                "size": len(manifest),
                "platform": {"architecture": architecture, "os": "linux"},
                "annotations": {NAME_ANNOTATION: name},
            }
            for name in names
        ],
    }
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}', 0o644)
        _add(archive, "index.json", _encode(index), 0o644)
        _add(archive, _blob_path(digest_of(manifest)), manifest, 0o644)
        for digest, content in blobs:
            entry = tarfile.TarInfo(_blob_path(digest))
            content.seek(0, io.SEEK_END)
            entry.size = content.tell()
            content.seek(0)
            archive.addfile(entry, content)


def digest_of(content: bytes) -> str:
    """The content's digest as OCI writes it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _encode(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
