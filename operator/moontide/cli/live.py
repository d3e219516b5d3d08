"""What goes on on the screen: `status --watch`, and `bump --wait` with a line a replica."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moontide.cli import screen
from moontide.cli.cluster import Reader
from moontide.cli.errors import CliError
from moontide.cli.gather import PolicySight, Sight, look
from moontide.cli.history import started, updates
from moontide.cli.operators import installations, log_lines
from moontide.cli.timeline import Timeline, of_fleet, of_log, render
from moontide.trainer.cli import DONE
from moontide.trainer.errors import ApiUnavailable, CommitTimeout, MoontideError, Superseded

LOOK_SECONDS = 0.25
WATCH_SECONDS = 1.0


def plainly(what: RenderableType) -> str:
    """For a file or a program: lines as long as they are, no colour, no blanks at their ends."""
    text = io.StringIO()
    Console(file=text, width=4096, no_color=True, highlight=False, markup=False, emoji=False).print(what)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _show(console: Console, what: RenderableType) -> None:
    """Print it, plainly where there is no terminal."""
    if console.is_terminal:
        console.print(what)
    else:
        console.file.write(plainly(what) + "\n")
        console.file.flush()


def _pause(took: float, at_least: float) -> float:
    """Looks take a third of the time at most, however large the fleet."""
    return max(at_least, 2 * took)


@contextmanager
def _live(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as shown:
        yield lambda what: shown.update(what, refresh=True)


def watch(
    console: Console,
    see: Callable[[], Sight],
    *,
    as_json: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    looks: int | None = None,
) -> None:
    """Show what is seen, again and again, for ever or ``looks`` times. Without a terminal, and as JSON: each change."""
    last: object = None

    def turns() -> Iterator[tuple[Sight | None, str]]:
        done = 0
        while looks is None or done < looks:
            began, done = time.monotonic(), done + 1
            try:
                yield see(), ""
            except ApiUnavailable as error:
                yield None, str(error)
            sleep(_pause(time.monotonic() - began, WATCH_SECONDS))

    if as_json or not console.is_terminal:
        for sight, trouble in turns():
            if sight is None:
                print(trouble, file=sys.stderr)
                continue
            found = screen.wire(sight)
            if found != last:
                if as_json:
                    console.file.write(json.dumps(found, ensure_ascii=False) + "\n")
                    console.file.flush()
                else:
                    _show(console, screen.render(sight))
            last = found
        return
    seen: Sight | None = None
    with _live(console) as show:
        for sight, trouble in turns():
            seen = sight or seen
            if seen is None:
                show(Text(trouble, screen.BAD))
            else:
                show(screen.render(seen, more=[trouble] if trouble else []))


def follow(
    console: Console,
    reader: Reader,
    namespace: str,
    name: str,
    label: str,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show a line a replica until the version is current, then the timeline. Returns the exit status.

    Raises CommitTimeout, Superseded, CliError.
    """
    began, told = clock(), _Told(console, clock)
    if not console.is_terminal:
        seen = _until(reader, namespace, name, label, began + seconds, told.lines, clock, sleep)
    else:
        with _live(console) as show:
            seen = _until(
                reader,
                namespace,
                name,
                label,
                began + seconds,
                lambda sight, trouble: show(_screen(sight, clock() - began, trouble)),
                clock,
                sleep,
            )
    wire = seen.wire
    counts = (wire.status.get("replicas") or {}).get("summary", "0/0")
    _show(console, Text(f"version {label} is current in epoch {wire.status.get('epoch')}, {counts} replicas"))
    _show(console, render(drawn(reader, seen)))
    return DONE


class _Told:
    """Says each change of a policy or a replica once, as a line."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock, self._began = console, clock, clock()
        self._last: dict[str, str] = {}

    def lines(self, sight: Sight, trouble: str) -> None:
        seen = sight.policies[0]
        found = {"": seen.wire.state()}
        if trouble:
            found["the API server"] = trouble
        for each in screen.rows(sight.following(seen)):
            at = "" if each.epoch is None else f" in epoch {each.epoch}, version {each.version or 'none'}"
            found[each.replica] = f"{each.state}{at}" + (f" ({each.reason})" if each.reason else "")
        for name, text in found.items():
            if self._last.get(name) != text:
                head = f"{name}: " if name else ""
                _show(self._console, Text(f"  {self._clock() - self._began:7.2f} s  {head}{text}"))
        self._last = found


def _screen(sight: Sight, seconds: float, trouble: str) -> RenderableType:
    seen = sight.policies[0]
    fleets = sight.following(seen)
    parts: list[RenderableType] = [Text(f"{seconds:6.1f} s  {seen.full_name}  {seen.wire.state()}")]
    if rows := screen.rows(fleets):
        parts.append(screen.replica_table(rows, many=len(fleets) > 1))
    parts += [Text(f"not seen: {each}", screen.FAINT) for each in sight.unseen]
    return Group(*parts, *([Text(trouble, screen.BAD)] if trouble else []))


def _until(
    reader: Reader,
    namespace: str,
    name: str,
    label: str,
    ends: float,
    show: Callable[[Sight, str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> PolicySight:
    sight: Sight | None = None
    while True:
        looked, trouble = clock(), ""
        try:
            sight = look(reader, namespace, name)
        except ApiUnavailable as error:
            trouble = str(error)
            if sight is None and clock() >= ends:
                raise
        if sight is not None:
            show(sight, trouble)
            seen = sight.policies[0]
            wire = seen.wire
            if not trouble and wire.is_current(label):
                return seen
            if wire.version != label:
                raise Superseded(f"version {label} was waited for, and spec.version is {wire.version} now")
            if clock() >= ends:
                again = f"kubectl moontide wait {name} -n {namespace}"
                raise CommitTimeout(
                    wire.condition("Current").reason,
                    f"version {label} of PolicyVersion {namespace}/{name} is not current in time; {wire.advice()}; "
                    f"the operator goes on, follow it with: {again}, or ask why: kubectl moontide explain {name} -n "
                    f"{namespace}",
                )
        sleep(min(_pause(clock() - looked, LOOK_SECONDS), max(0.0, ends - clock())))


def drawn(reader: Reader, seen: PolicySight, epoch: int | None = None, log: list[str] | None = None) -> Timeline:
    """A change of a policy (the last), by replica where the operator's log can be read. Raises CliError."""
    known = updates(seen)
    if not known:
        raise CliError(f"{seen.full_name} has seen no change yet, so there is nothing to draw")
    update = known[0] if epoch is None else next((each for each in known if each.epoch == epoch), None)
    if update is None:
        text = ", ".join(str(each.epoch) for each in known)
        raise CliError(f"{seen.full_name} remembers no epoch {epoch}; it has: {text}")
    why = "the log given says nothing of it"
    try:
        if log is None:
            why = "the operator's log says nothing of it any more"
            log = log_lines(reader, installations(reader), started(update))
        found = of_log(seen.full_name, update, log)
    except MoontideError as error:
        return of_fleet(seen.full_name, update, f"the operator's log cannot be had: {error}")
    return found or of_fleet(seen.full_name, update, why)
