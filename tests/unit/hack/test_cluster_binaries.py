from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hack.cluster import binaries
from hack.cluster.binaries import Build, input_hash, required_version
from hack.cluster.errors import ClusterError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in (
        "go.mod",
        "go.sum",
        "helm/go.mod",
        "helm/go.sum",
        "coredns/go.mod",
        "coredns/go.sum",
        "coredns/main.go",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(binaries.SOURCE / name, tmp_path / name)
    return tmp_path


def test_the_versions_are_those_of_go_mod() -> None:
    assert required_version((binaries.SOURCE / "go.mod").read_text(), "k8s.io/kubernetes") == "v1.36.3"
    assert required_version((binaries.SOURCE / "go.mod").read_text(), "go.etcd.io/etcd/server/v3") == "v3.6.8"
    assert required_version((binaries.SOURCE / "helm" / "go.mod").read_text(), "helm.sh/helm/v4") == "v4.2.4"


def test_a_module_that_is_not_required_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"example\.com/x"):
        required_version("module m\n\nrequire example.com/xy v1.0.0\n", "example.com/x")


def test_every_staging_module_is_replaced_by_the_release_that_belongs_to_kubernetes() -> None:
    lines = [line for line in (binaries.SOURCE / "go.mod").read_text().splitlines() if line.startswith("replace ")]
    assert len(lines) >= 30
    assert all(line.endswith(" v0.36.3") for line in lines), lines


@pytest.mark.parametrize("changed", ["go.mod", "go.sum", "helm/go.sum", "coredns/main.go"])
def test_the_hash_follows_every_input(source: Path, changed: str) -> None:
    before = input_hash(source)
    assert input_hash(source) == before
    (source / changed).write_text((source / changed).read_text() + "\n// changed\n")
    assert input_hash(source) != before


def test_the_hash_follows_the_flags_and_ignores_other_files(source: Path) -> None:
    before = input_hash(source, (Build("a", ".", ("x/y",), ("-X a=1",)),))
    assert input_hash(source, (Build("a", ".", ("x/y",), ("-X a=2",)),)) != before
    (source / "README.md").write_text("text")
    assert input_hash(source, (Build("a", ".", ("x/y",), ("-X a=1",)),)) == before


def test_programs_have_the_names_that_people_know() -> None:
    names = {name for build in binaries.builds() for name in build.programs}
    assert names == {
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
        "kube-proxy",
        "kubectl",
        "etcd",
        "pause",
        "coredns",
        "helm",
    }


def test_kubernetes_is_stamped_with_its_version() -> None:
    flags = binaries.builds()[0].ldflags
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags
    assert "-X k8s.io/component-base/version.gitMinor=36" in flags
