"""The cluster's programs, built from pinned Go modules into a folder named after the hash of all inputs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import cache_root

SOURCE = Path(__file__).resolve().parent
HEARTBEAT_SECONDS = 10.0


@dataclass(frozen=True)
class Build:
    """One `go build` in one module. `renames` maps the file that Go writes to the name that the program has."""

    title: str
    module_dir: str
    packages: tuple[str, ...]
    ldflags: tuple[str, ...]
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the files that this build gives."""
        renames = dict(self.renames)
        written = [_file_name(package) for package in self.packages]
        return tuple(renames.get(name, name) for name in written)


def _file_name(package: str) -> str:
    parts = package.rstrip("/").split("/")
    return parts[-2] if re.fullmatch(r"v\d+", parts[-1]) else parts[-1]


def required_version(go_mod: str, module: str) -> str:
    """The version of a module that a go.mod asks for."""
    found = re.search(rf"^(?:require\s+|\t){re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    if not found:
        raise ClusterError(f"go.mod does not require {module}")
    return found[1]


def builds() -> tuple[Build, ...]:
    """What is built, in order of how much the rest waits for it."""
    kubernetes = required_version((SOURCE / "go.mod").read_text(), "k8s.io/kubernetes")
    helm = required_version((SOURCE / "helm" / "go.mod").read_text(), "helm.sh/helm/v4")
    major, minor = kubernetes.removeprefix("v").split(".")[:2]
    stamp = "k8s.io/component-base/version"
    return (
        Build(
            "kubernetes and etcd",
            ".",
            (
                *(
                    f"k8s.io/kubernetes/cmd/{name}"
                    for name in (
                        "kube-apiserver",
                        "kube-controller-manager",
                        "kube-scheduler",
                        "kubelet",
                        "kube-proxy",
                        "kubectl",
                    )
                ),
                "go.etcd.io/etcd/server/v3",
                "./pause",
            ),
            (
                # kubectl refuses to compare versions when the binaries carry none.
                f"-X {stamp}.gitVersion={kubernetes}",
                f"-X {stamp}.gitMajor={major}",
                f"-X {stamp}.gitMinor={minor}",
            ),
            (("server", "etcd"),),
        ),
        Build("CoreDNS", "coredns", ("moontide.dev/hack/cluster/coredns",), ()),
        Build("Helm", "helm", ("helm.sh/helm/v4/cmd/helm",), (f"-X helm.sh/helm/v4/internal/version.version={helm}",)),
    )


def input_hash(source: Path = SOURCE, plans: tuple[Build, ...] | None = None) -> str:
    """Hash of the Go files, the pins and the build flags: the same inputs give the same folder."""
    digest = hashlib.sha256()
    for pattern in ("go.mod", "go.sum", "*/go.mod", "*/go.sum", "*/*.go"):
        for path in sorted(source.glob(pattern)):
            digest.update(f"{path.relative_to(source)}\0".encode())
            digest.update(path.read_bytes())
            digest.update(b"\0")
    digest.update(repr(plans if plans is not None else builds()).encode())
    return digest.hexdigest()[:16]


def bin_dir() -> Path:
    """The folder of the programs that match this checkout; it may not exist yet."""
    return cache_root() / f"bin-{input_hash()}"


def ensure(progress: Progress) -> Path:
    """Build what is missing and return the folder. Each program appears there whole or not at all."""
    target = bin_dir()
    target.mkdir(parents=True, exist_ok=True)
    for build in builds():
        missing = [name for name in build.programs if not (target / name).exists()]
        if missing:
            _run(build, target, progress)
    return target


def program(name: str, progress: Progress) -> Path:
    """One of the programs: ours if it is built, else the machine's own, else it is built together with the others."""
    own = bin_dir() / name
    if own.exists():
        return own
    found = shutil.which(name)
    return Path(found) if found else ensure(progress) / name


def _go() -> str:
    go = shutil.which("go") or ("/usr/local/go/bin/go" if Path("/usr/local/go/bin/go").exists() else None)
    if go is None:
        raise ClusterError("Go is not installed; the cluster's programs are built from Go modules (see hack/cluster)")
    return go


def _run(build: Build, target: Path, progress: Progress) -> None:
    scratch = target / f".build-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    flags = " ".join(("-s", "-w", *build.ldflags))
    command = [_go(), "build", "-v", "-trimpath", "-ldflags", flags, "-o", f"{scratch}/", *build.packages]
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}
    progress.say(f"building {build.title}: {', '.join(build.programs)} (minutes on a cold machine)")
    began = time.monotonic()
    last_lines: list[str] = []
    counts = {"compiled": 0, "downloaded": 0}
    process = subprocess.Popen(
        command, cwd=SOURCE / build.module_dir, env=environment, stderr=subprocess.PIPE, text=True
    )

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            counts["downloaded" if line.startswith("go: downloading") else "compiled"] += 1
            last_lines.append(line)
            del last_lines[:-40]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                process.wait(timeout=HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                progress.say(
                    f"  {build.title}: {counts['compiled']} packages compiled, {counts['downloaded']} modules "
                    f"downloaded, {time.monotonic() - began:.0f} s"
                )
        reader.join()
        if process.returncode != 0:
            raise ClusterError(f"go build of {build.title} failed:\n{''.join(last_lines)}")
        renames = dict(build.renames)
        for written in scratch.iterdir():
            written.rename(target / renames.get(written.name, written.name))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
        shutil.rmtree(scratch, ignore_errors=True)
    progress.say(f"built {build.title} in {time.monotonic() - began:.1f} s ({counts['compiled']} packages compiled)")
