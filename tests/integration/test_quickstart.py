"""docs/quickstart.md, on a cluster of one's own: its commands run in order, as they stand, against a real API server.

Stand-ins: docker, curl (it fails where no port is forwarded), the virtual environment, Helm (it renders, as the
session's operator is there already), and what needs a node: `wait` and `port-forward` look whether there is what they
are about.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "rl"
STAND_IN = r"""#!{python}
import json, os, re, subprocess, sys, time
name, given = os.path.basename(sys.argv[0]), sys.argv[1:]
with open({written!r}, "a") as stream:
    print(json.dumps([name, *given]), file=stream)

def run(*command, **more):
    return subprocess.run(command, **more).returncode

if name == "helm":
    sys.exit(run({tools!r} + "/helm", "template", *given[1:]))
if name == "python3" and given[:2] == ["-m", "venv"]:
    os.makedirs(given[2] + "/bin")
    sys.exit(os.symlink(sys.argv[0], given[2] + "/bin/pip"))
def forwarded(port):
    try:
        with open({written!r} + port) as stream:
            os.kill(int(stream.read()), 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    return True

ends = time.monotonic() + 60
if name == "curl":
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/", " ".join(given))
    while not forwarded(port):
        if time.monotonic() > ends:
            sys.exit("curl: nothing listens on port " + port)
        time.sleep(0.1)
if name != "kubectl":
    sys.exit(0)
kubectl = [{tools!r} + "/kubectl"]
if given[0] == "moontide":
    moontide = [sys.executable, "-m", "moontide.cli.entry"]
    if given[1] == "doctor":
        sys.exit(run(*moontide, *given[1:]) not in (0, 1))
    sys.exit(run(*moontide, *("--dry-run" if each == "--wait" else each for each in given[1:])))
if given[0] in ("wait", "port-forward"):
    there = [each for each in given[1:] if not each.startswith("--") and not each.isdigit()]
    while run(*kubectl, "get", *there) and time.monotonic() < ends:
        time.sleep(0.5)
    if given[0] == "wait":
        assert not run(*kubectl, "wait", "--for=create", "--timeout=60s", "-n", {namespace!r}, "secret/chat-admin")
        pods = [*kubectl, "get", "pods", "-n", {namespace!r}, "-o", "name"]
        while subprocess.check_output(pods).count(b"pod/chat-") < 2 and time.monotonic() < ends:
            time.sleep(0.5)
    if run(*kubectl, "get", *there):
        sys.exit(1)
    if given[0] == "port-forward":
        with open({written!r} + given[-1], "w") as stream:
            stream.write(str(os.getpid()))
        time.sleep(120)
    sys.exit(0)
if given[0] == "rollout":
    sys.exit(0)
sys.exit(run(*kubectl, *given))
"""


def _script() -> str:
    """Every command of the page from the section on, without what is in lists and tables."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    blocks = re.findall(
        r"^```sh\n(.*?)^```$", page[page.index("## On a cluster of your own") :], re.DOTALL | re.MULTILINE
    )
    assert len(blocks) >= 5
    return "set -euo pipefail\n" + "".join(blocks)


@pytest.fixture(name="commands")
def _commands(kubectl: Any, operator: Any, tools: Path, tmp_path: Path) -> Iterator[tuple[list[list[str]], str]]:
    """What was run, and what was printed."""
    written, folder = tmp_path / "written", tmp_path / "bin"
    folder.mkdir()
    stand_in = STAND_IN.format(
        python=sys.executable,
        written=str(written),
        tools=str(tools),
        namespace=NAMESPACE,
    )
    for name in ("docker", "curl", "python3", "helm", "kubectl"):
        (folder / name).write_text(stand_in)
        (folder / name).chmod(0o755)
    environ = {
        **os.environ,
        "KUBECONFIG": str(kubectl.kubeconfig),
        "HOME": str(tmp_path),
        "PATH": f"{folder}:/usr/bin:/bin",
    }
    try:
        done = subprocess.run(
            ["bash", "-c", _script()], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield [json.loads(line) for line in written.read_text().splitlines()], done.stdout
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=false", "--ignore-not-found")


def test_each_command_of_the_page_runs_after_the_one_before(
    commands: tuple[list[list[str]], str], kubectl: Any
) -> None:
    ran, printed = commands
    for built in [each for each in ran if each[:2] == ["docker", "build"]]:
        assert (ROOT / built[built.index("-f") + 1]).is_file()
    pushed = {each[2] for each in ran if each[:2] == ["docker", "push"]}
    (helm,) = (each for each in ran if each[0] == "helm")
    named = {part.partition("=")[2] for part in helm if "image=" in part}
    # What the chart is told is what was pushed, and has a tag.
    assert named == pushed
    assert all(re.fullmatch(r"[\w./-]+:[\w.]+", each) for each in pushed)
    assert f'image: "{next(each for each in pushed if "/operator:" in each)}"' in printed

    fleet = kubectl.must_get("ifd", "chat", NAMESPACE)
    (forwarded,) = {each[-1] for each in ran if each[1:2] == ["port-forward"] and "svc/chat" in each}
    assert forwarded == "8000"
    pods = [each for each in ran if each[1:2] == ["port-forward"] and "svc/chat" not in each]
    assert len(pods) == fleet["spec"]["replicas"] == 2
    told = [each for each in ran if each[0] == "curl" and any(part.endswith("/collective_rpc") for part in each)]
    assert len(told) == len(pods)
    token = next(part for part in told[0] if part.startswith("Authorization: Bearer "))
    assert len(token) > len("Authorization: Bearer ") + 20
    assert "version 2 (dry run, nothing is changed)" in printed
