"""The SBOM of an image: what its layers, on top of each other, have installed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from hack.images import cli, sbom
from hack.images.catalogue import CUDA_IMAGE, DEMO_IMAGE, IMAGES, RELEASE_IMAGES, Image

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
    """Holds images of three layers, by these names."""

    name = "double"

    def __init__(self, *held: str, release: str = "ID=debian\nVERSION_CODENAME=bookworm\n") -> None:
        self.held = held
        self.release = release

    def has(self, reference: str) -> bool:
        return reference in self.held

    def to_layout(self, reference: str, folder: Path) -> None:
        made = [
            layer(folder, {"./var/lib/dpkg/status": STATUS, "usr/bin/sh": "x", "usr/lib/os-release": self.release}),
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
    text = sbom.document(builder, "moontide.local/operator:dev")  # type: ignore[arg-type]
    said = json.loads(text)
    assert (said["bomFormat"], said["specVersion"]) == ("CycloneDX", "1.5")
    assert said["metadata"]["component"]["name"] == "moontide.local/operator:dev"
    assert [each["purl"] for each in said["components"]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u9?arch=amd64&distro=bookworm",
        "pkg:pypi/kopf@1.1",
        "pkg:pypi/old-name@2",
    ]
    assert text == sbom.document(builder, "moontide.local/operator:dev")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


class EmptyDouble(BuilderDouble):
    """Its images have nothing in them that we can read."""

    def to_layout(self, reference: str, folder: Path) -> None:
        manifest = blob(folder, json.dumps({"layers": [{"digest": layer(folder, {"lib/apk/db": "x"})}]}).encode())
        (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": manifest}]}))


def _printed(
    given: str,
    builder: BuilderDouble,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, str]:
    monkeypatch.setattr(sbom, "cache_root", lambda: folder)
    monkeypatch.setattr(cli, "choose", lambda progress, wanted: builder)
    status = cli.main(["sbom", given])
    said = capsys.readouterr()
    return status, said.err if status else said.out


@pytest.mark.parametrize("image", [*IMAGES, *RELEASE_IMAGES, DEMO_IMAGE, CUDA_IMAGE], ids=lambda image: image.name)
def test_every_image_that_we_build_has_one(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = _printed(image.name, BuilderDouble(image.reference), tmp_path, monkeypatch, capsys)
    assert status == 0
    assert json.loads(text)["metadata"]["component"]["name"] == image.reference
    status, text = _printed(image.name, BuilderDouble(), tmp_path, monkeypatch, capsys)
    assert status == 1
    assert f"run: python3 -m hack.images build {image.name} --cluster none" in text


def test_an_image_by_another_name_and_on_another_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As vLLM's own image is."""
    name = "registry.example/me/engine:0.1.0"
    builder = BuilderDouble(name, release='NAME="Ubuntu"\nID=ubuntu\nVERSION_CODENAME="jammy"\n\n# x')
    status, text = _printed(name, builder, tmp_path, monkeypatch, capsys)
    assert status == 0
    assert "pkg:deb/ubuntu/libc6@2.36-9%2Bdeb12u9?arch=amd64&distro=jammy" in text
    status, text = _printed("registry.example/other:1", builder, tmp_path, monkeypatch, capsys)
    assert (status, text) == (1, "error: double holds no image registry.example/other:1\n")
    status, text = _printed("motor", builder, tmp_path, monkeypatch, capsys)
    assert status == 1
    assert text.startswith("error: there is no image 'motor': operator, ")


def test_an_image_that_cannot_be_read_has_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "registry.example/rclone:1"
    status, text = _printed(name, EmptyDouble(name), tmp_path, monkeypatch, capsys)
    assert status == 1
    assert f"{name} has neither Debian packages nor Python distributions" in text
