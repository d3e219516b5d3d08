from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import IO, Any

import pytest

from hack.cluster.archives import digest_of
from hack.images import layouts
from hack.images.layouts import Layout

LARGE, SMALL, CONFIG = b"L" * 4096, b"s" * 10, b'{"config": 1}'


class FakeBuilder:
    """Writes layers as the real one does: one that lies in the layout with its size is left alone."""

    def __init__(self, layers: list[bytes]) -> None:
        self.layers = layers
        self.written: list[bytes] = []

    def to_layout(self, reference: str, folder: Path) -> None:
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        manifest = json.dumps(
            {
                "config": {"digest": digest_of(CONFIG), "size": len(CONFIG)},
                "layers": [{"digest": digest_of(layer), "size": len(layer)} for layer in self.layers],
            }
        ).encode()
        for content in (*self.layers, CONFIG, manifest):
            path = blobs / digest_of(content).partition(":")[2]
            if not path.exists():
                path.write_bytes(content)
                self.written.append(content)
        entries = [{"digest": digest_of(manifest)}]
        if (folder / "index.json").exists():
            entries += json.loads((folder / "index.json").read_text())["manifests"]
        (folder / "index.json").write_text(json.dumps({"manifests": entries}))


class FakeRuntime:
    """Takes an archive like containerd: what the manifest names must be there, in the archive or from before."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.names: list[str] = []

    def content(self) -> set[str]:
        return set(self.held)

    def import_stream(self, write: Any) -> None:
        buffer = io.BytesIO()
        stream: IO[bytes] = buffer
        write(stream)
        buffer.seek(0)
        index: dict[str, Any] = {}
        with tarfile.open(fileobj=buffer, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None
                data = content.read()
                if member.name == "index.json":
                    index = json.loads(data)
                elif member.name.startswith("blobs/"):
                    assert digest_of(data) == member.name.removeprefix("blobs/").replace("/", ":")
                    self.held[digest_of(data)] = data
        manifest = json.loads(self.held[index["manifests"][0]["digest"]])
        for part in (manifest["config"], *manifest["layers"]):
            assert part["digest"] in self.held
        self.names = [entry["annotations"]["io.containerd.image.name"] for entry in index["manifests"]]


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "LARGE_BYTES", 1024)


def test_the_first_transfer_sends_everything(tmp_path: Path) -> None:
    builder, runtime = FakeBuilder([LARGE, SMALL]), FakeRuntime()
    done = Layout(tmp_path / "x").send(builder, "r", ["a:dev", "a:key"], runtime)  # type: ignore[arg-type]
    assert (done.layers, done.sent_layers) == (2, 2)
    assert done.sent_bytes == len(LARGE) + len(SMALL) + len(CONFIG)
    assert runtime.names == ["a:dev", "a:key"]


def test_the_next_one_neither_writes_nor_sends_the_large_layer(tmp_path: Path) -> None:
    runtime, layout = FakeRuntime(), Layout(tmp_path / "x")
    layout.send(FakeBuilder([LARGE, SMALL]), "r", ["a"], runtime)  # type: ignore[arg-type]
    builder = FakeBuilder([LARGE, b"new"])
    done = layout.send(builder, "r", ["a"], runtime)  # type: ignore[arg-type]
    assert (done.sent_layers, done.sent_bytes) == (1, 3)
    assert done.image_bytes == len(LARGE) + 3
    assert LARGE not in builder.written


def test_no_stand_in_is_left_behind_or_sent_to_a_runtime_that_lost_its_images(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "x")
    runtime = FakeRuntime()
    for _ in range(2):
        layout.send(FakeBuilder([LARGE, SMALL]), "r", ["a"], runtime)  # type: ignore[arg-type]
        assert not any(path.stat().st_size >= 1024 for path in (tmp_path / "x/blobs/sha256").iterdir())
    emptied = FakeRuntime()
    done = layout.send(FakeBuilder([LARGE, SMALL]), "r", ["a"], emptied)  # type: ignore[arg-type]
    assert done.sent_layers == 2
    assert emptied.held[digest_of(LARGE)] == LARGE


def test_a_failed_transfer_leaves_no_stand_in(tmp_path: Path) -> None:
    layout, runtime = Layout(tmp_path / "x"), FakeRuntime()
    layout.send(FakeBuilder([LARGE, SMALL]), "r", ["a"], runtime)  # type: ignore[arg-type]

    def fail(write: Any) -> None:
        raise OSError("broken")

    runtime.import_stream = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="broken"):
        layout.send(FakeBuilder([LARGE, b"new"]), "r", ["a"], runtime)  # type: ignore[arg-type]
    assert not any(path.stat().st_size >= 1024 for path in (tmp_path / "x/blobs/sha256").iterdir())


def test_an_archive_holds_the_whole_image(tmp_path: Path) -> None:
    Layout(tmp_path / "x").archive(FakeBuilder([LARGE, SMALL]), "r", ["a"], tmp_path / "a.tar")  # type: ignore[arg-type]
    runtime = FakeRuntime()
    runtime.import_stream(lambda stream: stream.write((tmp_path / "a.tar").read_bytes()))
    assert digest_of(LARGE) in runtime.held
