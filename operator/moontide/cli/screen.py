"""`status`: the fleet on one screen, for people and as JSON. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moontide.api.v1alpha1 import Condition, KVCachePoolStatus
from moontide.cli.gather import FleetSight, PolicySight, Sight
from moontide.planning.model import Replica

GOOD, BUSY, BAD, FAINT = "green", "yellow", "red", "dim"
_STATES = {"open": GOOD, "paused": BUSY, "loading": BUSY, "closed": BAD, "no answer": BAD, "starting": BUSY}


@dataclass(frozen=True)
class Row:
    """One replica, in words."""

    fleet: str
    replica: str
    state: str
    epoch: int | None
    version: str | None
    in_flight: int | None
    reason: str
    source: str
    """Who says so: ``engine``, or ``status`` where the engine was not asked."""

    def wire(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "fleet": self.fleet,
            "replica": self.replica,
            "state": self.state,
            "epoch": self.epoch,
            "version": self.version,
            "inFlight": self.in_flight,
            "reason": self.reason,
            "source": self.source,
        }


def row(sight: FleetSight, replica: Replica) -> Row:
    """What is to be said of one replica."""
    engine, taken = replica.status, replica.name in sight.assumed
    source = "status" if taken else "engine"
    reason = _reason_of(sight, replica)
    if engine is None:
        starting = replica.container_id is None and not replica.url
        state = "starting" if starting else "no answer"
        return Row(sight.full_name, replica.name, state, None, None, None, reason or replica.error, source)
    state = "loading" if engine.loading is not None and engine.loading.running else str(engine.state)
    if not engine.responsive:
        state, reason = "no answer", engine.fault or "the engine behind its gate does not answer"
    epoch = None if engine.epoch == 0 and engine.version is None and engine.state == "closed" else engine.epoch
    flight = None if taken else engine.in_flight
    return Row(sight.full_name, replica.name, state, epoch, engine.version, flight, reason, source)


def _reason_of(sight: FleetSight, replica: Replica) -> str:
    if replica.terminating:
        return "on its way out"
    engine = replica.status
    said = next((each for each in sight.status.closed if each.name == replica.name), None)
    if engine is not None and engine.state != "closed":
        return ""
    if said is not None:
        return f"{said.reason}: {said.message}".rstrip(": ")
    return engine.reason if engine is not None else replica.error


def rows(fleets: Iterable[FleetSight]) -> list[Row]:
    """All replicas, fleet by fleet."""
    return [
        row(sight, each) for sight in fleets for each in sorted(sight.fleet.replicas, key=lambda replica: replica.name)
    ]


def condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """One condition."""
    return next((each for each in conditions if each.type == kind), None)


class Plain(Table):
    """A table whose cells are shown as they are: what a cluster says is no markup."""

    def add_row(self, *cells: RenderableType | None, **more: Any) -> None:
        super().add_row(*(Text(each) if isinstance(each, str) else each for each in cells), **more)


def table(*heads: str) -> Table:
    """A table as this program draws it."""
    made = Plain(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in heads:
        last = head == heads[-1]
        made.add_column(head, overflow="fold", no_wrap=not last)
    return made


def _mark(ok: bool | None) -> str:
    return FAINT if ok is None else GOOD if ok else BAD


def render(sight: Sight, *, more: Iterable[str] = ()) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = []
    if sight.policies:
        parts += [_policies(sight.policies, sight), Text()]
    if sight.fleets:
        parts += [_fleets(sight.fleets), Text()]
        replicas = rows(sight.fleets)
        if replicas:
            parts += [replica_table(replicas, many=len(sight.fleets) > 1), Text()]
    if sight.pools:
        parts += [_pools(sight), Text()]
    if not parts:
        parts.append(Text("no PolicyVersion, InferenceDeployment or KVCachePool here; see all namespaces with -A"))
    parts += [Text(f"not seen: {each}", style=FAINT) for each in (*sight.unseen, *more)]
    while parts and isinstance(parts[-1], Text) and not parts[-1].plain:
        parts.pop()
    return Group(*parts)


def _policies(policies: Iterable[PolicySight], sight: Sight) -> Table:
    made = table("POLICY", "VERSION", "EPOCH", "STATE", "REPLICAS", "PAUSED", "FOR", "SAYS")
    for each in policies:
        spec, status, wire = each.resource.model.spec, each.status, each.wire
        current = wire.condition("Current")
        served = status.version or "none"
        version = served if served == spec.label else f"{served} → {spec.label}"
        counts = status.replicas.summary if status.replicas is not None else "0/0"
        update = status.last_update
        paused = "-" if update is None or update.pause_seconds is None else f"{update.pause_seconds:.3f} s"
        found = condition(status.conditions, "Current")
        age = "-" if found is None else ago(found.last_transition_time, sight.now)
        says = current.message if current.fresh else "of an older spec: the operator has not looked yet"
        degraded = condition(status.conditions, "Degraded")
        if degraded is not None and degraded.status == "True":
            says += f"; {degraded.reason}: {degraded.message}"
        style = _mark(current.status == "True" and current.fresh) if current.status != "Unknown" else BUSY
        made.add_row(each.full_name, version, str(status.epoch), Text(current.reason, style), counts, paused, age, says)
    return made


def _fleets(fleets: Iterable[FleetSight]) -> Table:
    made = table("FLEET", "MODEL", "READY", "CURRENT", "VERSION", "POOL", "POLICY", "TROUBLE")
    for each in fleets:
        spec, status = each.resource.model.spec, each.status
        model = spec.model.served_name if spec.model is not None else "(adopted)"
        current = status.current or f"0/{spec.wanted}"
        policy = "-" if each.follows is None else "/".join(each.follows)
        ok = status.current_replicas >= spec.wanted
        made.add_row(
            each.full_name,
            model,
            status.ready or f"0/{spec.wanted}",
            Text(current, _mark(ok)),
            status.version or "-",
            each.fleet.pool or "-",
            policy,
            "; ".join(trouble(each)),
        )
    return made


EXPECTED = {("KVCacheAttached", "NotConfigured")}


def trouble(sight: FleetSight) -> list[str]:
    """Conditions of a fleet that are not as they should be."""
    found = []
    for each in sight.status.conditions:
        if each.type == "Progressing":
            bad = each.status == "True" or each.reason != "Complete"
        else:
            bad = each.status != "True" and (each.type, each.reason) not in EXPECTED
        if bad:
            found.append(f"{each.type} {each.reason}: {each.message}".rstrip(": "))
    return found


def replica_table(replicas: Iterable[Row], *, many: bool = False) -> Table:
    """A line a replica."""
    made = table(*(["FLEET"] if many else []), "REPLICA", "STATE", "EPOCH", "VERSION", "IN FLIGHT", "REASON")
    for each in replicas:
        flight = "-" if each.in_flight is None else str(each.in_flight)
        cells: list[str | Text] = [
            each.replica,
            Text(each.state + ("*" if each.source == "status" else ""), _STATES.get(each.state, "")),
            "-" if each.epoch is None else str(each.epoch),
            each.version or "-",
            flight,
            each.reason,
        ]
        made.add_row(*([each.fleet] if many else []), *cells)
    return made


def _pools(sight: Sight) -> Table:
    made = table("POOL", "READY", "CLIENTS", "KEYS", "USED", "SAYS")
    for each in sight.pools:
        status = each.model.status or KVCachePoolStatus()
        ready = condition(status.conditions, "Ready")
        word = "Unknown" if ready is None else ready.status
        says = "" if ready is None or ready.status == "True" else f"{ready.reason}: {ready.message}"
        numbers = ("-" if number is None else str(number) for number in (status.clients, status.keys))
        made.add_row(
            f"{each.meta.namespace}/{each.meta.name}",
            Text(word, _mark(word == "True")),
            *numbers,
            status.used or "-",
            says,
        )
    return made


def ago(moment: str, now: dt.datetime) -> str:
    """How long ago a time of a condition is."""
    seconds = max(0, int((now - dt.datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def wire(sight: Sight) -> dict[str, Any]:
    """The screen as JSON: objects as the API server has them, and the replicas."""
    return {
        "policies": [each.body for each in sight.policies],
        "fleets": [each.body for each in sight.fleets],
        "pools": [
            {"namespace": each.meta.namespace, "name": each.meta.name, **each.model.to_wire()} for each in sight.pools
        ],
        "replicas": [each.wire() for each in rows(sight.fleets)],
        "unseen": list(sight.unseen),
    }
