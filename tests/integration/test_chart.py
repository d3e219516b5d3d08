"""The chart without a cluster: what Helm makes of values, and what it says to values that make no sense."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from hack import chart
from hack.cluster.settings import repository_root

HOOK = {"hook": {"enabled": True}}
ROLE: dict[str, Any] = {"namespace": "rl", "policies": ["policy"]}
WHOLE: dict[str, Any] = {key: value for values in chart.SETS.values() for key, value in values.items()}


@pytest.mark.parametrize("values", [*chart.SETS.values(), WHOLE], ids=[*chart.SETS, "all of them"])
def test_lint_has_no_warning(values: dict[str, Any]) -> None:
    done = chart.on(["lint", "--strict"], values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_the_lint_can_fail() -> None:
    done = chart.on(["lint", "--strict"], {"replicas": 3})
    assert done.returncode != 0


@pytest.mark.parametrize("name", chart.SETS)
def test_snapshot(name: str) -> None:
    """When a change is meant: ``make chart``, and read the diff."""
    assert chart.snapshot(chart.SETS[name]) == chart.path(name).read_text()


def test_there_is_no_snapshot_of_nothing() -> None:
    assert {path.stem for path in chart.SNAPSHOTS.iterdir()} == set(chart.SETS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        # A misspelt name, at every depth.
        ({"logLevl": "INFO"}, "additional properties 'logLevl' not allowed"),
        ({"hook": {"port": 1}}, "at '/hook': additional properties 'port' not allowed"),
        ({"defaults": {"engine": {"img": "x"}}}, "at '/defaults/engine': additional properties 'img' not allowed"),
        ({"resources": {"limit": {"cpu": "1"}}}, "at '/resources': additional properties 'limit' not allowed"),
        ({"monitoring": {"rules": {"enable": True}}}, "additional properties 'enable' not allowed"),
        ({"networkPolicies": {"trainers": [{"pods": {}}]}}, "at '/networkPolicies/trainers/0': additional properties"),
        ({"trainer": {"roles": [{"namespace": "rl"}]}}, "at '/trainer/roles/0': missing property 'policies'"),
        # A value of the wrong kind.
        ({"logLevel": "LOUD"}, "value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
        ({"replicas": 3}, "at '/replicas': value must be one of 1, 2"),
        ({"crds": {"install": "yes"}}, "at '/crds/install': got string, want boolean"),
        ({"image": ""}, "at '/image': minLength: got 0, want 1"),
        ({"image": {"tag": "x"}}, "at '/image': got object, want string"),
        ({"monitoring": {"dashboard": {"labels": {"a": 1}}}}, "got number, want string"),
        ({"admission": {"marks": True}}, "at '/admission/marks': value must be one of 'Auto', 'On', 'Off'"),
        ({"nodeSelector": {"gpu": True}}, "at '/nodeSelector/gpu': got boolean, want string"),
        ({"tolerations": [{"keys": "a"}]}, "at '/tolerations/0': additional properties 'keys' not allowed"),
        ({"tolerations": [{"operator": "In"}]}, "value must be one of 'Exists', 'Equal'"),
        ({"affinity": {"nodes": {}}}, "at '/affinity': additional properties 'nodes' not allowed"),
        ({"podAnnotations": {"a": 1}}, "at '/podAnnotations/a': got number, want string"),
        # What no schema could say.
        ({"defaults": {"engine": {"version": "v0.32"}}}, "three numbers, for example 0.32.0"),
        ({"monitoring": {"podMonitors": {"interval": "often"}}}, "write a number and ms, s or m, for example 15s"),
        ({"watchNamespace": "a,b"}, "for several, install the chart once for each, or leave it empty for all"),
        ({"networkPolicies": {"namespaces": ["R L"]}}, 'networkPolicies.namespaces has "R L"'),
        (
            {"trainer": {"roles": [{**ROLE, "namespace": "R L"}]}},
            'trainer.roles has "R L", which is no name of a namespace',
        ),
        ({"podLabels": {"app.kubernetes.io/name": "a"}}, "which the chart sets itself"),
        ({"networkPolicies": {"enabled": True}}, "write networkPolicies.namespaces, for example {rl}"),
        ({"trainer": {"roles": [{**ROLE, "via": "hook"}]}}, "via the hook, which is off: write hook.enabled=true"),
        ({"trainer": {"roles": [{**ROLE, "via": "ray"}]}}, "value must be one of 'kubeconfig', 'hook'"),
        ({"trainer": {"roles": [ROLE, ROLE]}}, "in namespace rl twice: give each a name of its own"),
        ({"adminTLS": {"caConfigMap": "a", "caSecret": "b"}}, "two places for one file: write one of them"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_values_are_refused_with_what_to_write(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        chart.manifests(values)


@pytest.mark.parametrize("values", chart.SETS.values(), ids=chart.SETS)
def test_every_object_says_whose_it_is_and_no_name_comes_twice(values: dict[str, Any]) -> None:
    made = [each for each in chart.manifests(values) if each["kind"] != "CustomResourceDefinition"]
    for each in made:
        assert (
            each["metadata"]["labels"].items()
            >= {
                "app.kubernetes.io/instance": chart.RELEASE,
                "app.kubernetes.io/managed-by": "Helm",
            }.items()
        ), each["metadata"]
    places = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in made]
    assert len(places) == len(set(places))


def test_the_crds_come_with_the_chart_or_not_at_all() -> None:
    with_them = [each["kind"] for each in chart.manifests({})].count("CustomResourceDefinition")
    without = [each["kind"] for each in chart.manifests({"crds": {"install": False}})]
    assert (with_them, without.count("CustomResourceDefinition")) == (3, 0)


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({}, {"marks", "writers", "reach", "in-use", "pod-templates"}),
        ({"admission": {"marks": "Off"}}, {"pod-templates"}),
        ({"admission": {"inUse": "Off"}}, {"marks", "writers", "reach", "pod-templates"}),
        ({"admission": {"podTemplates": "Any"}}, {"marks", "writers", "reach", "in-use"}),
        ({"admission": {"podTemplates": "Restricted"}}, {"marks", "writers", "reach", "in-use", "pod-templates"}),
        # As in a release that was made before these values existed, with --reuse-values.
        ({"admission": None}, {"marks", "writers", "reach", "in-use", "pod-templates"}),
        ({"watchNamespace": "rl"}, set[str]()),
        ({"watchNamespace": "rl", "admission": {"marks": "On"}}, {"marks", "writers", "reach", "in-use"}),
        ({"watchNamespace": "rl", "admission": {"podTemplates": "PodCreators"}}, {"pod-templates"}),
    ],
    ids=lambda each: str(sorted(each) if isinstance(each, set) else each),
)
def test_which_admission_policies_there_are(values: dict[str, Any], made: set[str]) -> None:
    found = [each for each in chart.manifests(values) if each["kind"].startswith("ValidatingAdmissionPolicy")]
    head = "moontide-operator-moontide-system-"
    for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"):
        assert {each["metadata"]["name"] for each in found if each["kind"] == kind} == {head + name for name in made}


def test_without_the_kind_auto_makes_no_policy_and_on_says_so() -> None:
    lacking = ("--api-versions", "v1/Pod")
    done = chart.on(["template", chart.RELEASE], {}, *lacking)
    assert done.returncode == 0, done.stderr
    assert "ValidatingAdmissionPolicy" not in done.stdout
    for asked in ({"marks": "On"}, {"podTemplates": "PodCreators"}, {"podTemplates": "Restricted"}):
        refused = chart.on(["template", chart.RELEASE], {"admission": asked}, *lacking)
        assert "this API server has no ValidatingAdmissionPolicy" in refused.stderr


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({}, True),
        ({"userRoles": None}, True),
        ({"userRoles": "Off"}, False),
        ({"watchNamespace": "rl"}, False),
        ({"watchNamespace": "rl", "userRoles": "On"}, True),
    ],
    ids=str,
)
def test_when_there_are_roles_for_people(values: dict[str, Any], made: bool) -> None:
    roles = {each["metadata"]["name"] for each in chart.manifests(values) if each["kind"] == "ClusterRole"}
    assert {"moontide-view", "moontide-edit"} & roles == ({"moontide-view", "moontide-edit"} if made else set())


def test_every_value_reaches_a_manifest() -> None:
    """A value that changes nothing is a promise that is not kept."""
    usual = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    beside: dict[str, Any] = {
        "crds": {"install": False},
        "hook": {"enabled": True},
        "networkPolicies": {"enabled": True, "namespaces": ["rl"]},
        "monitoring": {kind: {"enabled": True} for kind in ("podMonitors", "rules", "dashboard")},
    }
    before = chart.on(["template", chart.RELEASE], beside).stdout
    untouched = []
    for place, value in _leaves(usual):
        done = chart.on(["template", chart.RELEASE], _put(beside, place, _other(place, value)))
        assert done.returncode == 0, (place, done.stderr)
        if done.stdout == before:
            untouched.append(".".join(place))
    assert untouched == []


def test_the_operators_pods_keep_the_labels_that_they_are_found_by() -> None:
    found = chart.manifests({"podLabels": {"team": "platform"}, "podAnnotations": {"a": "b"}})
    (spec,) = (each["spec"] for each in found if each["kind"] == "Deployment")
    metadata = spec["template"]["metadata"]
    assert metadata["labels"].items() >= {"team": "platform", **spec["selector"]["matchLabels"]}.items()
    assert "team" not in spec["selector"]["matchLabels"]
    assert metadata["annotations"] == {"a": "b"}


@pytest.mark.parametrize(("via", "verb"), [("", "patch"), ("kubeconfig", "patch"), ("hook", "bump")])
def test_a_trainers_role_changes_the_whole_spec_only_with_a_kubeconfig(via: str, verb: str) -> None:
    role = {**ROLE, **({"via": via} if via else {})}
    found = chart.manifests({**HOOK, "trainer": {"roles": [role]}})
    (made,) = (each for each in found if each["metadata"]["name"] == "moontide-trainer")
    (rule,) = made["rules"]
    assert (rule["resources"], rule["verbs"]) == (["policyversions"], ["get", verb])


def test_of_the_authorities_secret_the_operator_gets_no_key() -> None:
    found = chart.manifests({"adminTLS": {"caSecret": "root"}})
    (pod,) = (each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment")
    (volume,) = (each for each in pod["volumes"] if each["name"] == "admin-ca")
    assert volume["secret"] == {
        "secretName": "root",
        "optional": True,
        "items": [{"key": "ca.crt", "path": "ca.crt"}],
    }


def test_an_alerts_runbook_is_its_section() -> None:
    def annotations(**rules: Any) -> dict[str, dict[str, str]]:
        found = chart.manifests({"monitoring": {"rules": {"enabled": True, **rules}}})
        (made,) = (each for each in found if each["kind"] == "PrometheusRule")
        return {each["alert"]: each["annotations"] for each in made["spec"]["groups"][0]["rules"]}

    page = "https://docs.example/runbook/"
    text = (repository_root() / "docs/runbook.md").read_text()
    anchors = {f"#{heading.lower()}" for heading in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    found = annotations(runbookUrl=page)
    assert {each["runbook_url"].removeprefix(page) for each in found.values()} == anchors
    assert all(each["runbook_url"].endswith(f"#{alert.lower()}") for alert, each in found.items())
    assert all(set(each) == {"summary", "description"} for each in annotations().values())


def _leaves(values: dict[str, Any], *place: str) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in ("labels", "requests", "limits"):
            found += _leaves(value, *place, name)
        else:
            found.append(((*place, name), value))
    return found


def _other(place: tuple[str, ...], value: Any) -> Any:
    """Another value that the schema takes."""
    special: dict[str, Any] = {
        "install": True,
        "replicas": 2,
        "marks": "Off",
        "inUse": "Deny",
        "podTemplates": "Restricted",
        "userRoles": "Off",
        "logLevel": "DEBUG",
        "overlapSeconds": 900,
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "s"}],
        "roles": [ROLE],
        "version": "0.33.0",
        "device": "cpu",
        "interval": "7s",
        "namespaces": ["other"],
        "labels": {"a": "b"},
        "nodeSelector": {"a": "b"},
        "podLabels": {"a": "b"},
        "podAnnotations": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"podAffinity": {}},
        "requests": {"cpu": "1"},
        "limits": {"cpu": "1"},
    }
    if place[-1] in special:
        return special[place[-1]]
    if isinstance(value, bool):
        # What is off by default is on in what it is compared with.
        return False
    return [{"podSelector": {"matchLabels": {"a": "b"}}}] if isinstance(value, list) else "other"


def _put(values: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = place
    inner = values.get(name, {})
    return {**values, name: _put(inner, tuple(rest), value) if rest else value}


def _notes(values: dict[str, Any], command: str = "install") -> str:
    done = chart.on([command, chart.RELEASE], values, "--dry-run=client")
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({}, ["kubectl rollout status -n moontide-system deploy/moontide-operator", "kubectl get kvp,ifd,polv -A"]),
        ({"watchNamespace": "rl"}, ["serves namespace rl.", "kubectl get kvp,ifd,polv -n rl"]),
        ({"crds": {"install": False}}, ["kubectl apply --server-side -f crds/"]),
        (HOOK, ["http://moontide-operator-hook.moontide-system.svc:8082, for tokens of audience moontide"]),
        ({"hook": {"enabled": True, "tlsSecret": "s"}}, ["https://moontide-operator-hook.moontide-system.svc:8082"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_notes_say_the_next_commands(values: dict[str, Any], lines: list[str]) -> None:
    notes = _notes(values)
    for line in [*lines, "kubectl moontide doctor"]:
        assert line in notes
    assert ("crds/" in notes) == (values.get("crds") == {"install": False})


@pytest.mark.parametrize(
    ("values", "unguarded", "any_template"),
    [
        ({}, False, False),
        ({"watchNamespace": "rl"}, True, True),
        ({"watchNamespace": "rl", "admission": {"marks": "On", "podTemplates": "Restricted"}}, False, False),
        ({"admission": {"marks": "Off"}}, True, False),
        ({"admission": {"podTemplates": "Any"}}, False, True),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_notes_say_what_no_policy_keeps(values: dict[str, Any], unguarded: bool, any_template: bool) -> None:
    notes = _notes(values)
    assert ("can hide an engine from a change of policy" in notes) == unguarded
    assert ("may run any pod as any ServiceAccount of its namespace" in notes) == any_template
