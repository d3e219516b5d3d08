"""Where the operator runs, who of it leads, and what it has logged. Reads only."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from dataclasses import dataclass

from moontide.cli.cluster import Reader, core, find, items, refusal
from moontide.cli.errors import CliError, Denied
from moontide.trainer.policy import Object

SYSTEM = "moontide-system"
SELECTOR = "app.kubernetes.io/name=moontide-operator"


@dataclass(frozen=True)
class Installation:
    """One release of the chart."""

    deployment: Object
    pods: tuple[Object, ...]
    lease: Object | None
    lease_refused: str = ""

    @property
    def name(self) -> str:
        return str(self.deployment["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.deployment["metadata"]["namespace"])

    @property
    def environ(self) -> dict[str, str]:
        """Literal environment of the operator's container."""
        pod = self.deployment["spec"]["template"]["spec"]
        return {
            each["name"]: str(each.get("value", ""))
            for container in pod.get("containers") or ()
            for each in container.get("env") or ()
        }

    @property
    def release(self) -> str:
        """Helm's name of it."""
        return str((self.deployment["metadata"].get("labels") or {}).get("app.kubernetes.io/instance") or "moontide")

    @property
    def version(self) -> str:
        """The chart's; an image of another version may be written into its values."""
        return str((self.deployment["metadata"].get("labels") or {}).get("app.kubernetes.io/version") or "unknown")

    @property
    def image(self) -> str:
        """Of the operator's container."""
        return str(self.deployment["spec"]["template"]["spec"]["containers"][0].get("image") or "unknown")

    def wire(self) -> dict[str, str]:
        """As JSON: which one it is, and its version."""
        return {"namespace": self.namespace, "name": self.name, "version": self.version, "image": self.image}

    @property
    def account(self) -> str:
        """The user that its service account is."""
        pod = self.deployment["spec"]["template"]["spec"]
        return f"system:serviceaccount:{self.namespace}:{pod.get('serviceAccountName') or 'default'}"

    @property
    def holder(self) -> str:
        """Who holds the Lease; empty where nobody does."""
        return str(((self.lease or {}).get("spec") or {}).get("holderIdentity") or "")

    def renewed(self) -> dt.datetime | None:
        """When the Lease was last renewed."""
        text = ((self.lease or {}).get("spec") or {}).get("renewTime")
        return dt.datetime.fromisoformat(str(text).replace("Z", "+00:00")) if text else None


def installations(reader: Reader) -> list[Installation]:
    """Operators of the cluster, or of ``moontide-system`` for who may not see others. Raises CliError."""
    path = "/apis/apps/v1/{}deployments"
    try:
        found = items(reader, path.format(""), {"labelSelector": SELECTOR})
    except Denied:
        found = items(reader, path.format(f"namespaces/{SYSTEM}/"), {"labelSelector": SELECTOR})
    made = []
    for each in found:
        namespace, name = each["metadata"]["namespace"], each["metadata"]["name"]
        instance = (each["metadata"].get("labels") or {}).get("app.kubernetes.io/instance")
        selector = SELECTOR + (f",app.kubernetes.io/instance={instance}" if instance else "")
        try:
            pods = items(reader, core("pods", namespace), {"labelSelector": selector})
        except Denied:
            pods = []
        lease, refused = None, ""
        try:
            lease = find(reader, f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
        except Denied as error:
            refused = str(error)
        made.append(Installation(each, tuple(pods), lease, refused))
    return made


def log_lines(reader: Reader, found: Iterable[Installation], since: dt.datetime) -> list[str]:
    """What all operators have logged since a time. Raises CliError where the user may not see it, or nothing runs."""
    pods = [pod for each in found for pod in each.pods]
    if not pods:
        raise CliError("no pod of the operator is seen")
    lines: list[str] = []
    refused: CliError | None = None
    text = since.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for pod in pods:
        path = f"{core('pods', pod['metadata']['namespace'], pod['metadata']['name'])}/log"
        reply = reader.ask(path, {"sinceTime": text, "container": pod["spec"]["containers"][0]["name"]})
        if reply.status == 200:
            # A log of one line is a JSON object itself.
            lines += (json.dumps(reply.body) if reply.body else reply.text).splitlines()
        else:
            refused = refusal(reader, reply, path)
    if not lines and refused is not None:
        raise refused
    return lines
