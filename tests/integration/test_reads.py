"""What tests read of an object without kubectl is what kubectl says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hack.cluster.errors import ClusterError
from hack.cluster.reads import Reads
from tests.integration.conftest import Kubectl

POLICY = {"apiVersion": "moontide.dev/v1alpha1", "kind": "PolicyVersion", "spec": {"version": 1}}


@pytest.fixture
def reads(kubectl: Kubectl) -> Reads:
    """With the rights of an administrator."""
    return Reads([str(kubectl.binary), f"--kubeconfig={kubectl.kubeconfig}"])


def test_an_object_by_each_name_of_its_kind(kubectl: Kubectl, reads: Reads) -> None:
    kubectl.make_namespace("reads")
    kubectl.apply({**POLICY, "metadata": {"name": "unfollowed", "namespace": "reads"}})
    for kind in ("polv", "policyversion", "policyversions", "policyversions.moontide.dev"):
        said = json.loads(kubectl("get", kind, "unfollowed", "-n", "reads", "-o", "json"))
        read = reads.get(kind, "unfollowed", "reads")
        assert read is not None
        assert (read["metadata"]["uid"], read["spec"]) == (said["metadata"]["uid"], said["spec"])
        assert set(read["metadata"]) == set(said["metadata"])
    for kind, name in (("namespace", "reads"), ("pvc", "weights"), ("crd", "kvcachepools.moontide.dev")):
        assert reads.get(kind, name, "reads") == json.loads(kubectl("get", kind, name, "-n", "reads", "-o", "json"))


def test_what_is_not_there_is_none_and_a_kind_that_is_not_there_is_an_error(kubectl: Kubectl, reads: Reads) -> None:
    kubectl.make_namespace("reads")
    for kind, namespace in (("polv", "reads"), ("secret", "no-such-namespace"), ("deployment", "reads")):
        assert reads.get(kind, "none", namespace) is None
    with pytest.raises(ClusterError, match="doesn't have a resource type 'unicorn'"):
        reads.get("unicorn", "one", "reads")


def test_who_may_not_read_is_told_so(kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl.make_namespace("reads")
    kubectl.run("create", "serviceaccount", "nobody", "-n", "reads", check=False)
    token = kubectl("create", "token", "nobody", "-n", "reads").strip()
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    theirs = Reads([str(kubectl.binary), f"--kubeconfig={file}"])
    with pytest.raises(ClusterError, match="forbidden"):
        theirs.get("secret", "any", "reads")
    config["users"][0]["user"] = {"username": "a", "password": "b"}
    file.write_text(json.dumps(config))
    with pytest.raises(ClusterError, match="neither a client certificate nor a token"):
        Reads([str(kubectl.binary), f"--kubeconfig={file}"]).get("secret", "any", "reads")
