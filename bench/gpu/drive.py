"""The operator's own planner and client of engines, on engines that are already up and without a cluster.

    python3 bench/gpu/drive.py --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8003 \\
        --wiper http://127.0.0.1:9004 --namespace UID --token-file token --version step-2 [--set strategy=Fence]

What runs is ``moontide.reconcile.policyversion``: look, plan, write, act, until there is nothing to do. Only the API
server is missing: :class:`PaperKube` keeps the policy, the fleet and the pool in memory, so a write costs nothing
here. Engines are adopted by URL (docs/adopted-engines.md). Prints each step as the operator logs it, then the change's
timeline as in ``status.lastUpdate``.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "operator")]


from moontide import naming  # noqa: E402
from moontide.engines.tls import Trust  # noqa: E402
from moontide.engines.wire import Answer, Session  # noqa: E402
from moontide.kube.client import Kube, Resource, parse  # noqa: E402
from moontide.kube.kinds import DEPLOYMENT, POLICY, POOL  # noqa: E402
from moontide.kube.tokens import Tokens  # noqa: E402
from moontide.reconcile import policyversion  # noqa: E402
from moontide.reconcile.context import Context  # noqa: E402

Body = dict[str, Any]
HOME, NAME, POOL_NAME = "paper", "policy", "kv"
KINDS = {kind.kind: kind for kind in (POOL, DEPLOYMENT, POLICY)}
WAIT_SECONDS = 0.5
"""The longest that the driver waits between two turns; the operator's own loop asks for more where nothing moves."""


class OneToken(Tokens):
    """Everybody here takes one token, that of the file that engines and wiper were started with."""

    def __init__(self, token: str) -> None:
        super().__init__(bytes(32))
        self._token = token

    def derive(self, uid: str, rotation: str = "") -> str:
        """That token."""
        return self._token


class PaperKube:
    """What the reconcile asks an API server for, in memory: one policy, one fleet, one pool. Nobody else writes."""

    def __init__(self, fleet_uid: str, urls: Sequence[str], pool: bool) -> None:
        self.events: list[tuple[str, str]] = []
        fleet: Body = {"policyRef": {"name": NAME}, "endpoints": {"urls": list(urls)}}
        self._bodies: dict[str, Body] = {DEPLOYMENT.kind: self._body(fleet, "fleet", fleet_uid)}
        if pool:
            fleet["kvCache"] = {"poolRef": {"name": POOL_NAME}}
            self._bodies[POOL.kind] = self._body({}, POOL_NAME, "paper-pool")

    @staticmethod
    def _body(spec: Body, name: str, uid: str) -> Body:
        return {"metadata": {"name": name, "namespace": HOME, "uid": uid, "generation": 1}, "spec": spec}

    def _read(self, kind: str) -> Resource[Any] | None:
        body = self._bodies.get(kind)
        return None if body is None else parse(KINDS[kind], copy.deepcopy(body))

    def patch(self, changes: Mapping[str, object]) -> None:
        """Change the policy's spec as a merge patch does: None removes."""
        body = self._bodies.setdefault(POLICY.kind, self._body({}, NAME, "paper-policy"))
        spec = {key: value for key, value in {**body["spec"], **changes}.items() if value is not None}
        if spec != body["spec"]:
            body["metadata"]["generation"] += 1
        body["spec"] = spec

    @property
    def status(self) -> Body:
        """Of the policy, as the API server would give it."""
        found: Body = self._bodies[POLICY.kind].get("status") or {}
        return found

    async def get_policy(self, namespace: str, name: str) -> Resource[Any] | None:
        return self._read(POLICY.kind)

    async def get_pool(self, namespace: str, name: str) -> Resource[Any] | None:
        return self._read(POOL.kind)

    async def list_deployments_following(
        self, namespace: str, policy: str, allowed: Collection[str] = ()
    ) -> list[Resource[Any]]:
        fleet = self._read(DEPLOYMENT.kind)
        return [] if fleet is None else [fleet]

    async def apply_policy_status(self, namespace: str, name: str, status: Any, uid: str | None = None) -> bool:
        self._bodies[POLICY.kind]["status"] = status.to_wire()
        return True

    async def mark_adopted(self, namespace: str, name: str, uid: str, changes: Mapping[str, str | None]) -> bool:
        body = self._bodies[DEPLOYMENT.kind]
        merged = {**(body.get("status") or {}).get("adopted", {}), **changes}
        body["status"] = {"adopted": {boot: url for boot, url in merged.items() if url is not None}}
        return True

    async def read_pods(self, namespace: str, selector: str, convert: Any, seen: Any) -> list[Any]:
        return []

    async def event(self, regarding: Resource[Any], reason: str, message: str, type: str = "Normal") -> None:
        self.events.append((reason, message))


class ToWiper(Session):
    """Sends what is for the pool's Service to the wiper's URL, and everything else where it says."""

    def __init__(self, wiper: str | None) -> None:
        super().__init__(Trust())
        self._wiper = wiper.rstrip("/") if wiper else None
        self._service = f"http://{naming.service_host(naming.master(POOL_NAME), HOME)}:{naming.WIPER_PORT}"

    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, server_name: str = ""
    ) -> Answer:
        """As of a Session."""
        if self._wiper is not None and url.startswith(self._service):
            url = self._wiper + url.removeprefix(self._service)
        return await super().ask(method, url, headers, body, server_name)


class Steps(logging.Handler):
    """Collects what the operator logs of its steps, with the seconds since :attr:`began`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.began = time.monotonic()
        self.lines: list[str] = []
        self.thread: int | None = None
        """Of the driver that it listens to; there may be others."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread != self.thread:
            return
        after = time.monotonic() - self.began
        epoch, seconds = getattr(record, "epoch", "?"), getattr(record, "seconds", None)
        took = "" if seconds is None else f" ({seconds * 1000:.1f} ms)"
        self.lines.append(f"{after * 1000:9.1f} ms  epoch {epoch}  {record.getMessage()}{took}")


class Driver:
    """Reconciles one policy over some engines. All of it happens in a thread with an event loop of its own."""

    def __init__(
        self,
        engines: Sequence[str],
        wiper: str | None,
        fleet_uid: str,
        token: str,
        http: Session | None = None,
    ) -> None:
        """``engines``: base URLs of admin ports. ``wiper``: None for a fleet without a store. ``http``: another way to
        them than TCP."""
        self.kube = PaperKube(fleet_uid, engines, wiper is not None)
        self.steps = Steps()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._wiper, self._token, self._given = wiper, token, http
        logger = logging.getLogger(policyversion.__name__)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self.steps)

    def __enter__(self) -> Driver:
        self._thread.start()
        self.steps.thread = self._thread.ident
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(policyversion.__name__).removeHandler(self.steps)
        asyncio.run_coroutine_threadsafe(self._http.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _connect(self) -> None:
        """A client belongs to the loop in which it is made."""
        self._http = self._given or ToWiper(self._wiper)
        self._context = Context(cast("Kube", self.kube), self._http, OneToken(self._token), term=lambda: 1)

    def change(self, seconds: float = 60.0, **spec: object) -> Body:
        """Change the policy's spec and reconcile until it is so everywhere: the status. Raises TimeoutError."""
        self.steps.began, self.steps.lines = time.monotonic(), []
        return asyncio.run_coroutine_threadsafe(self._change(seconds, spec), self._loop).result(seconds + 30)

    def settle(self, seconds: float = 60.0) -> Body:
        """Reconcile until old keys are removed too (``Fence`` and salted fleets remove them afterwards)."""
        return asyncio.run_coroutine_threadsafe(self._until(seconds, wiped), self._loop).result(seconds + 30)

    async def _change(self, seconds: float, spec: Mapping[str, object]) -> Body:
        self.kube.patch(spec)
        return await self._until(seconds, finished)

    async def _until(self, seconds: float, done: Any) -> Body:
        ends = time.monotonic() + seconds
        while True:
            rest = await policyversion.reconcile(self._context, HOME, NAME)
            policy = self.kube._bodies[POLICY.kind]
            if done(policy):
                return self.kube.status
            if time.monotonic() > ends:
                raise TimeoutError(f"not within {seconds:g} s: {conditions(self.kube.status)}; {self.steps.lines[-5:]}")
            await asyncio.sleep(min(rest, WAIT_SECONDS))


def conditions(status: Mapping[str, Any]) -> dict[str, str]:
    """Type to status, reason and message."""
    return {
        each["type"]: f"{each['status']} {each['reason']} {each.get('message', '')}".strip()
        for each in status.get("conditions", ())
    }


def finished(policy: Mapping[str, Any]) -> bool:
    """Whether every engine is where the spec wants it: current, or held still for the push of ``preparing``."""
    spec, status = policy["spec"], policy.get("status") or {}
    if status.get("observedGeneration") != policy["metadata"]["generation"]:
        return False
    found = {each["type"]: each for each in status.get("conditions", ())}
    if spec.get("preparing") is not None and str(spec["preparing"]) != str(spec["version"]):
        preparation = status.get("preparation") or {}
        right = preparation.get("version") == str(spec["preparing"])
        return right and found.get("Prepared", {}).get("status") == "True"
    return status.get("targetVersion") == str(spec["version"]) and found.get("Current", {}).get("status") == "True"


def wiped(policy: Mapping[str, Any]) -> bool:
    """Whether the last change has removed the keys of older epochs."""
    return finished(policy) and ((policy.get("status") or {}).get("lastUpdate") or {}).get("wipedAt") is not None


def setting(text: str) -> tuple[str, object]:
    """``name=value`` of the command line: the value as JSON if it is some, else as a string."""
    name, mark, value = text.partition("=")
    if not mark or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: write a field of the policy's spec as for example strategy=Fence")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(arguments: list[str] | None = None) -> int:
    """Command line: one change. 0 when it is finished and old keys are gone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", action="append", required=True, help="base URL of an engine's admin port")
    parser.add_argument("--wiper", help="base URL of the wiper beside the Mooncake master; none: no store")
    parser.add_argument("--namespace", required=True, help="MOONTIDE_KEY_NAMESPACE of the engines")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    token = options.token_file.read_text().split()[0]
    with Driver(options.engine, options.wiper, options.namespace, token) as driver:
        try:
            driver.change(options.seconds, version=options.version, **dict(options.set))
            driver.settle(options.seconds)
        except TimeoutError as error:
            print("\n".join(driver.steps.lines), file=sys.stderr)
            print(f"error: {error}", file=sys.stderr)
            return 1
        print("\n".join(driver.steps.lines))
        print(json.dumps(driver.kube.status["lastUpdate"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
