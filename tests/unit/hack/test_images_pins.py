"""The operator's image installs what requirements/operator.txt asks for, each distribution pinned with its hashes."""

from __future__ import annotations

import re

from packaging.requirements import Requirement

from hack.cluster.settings import repository_root

FOLDER = repository_root() / "requirements"


def pins() -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each distribution."""
    text = (FOLDER / "operator-image.txt").read_text().replace("\\\n", " ")
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


def test_the_image_takes_nothing_else() -> None:
    steps = (FOLDER.parent / "images" / "operator" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    installs = [line for line in steps if "pip install" in line]
    assert len(installs) == 2
    assert all("--require-hashes" in line or "--no-deps --no-build-isolation" in line for line in installs)
