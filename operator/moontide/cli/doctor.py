"""`doctor`: reads what the checks judge. Each part that the user may not see is left out, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from moontide.api.v1alpha1 import API_VERSION, GROUP
from moontide.cli.checks import GUARDS, LWS, Facts, Finding, Level, Right, guard, operator_rights, user_rights
from moontide.cli.cluster import Reader, core, find, get, items
from moontide.cli.errors import CliError, Denied, NotInstalled
from moontide.cli.gather import Sight, look
from moontide.cli.operators import SELECTOR, Installation, installations
from moontide.cli.screen import Plain
from moontide.kube.kinds import KINDS
from moontide.trainer.policy import Object

T = TypeVar("T")
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_GUARDS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
_WALLS = "/apis/networking.k8s.io/v1/{}networkpolicies"
_MARKS = {Level.OK: ("ok", "green"), Level.WARN: ("warn", "yellow"), Level.FAIL: ("FAIL", "bold red")}


def facts(reader: Reader, namespace: str | None) -> Facts:
    """Read everything; ``namespace``: whose fleets, None for all. Raises ApiUnavailable, AccessError, CliError."""
    refused: dict[str, str] = {}

    def part(name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (Denied, NotInstalled) as error:
            refused[name] = str(error)
            return None

    version = str(get(reader, "/version").get("gitVersion", ""))
    served = reader.ask(f"/apis/{API_VERSION}").status == 200
    found = part("operators", lambda: installations(reader))
    reviews = part("operator rights", lambda: _operators_rights(reader, found or []))
    mine = part("user rights", lambda: _mine(reader, namespace, found or []))
    walls = _WALLS.format(f"namespaces/{namespace}/" if namespace is not None else "")
    walled = part("network", lambda: items(reader, walls, {"labelSelector": SELECTOR}))
    return Facts(
        now=reader.now(),
        version=version,
        crds=part("crds", lambda: {name: find(reader, f"{_CRDS}/{name}") for name in _names()}),
        served=served,
        lws=part("lws", lambda: find(reader, f"{_CRDS}/{LWS}") is not None),
        nodes=_tuple(part("nodes", lambda: items(reader, core("nodes", None)))),
        operators=_tuple(found),
        operator_rights=reviews or {},
        user=_user(reader),
        user_rights=tuple(mine or ()),
        sight=part("fleets", lambda: _sight(reader, namespace)) if served else None,
        refused=refused,
        unguarded=part("guards", lambda: _unguarded(reader, found or [])),
        walled=frozenset(each["metadata"]["namespace"] for each in walled) if walled is not None else None,
    )


def _names() -> list[str]:
    return [f"{kind.plural}.{GROUP}" for kind in KINDS]


def _tuple(found: Iterable[T] | None) -> tuple[T, ...] | None:
    return None if found is None else tuple(found)


def _sight(reader: Reader, namespace: str | None) -> Sight:
    # Engines say nothing here that conditions do not say, and asking them takes the time of those that do not answer.
    return look(reader, namespace, ask_engines=False)


def _user(reader: Reader) -> str:
    kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    reply = reader.ask("/apis/authentication.k8s.io/v1/selfsubjectreviews", body=kind)
    user = ((reply.body.get("status") or {}).get("userInfo") or {}).get("username")
    return str(user or "unknown")


def _review(reader: Reader, right: Right, user: str | None) -> bool:
    """Whether a user (None: who asks) has a right. Raises Denied where that may not be asked."""
    kind = "SelfSubjectAccessReview" if user is None else "SubjectAccessReview"
    spec: Object = {"resourceAttributes": right.attributes()}
    if user is not None:
        _, _, namespace, _ = user.split(":")
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
        spec |= {"user": user, "groups": groups}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    reply = reader.ask(f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body=body)
    if reply.status == 403:
        raise Denied(reply.message)
    if reply.status not in (200, 201):
        raise CliError(f"{reader.server} answers {reply.status} to a {kind}: {reply.message}")
    return bool((reply.body.get("status") or {}).get("allowed"))


def _operators_rights(reader: Reader, found: Iterable[Installation]) -> dict[str, tuple[tuple[Right, bool], ...]]:
    made = {}
    for each in found:
        made[each.account] = tuple((right, _review(reader, right, each.account)) for right in operator_rights(each))
    return made


def _unguarded(reader: Reader, found: Iterable[Installation]) -> dict[str, tuple[str, ...]]:
    bound: set[str] = set()
    # Kubernetes before 1.30 has no such kind.
    if reader.ask(_GUARDS, {"limit": "1"}).status != 404:
        bound = {each["metadata"]["name"] for each in items(reader, _GUARDS, {"labelSelector": SELECTOR})}
    return {each.account: tuple(which for which in GUARDS if guard(each, which) not in bound) for each in found}


def _mine(reader: Reader, namespace: str | None, found: list[Installation]) -> list[tuple[Right, bool]]:
    system = {"system": found[0].namespace} if found else {}
    return [(right, _review(reader, right, None)) for right in user_rights(namespace or "", **system)]


def render(found: Iterable[Finding]) -> Table:
    """A line a finding: what, and what to do."""
    made = Plain(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    made.add_column(overflow="fold")
    for each in found:
        word, style = _MARKS[each.level]
        text = Text(each.text)
        if each.todo:
            text.append(f"\n→ {each.todo}", "cyan")
        made.add_row(Text(word, style), each.about, text)
    return made
