"""The token of a pool's wiper is rotated: a real API server and operator, the wiper's own HTTP, gates over doubles.

In a module of its own: the operator of a stage and one that serves every namespace would fight over its Secrets.
"""

from __future__ import annotations

import base64
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.integration.stage import RESOLVING


class Wiper:
    """The wiper of a stage's pool, whose kubelet is the test."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self._token_file: Path = stage.folder / "kv-wiper.token"

    def runs(self) -> bool:
        """Be the kubelet: the master's pod has an address, at which the wiper is."""
        where = f"/api/v1/namespaces/{self.stage.namespace}/pods"
        pods = self.stage.api("GET", f"{where}?labelSelector=app.kubernetes.io/component%3Dstore")["items"]
        host = self.stage.services
        for pod in pods:
            status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}]}
            self.stage.api("PATCH", f"{where}/{pod['metadata']['name']}/status", {"status": status})
        return len(pods) == 1

    @property
    def secret(self) -> list[str]:
        """The tokens in the Secret, the one in use first."""
        found = self.stage.api("GET", f"/api/v1/namespaces/{self.stage.namespace}/secrets/kv-wiper")
        return base64.b64decode(found["data"]["token"]).decode().split()

    def bring(self, *tokens: str) -> None:
        """Be the kubelet: the token file is what the Secret is."""
        self._token_file.write_text("\n".join(tokens))

    def answers(self, token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        url = f"http://{self.stage.services}:9004/moontide/v1/keys?namespace=nobody"
        return httpx.get(url, headers=headers, trust_env=False, timeout=60).status_code

    @property
    def token(self) -> dict[str, Any]:
        """``status.wiperToken``."""
        body = self.stage.api("GET", self.stage.path("KVCachePool", "kv"))
        return dict((body.get("status") or {}).get("wiperToken") or {})

    @property
    def events(self) -> list[dict[str, Any]]:
        """Those of the namespace."""
        found = self.stage.api("GET", f"/api/v1/namespaces/{self.stage.namespace}/events")
        return list(found["items"])

    def rotate(self, value: str) -> None:
        body = {"metadata": {"annotations": {"moontide.dev/rotate-token": value}}}
        self.stage.api("PATCH", self.stage.path("KVCachePool", "kv"), body)


def test_the_token_of_a_wiper_is_rotated_and_an_operator_killed_in_any_phase_is_followed(
    make_stage: Any, wait_for: Any
) -> None:
    with make_stage() as (stage, make_operator):
        environ = {
            "MOONTIDE_RESYNC_SECONDS": "1",
            # Whoever waits for the overlap may be late.
            "MOONTIDE_TOKEN_OVERLAP_SECONDS": "20",
            # As a pod's container that restarts, the next one need not wait for the Lease.
            "MOONTIDE_POD_NAME": "one",
            "MOONTIDE_POD_UID": "one",
        }
        operator = make_operator("rotating", environ, RESOLVING.format(services=stage.services))
        operator.start()
        stage.pool()
        stage.fleet("chat", fences=False)
        stage.wait_current("chat", 1)
        wiper, version = Wiper(stage), 1
        wait_for("the master's pod", wiper.runs)

        def killed_and_changed() -> None:
            """Another operator, and a change of policy, which of a plain fleet takes two verified wipes."""
            nonlocal version
            operator.stop(signal.SIGKILL)
            operator.start()
            version += 1
            stage.double("change", names=sorted(stage.double("states")), weights=str(version))
            stage.ask("chat", version=str(version))
            stage.wait_current("chat", version)

        def told() -> set[str]:
            return {each["reason"] for each in wiper.events if each["involvedObject"]["kind"] == "KVCachePool"}

        def waits(phase: str, for_what: str) -> bool:
            return wiper.token.get("phase") == phase and for_what in wiper.token["message"]

        (old,) = wiper.secret
        wiper.rotate("november")
        wait_for("it says who waits", lambda: waits("Introducing", "(Http401)"))
        kept, new = wiper.secret
        assert (kept, wiper.answers(old), wiper.answers(new)) == (old, 200, 401)
        killed_and_changed()
        assert wiper.token["phase"] == "Introducing"

        wiper.bring(old, new)
        wait_for("it overlaps", lambda: wiper.token["phase"] == "Overlapping")
        killed_and_changed()

        wait_for("it says who still takes the old one", lambda: waits("Retiring", "(takes it)"))
        assert wiper.secret == [new]
        killed_and_changed()
        assert wiper.token["phase"] == "Retiring"
        wiper.bring(new)
        wait_for("it is done", lambda: wiper.token["phase"] == "Current")
        assert wiper.token["rotation"].startswith("november@")
        assert (wiper.answers(old), wiper.answers(new)) == (401, 200)
        # An operator that is killed between the status and the Event leaves none.
        wait_for("Events", lambda: {"TokenRotating", "TokenRotated"} <= told())
        killed_and_changed()
        assert wiper.secret == [new]

        assert {"TokenRotating", "TokenRotated"} <= told()
        assert [each["message"] for each in wiper.events if "Unauthorized" in each["message"]] == []
        assert [each for each in stage.journal() if "stale" in each] == []
