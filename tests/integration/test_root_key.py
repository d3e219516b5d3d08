"""The root key is replaced after a leak: a real API server and operator, gates over doubles."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tests.integration.stage import RESOLVING


def test_a_root_key_that_has_leaked_is_replaced_while_engines_serve(make_stage: Any, wait_for: Any) -> None:
    with make_stage() as (stage, make_operator):
        environ = {"MOONTIDE_RESYNC_SECONDS": "1", "MOONTIDE_LEASE_SECONDS": "60"}
        operator = make_operator("rekeyed", environ, RESOLVING.format(services=stage.services))
        operator.start()
        stage.pool()
        # Its policy ends with removals, for which the wiper has to take the operator's token.
        stage.fleet("chat", fences=False, weights="Unchecked")
        epoch = stage.wait_current("chat", 1)
        secrets = f"/api/v1/namespaces/{stage.namespace}/secrets"

        def held(name: str) -> str:
            return base64.b64decode(stage.api("GET", f"{secrets}/{name}")["data"]["token"]).decode()

        def states() -> set[tuple[str, int]]:
            return {tuple(each) for each in stage.double("states").values()}

        wait_for("both serve", lambda: states() == {("open", epoch)})
        names = ("chat-admin", "kv-wiper")
        before = {name: held(name) for name in names}
        assert operator.stop() == 0
        stage.api("DELETE", f"{secrets}/moontide-root-key")
        operator.start()
        wait_for("every token is another one", lambda: all(held(name) != before[name] for name in names))

        # The kubelet has not brought the files yet: engines refuse the operator, serve on, and a change waits.
        def refused() -> bool:
            closed = stage.api("GET", stage.path("InferenceDeployment", "chat"))["status"].get("closed") or ()
            said = [(each["reason"], each["message"].partition(":")[0]) for each in closed]
            return said == [("NoAnswer", "Http401")] * 2

        wait_for("the engines refuse it", refused)
        stage.ask("chat", version="2")
        wait_for("it is seen", lambda: stage.status("chat")["observedGeneration"] == 2)
        assert stage.current("chat") is None
        assert states() == {("open", epoch)}

        # It has: engines and wiper read them at the next request.
        for name in names:
            file: Path = stage.folder / f"{name}.token"
            assert file.read_text() == before[name]
            file.write_text(held(name))
        assert stage.wait_current("chat", 2) > epoch
        assert states() == {("open", stage.status("chat")["epoch"])}
        assert operator.stop() == 0
