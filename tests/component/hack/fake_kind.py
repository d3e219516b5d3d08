"""A fake of kind: takes exactly the commands and flags that kind 0.30 documents, and keeps clusters in a folder.

What it loads is read as containerd reads it: the index names the image and its platform, and every blob of the manifest
must be there with the digest that it is named by.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tarfile
from pathlib import Path

STATE = Path(os.environ["FAKE_KIND_STATE"])


def parser() -> argparse.ArgumentParser:
    """kind's commands, as far as anybody here uses them."""
    top = argparse.ArgumentParser(prog="kind", allow_abbrev=False)
    groups = top.add_subparsers(dest="group", required=True)

    def command(
        group: argparse._SubParsersAction[argparse.ArgumentParser], name: str, *flags: str
    ) -> argparse.ArgumentParser:
        added = group.add_parser(name, allow_abbrev=False)
        if "name" in flags:
            added.add_argument("--name", "-n", default="kind")
        for flag in flags:
            if flag in ("internal", "retain"):
                added.add_argument(f"--{flag}", action="store_true")
            elif flag != "name":
                added.add_argument(f"--{flag}")
        return added

    create = groups.add_parser("create").add_subparsers(dest="what", required=True)
    command(create, "cluster", "name", "config", "image", "retain", "wait", "kubeconfig")
    delete = groups.add_parser("delete").add_subparsers(dest="what", required=True)
    command(delete, "cluster", "name", "kubeconfig")
    export = groups.add_parser("export").add_subparsers(dest="what", required=True)
    command(export, "kubeconfig", "name", "kubeconfig", "internal")
    command(groups.add_parser("get").add_subparsers(dest="what", required=True), "clusters")
    load = groups.add_parser("load").add_subparsers(dest="what", required=True)
    command(load, "image-archive", "name", "nodes").add_argument("archives", nargs="+", type=Path)
    return top


def main() -> int:
    """Run one command; 0 is success."""
    options = parser().parse_args()
    with (STATE / "calls").open("a") as stream:
        stream.write(json.dumps(sys.argv[1:]) + "\n")
    if (STATE / "no-docker").exists():
        print('ERROR: failed to list clusters: command "docker ps" failed', file=sys.stderr)
        return 1
    name = getattr(options, "name", "")
    folder = STATE / "clusters" / name
    if (options.group, options.what) == ("get", "clusters"):
        found = sorted(each.name for each in (STATE / "clusters").glob("*"))
        print("\n".join(found) if found else "", end="\n" if found else "")
        if not found:
            print("No kind clusters found.", file=sys.stderr)
        return 0
    if options.group == "delete":
        for each in folder.glob("*"):
            each.unlink()
        if folder.exists():
            folder.rmdir()
        return 0
    if options.group == "create":
        folder.mkdir(parents=True)
    elif not folder.exists():
        print(f'ERROR: no nodes found for cluster "{name}"', file=sys.stderr)
        return 1
    if options.group in ("create", "export"):
        context = {"name": f"kind-{name}", "cluster": {"server": "https://127.0.0.1:38000"}}
        Path(options.kubeconfig).write_text(json.dumps({"current-context": context["name"], "clusters": [context]}))
        return 0
    for archive in options.archives:
        with (folder / "images").open("a") as stream:
            stream.write("".join(f"{each}\n" for each in names(archive)))
    return 0


def names(archive: Path) -> list[str]:
    """Names of the images in an OCI archive. Raises where containerd would not take it."""
    with tarfile.open(archive) as opened:
        files = {each.name: opened.extractfile(each) for each in opened}
        content = {name: stream.read() for name, stream in files.items() if stream is not None}
    assert json.loads(content["oci-layout"])["imageLayoutVersion"] == "1.0.0"

    def blob(digest: str) -> bytes:
        data = content["blobs/" + digest.replace(":", "/")]
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == digest, digest
        return data

    found = []
    for entry in json.loads(content["index.json"])["manifests"]:
        manifest = json.loads(blob(entry["digest"]))
        config = json.loads(blob(manifest["config"]["digest"]))
        assert entry["platform"] == {"architecture": config["architecture"], "os": config["os"]}
        for layer in manifest["layers"]:
            assert len(blob(layer["digest"])) == layer["size"]
        found.append(entry["annotations"]["io.containerd.image.name"])
    return found


if __name__ == "__main__":
    sys.exit(main())
