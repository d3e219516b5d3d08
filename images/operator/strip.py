"""Removes shells, package managers and all else that the operator does not run, from a Debian root: the last step of
the build, which fails if any is left. Packages are taken out of dpkg's status, too: the image says what it holds."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
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

# Of a Python that no package of Debian's brought, as in the python images.
DISTRIBUTIONS = ("pip", "setuptools", "wheel", "pkg_resources", "_distutils_hack")
UNWANTED = re.compile(
    r"(.*/)?(s?bin/(sh|[bd]ash|rbash|busybox|perl[\w.-]*|apt(-\w+)?|dpkg(-[\w-]+)?|pip[\d.]*)"
    r"|lib/python3[\d.]*/((site|dist)-packages/)?(pip|ensurepip)/__init__\.py)"
)
"""Paths of what must not be in the image."""


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
    for library in (root / "usr/local/lib").glob("python3.*"):
        shutil.rmtree(library / "ensurepip", ignore_errors=True)
        for distribution in DISTRIBUTIONS:
            shutil.rmtree(library / "site-packages" / distribution, ignore_errors=True)
            for about in (library / "site-packages").glob(f"{distribution}-*.dist-info"):
                shutil.rmtree(about)
        (library / "site-packages/distutils-precedence.pth").unlink(missing_ok=True)
    for program in (*(root / "usr/local/bin").glob("pip*"), *(root / "usr/local/bin").glob("wheel*")):
        program.unlink()
    status.write_text("\n\n".join(each.strip() for each in paragraphs if name_of(each.strip()) not in PACKAGES) + "\n")


def files(root: Path) -> Iterator[str]:
    """Every file and link under ``root`` as a path from there, but for what is mounted there during a build."""
    mounted = {root / each for each in ("proc", "sys", "dev", "var/cache")}
    for folder, below, names in os.walk(root):
        links = [each for each in below if os.path.islink(os.path.join(folder, each))]
        below[:] = [each for each in below if Path(folder) / each not in mounted]
        yield from (os.path.relpath(os.path.join(folder, name), root) for name in (*names, *links))


def unwanted(paths: Iterable[str]) -> list[str]:
    """Those of ``paths``, relative to the root, that are a shell, a package manager, or what brings one."""
    return sorted(path for path in paths if UNWANTED.fullmatch(path))


if __name__ == "__main__":
    strip(Path(sys.argv[1]))
    if left := unwanted(files(Path(sys.argv[1]))):
        sys.exit(f"the operator's image must have no shell and no package manager, and has: {', '.join(left)}")
