"""What status, explain and a dry run show, and what they say when something cannot be seen."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moontide.cli import app, live
from moontide.cli.app import main
from moontide.cli.cluster import Reply, items
from moontide.cli.gather import look
from moontide.cli.rehearsal import rehearse
from moontide.cli.screen import render, rows
from moontide.engines.client import Unanswered
from moontide.planning import protocol
from moontide.planning.model import EngineStatus
from moontide.trainer.errors import ApiUnavailable
from tests.unit.cli.paper import MOONTIDE, PaperCluster, paper
from tests.unit.cli.test_rehearsal import world_of

Type = Callable[..., tuple[str, str]]
POLICIES = f"{MOONTIDE}/namespaces/rl/policyversions"


@pytest.fixture(name="type_into")
def _type_into(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Runs a command on a cluster; gives stdout and stderr."""

    def run(cluster: PaperCluster, *arguments: str, rc: int = 0) -> tuple[str, str]:
        @contextlib.contextmanager
        def there(_: app.Where, direct: bool = False) -> Iterator[PaperCluster]:
            cluster.direct = direct
            yield cluster

        monkeypatch.setattr(app.Where, "cluster", there)
        capsys.readouterr()
        done = main(list(arguments))
        said = capsys.readouterr()
        assert done == rc, said.out + said.err
        assert "Traceback" not in said.err
        return said.out, said.err

    return run


def test_the_fleet_on_one_screen(type_into: Type) -> None:
    world = world_of(True, weights="Unchecked")
    out, _ = type_into(paper(world), "status")
    assert "rl/policy  1        1      Current  2/2" in out
    assert "rl/chat  tiny   2/2    2/2      1        kv    rl/policy" in out
    assert "chat-1   open   1      1        0" in out
    assert "rl/kv  True   2        12    3 %" in out
    assert "not seen" not in out
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_it_is_what_engines_say_that_counts() -> None:
    world = world_of(True, weights="Unchecked")
    sight = look(paper(world), "rl", "policy")
    seen = sight.observed(sight.policies[0])
    expected = {replica.name: replica.status for fleet in world.observe().fleets for replica in fleet.replicas}
    assert {replica.name: replica.status for replica in seen.fleets[0].replicas} == expected
    assert [replica.may_have_served for replica in seen.fleets[0].replicas] == [True, True]
    assert (seen.policy_uid, seen.fleets[0].pool_uid) == ("policy", "pool-uid")


@pytest.mark.parametrize("fences", [False, True])
@pytest.mark.parametrize("denied", ["secrets", "engines", "tls", "refused"])
def test_without_engines_the_plan_is_the_same_and_is_said_to_be_assumed(fences: bool, denied: str) -> None:
    world = world_of(fences, weights="Unchecked")
    cluster = paper(world)
    if denied == "secrets":
        cluster.denied.add("/api/v1/namespaces/rl/secrets")
    elif denied == "tls":
        cluster.answers = dict.fromkeys(cluster.answers, Unanswered("TLSHandshake", "put it into a ConfigMap"))
    elif denied == "refused":
        why = Unanswered("Refused", "you may not get pods/proxy in rl")
        cluster.answers = dict.fromkeys(cluster.answers, why)
    else:
        cluster.answers.clear()
    sight = look(cluster, "rl", "policy")
    assert sight.fleets[0].assumed == {"chat-1", "chat-2"}
    (text,) = sight.unseen
    said = {
        "secrets": "you may not get Secret chat-admin",
        "tls": "is known to the operator alone",
        "engines": "none answers through the API server",
        "refused": "engines in namespace rl: you may not get pods/proxy in rl, so they were not asked",
    }
    assert said[denied] in text
    assert {row.source for row in rows(sight.fleets)} == {"status"}
    world.bump("2")
    spec, generation = world.spec, world.generation
    guessed = rehearse(spec, generation, world.status, sight.observed(sight.policies[0]))
    known = rehearse(spec, generation, world.status, world.observe())
    kinds = [[sorted({protocol.step_of(a).value for a in each.actions}) for each in r.rounds] for r in (guessed, known)]
    assert kinds[0] == kinds[1]
    assert guessed.end == known.end


def test_who_may_not_list_pods_is_told_so(type_into: Type) -> None:
    cluster = paper(world_of(True))
    cluster.denied.add("/api/v1/namespaces/rl/pods")
    out, _ = type_into(cluster, "status", "policy")
    assert "not seen: pods of rl: user cannot read /api/v1/namespaces/rl/pods; ask for the right" in out


def test_one_engine_that_does_not_answer_is_not_assumed() -> None:
    world = world_of(True)
    cluster = paper(world)
    cluster.answers.pop("10.0.0.2:8001")
    found = {row.replica: (row.state, row.reason) for row in rows(look(cluster, "rl", "policy").fleets)}
    assert found["chat-1"] == ("open", "")
    assert found["chat-2"] == ("no answer", "Timeout: no answer from 10.0.0.2:8001")


def test_a_dry_run_changes_nothing_and_says_what_would_be_done(type_into: Type) -> None:
    cluster = paper(world_of(False, weights="Unchecked"))
    out, _ = type_into(cluster, "bump", "policy", "2", "--dry-run")
    assert "the planner begins a new epoch: version 2 is asked for, 1 has the epoch\n" in out
    assert "   5. wipe store of chat\n" in out
    assert "then Current=True Current: 2/2 replicas serve version 2 in epoch 2\n" in out
    found = json.loads(type_into(cluster, "bump", "policy", "2", "--dry-run", "-o", "json")[0])
    assert [each["epoch"] for each in found["looks"]] == [2] * 8  # The last is the note that all is done.
    assert found["looks"][1]["actions"][0] == {"step": "quiesce", "of": "chat-1"}


def test_a_dry_run_beside_a_preparation_is_refused(type_into: Type) -> None:
    world = world_of(True)
    world.bump(1, preparing=2)
    world.run()
    cluster = paper(world)
    assert (
        "version 2 is being prepared: write kubectl moontide commit"
        in type_into(cluster, "bump", "policy", "2", "--dry-run", rc=1)[1]
    )
    assert "would begin that anew" in type_into(cluster, "bump", "policy", "3", "--dry-run", rc=1)[1]


def test_explain_names_each_replica_and_its_next_step(type_into: Type) -> None:
    world = world_of(True)
    world.bump("2")
    world.give_weights(world.pod(0), "2")
    out, _ = type_into(paper(world), "explain", "policy")
    assert "asked for   version 2, which the operator has not looked at yet" in out
    assert "its keys carry the epoch" in out
    assert "chat-1: open in epoch 1, version 1; next: quiesce, in epoch 2" in out
    assert "close chat-2 (WaitingForWeights)" in out
    found = json.loads(type_into(paper(world), "explain", "policy", "-o", "json")[0])
    assert (found["decides"], found["version"], found["served"]) == ("Allotment", "2", "1")


def test_explain_knows_that_a_change_that_is_held_back_was_looked_at(type_into: Type) -> None:
    world = world_of(True)
    world.bump("2", suspend=True)
    world.run()
    out, _ = type_into(paper(world), "explain", "policy")
    assert "asked for   version 2\n" in out
    assert "suspended   nothing begins until spec.suspend is false" in out


def test_near_names_are_suggested(type_into: Type) -> None:
    cluster = paper(world_of(True))
    for command in (["status", "polcy"], ["explain", "polcy"], ["history", "polcy"], ["timeline", "polcy"]):
        assert type_into(cluster, *command, rc=1)[1] == (
            "kubectl moontide: there is no PolicyVersion rl/polcy; did you mean policy?\n"
        )
    assert "there are: policy" in type_into(cluster, "explain", "zzz", rc=1)[1]
    assert (
        "there is one in namespace rl: name it with -n" in type_into(cluster, "explain", "policy", "-n", "b", rc=1)[1]
    )


def test_no_kinds_no_rights_no_credentials_are_a_sentence_each(type_into: Type) -> None:
    bare = PaperCluster(installed=False)
    assert "does not know Moontide's kinds: install the CRDs" in type_into(bare, "status", rc=1)[1]
    assert "does not know Moontide's kinds" in type_into(bare, "history", "policy", rc=1)[1]
    shut = PaperCluster(denied={MOONTIDE})
    assert "user cannot read" in type_into(shut, "status", "-A", rc=1)[1]
    unknown = PaperCluster(
        replies={f"{MOONTIDE}/namespaces/rl/policyversions": Reply(401, {"message": "Unauthorized"})}
    )
    assert "does not know the credentials: Unauthorized; log in again" in type_into(unknown, "status", rc=1)[1]
    newer = paper(world_of(True))
    newer.lists[POLICIES][0]["spec"]["strategy"] = "Wave"
    assert "are of different releases" in type_into(newer, "status", rc=1)[1]


def test_an_empty_namespace_says_so(type_into: Type) -> None:
    assert "no PolicyVersion, InferenceDeployment or KVCachePool here" in type_into(PaperCluster(), "status")[0]


def test_wrong_arguments_are_one_line_that_says_what_to_write(type_into: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in (
        (["frob"], "No such command 'frob'; write: kubectl moontide [OPTIONS] COMMAND"),
        (["statsu"], "did you mean 'status'"),
        (["bump", "policy"], "Missing argument 'VERSION'; write: kubectl moontide bump [OPTIONS] NAME VERSION"),
        (["bump", "policy", "a b"], "'a b' is no version"),
        (["wait", "policy", "--timeout=5q"], "'5q' is no time: write seconds, or for example 90s, 5m or 1h"),
        (["status", "policy", "-A"], "one policy is in one namespace"),
        (["status", "policy", "-o", "yaml"], "'yaml' is not one of 'text', 'json'"),
        (["timeline", "policy", "--epoch", "x"], "valid integer"),
    ):
        _, error = type_into(PaperCluster(), *arguments, rc=2)
        assert said in error
        assert error.startswith("kubectl moontide: ")
        assert error.count("\n") == 1


def test_no_cluster_is_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    assert main(["status"]) == 1
    assert "kubeconfig /nowhere/config cannot be read" in capsys.readouterr().err


def test_watch_says_each_change_once(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = paper(world_of(True))
    pauses: list[float] = []
    live.watch(app.console(), lambda: look(cluster, "rl"), sleep=pauses.append, looks=3)
    assert capsys.readouterr().out.count("POLICY") == 2  # The head of a table, and a column of another.
    live.watch(app.console(), lambda: look(cluster, "rl"), as_json=True, sleep=pauses.append, looks=2)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["replicas"][0]["state"] == "open"
    assert len(pauses) == 5
    assert min(pauses) >= live.WATCH_SECONDS


def test_follow_ends_with_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    world = world_of(False, weights="Unchecked")
    world.bump("2")
    seconds = iter(range(1000))

    class Moving(PaperCluster):
        """Each look at the policy finds the world a turn on."""

        def ask(self, path: str, params: Any = None, body: Any = None) -> Reply:
            if path == f"{POLICIES}/policy":
                world.turn()
                world.pass_time(0.1)
                now = paper(world)
                self.lists, self.answers = now.lists, now.answers
            return super().ask(path, params, body)

    moving = Moving()
    done = live.follow(
        app.console(), moving, "rl", "policy", "2", 900.0, clock=lambda: float(next(seconds)), sleep=lambda _: None
    )
    out = capsys.readouterr().out
    assert done == 0
    assert "chat-1: paused in epoch 1, version 1\n" in out
    assert "chat-2: open in epoch 2, version 2\n" in out
    assert "version 2 is current in epoch 2, 2/2 replicas\n" in out
    assert "whole fleet  qqq" in out
    assert "times of the whole fleet, from status" in out
    assert out.count("chat-1: paused in epoch 1") == 1


def test_follow_gives_up_in_time_with_advice() -> None:
    world = world_of(True)
    world.bump("2")
    seconds = iter(range(1000))
    with pytest.raises(live.CommitTimeout, match="kubectl moontide explain policy -n rl"):
        live.follow(
            app.console(),
            paper(world),
            "rl",
            "policy",
            "2",
            5.0,
            clock=lambda: float(next(seconds)),
            sleep=lambda _: None,
        )


def test_kubectl_and_shells_complete_commands_and_names(
    type_into: Type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # typer asks the processes above this one, among which there may be no shell.
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    cluster = paper(world_of(True))
    type_into(cluster, "status")
    for words, found in ((["ti"], ["timeline"]), (["status", ""], ["policy"]), (["bump", "x"], []), (["b"], ["bump"])):
        assert app.complete(words) == 0
        *lines, directive = capsys.readouterr().out.splitlines()
        assert (lines, directive) == (found, ":4"), words
    with pytest.raises(SystemExit) as ended:
        main(["--show-completion", "bash"])
    assert ended.value.code == 0
    assert "_KUBECTL_MOONTIDE_COMPLETE=complete_bash" in capsys.readouterr().out


def test_a_shell_is_not_kept_waiting_for_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    monkeypatch.setattr(app, "SOON_SECONDS", 0.1)
    begun, over = threading.Event(), threading.Event()

    class Silent(PaperCluster):
        """Answers when the test is over."""

        def ask(self, path: str, params: Any = None, body: Any = None) -> Reply:
            begun.set()
            over.wait(60)
            raise ApiUnavailable("too late")

    @contextlib.contextmanager
    def there(_: app.Where) -> Iterator[PaperCluster]:
        yield Silent()

    monkeypatch.setattr(app.Where, "cluster", there)
    try:
        assert app.complete(["status", ""]) == 0
        assert begun.is_set()
        assert capsys.readouterr().out == ":4\n"
    finally:
        over.set()


def test_versions_are_this_programs_and_the_operators(type_into: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.metadata.version("moontide")
    cluster = paper(world_of(True))
    labels = {"app.kubernetes.io/name": "moontide-operator", "app.kubernetes.io/version": "0.0.9"}
    containers = [{"name": "operator", "image": "registry.example/operator:8"}]
    deployment = {
        "metadata": {"name": "moontide-operator", "namespace": "moontide-system", "labels": labels},
        "spec": {"template": {"spec": {"containers": containers}}},
    }
    cluster.add("/apis/apps/v1/deployments", deployment)
    said = "operator moontide-system/moontide-operator 0.0.9, image registry.example/operator:8\n"
    for arguments in (["version"], ["--version"]):
        assert type_into(cluster, *arguments)[0] == f"kubectl moontide {own}\n{said}"
    found = json.loads(type_into(cluster, "version", "-o", "json")[0])
    assert (found["version"], found["operators"][0]["version"], found["unseen"]) == (own, "0.0.9", "")
    cluster.lists["/apis/apps/v1/deployments"] = []
    assert type_into(cluster, "version")[0].endswith("operator: not seen: none is installed\n")
    cluster.denied.add("/apis/apps")
    assert "operator: not seen: user cannot read" in type_into(cluster, "version")[0]
    monkeypatch.undo()
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    assert main(["--version"]) == 0


def test_on_a_terminal_it_is_one_screen_that_changes() -> None:
    cluster = paper(world_of(True))
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=120, color_system=None)
    live.watch(terminal, lambda: look(cluster, "rl"), sleep=lambda _: None, looks=2)
    assert "chat-1" in text.getvalue()
    assert "\x1b[" in text.getvalue()

    tried: list[int] = []

    def flaky() -> Any:
        tried.append(1)
        if len(tried) == 2:
            raise ApiUnavailable("the API server is away")
        return look(cluster, "rl")

    live.watch(terminal, flaky, sleep=lambda _: None, looks=3)
    assert "not seen: the API server is away" in text.getvalue()

    done = live.follow(terminal, cluster, "rl", "policy", "1", 5.0)
    assert done == 0
    assert "version 1 is current in epoch 1, 2/2 replicas" in text.getvalue()


def test_long_lists_are_read_to_their_end() -> None:
    pages = iter(
        [
            Reply(200, {"items": [{"metadata": {"name": "b"}}], "metadata": {"continue": "more"}}),
            Reply(200, {"items": [{"metadata": {"name": "a"}}], "metadata": {}}),
        ]
    )
    params: list[Any] = []

    class Paged(PaperCluster):
        """Gives a list in two pages."""

        def ask(self, path: str, given: Any = None, body: Any = None) -> Reply:
            params.append(dict(given))
            return next(pages)

    assert [each["metadata"]["name"] for each in items(Paged(), "/x")] == ["a", "b"]
    assert params == [{"limit": "500"}, {"limit": "500", "continue": "more"}]


def test_engines_that_others_launched_are_asked_by_their_url(type_into: Type) -> None:
    cluster = paper(world_of(True))
    fleet = cluster.lists[f"{MOONTIDE}/namespaces/rl/inferencedeployments"][0]
    engine = next(iter(cluster.answers.values()))
    assert isinstance(engine, EngineStatus)
    url = "http://10.9.0.1:8001"
    fleet["spec"] = {"endpoints": {"urls": [url]}, "policyRef": {"name": "policy"}}
    fleet["status"]["adopted"] = {engine.boot_id: url}
    cluster.answers = {"10.9.0.1:8001": engine.model_copy(update={"key_namespace": "fleet-chat"})}
    sight = look(cluster, "rl", "policy")
    assert [(row.state, row.epoch, row.source) for row in rows(sight.fleets)] == [("open", 1, "status")]
    assert sight.unseen == (
        "engines of rl/chat: are reached at their URLs alone; taken as status says; where these lead there, "
        "write --direct",
    )
    assert not [path for path in cluster.asked if "/secrets/" in path]
    assert "not seen" not in type_into(cluster, "status", "--no-engines")[0]
    out = type_into(cluster, "status", "--direct")[0]
    assert "(adopted)" in out
    assert "not seen" not in out
    (found,) = rows(look(cluster, "rl", "policy").fleets)
    assert (found.replica, found.state, found.source) == ("10.9.0.1:8001", "open", "engine")
    cluster.answers = {}
    sight = look(cluster, "rl", "policy")
    assert [(row.state, row.epoch, row.source) for row in rows(sight.fleets)] == [("open", 1, "status")]
    assert "none answers from here" in sight.unseen[0]


def test_fleets_of_other_namespaces_are_followers_where_the_policy_allows_them(type_into: Type) -> None:
    world = world_of(True)
    cluster = paper(world)
    fleet = copy.deepcopy(cluster.lists[f"{MOONTIDE}/namespaces/rl/inferencedeployments"][0])
    fleet["metadata"] |= {"namespace": "lab", "name": "far", "uid": "fleet-far"}
    fleet["spec"]["policyRef"] = {"name": "policy", "namespace": "rl"}
    del fleet["spec"]["kvCache"]
    cluster.add(f"{MOONTIDE}/namespaces/lab/inferencedeployments", fleet)
    assert "far" not in type_into(cluster, "explain", "policy")[0]
    spec = cluster.lists[POLICIES][0]["spec"]
    for allowed in (["lab"], ["*"]):
        spec["allowedNamespaces"] = allowed
        sight = look(cluster, "rl", "policy")
        assert [each.name for each in sight.observed(sight.policies[0]).fleets] == ["lab/far", "chat"]
    assert "fleet lab/far:" in type_into(cluster, "explain", "policy")[0]
    spec["allowedNamespaces"] = []
    assert "lab/far" in type_into(cluster, "status", "-A")[0]


def test_what_the_cluster_says_is_no_markup(type_into: Type) -> None:
    cluster = paper(world_of(True))
    fleet = cluster.lists[f"{MOONTIDE}/namespaces/rl/inferencedeployments"][0]
    fleet["status"]["conditions"][0] |= {"status": "False", "message": "[/red] saw [bold]pods[0] :smile: so"}
    assert "[/red] saw [bold]pods[0] :smile: so" in type_into(cluster, "status")[0]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        app.console().print(render(look(cluster, "rl")))
    assert "[bold]pods[0]" in "".join(text.getvalue().split())


def test_what_cannot_be_read_is_a_sentence(
    type_into: Type, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = paper(world_of(True))
    cluster.lists["/api/v1/namespaces/rl/pods"][0]["status"]["containerStatuses"][0]["ready"] = {"so": 1}
    assert "an object that this release cannot read: " in type_into(cluster, "status", rc=1)[1]
    monkeypatch.undo()
    cluster_entry = {"name": "c", "cluster": {"server": "https://host:port"}}
    config = {"current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}
    path = tmp_path / "config"
    path.write_text(json.dumps({**config, "clusters": [cluster_entry], "users": [{"name": "u", "user": {}}]}))
    assert main(["status", "--kubeconfig", str(path)]) == 1
    assert "the server of the kubeconfig is no URL" in capsys.readouterr().err
    cluster_entry["cluster"] = {"server": "http://127.0.0.1:9"}
    path.write_text(json.dumps({**config, "clusters": [cluster_entry], "users": [{"name": "u", "user": {}}]}))
    assert main(["status", "--kubeconfig", str(path)]) == 3
    assert "is the cluster up, and is it the right context?" in capsys.readouterr().err
