"""Removes shells, the package manager and all else that the operator does not run, from a Debian root: the last step of
the build. Packages are taken out of dpkg's status, too, so that the image says what it holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGES = frozenset(
    (
        "adduser",
        "apt",
        "bash",
        "bsdutils",
        "coreutils",
        "dash",
        "debconf",
        "debianutils",
        "diffutils",
        "dpkg",
        "e2fsprogs",
        "findutils",
        "gpgv",
        "grep",
        "gzip",
        "hostname",
        "init-system-helpers",
        "libapt-pkg6.0",
        "libpam-modules-bin",
        "login",
        "logsave",
        "mawk",
        "mount",
        "ncurses-bin",
        "passwd",
        "perl-base",
        "python3-distutils",
        "python3-pip-whl",
        "python3-setuptools-whl",
        "python3-venv",
        "python3.11-venv",
        "sed",
        "sysvinit-utils",
        "tar",
        "util-linux",
        "util-linux-extra",
    )
)


def name_of(paragraph: str) -> str:
    """The package that a paragraph of dpkg's status is about."""
    return paragraph.partition("\n")[0].removeprefix("Package: ")


def strip(root: Path) -> None:
    """Remove the packages' files under ``root``. What several packages have, none of ours needs."""
    status = root / "var/lib/dpkg/status"
    paragraphs = [each for each in status.read_text().split("\n\n") if each.strip()]
    for listing in (root / "var/lib/dpkg/info").glob("*.list"):
        if listing.name.removesuffix(".list").partition(":")[0] in PACKAGES:
            for line in listing.read_text().splitlines():
                path = root / line.lstrip("/")
                if path.is_file() or (path.is_symlink() and not path.is_dir()):
                    os.unlink(path)
    for left in ("bin/sh", "usr/bin/sh", "bin/bash", "usr/bin/awk", "usr/bin/perl"):
        (root / left).unlink(missing_ok=True)
    status.write_text("\n\n".join(each.strip() for each in paragraphs if name_of(each.strip()) not in PACKAGES) + "\n")


if __name__ == "__main__":
    strip(Path(sys.argv[1]))
