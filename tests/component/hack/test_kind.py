"""`hack.cluster --cluster kind` as a process, against a fake of kind that takes what kind takes and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hack.cluster.archives import SmallImage, write_small_image
from hack.cluster.settings import repository_root
from hack.images.layouts import Layout

NAME = "moontide-local"


class Kind:
    """The fake, and our commands that call it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        (self.state / "clusters").mkdir(parents=True)
        programs = folder / "bin"
        programs.mkdir()
        kind = programs / "kind"
        kind.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_kind.py")} "$@"\n')
        kind.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "FAKE_KIND_STATE": str(self.state),
            "MOONTIDE_CACHE": str(folder / "cache"),
            "KUBECONFIG": str(folder / "users-own"),
        }
        self.kubeconfig = folder / "cache" / "run" / "kind.kubeconfig"

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hack.cluster", arguments[0], "--cluster", "kind", *arguments[1:]]
        return subprocess.run(
            command,
            cwd=repository_root(),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.state / "calls").read_text().splitlines()]

    @property
    def images(self) -> list[str]:
        return (self.state / "clusters" / NAME / "images").read_text().split()


@pytest.fixture
def kind(tmp_path: Path) -> Kind:
    return Kind(tmp_path)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "program").write_text("#!/bin/sh\n")
    output = tmp_path / "small.tar"
    write_small_image(SmallImage(("/program",), {"/program": tmp_path / "program"}), "moontide.local/small:1", output)
    return output


def test_a_cluster_is_made_loaded_and_ended(kind: Kind, archive: Path) -> None:
    up = kind("up")
    assert up.returncode == 0, up.stderr
    assert up.stdout.split() == [str(kind.kubeconfig)]
    assert json.loads(kind.kubeconfig.read_text())["current-context"] == f"kind-{NAME}"
    loaded = kind("load-image", str(archive))
    assert loaded.returncode == 0, loaded.stderr
    assert kind.images == ["moontide.local/small:1"]
    assert kind("down").returncode == 0
    assert not list((kind.state / "clusters").iterdir())
    assert not kind.kubeconfig.exists()
    assert not Path(kind.environment["KUBECONFIG"]).exists(), "the user's own kubeconfig is never written"


def test_one_that_is_there_is_used_and_its_kubeconfig_written_anew(kind: Kind) -> None:
    assert kind("up").returncode == 0
    kind.kubeconfig.unlink()
    again = kind("up")
    assert again.returncode == 0, again.stderr
    assert kind.kubeconfig.exists()
    assert [call[:2] for call in kind.calls] == [
        ["get", "clusters"],
        ["create", "cluster"],
        ["get", "clusters"],
        ["export", "kubeconfig"],
    ]


def test_where_docker_does_not_answer_kinds_own_words_are_shown(kind: Kind) -> None:
    (kind.state / "no-docker").touch()
    up = kind("up")
    assert up.returncode == 1
    assert "docker ps" in up.stderr
    assert "Traceback" not in up.stderr
    assert not kind.kubeconfig.exists()


def test_an_image_goes_to_a_cluster_that_exists_or_not_at_all(kind: Kind, archive: Path) -> None:
    loaded = kind("load-image", str(archive))
    assert loaded.returncode == 1
    assert f'no nodes found for cluster "{NAME}"' in loaded.stderr


def test_an_image_of_another_architecture_says_so_in_its_archive(kind: Kind, tmp_path: Path) -> None:
    class FakeBuilder:
        """Has one image, made for arm64."""

        def to_layout(self, reference: str, folder: Path) -> None:
            config = b'{"architecture": "arm64", "os": "linux"}'
            blobs = folder / "blobs" / "sha256"
            blobs.mkdir(parents=True)
            digests = {}
            manifest = json.dumps({"config": {"digest": _put(blobs, config)}, "layers": []}).encode()
            digests["digest"] = _put(blobs, manifest)
            (folder / "index.json").write_text(json.dumps({"manifests": [digests]}))

    output = tmp_path / "arm.tar"
    Layout(tmp_path / "layout").archive(FakeBuilder(), "r", ["a.test/x:1", "a.test/x:dev"], output)  # type: ignore[arg-type]
    assert kind("up").returncode == 0
    loaded = kind("load-image", str(output))
    assert loaded.returncode == 0, loaded.stderr
    assert kind.images == ["a.test/x:1", "a.test/x:dev"]


def _put(blobs: Path, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    (blobs / digest).write_bytes(content)
    return f"sha256:{digest}"
