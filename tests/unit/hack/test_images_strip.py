"""The operator's image without a shell: what the last step of its build removes from a Debian root."""

from __future__ import annotations

import runpy
from pathlib import Path

from hack.cluster.settings import repository_root

FOLDER = repository_root() / "images" / "operator"
STATUS = """Package: dash
Status: install ok installed
Version: 1

Package: libc6
Status: install ok installed
Version: 2
"""


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
