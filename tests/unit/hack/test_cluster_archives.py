from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from hack.cluster.archives import SmallImage, digest_of, small_layer, write_oci_archive, write_small_image


@pytest.fixture
def image(tmp_path: Path) -> SmallImage:
    (tmp_path / "program").write_bytes(b"\x7fELF")
    return SmallImage(("/bin/program",), {"/bin/program": tmp_path / "program"}, {"/bin/alias": "/bin/program"})


def read_archive(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        members = {}
        for member in archive:
            stream = archive.extractfile(member)
            assert stream is not None
            members[member.name] = stream.read()
        return members


def test_an_archive_is_consistent_down_to_its_digests(image: SmallImage, tmp_path: Path) -> None:
    write_small_image(image, "moontide.local/x:1", tmp_path / "x.tar")
    members = read_archive(tmp_path / "x.tar")
    for name, content in members.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(content).hexdigest() == name.rpartition("/")[2]
    entry = json.loads(members["index.json"])["manifests"][0]
    assert entry["annotations"]["io.containerd.image.name"] == "moontide.local/x:1"
    manifest = json.loads(members[f"blobs/{entry['digest'].replace(':', '/')}"])
    config = json.loads(members[f"blobs/{manifest['config']['digest'].replace(':', '/')}"])
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    assert config["config"]["Entrypoint"] == ["/bin/program"]
    assert config["config"]["User"] == "10001:10001"


def test_a_layer_is_the_same_each_time_and_holds_files_links_and_folders(image: SmallImage) -> None:
    layer = small_layer(image)
    assert layer == small_layer(image)
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        assert archive.getmember("bin/program").mode == 0o755
        assert archive.getmember("bin/alias").linkname == "bin/program"
        assert archive.getmember("tmp").mode == 0o1777
        names = archive.getnames()
    assert names.index("bin") < names.index("bin/program")
    assert len(names) == len(set(names))


def test_the_key_follows_the_content(image: SmallImage) -> None:
    before = image.key()
    assert image.key() == before
    next(iter(image.files.values())).write_bytes(b"\x7fELF2")
    assert image.key() != before


def test_blobs_may_be_left_out_and_names_may_be_several(tmp_path: Path) -> None:
    manifest = json.dumps({"layers": []}).encode()
    with (tmp_path / "x.tar").open("wb") as stream:
        write_oci_archive(stream, ["a:1", "b:2"], manifest, [("sha256:" + "0" * 64, io.BytesIO(b"blob"))])
    members = read_archive(tmp_path / "x.tar")
    entries = json.loads(members["index.json"])["manifests"]
    assert [entry["annotations"]["io.containerd.image.name"] for entry in entries] == ["a:1", "b:2"]
    assert {entry["digest"] for entry in entries} == {digest_of(manifest)}
    assert members["blobs/sha256/" + "0" * 64] == b"blob"
