"""The SBOM of an image: what its layers, on top of each other, have installed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from hack.images import sbom
from hack.images.cli import parser

STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u9
Description: C library
 with a second line

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1.0
"""
SITE = "opt/venv/lib/python3.11/site-packages"


def metadata(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not this\n"


def layer(folder: Path, content: Mapping[str, str]) -> str:
    """A layer among the blobs of a layout; its digest."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, text in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return blob(folder, raw.getvalue())


def blob(folder: Path, raw: bytes) -> str:
    digest = hashlib.sha256(raw).hexdigest()
    place = folder / "blobs" / "sha256" / digest
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(raw)
    return f"sha256:{digest}"


class BuilderDouble:
    """Holds one image of three layers."""

    def to_layout(self, reference: str, folder: Path) -> None:
        made = [
            layer(folder, {"./var/lib/dpkg/status": STATUS, "usr/bin/sh": "x"}),
            layer(
                folder,
                {
                    f"{SITE}/kopf-1.0.dist-info/METADATA": metadata("kopf", "1.0"),
                    f"{SITE}/Old_Name-2.dist-info/METADATA": metadata("Old_Name", "2"),
                    f"{SITE}/old-1.dist-info/METADATA": metadata("old", "1"),
                },
            ),
            layer(
                folder,
                {
                    f"{SITE}/.wh.kopf-1.0.dist-info": "",
                    f"{SITE}/kopf-1.1.dist-info/METADATA": metadata("kopf", "1.1"),
                    f"{SITE}/old-1.dist-info/.wh.METADATA": "",
                },
            ),
        ]
        manifest = blob(folder, json.dumps({"layers": [{"digest": each} for each in made]}).encode())
        (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": manifest}]}))


def test_it_names_what_the_layers_leave_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbom, "cache_root", lambda: tmp_path)
    builder = BuilderDouble()
    text = sbom.document(builder, "moontide.local/operator:dev", "bookworm")  # type: ignore[arg-type]
    said = json.loads(text)
    assert (said["bomFormat"], said["specVersion"]) == ("CycloneDX", "1.5")
    assert said["metadata"]["component"]["name"] == "moontide.local/operator:dev"
    assert [each["purl"] for each in said["components"]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u9?arch=amd64&distro=bookworm",
        "pkg:pypi/kopf@1.1",
        "pkg:pypi/old-name@2",
    ]
    assert text == sbom.document(builder, "moontide.local/operator:dev", "bookworm")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_an_image_by_name() -> None:
    assert parser().parse_args(["sbom", "operator"]).image == "operator"
