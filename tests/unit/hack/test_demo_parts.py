"""The demo's parts that need no cluster."""

from __future__ import annotations

import pytest
import yaml

from hack.demo import install, prompts
from hack.demo.kube import NotInTime, _json_stream, is_current, wait
from hack.demo.story import Summary, side_of
from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec, PolicyVersionSpec


def _policy(status: str, version: object, observed: int) -> dict[str, object]:
    condition = {"type": "Current", "status": status, "observedGeneration": observed}
    return {"metadata": {"generation": 2}, "status": {"version": version, "conditions": [condition]}}


def test_current_needs_the_condition_the_version_and_the_generation() -> None:
    assert is_current(_policy("True", "2", 2), "2")
    assert not is_current(_policy("False", "2", 2), "2")
    assert not is_current(_policy("True", "1", 2), "2")
    assert not is_current(_policy("True", "2", 1), "2"), "a condition of the spec before"
    assert not is_current({"metadata": {"generation": 1}}, "2")


def test_watch_stream_is_cut_into_objects() -> None:
    lines = ["{\n", '    "a": {\n', '        "b": 1\n', "    }\n", "}\n", "{\n", '    "a": 2\n', "}\n"]
    assert list(_json_stream(iter(lines))) == [{"a": {"b": 1}}, {"a": 2}]


def test_wait_says_what_was_last_seen() -> None:
    with pytest.raises(NotInTime, match=r"the thing: not within 0 s\. it was red"):
        wait(lambda: None, 0, "the thing", last=lambda: "it was red")


def test_prompts_are_the_same_each_time_and_groups_share_no_block() -> None:
    texts = prompts.make()
    assert texts == prompts.make()
    assert len(set(texts.all)) == len(texts.all)
    # A block is 32 tokens and a word at least one: equal blocks would need 16 equal characters at the very least.
    assert not {text[:16] for text in texts.kept} & {text[:16] for text in texts.load}
    assert len({text[: 2 * prompts.PREFIX_WORDS] for text in texts.load}) == 4, "load prompts share prefixes"


def test_examples_are_what_the_api_takes() -> None:
    models = {
        "KVCachePool": KVCachePoolSpec,
        "InferenceDeployment": InferenceDeploymentSpec,
        "PolicyVersion": PolicyVersionSpec,
    }
    found = {each["kind"]: each for each in install.manifests(None)}
    for kind, model in models.items():
        model.model_validate(found[kind]["spec"])
    spec = found["InferenceDeployment"]["spec"]
    assert str(found["PolicyVersion"]["spec"]["version"]) == spec["model"]["version"]
    assert spec["policyRef"]["name"] == found["PolicyVersion"]["metadata"]["name"]
    assert spec["kvCache"]["poolRef"]["name"] == found["KVCachePool"]["metadata"]["name"]
    assert yaml.safe_load((install.EXAMPLES / "values.yaml").read_text())["crds"] == {"install": False}


def test_summary_says_when_the_answer_is_not_the_cold_engines() -> None:
    good = Summary(2, 2, 100, 0, 300, 0.1842, 16, 16).lines()
    assert good[0] == "replicas reset 2/2"
    assert good[2] == "pause 184 ms"
    assert "bump equals the cold" in good[3]
    bad = Summary(2, 1, 100, 3, 300, None, 15, 16).lines()
    assert bad[0] == "replicas reset 1/2"
    assert bad[1].startswith("keys left 3 ")
    assert "does NOT equal" in bad[3]


def test_versions_alternate_between_the_weights() -> None:
    assert [side_of(version) for version in (1, 2, 3)] == ["policy-a", "policy-b", "policy-a"]
