"""Both loops of examples/trainers against the demo's fleet, as a person runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hack.cluster.settings import repository_root
from hack.demo.cold import References
from hack.demo.fleet import Fleet
from hack.demo.install import Target
from hack.demo.kube import Kube, is_current
from hack.demo.prompts import Prompts
from tests.e2e.oracle.trainer import Trainer

STEPS = 3
SECONDS = 120


@pytest.mark.parametrize(("example", "last"), [("prime_style", 109), ("verl_style", 209)])
def test_a_loop_ends_with_the_weights_it_says(
    example: str, last: int, fleet: Fleet, kube: Kube, target: Target, texts: Prompts, references: References
) -> None:
    """A step that ends with 9 has all of policy-b's weights, so a cold engine's answers to them are known."""
    models = Path(kube.run("get", "pv", "moontide-demo-models", "-o", "jsonpath={.spec.hostPath.path}"))
    script = repository_root() / "examples" / "trainers" / f"{example}.py"
    url = fleet.replicas()[0].inference
    command = [sys.executable, str(script), "--models", str(models), "--url", url, "--namespace", fleet.namespace]
    command += ["--first", str(last - STEPS + 1), "--steps", str(STEPS)]
    environ = {**os.environ, "KUBECONFIG": str(target.kube.access.kubeconfig)}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        policy = fleet.get_policy()
        assert is_current(policy, str(last))
        for replica in fleet.replicas():
            for number, text in enumerate(texts.kept):
                answer = replica.ask(fleet.model, number, text)
                assert (answer.status, answer.version) == (200, str(last))
                assert references["policy-b"][number].equals(answer)
    finally:
        for folder in models.glob("step-*"):
            shutil.rmtree(folder)
    # The next number has the weights that all other tests give it.
    Trainer(fleet, references).change(None, hold=False)
