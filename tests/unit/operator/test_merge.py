"""Strategic merge of pod templates: its laws, and the cases of each kind of list."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.resources.merge import KEYS, merge

NAMES = st.sampled_from(["a", "b", "c", "engine"])
SCALARS = st.one_of(st.booleans(), st.integers(0, 9), st.sampled_from(["x", "y"]))


def _unique(items: st.SearchStrategy[dict[str, Any]], *keys: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(items, max_size=3, unique_by=tuple(lambda item, key=key: item[key] for key in keys))


def _some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


LABELS = st.dictionaries(NAMES, st.sampled_from(["1", "2"]), max_size=3)
ENV = _unique(st.fixed_dictionaries({"name": NAMES, "value": st.sampled_from(["1", "2"])}), "name")
MOUNTS = _unique(st.fixed_dictionaries({"mountPath": NAMES, "name": NAMES}), "mountPath")
PORTS = _unique(st.fixed_dictionaries({"containerPort": st.integers(1, 3), "name": NAMES}), "containerPort")
CONTAINERS = _unique(
    st.fixed_dictionaries(
        {"name": NAMES},
        optional={
            "image": st.sampled_from(["i:1", "i:2"]),
            "command": st.lists(NAMES, min_size=1, max_size=2),
            "env": ENV,
            "volumeMounts": MOUNTS,
            "ports": PORTS,
            "securityContext": _some(privileged=st.booleans(), runAsUser=st.integers(1, 3)),
        },
    ),
    "name",
)
VOLUMES = _unique(
    st.one_of(
        st.fixed_dictionaries({"name": NAMES, "emptyDir": _some(medium=st.just("Memory"))}),
        st.fixed_dictionaries({"name": NAMES, "hostPath": st.fixed_dictionaries({"path": NAMES})}),
    ),
    "name",
)
SPREAD = st.lists(
    st.fixed_dictionaries(
        {"topologyKey": NAMES, "whenUnsatisfiable": st.sampled_from(["DoNotSchedule", "ScheduleAnyway"])},
        optional={"maxSkew": st.integers(1, 3)},
    ),
    max_size=3,
    unique_by=lambda item: (item["topologyKey"], item["whenUnsatisfiable"]),
)
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": _some(labels=LABELS, annotations=LABELS),
        "spec": _some(
            containers=CONTAINERS,
            initContainers=CONTAINERS,
            volumes=VOLUMES,
            imagePullSecrets=_unique(st.fixed_dictionaries({"name": NAMES}), "name"),
            tolerations=st.lists(st.fixed_dictionaries({"key": NAMES}), max_size=3),
            nodeSelector=LABELS,
            priorityClassName=NAMES,
            topologySpreadConstraints=SPREAD,
        ),
    },
)


def _leaves(node: Any, path: tuple[str, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Every scalar and atomic list by where it is; items of merging lists by their key."""
    bare = tuple(part for part in path if isinstance(part, str))
    if isinstance(node, dict):
        found: dict[tuple[Any, ...], Any] = {}
        for key, value in node.items():
            found |= _leaves(value, (*path, key))
        return found
    if bare in KEYS:
        keys, found = KEYS[bare], {}
        for item in node:
            found |= _leaves(item, (*path, tuple(item[key] for key in keys)))  # type: ignore[arg-type]
        return found
    return {path: node}


@given(TEMPLATES)
def test_nothing_merged_changes_nothing_and_a_template_is_its_own_override(template: dict[str, Any]) -> None:
    assert merge(template, {}) == template
    assert merge(template, template) == template
    assert merge({}, template) == template


@given(TEMPLATES, TEMPLATES)
def test_everything_that_the_override_says_holds_and_what_it_does_not_mention_stays(
    template: dict[str, Any], override: dict[str, Any]
) -> None:
    kept = copy.deepcopy((template, override))
    merged = merge(template, override)
    assert (template, override) == kept
    assert merge(merged, override) == merged
    said, before, after = _leaves(override), _leaves(template), _leaves(merged)
    for path, value in said.items():
        assert after[path] == value
    for path, value in before.items():
        if path in said:
            continue
        volume = path[:3] if path[:2] == ("spec", "volumes") else None
        if volume is None or not any(other[:3] == volume for other in said):
            assert after[path] == value
    assert set(after) <= set(said) | set(before)


@given(TEMPLATES, TEMPLATES)
def test_the_template_s_order_stays_and_what_is_new_comes_last(
    template: dict[str, Any], override: dict[str, Any]
) -> None:
    def names(of: dict[str, Any]) -> list[str]:
        return [item["name"] for item in of.get("spec", {}).get("containers", [])]

    before, merged = names(template), names(merge(template, override))
    assert merged[: len(before)] == before
    assert merged[len(before) :] == [name for name in names(override) if name not in before]


@given(TEMPLATES, NAMES)
def test_a_deleted_item_is_gone_and_the_others_stay(template: dict[str, Any], name: str) -> None:
    over = {"spec": {"containers": [{"name": name, "$patch": "delete"}]}}
    merged = merge(template, over)
    rest = [item for item in template.get("spec", {}).get("containers", []) if item["name"] != name]
    assert merged["spec"]["containers"] == rest
    assert merge(merged, over) == merged


BASE: dict[str, Any] = {
    "metadata": {"labels": {"app": "x"}},
    "spec": {
        "securityContext": {"runAsUser": 1, "fsGroup": 1},
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "ports": [{"name": "http", "containerPort": 8000}],
            }
        ],
        "volumes": [{"name": "cache", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
        "tolerations": [{"key": "old"}],
    },
}


def test_lists_of_each_kind() -> None:
    made = merge(
        BASE,
        {
            "spec": {
                "securityContext": {"fsGroup": None, "runAsUser": 2},
                "tolerations": [{"key": "new"}],
                "containers": [
                    {
                        "name": "engine",
                        "env": [
                            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}, "value": None},
                            {"name": "C", "value": "3"},
                        ],
                        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
                    },
                    {"name": "sidecar", "image": "s:1"},
                ],
                "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "c"}}],
                "imagePullSecrets": [{"name": "pull"}],
            }
        },
    )["spec"]
    assert made["securityContext"] == {"runAsUser": 2}
    assert made["tolerations"] == [{"key": "new"}]
    engine, sidecar = made["containers"]
    assert engine["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "C", "value": "3"},
    ]
    assert engine["volumeMounts"] == [{"name": "scratch", "mountPath": "/tmp"}]
    assert engine["ports"] == BASE["spec"]["containers"][0]["ports"]
    assert sidecar == {"name": "sidecar", "image": "s:1"}
    assert made["volumes"][0] == {"name": "cache", "persistentVolumeClaim": {"claimName": "c"}}
    assert made["imagePullSecrets"] == [{"name": "pull"}]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, r"an item of spec\.containers has no name"),
        ({"spec": {"containers": {"name": "x"}}}, r"spec\.containers has to be a list of maps"),
        ({"spec": {"containers": ["x"]}}, r"spec\.containers has to be a list of maps"),
        ({"spec": {"containers": [{"name": "x"}, {"name": "x"}]}}, r"spec\.containers names x twice"),
        ({"spec": {"containers": [{"name": "x", "$patch": "replace"}]}}, "'replace'; write delete"),
        ({"spec": {"$patch": "replace"}}, r"spec\.\$patch: write"),
        ({"spec": {"securityContext": 1}}, r"spec\.securityContext has to be a map"),
        ({"spec": {"securityContext": {"$retainKeys": ["a"]}}}, "write a list item with"),
        ({"spec": {"affinity": {"$patch": "delete"}}}, "write a list item with"),
        (
            {"spec": {"topologySpreadConstraints": [{"topologyKey": "x"}]}},
            r"spec\.topologySpreadConstraints has no whenUnsatisfiable",
        ),
    ],
)
def test_what_is_no_override(override: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        merge(BASE, override)
