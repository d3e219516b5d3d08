"""TLS on the admin ports of a fleet and on its pool's wiper, turned on while the fleet serves.

The operator, its API server, the gates, admin planes and the wiper's HTTP are real, and so is every handshake.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.component.certificates import Authority
from tests.integration.stage import RESOLVING


def _progressing(stage: Any) -> dict[str, str]:
    body = stage.api("GET", stage.path("InferenceDeployment", "chat"))
    found = (body.get("status") or {}).get("conditions") or ()
    return next((each for each in found if each["type"] == "Progressing"), {"reason": "", "message": ""})


def _run(stage: Any, uid: str, weights: str) -> set[str]:
    """Start an engine in each pod that has none, and end those whose pod is gone. Returns the names of the pods."""
    names: set[str] = stage.start_pods("chat", uid, False, weights)
    for engine in set(stage.double("states")) - names:
        stage.double("kill", name=engine)
    return names


def _secured(stage: Any) -> list[bool]:
    """Of each pod that runs, whether it was made for TLS."""
    return sorted(
        any(each["name"] == "admin-tls" for each in pod["spec"]["volumes"])
        for pod in stage.pods("chat")
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("podIP")
    )


def test_a_fleet_changes_its_policy_before_during_and_after_the_rollout_to_tls(
    make_stage: Any, wait_for: Any, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    with make_stage() as (stage, make_operator):
        environ = {"MOONTIDE_ADMIN_AUTHORITIES": str(authority.certificate), "MOONTIDE_RESYNC_SECONDS": "1"}
        make_operator("secured", environ, RESOLVING.format(services=stage.services)).start()
        stage.certificate("kv-tls", authority, f"kv-master.{stage.namespace}.svc")
        stage.pool(master={"wiperTlsSecretRef": {"name": "kv-tls"}})
        stage.fleet("chat", fences=False)
        stage.wait_current("chat", 1)
        uid = stage.api("GET", stage.path("InferenceDeployment", "chat"))["metadata"]["uid"]
        stage.call_ready(_run(stage, uid, "1"))
        assert _secured(stage) == [False, False]

        def change(version: str) -> None:
            stage.double("change", names=sorted(stage.double("states")), weights=version)
            stage.ask("chat", version=version)
            epoch = stage.wait_current("chat", version)
            # A newcomer, and one that did not answer for a moment, is not waited for.
            wait_for(
                "both serve",
                lambda: [tuple(each) for each in stage.double("states").values()] == [("open", epoch)] * 2,
            )

        asked = {"spec": {"engine": {"adminTlsSecretRef": {"name": "chat-tls"}}}}
        stage.api("PATCH", stage.path("InferenceDeployment", "chat"), asked)
        said = wait_for("what is missing", lambda: (s := _progressing(stage))["reason"] == "SecretMissing" and s)
        assert f"for the DNS name chat.{stage.namespace}.svc" in said["message"]
        assert _secured(stage) == [False, False]

        stage.certificate("chat-tls", authority, f"chat.{stage.namespace}.svc")

        def one_of_each() -> bool:
            _run(stage, uid, "1")
            return _secured(stage) == [False, True]

        wait_for("a pod of each kind", one_of_each)
        change("2")

        def all_secured() -> bool:
            stage.call_ready(_run(stage, uid, "2"))
            return _secured(stage) == [True, True]

        wait_for("no pod without TLS", all_secured)
        change("3")
        journal = stage.journal()
        assert [each for each in journal if "stale" in each] == []
        assert [each["removed"] for each in journal if "removal" in each][-1] == 0
