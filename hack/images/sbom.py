"""What an image holds, as a CycloneDX document: the Debian packages and the Python distributions in its layers."""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from hack.cluster.errors import ClusterError
from hack.cluster.settings import cache_root
from hack.images.builder import Builder

Files = dict[str, str]
Read = Callable[[tarfile.TarFile, tarfile.TarInfo, PurePosixPath], str | None]
DPKG = "var/lib/dpkg/status"
RELEASE = "usr/lib/os-release"


def document(builder: Builder, reference: str) -> str:
    """The SBOM of an image that the builder holds. Raises ClusterError for one that has nothing of what we know."""
    with tempfile.TemporaryDirectory(prefix="sbom-", dir=cache_root()) as folder:
        builder.to_layout(reference, Path(folder))
        found = components(files(layers(Path(folder))))
    if not found:
        raise ClusterError(
            f"{reference} has neither Debian packages nor Python distributions, and nothing else is read"
        )
    return render(reference, found)


def layers(layout: Path) -> list[Path]:
    """The layers of the one image in a folder in OCI layout, the lowest first."""

    def blob(digest: str) -> Path:
        return layout / "blobs" / Path(*digest.split(":"))

    (only,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(blob(only["digest"]).read_text())
    return [blob(layer["digest"]) for layer in manifest["layers"]]


def files(tars: Iterable[Path]) -> Files:
    """The files that say what is installed, by path, as the layers leave them on top of each other."""

    def text(layer: tarfile.TarFile, member: tarfile.TarInfo, place: PurePosixPath) -> str | None:
        if not member.isfile() or not (str(place) in (DPKG, RELEASE) or _describes(place)):
            return None
        content = layer.extractfile(member)
        assert content is not None
        return content.read().decode(errors="replace")

    return merged(tars, text)


def merged(tars: Iterable[Path], read: Read) -> Files:
    """What ``read`` says of each member, by path from the root, as the layers leave them on top of each other; nothing
    of a member of which it says None."""
    found: Files = {}
    for path in tars:
        with tarfile.open(path) as layer:
            added: Files = {}
            for member in layer:
                place = PurePosixPath(member.name.lstrip("/"))
                if place.name.startswith(".wh."):
                    _hide(found, place)
                elif (said := read(layer, member, place)) is not None:
                    added[str(place)] = said
            found.update(added)
    return found


def _hide(found: Files, mark: PurePosixPath) -> None:
    """Take out what a mark of removal hides in the layers below."""
    gone = str(mark.parent if mark.name == ".wh..wh..opq" else mark.with_name(mark.name.removeprefix(".wh.")))
    for name in [each for each in found if each == gone or each.startswith(f"{gone}/")]:
        del found[name]


def _describes(place: PurePosixPath) -> bool:
    return place.name == "METADATA" and place.parent.name.endswith(".dist-info")


def components(found: Mapping[str, str]) -> list[dict[str, str]]:
    """A component each, in the order of their package URLs."""
    system = _system(found.get(RELEASE, ""))
    made = [_debian(*each, *system) for each in _packages(found.get(DPKG, ""))]
    for name, text in found.items():
        if name not in (DPKG, RELEASE):
            said = HeaderParser().parsestr(text)
            made.append(_python(str(said["Name"]), str(said["Version"])))
    return [one for _, one in sorted({each["purl"]: each for each in made}.items())]


def _system(release: str) -> tuple[str, str]:
    """Vendor and suite that os-release names, for the packages' URLs; ("debian", "") where it names none."""
    said = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    return said.get("ID", "debian").strip('"'), said.get("VERSION_CODENAME", "").strip('"')


def _packages(status: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and architecture of each package that dpkg says is installed."""
    for paragraph in status.split("\n\n"):
        said = HeaderParser().parsestr(paragraph.strip())
        if said["Status"] == "install ok installed":
            yield str(said["Package"]), str(said["Version"]), str(said["Architecture"])


def _debian(name: str, version: str, architecture: str, vendor: str, suite: str) -> dict[str, str]:
    purl = f"pkg:deb/{vendor}/{quote(name)}@{quote(version)}?arch={architecture}" + (
        f"&distro={suite}" if suite else ""
    )
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _python(name: str, version: str) -> dict[str, str]:
    purl = f"pkg:pypi/{quote(name.lower().replace('_', '-'))}@{quote(version)}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def render(reference: str, parts: list[dict[str, str]]) -> str:
    """CycloneDX 1.5, the same text for the same image."""
    image = {"type": "container", "bom-ref": reference, "name": reference}
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": image},
        "components": parts,
    }
    return json.dumps(content, indent=2) + "\n"
