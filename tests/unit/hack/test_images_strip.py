"""The operator's image without a shell: what the last step of its build removes from a Debian root, and what stays."""

from __future__ import annotations

import hashlib
import io
import json
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import repository_root
from hack.images import bare, cli
from hack.images.catalogue import by_name

FOLDER = repository_root() / "images" / "operator"
STATUS = """Package: dash
Status: install ok installed
Version: 1

Package: libc6
Status: install ok installed
Version: 2
"""


PYTHON = "usr/local/lib/python3.11"
SITE = f"{PYTHON}/site-packages"


def tree(root: Path, *files: str) -> None:
    """These files, in a root that dpkg knows nothing of."""
    for name in ("var/lib/dpkg/status", *files):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(STATUS if name.endswith("status") else "x")


class BuilderDouble:
    """Builds an image of these layers, whatever it is told to build."""

    def __init__(self, *layers: Sequence[str]) -> None:
        self.layers = layers
        self.held: list[str] = []

    def references(self) -> list[str]:
        return self.held

    def build(self, context: Path, dockerfile: Path, reference: str, arguments: object) -> None:
        self.held.append(reference)

    def tag(self, reference: str, other: str) -> None:
        self.held.append(other)

    def remove(self, reference: str) -> None:
        self.held.remove(reference)

    def to_layout(self, reference: str, folder: Path) -> None:
        manifest = {"layers": [{"digest": _blob(folder, _tar(names))} for names in self.layers]}
        digest = _blob(folder, json.dumps(manifest).encode())
        (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": digest}]}))


def _tar(names: Sequence[str]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name in names:
            info = tarfile.TarInfo(name.partition(" -> ")[0])
            if " -> " in name:
                info.type, info.linkname = tarfile.SYMTYPE, name.partition(" -> ")[2]
            tar.addfile(info)
    return raw.getvalue()


def _blob(folder: Path, raw: bytes) -> str:
    digest = hashlib.sha256(raw).hexdigest()
    (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (folder / "blobs" / "sha256" / digest).write_bytes(raw)
    return f"sha256:{digest}"


def test_shells_go_with_their_names_and_what_runs_stays(tmp_path: Path) -> None:
    bin_, info = tmp_path / "usr/bin", tmp_path / "var/lib/dpkg/info"
    for folder in (bin_, info):
        folder.mkdir(parents=True)
    # As Debian has it: /bin is a link, and every package lists it.
    (tmp_path / "bin").symlink_to("usr/bin")
    for name in ("dash", "python3.11", "ldd"):
        (bin_ / name).write_text("x")
    (bin_ / "sh").symlink_to("dash")
    (info / "dash.list").write_text("/.\n/bin\n/bin/dash\n/bin/sh\n/usr/share/doc/dash\n")
    (info / "libc6:amd64.list").write_text("/.\n/bin\n/usr/bin/ldd\n")
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    runpy.run_path(str(FOLDER / "strip.py"))["strip"](tmp_path)
    assert sorted(path.name for path in bin_.iterdir()) == ["ldd", "python3.11"]
    assert (tmp_path / "bin").is_symlink()
    assert (tmp_path / "var/lib/dpkg/status").read_text() == STATUS.partition("\n\n")[2].rstrip() + "\n"


def test_no_layer_of_the_image_has_what_was_removed() -> None:
    steps = (FOLDER / "Dockerfile").read_text().splitlines()
    last = max(number for number, line in enumerate(steps) if line.startswith("FROM "))
    assert steps[last] == "FROM scratch"
    assert not [line for line in steps[last:] if line.startswith("RUN")]
    assert "python3 /strip.py /" in "\n".join(steps)


def test_a_python_that_no_package_brought_loses_its_installers(tmp_path: Path) -> None:
    """As python:3.11-slim-bookworm has them."""
    gone = (
        "usr/local/bin/pip3.11",
        "usr/local/bin/wheel",
        f"{SITE}/pip/__init__.py",
        f"{SITE}/pip-24.0.dist-info/METADATA",
        f"{SITE}/setuptools/__init__.py",
        f"{SITE}/setuptools-79.0.1.dist-info/METADATA",
        f"{SITE}/wheel-0.45.1.dist-info/METADATA",
        f"{SITE}/_distutils_hack/__init__.py",
        f"{SITE}/distutils-precedence.pth",
        f"{PYTHON}/ensurepip/__init__.py",
        f"{PYTHON}/ensurepip/_bundled/pip-24.0-py3-none-any.whl",
    )
    kept = ("usr/local/bin/python3.11", f"{PYTHON}/venv/__init__.py", f"{SITE}/README.txt", f"{SITE}/pipeline.py")
    tree(tmp_path, *gone, *kept)
    (tmp_path / "usr/local/bin/pip").symlink_to("pip3.11")
    done = subprocess.run([sys.executable, FOLDER / "strip.py", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()}
    assert left == {*kept, "var/lib/dpkg/status"}


@pytest.mark.parametrize(
    "path",
    [
        "usr/bin/bash",
        "sbin/dash",
        "bin/busybox",
        "usr/bin/perl5.36.0",
        "usr/bin/apt-get",
        "usr/bin/dpkg",
        "usr/sbin/dpkg-preconfigure",
        "opt/venv/bin/pip3",
        "opt/venv/lib/python3.11/site-packages/pip/__init__.py",
        "usr/lib/python3/dist-packages/pip/__init__.py",
        "usr/lib/python3.11/ensurepip/__init__.py",
    ],
)
def test_the_build_fails_of_what_is_left(tmp_path: Path, path: str) -> None:
    tree(tmp_path, path, "usr/bin/python3.11", "usr/share/bash/README", "usr/lib/dpkg/x", "var/cache/apt/bin/sh")
    done = subprocess.run([sys.executable, FOLDER / "strip.py", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"the operator's image must have no shell and no package manager, and has: {path}\n"


def _build(builder: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, name: str = "operator") -> None:
    monkeypatch.setattr(bare, "cache_root", lambda: folder)
    monkeypatch.setattr(cli, "cache_root", lambda: folder)
    cli._build_one(by_name(name), {name: "0123"}, "base", builder, Progress(quiet=True))


def test_an_image_with_a_shell_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = BuilderDouble(["usr/bin/python3.11", "bin -> usr/bin"], ["./usr/bin/sh -> dash", "opt/venv/bin/pip"])
    with pytest.raises(ClusterError, match=r"must have no shell .*, and has opt/venv/bin/pip, usr/bin/sh: its base"):
        _build(builder, monkeypatch, tmp_path)
    assert builder.held == []
    # Others have one.
    _build(builder, monkeypatch, tmp_path, "mooncake")
    assert builder.held == ["moontide.local/mooncake:0123", "moontide.local/mooncake:dev"]


def test_what_a_later_layer_removes_is_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = BuilderDouble(["bin/sh", f"{SITE}/pip/__init__.py"], ["bin/.wh.sh", f"{SITE}/.wh.pip"])
    _build(builder, monkeypatch, tmp_path)
    assert builder.held == ["moontide.local/operator:0123", "moontide.local/operator:dev"]
