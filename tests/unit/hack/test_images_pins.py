"""Images install distributions that are pinned with their hashes; the CPU engine's are pinned by version alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hack.cluster.settings import repository_root

FOLDER = repository_root() / "requirements"


HASHED = ("operator-image", "build", "mooncake", "mooncake-cuda12", "mooncake-cuda13")


def pins(name: str = "operator-image") -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each distribution."""
    text = (FOLDER / f"{name}.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            matched = re.fullmatch(r"([a-z0-9-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", line)
            assert matched is not None, f"neither pinned nor hashed: {line[:80]}"
            found[matched[1]] = (matched[2], matched[3].count("--hash"))
    return found


def test_every_distribution_of_the_operators_image_is_pinned_and_hashed() -> None:
    found = pins()
    wanted = [Requirement(each) for each in (FOLDER / "operator.txt").read_text().split("\n") if each.strip()]
    assert len(wanted) >= 5
    for each in wanted:
        version, hashes = found[each.name]
        assert each.specifier.contains(version), f"{each} is pinned to {version}"
        assert hashes >= 1
    assert "hatchling" in found


@pytest.mark.parametrize("name", HASHED)
def test_pins_are_whole_and_name_no_index(name: str) -> None:
    assert all(hashes >= 1 for _, hashes in pins(name).values())
    assert not re.search(r"--(extra-)?index-url|--find-links|://", (FOLDER / f"{name}.txt").read_text())


def test_master_and_engines_have_one_client_and_the_same_of_all_else() -> None:
    def version(text: str, name: str) -> str | None:
        found = re.search(rf"^{name}==([^\s;]+)", text, re.MULTILINE)
        return found and found[1]

    client = pins("mooncake")["mooncake-transfer-engine-non-cuda"][0]
    for engine in sorted(FOLDER.glob("engine-cpu*.txt")):
        text = engine.read_text()
        if engine.name.endswith(".overrides.txt"):
            continue
        for name, (pinned, _) in {**pins("mooncake"), **pins("build")}.items():
            assert version(text, name) in (pinned, None), f"{name} of {engine.name}"
        assert version(text, "mooncake-transfer-engine-non-cuda") == client
    assert pins("mooncake-cuda13")["mooncake-transfer-engine-cuda13"][0] == client
    assert pins("mooncake-cuda12")["mooncake-transfer-engine"][0] == client
    assert pins("build")["hatchling"] == pins()["hatchling"]


@pytest.mark.parametrize("path", sorted((FOLDER.parent / "images").rglob("Dockerfile*")), ids=lambda path: path.name)
def test_no_image_takes_what_is_not_pinned(path: Path) -> None:
    steps = path.read_text().replace("\\\n", " ").splitlines()
    installs = [part for line in steps for part in line.split("&&") if "pip install" in part]
    for each in installs:
        pinned = "--require-hashes --only-binary :all:" in each or "--no-deps --no-build-isolation" in each
        # The CPU engine, for demo and tests: its closure is pinned whole, by version.
        of_cpu = path.name == "Dockerfile.cpu-env" and ("--override" in each or '"uv==${UV_VERSION}"' in each)
        assert pinned or of_cpu, each
    assert installs or path.parent.name == "etcd" or path.name == "Dockerfile.cpu-demo"
    # Not even what builds them.
    assert ">=" not in path.read_text()
