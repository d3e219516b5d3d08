"""`kubectl moontide`: what it asks of the API server, what it prints, and how it ends."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from moontide.trainer import cli
from moontide.trainer.access import Access
from moontide.trainer.cli import main, version_of
from tests.unit.trainer.cluster import Cluster

Served = Callable[..., tuple[Cluster, Path]]
Run = Callable[..., int]


@pytest.fixture(name="here")
def _here(served: Served, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster that $KUBECONFIG names."""
    cluster, kubeconfig = served()
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    return cluster


def wrong(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that wrong arguments give."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_numbers_are_sent_as_numbers() -> None:
    found = [version_of(text) for text in ("43", "0", "043", "step-43", "9" * 19)]
    assert found == [43, 0, "043", "step-43", "9" * 19]


def test_wrong_arguments_are_one_line_that_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert wrong(capsys, "bump", "policy").endswith("write: kubectl moontide bump NAME VERSION [options]\n")
    assert "for example 43 or step-43" in wrong(capsys, "bump", "policy", "a b")
    assert "'bump', 'prepare', 'commit', 'abort', 'reset', 'wait', 'status'" in wrong(capsys, "frob")
    assert "write: kubectl moontide COMMAND NAME" in wrong(capsys)
    for bad in ("5q", "-1", "0", "nan", "inf", ""):
        assert "for example 90s, 5m or 1h" in wrong(capsys, "wait", "policy", f"--timeout={bad}")
    assert "invalid choice: 'ready'" in wrong(capsys, "wait", "policy", "--for", "ready")
    assert "unrecognized arguments" in wrong(capsys, "status", "policy", "more")


def test_help_tells_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "3 not in time" in " ".join(capsys.readouterr().out.split())


def test_bump(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.world.push_weights("2")
    assert main(["bump", "policy", "2", "--wait", "--timeout", "1m"]) == cli.DONE
    assert here.patches == [{"version": 2}]
    said = capsys.readouterr().out
    assert said.startswith("PolicyVersion rl/policy: spec.version is 2\n")
    assert re.search(r"^ +\d+\.\d\d s  Current=False \(Quiescing\) 0/2 replicas: ", said, re.M)
    assert said.endswith("PolicyVersion rl/policy: version 2 is current in epoch 2, 2/2 replicas\n")
    assert main(["bump", "policy", "2"]) == cli.DONE
    assert here.body["metadata"]["generation"] == 2


def test_bump_while_another_is_prepared_is_refused(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.edit(preparing=3)
    assert main(["bump", "policy", "2"]) == cli.FAILED
    assert "kubectl moontide commit policy -n rl" in capsys.readouterr().err
    assert main(["bump", "policy", "3"]) == cli.FAILED
    assert "write: kubectl moontide commit policy -n rl" in capsys.readouterr().err
    assert main(["reset", "policy"]) == cli.FAILED
    assert "a reset would begin that anew" in capsys.readouterr().err
    assert here.patches == []


def test_prepare_commit(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "policy", "2"]) == cli.DONE
    assert capsys.readouterr().out == "PolicyVersion rl/policy: spec.preparing is 2\n"
    assert main(["commit", "policy"]) == cli.FAILED
    assert "write: kubectl moontide wait policy -n rl --for prepared" in capsys.readouterr().err
    assert main(["wait", "policy", "--for", "prepared"]) == cli.DONE
    said = capsys.readouterr().out
    assert "version 2 may be pushed, epoch 2 is one of transit" in said
    assert "  tiny  10.0.0.1:8001  token in Secret tiny-admin" in said
    assert "first" not in said
    here.world.push_weights("2")
    assert main(["commit", "policy", "--wait"]) == cli.DONE
    assert here.patches == [{"preparing": 2}, {"version": 2, "preparing": None}]
    assert "version 2 is current in epoch 3, 2/2 replicas" in capsys.readouterr().out


def test_prepare_and_wait(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "policy", "2", "--wait"]) == cli.DONE
    assert "may be pushed" in capsys.readouterr().out
    assert main(["prepare", "policy", "1"]) == cli.FAILED
    assert "prepare the next one" in capsys.readouterr().err


def test_a_preparation_that_is_late(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.world.pod(0).engine.running = 1
    assert main(["prepare", "policy", "2", "--wait", "--timeout", "0.05s"]) == cli.LATE
    assert "kubectl moontide abort policy -n rl" in capsys.readouterr().err
    assert here.spec["preparing"] == 2


def test_abort(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.edit(preparing=2)
    here.settle()
    assert main(["abort", "policy"]) == cli.DONE
    assert main(["abort", "policy"]) == cli.DONE
    assert "preparing" not in here.spec
    assert capsys.readouterr().out == (
        "PolicyVersion rl/policy: version 2 is aborted\nPolicyVersion rl/policy: nothing was being prepared\n"
    )


def test_nothing_to_commit_or_wait_for(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["commit", "policy"]) == cli.FAILED
    assert main(["wait", "policy", "--for=prepared"]) == cli.FAILED
    said = capsys.readouterr().err
    assert said.count("write: kubectl moontide prepare policy -n rl VERSION") == 2
    assert here.patches == []


def test_an_expired_preparation_is_not_committed(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.edit(preparing=2)
    here.settle()
    here.world.pass_time(700)
    here.settle()
    assert main(["commit", "policy"]) == cli.FAILED
    assert "(Expired), so nothing is committed; write: kubectl moontide abort" in capsys.readouterr().err
    assert main(["wait", "policy", "--for=prepared"]) == cli.FAILED
    assert "raise it" in capsys.readouterr().err


def test_reset(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reset", "policy", "--wait"]) == cli.DONE
    assert main(["reset", "policy", "--wait"]) == cli.DONE
    nonces = [patch["resetNonce"] for patch in here.patches]
    assert len(set(nonces)) == 2
    assert all(re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}", nonce) for nonce in nonces)
    assert "version 1 is current in epoch 3" in capsys.readouterr().out


def test_wait_in_vain(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.edit(version=2)
    assert main(["wait", "policy", "--timeout", "0.05"]) == cli.LATE
    said = capsys.readouterr()
    assert "Current=False (WaitingForWeights)" in said.out
    assert "POST /update_weight_version" in said.err


def test_a_suspended_policy_is_said_to_be(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.edit(suspend=True)
    assert main(["bump", "policy", "2"]) == cli.DONE
    assert "spec.suspend is true: nothing begins until it is false" in capsys.readouterr().out


def test_status(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.world.push_weights("2")
    here.edit(version=2)
    here.settle()
    assert main(["status", "policy"]) == cli.DONE
    said = capsys.readouterr().out
    assert said.startswith("rl/policy, strategy Barrier, weights External\n  version      2\n  epoch        2\n")
    assert "  replicas     2/2 current, 0 closed\n" in said
    assert "  Current      True  Current  2/2 replicas serve version 2 in epoch 2\n" in said
    assert "last change: version 2, epoch 2, began 2026-01-01T00:00:0" in said
    assert re.search(r"^ +\+0\.\d{3} s  quiesced\n +\+0\.\d{3} s  ", said, re.M)
    history = said.split("history, newest first\n")[1].splitlines()
    assert history[0].split() == ["VERSION", "EPOCH", "BEGAN", "TOOK", "PAUSED", "REPLICAS", "KEYS", "REMOVED"]
    assert [line.split()[:2] for line in history[1:]] == [["2", "2"], ["1", "1"]]


def test_status_in_trouble(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    here.edit(preparing=2)
    here.world.pod(0).engine.hung = True
    here.settle()
    assert main(["status", "policy"]) == cli.DONE
    said = capsys.readouterr().out
    assert re.search(r"preparing    2 in epoch 2, since \S+: getting ready, 0 engines\n", said)
    assert re.search(r"failing since \S+: tiny-1, quiesce: Unreachable Timeout: no answer\n", said)
    assert "  not finished\n" in said
    here.on_get = lambda: None
    here.edit(suspend=True, version=3)
    assert main(["status", "policy"]) == cli.DONE
    said = capsys.readouterr().out
    assert "weights External, suspended\n  version      1 (asked for: 3)\n" in said
    assert "the operator has not looked at generation 3 yet" in said


def test_status_of_a_policy_that_nobody_has_looked_at(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    del here.body["status"]
    here.on_get = lambda: None
    here.edit(preparing=2)
    assert main(["status", "policy"]) == cli.DONE
    said = capsys.readouterr().out
    assert "version      none (asked for: 1)" in said
    assert "preparing    2, not begun" in said


def test_not_found_and_no_server(here: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "other"]) == cli.FAILED
    assert main(["status", "polv/policy"]) == cli.FAILED
    assert main(["status", "policy", "--context", "nowhere"]) == cli.FAILED
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "kubectl get polv -A" in said[0]
    assert "write it alone" in said[1]
    assert "name one of: here" in said[2]


def test_the_namespace_may_stand_before_and_after_the_command(
    here: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-n", "other", "status", "policy"]) == cli.FAILED
    assert main(["status", "policy", "-n", "other"]) == cli.FAILED
    assert capsys.readouterr().err.count("no PolicyVersion other/policy") == 2
    assert main(["status", "policy", "-n", "rl"]) == cli.DONE
    assert here.patches == []


def test_an_interrupt_ends_it_quietly(here: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Api, "run", interrupt)
    assert main(["status", "policy"]) == cli.INTERRUPTED
    assert here.requests == []


def test_the_console_script(here: Cluster) -> None:
    script = Path(sys.executable).parent / "kubectl-moontide"
    done = subprocess.run([script, "wait", "policy"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PolicyVersion rl/policy: version 1 is current in epoch" in done.stdout
    assert here.requests


@pytest.mark.parametrize("server", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_where_no_cluster_is_it_says_so_at_once(
    here: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    def no_sleep(seconds: float) -> None:
        raise AssertionError("it waits")

    def resolve(host: str, *_: object, **__: object) -> list[object]:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("moontide.trainer.kube.time.sleep", no_sleep)
    if "invalid" in server:
        monkeypatch.setattr("socket.getaddrinfo", resolve)
    access = Access(server, "rl", "kubeconfig here")
    for arguments in (["bump", "policy", "2"], ["wait", "policy"], ["status", "policy"]):
        assert main(arguments, access=access) == cli.LATE
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"kubectl moontide: no answer from kubeconfig here: {server}: ConnectError")
        assert said.err.endswith("; is it up, and is it the right context?\n")
        assert said.err.count("\n") == 1


def test_one_that_has_answered_is_waited_for(
    here: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = httpx.Client.request, list[str]()

    def flaky(client: httpx.Client, **call: Any) -> httpx.Response:
        asked.append(call["method"])
        if len(asked) == 2:
            raise httpx.ConnectError("Connection refused")
        return real(client, **call)

    monkeypatch.setattr(httpx.Client, "request", flaky)
    assert main(["bump", "policy", "2"]) == cli.DONE
    assert "ConnectError Connection refused; trying again" in capsys.readouterr().out
    assert asked[1] == asked[2]
    assert here.patches == [{"version": 2}]
