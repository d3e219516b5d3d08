"""The demo on clusters that were not made here: everything that is decided without one."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.access import Access
from hack.cluster.errors import ClusterError
from hack.demo import cold, command, elsewhere, install
from hack.demo.elsewhere import Choice
from hack.demo.install import Source, Target
from hack.demo.kube import KubeError
from hack.demo.say import Voice
from hack.images.cli import parser as images_parser
from hack.images.cli import references, registry_prefix
from moontide.api.v1alpha1 import InferenceDeploymentSpec


def _node(name: str, architecture: str = "amd64", images: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": more,
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"architecture": architecture, "operatingSystem": "linux"},
            "images": [{"names": [each]} for each in images],
        },
    }


class FakeKube:
    """Answers with what it was given, and keeps nothing else."""

    def __init__(self, **found: dict[str, Any]) -> None:
        self._found = found

    def find(self, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        return self._found.get(name.partition(".")[0].replace("-", "_"))


@pytest.mark.parametrize(
    ("text", "mode", "context"),
    [
        ("local", "local", None),
        ("kind", "kind", None),
        ("current", "context", None),
        ("context:staging", "context", "staging"),
        ("context:arn:aws:eks:eu-1:1:cluster/a", "context", "arn:aws:eks:eu-1:1:cluster/a"),
    ],
)
def test_a_cluster_is_named_on_purpose(text: str, mode: str, context: str | None) -> None:
    chosen = elsewhere.choice(text)
    assert (chosen.mode, chosen.context) == (mode, context)
    assert str(chosen) == text


@pytest.mark.parametrize("text", ["", "staging", "context", "context:", "Kind"])
def test_anything_else_is_answered_with_what_to_write(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write local, kind, context:NAME"):
        elsewhere.choice(text)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cluster", "context:a"], "say how images reach the nodes"),
        (["--cluster", "current"], "say how images reach the nodes"),
        (["--registry", "a/b"], "go with --cluster context:NAME"),
        (["--cluster", "kind", "--images-loaded"], "go with --cluster context:NAME"),
        (["--cluster", "kind", "--kubeconfig", "x"], "go with --cluster context:NAME"),
        (["--base-image", "a"], "--base-image goes with --cluster kind"),
        ([], ""),
        (["--cluster", "kind", "--base-image", "python:3.11-slim-bookworm"], ""),
        (["--cluster", "context:a", "--registry", "a/b", "--kubeconfig", "x"], ""),
        (["--cluster", "current", "--images-loaded"], ""),
        (["--cluster", "context:a", "--remove"], ""),
    ],
)
def test_options_that_do_not_go_together_are_a_sentence(arguments: list[str], sentence: str) -> None:
    said = command.contradiction(command.parser().parse_args(arguments))
    assert sentence in said
    assert bool(said) == bool(sentence)


def test_what_takes_a_kept_demo_away_is_named_in_full() -> None:
    parse, access = command.parser().parse_args, Access(Path("b"), "a", "https://a.test")
    assert command._ending(parse([]), Target("local", access)) == "make cluster-down"
    ends = command._ending(parse(["--cluster", "kind"]), Target("kind", access))
    assert ends == "python3 -m hack.cluster down --cluster kind"
    options = parse(["--cluster", "current", "--kubeconfig", "b", "--images-loaded"])
    said = command._ending(options, Target("context", access))
    assert said == "python3 -m hack.demo --cluster context:a --kubeconfig b --remove"
    assert command.contradiction(parse(said.split()[3:])) == ""


def test_objects_for_other_nodes_need_no_folder_and_no_gpu_of_this_machine() -> None:
    before = install.manifests(None)
    found = {each["kind"]: each for each in elsewhere.fitted(before)}
    assert found.keys() == {"Namespace", "KVCachePool", "PolicyVersion", "InferenceDeployment"}
    spec = found["InferenceDeployment"]["spec"]
    InferenceDeploymentSpec.model_validate(spec)
    assert spec["model"]["source"] == "file:///models/policy-a"
    assert "nvidia.com/gpu" not in str(spec)
    assert elsewhere.is_marked(found["Namespace"])
    assert before == install.manifests(None), "the examples themselves are not changed"


def test_every_crd_and_namespace_of_the_demo_bears_its_mark() -> None:
    made = elsewhere.crds()
    assert {each["spec"]["names"]["kind"] for each in made} == {"KVCachePool", "InferenceDeployment", "PolicyVersion"}
    assert all(elsewhere.is_marked(each) for each in (*made, elsewhere.namespace("a")))


def test_a_cluster_with_moontide_is_refused_and_one_with_our_mark_is_not() -> None:
    ours: dict[str, Any] = {"metadata": {"labels": elsewhere.MARK}}
    theirs: dict[str, Any] = {"metadata": {"labels": {"team": "rl"}}}
    elsewhere.refuse_what_is_there(FakeKube(), ["moontide-demo"])  # type: ignore[arg-type]
    elsewhere.refuse_what_is_there(FakeKube(policyversions=ours, moontide_demo=ours), ["moontide-demo"])  # type: ignore[arg-type]
    for found in ({"policyversions": theirs}, {"moontide_demo": {"metadata": {}}}, {"kvcachepools": {"metadata": {}}}):
        with pytest.raises(KubeError, match="does nothing: use a cluster without Moontide"):
            elsewhere.refuse_what_is_there(FakeKube(**found), ["moontide-demo"])  # type: ignore[arg-type]


def test_nodes_of_another_architecture_are_named() -> None:
    assert elsewhere.unfit([_node("a"), _node("b")], "x86_64") == ""
    assert elsewhere.unfit([_node("a", "arm64")], "aarch64") == ""
    said = elsewhere.unfit([_node("a"), _node("b", "arm64")], "x86_64")
    assert "this machine, amd64" in said
    assert "b (arm64)" in said
    assert elsewhere.unfit([_node("b", "arm64")], None) == "", "who loaded the images knows what for"


@pytest.mark.parametrize(
    "more",
    [{"unschedulable": True}, {"taints": [{"key": "a", "effect": "NoSchedule"}]}],
)
def test_nodes_that_take_no_pods_do_not_count(more: dict[str, Any]) -> None:
    assert elsewhere.unfit([_node("a"), _node("b", "arm64", **more)], "x86_64") == ""
    assert "no node of this cluster" in elsewhere.unfit([_node("b", **more)], None)
    assert elsewhere.missing([_node("b", **more)], ["x:1"]) == {}


def test_a_preference_against_a_node_is_no_refusal_and_an_unready_or_foreign_one_is() -> None:
    preferred = _node("a", taints=[{"key": "a", "effect": "PreferNoSchedule"}])
    assert elsewhere.usable([preferred]) == [preferred]
    unready, windows = _node("a"), _node("b")
    unready["status"]["conditions"][0]["status"] = "Unknown"
    windows["status"]["nodeInfo"]["operatingSystem"] = "windows"
    assert elsewhere.usable([unready, windows]) == []


def test_images_that_a_node_lacks_are_known_unless_its_list_is_full() -> None:
    held, bare = _node("a", images=("x:1", "y:1")), _node("b", images=("x:1",))
    full = _node("c", images=tuple(f"z:{number}" for number in range(50)))
    assert elsewhere.missing([held, bare, full], ["x:1", "y:1"]) == {"b": ["y:1"]}


def test_images_have_the_names_of_their_content_wherever_they_go() -> None:
    loaded = references(elsewhere.IMAGES, "base:1")
    pushed = references(elsewhere.IMAGES, "base:1", "registry.example/me/demo")
    assert loaded.keys() == pushed.keys() == set(elsewhere.IMAGES)
    for name in elsewhere.IMAGES:
        key = loaded[name].removeprefix(f"moontide.local/{name}:")
        assert len(key) == 16
        assert pushed[name] == f"registry.example/me/demo/{name}:{key}"
    assert references(elsewhere.IMAGES, "base:2") != loaded
    options = elsewhere.values(pushed)
    assert options[::2] == ["--set-string"] * 3
    assert f"defaults.engine.image={pushed['engine-cpu-demo']}" in options
    elsewhere.known(pushed, "\n".join(pushed.values()))
    with pytest.raises(KubeError, match="did not push"):
        elsewhere.known(pushed, "")


@pytest.mark.parametrize("text", ["registry.example/me", "localhost:5000/a/b-c", "10.0.0.1:5000/x_y/z"])
def test_a_registry_is_a_host_and_a_path(text: str) -> None:
    assert registry_prefix(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "registry.example",
        "https://registry.example/me",
        "registry.example/Me",
        "registry.example/me/",
        "registry.example/me:v1",
        "a/b c",
    ],
)
def test_anything_else_is_no_registry(text: str) -> None:
    with pytest.raises(ClusterError, match="write HOST/PATH"):
        registry_prefix(text)


def test_the_cold_engine_mounts_a_volume_only_where_there_is_one() -> None:
    here = cold._pod("demo", "engine:1", "tiny-models")["spec"]
    there = cold._pod("demo", "engine:1", None)["spec"]
    for spec, has in ((here, True), (there, False)):
        mounted = {each["name"] for each in spec["containers"][0]["volumeMounts"]}
        assert mounted == {each["name"] for each in spec["volumes"]}
        assert ("models" in mounted) is has


def test_a_target_knows_its_engine_and_where_its_weights_are(tmp_path: Path) -> None:
    access: Any = None
    local = Target("local", access)
    assert (local.elsewhere, local.foreign, local.claim) == (False, False, "tiny-models")
    assert local.engine_image == "moontide.local/engine-cpu:dev"
    made = Target("kind", access, {"engine-cpu-demo": "e:1"})
    assert (made.elsewhere, made.foreign, made.claim, made.engine_image) == (True, False, None, "e:1")
    assert Target("context", access).foreign


def test_current_is_a_context_without_a_name() -> None:
    assert elsewhere.choice("current") == Choice("context", None)


class FakeCluster(FakeKube):
    """Has nodes and objects, and writes down what it is told to run."""

    def __init__(self, nodes: list[dict[str, Any]], items: list[dict[str, Any]], **found: dict[str, Any]) -> None:
        super().__init__(**found)
        self.nodes = nodes
        self.items = items
        self.ran: list[str] = []

    def list(self, kind: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        assert kind == "nodes"
        return self.nodes

    def run(self, *arguments: str, **more: Any) -> str:
        self.ran.append(" ".join(arguments))
        return json.dumps({"items": self.items})


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A target of some mode on a fake cluster, with the commands of ours that it calls."""

    def make(mode: str, nodes: list[dict[str, Any]], items: Any = (), **found: Any) -> Any:
        fake, called = FakeCluster(nodes, list(items), **found), list[list[str]]()

        def call(command: list[str]) -> str:
            called.append(command)
            registry = "registry.example/me" if "--registry" in command else None
            return "\n".join(references(elsewhere.IMAGES, "base:1", registry).values())

        monkeypatch.setattr(Target, "kube", property(lambda _: fake))
        monkeypatch.setattr(install, "_call", call)
        monkeypatch.setattr(install, "helm", lambda _, *arguments: called.append(["helm", *arguments]) or "")
        access: Any = None
        return Target(mode, access), fake, called

    return make


@pytest.mark.parametrize(
    ("mode", "source", "cluster"),
    [
        ("kind", Source(base_image="base:1"), "kind"),
        ("context", Source("registry.example/me", base_image="base:1"), "none"),
    ],
)
def test_images_are_built_by_a_command_that_exists_and_named_in_the_target(
    target: Any, mode: str, source: Source, cluster: str
) -> None:
    made, _, called = target(mode, [_node("a", _here())])
    made = install.images(made, Voice(), source)
    (command,) = called
    parsed = images_parser().parse_args(command[3:])
    assert parsed.images == list(elsewhere.IMAGES)
    assert (parsed.cluster, parsed.registry, parsed.base_image) == (cluster, source.registry, "base:1")
    assert made.references == references(elsewhere.IMAGES, "base:1", source.registry)


def test_what_kinds_nodes_have_is_not_loaded_again(target: Any) -> None:
    names = references(elsewhere.IMAGES, "base:1")
    made, _, called = target("kind", [_node("a", _here(), tuple(names.values()))])
    assert install.images(made, Voice(), Source(base_image="base:1")).references == names
    assert called == []


def test_images_that_nobody_loaded_are_named_with_the_way_out(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_SEEN_SECONDS", 0)
    made, _, called = target("context", [_node("a")])
    with pytest.raises(KubeError, match=r"a lacks moontide\.local/operator:.* --archives FOLDER"):
        install.images(made, Voice(), Source(loaded=True, base_image="base:1"))
    assert called == []


def test_nodes_that_could_not_run_the_images_are_found_before_anything_is_built(target: Any) -> None:
    made, _, called = target("context", [_node("a", "s390x")])
    with pytest.raises(KubeError, match=r"a \(s390x\)"):
        install.images(made, Voice(), Source("registry.example/me", base_image="base:1"))
    assert called == []


PLURALS = ("kvcachepools", "inferencedeployments", "policyversions")
CRDS = {name: {"metadata": {"labels": elsewhere.MARK}} for name in PLURALS}


def test_all_that_the_demo_brought_is_taken_away(target: Any) -> None:
    made, fake, called = target("context", [], [_policy("moontide-demo")], **CRDS)
    install.withdraw(made, Voice())
    ran = "\n".join(fake.ran)
    for what in (
        "kvp,ifd,polv --all --namespace moontide-demo",
        "namespace moontide-demo",
        "namespace moontide-system",
    ):
        assert f"delete {what}" in ran
    assert sum("delete crd" in each for each in fake.ran) == 3
    assert "delete pv" not in ran, "no volume was made"
    assert called == [["helm", "uninstall", "moontide", "--namespace", "moontide-system", "--ignore-not-found"]]


def test_what_somebody_else_has_begun_to_use_stays(target: Any) -> None:
    made, fake, called = target("context", [], [_policy("moontide-demo"), _policy("rl")], **CRDS)
    with pytest.raises(KubeError, match=r"operator and CRDs stay, .*: PolicyVersion rl/policy$"):
        install.withdraw(made, Voice())
    assert called == []
    assert not any("crd" in each or "moontide-system" in each for each in fake.ran)


def test_an_installation_that_was_cut_short_is_taken_away_too(target: Any) -> None:
    made, fake, _ = target("context", [], policyversions=CRDS["policyversions"])
    install.withdraw(made, Voice())
    assert not any("kvp,ifd,polv" in each for each in fake.ran), "kubectl knows no such kinds yet"
    assert [each for each in fake.ran if "delete crd" in each] == [
        "delete crd policyversions.moontide.dev --ignore-not-found --timeout=60s"
    ]


def _policy(namespace: str) -> dict[str, Any]:
    return {"kind": "PolicyVersion", "metadata": {"namespace": namespace, "name": "policy"}}


def _here() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
