"""The gate: which requests may run, in which epoch, and what is known about the caches behind it.

A pure state machine. It knows neither HTTP nor vLLM nor an event loop; time comes from the clock it is given (seconds,
monotonic). Not thread-safe: one event loop owns it.

Invariants, whatever is called in whatever order:

- the gate is never open without an admission to the epoch it is open in;
- it is never admitted to an epoch unless the caches were clean and drained at that moment, or what they hold has
  another epoch's salt in its keys;
- it is moved to another epoch while it is open only with a new salt in its keys;
- a pause that is not ended in time becomes ``closed``; nothing opens by itself;
- while weights are loaded it is neither open nor admitted, and nothing runs behind it;
- the fence (term, epoch) only goes up.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]


class State(enum.StrEnum):
    """What the gate does with an inference request."""

    CLOSED = "closed"
    OPEN = "open"
    PAUSED = "paused"


class DuringBarrier(enum.StrEnum):
    """What happens to requests that arrive while the gate is paused."""

    QUEUE = "Queue"
    REFUSE = "Refuse"


class Entry(enum.Enum):
    """Answer of the gate to one request."""

    PASS = "pass"
    HOLD = "hold"
    REFUSE = "refuse"


@dataclass(frozen=True, order=True)
class Fence:
    """Position of a command in the order of all commands: leaders first, then epochs."""

    term: int
    epoch: int


@dataclass(frozen=True)
class Stamp:
    """What a request that passes the gate runs under."""

    epoch: int
    version: str | None


class Refusal(Exception):
    """A command that must not be carried out. ``reason`` is one word of the contract, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Gate:
    """State of one engine process, from its start (closed) on.

    ``listeners`` are called with the gate after each change of ``state``; they must not raise.
    """

    def __init__(self, boot_id: str, clock: Clock, admit_ttl: float = 120.0) -> None:
        if admit_ttl <= 0:
            raise ValueError("admit_ttl must be positive")
        self.boot_id = boot_id
        self.listeners: list[Callable[[Gate], None]] = []
        self._clock = clock
        self._admit_ttl = admit_ttl
        self._state = State.CLOSED
        self._reason = "Starting"
        self._fence = Fence(0, 0)
        self._stamp: Stamp | None = None
        self._admitted = False
        self._clean = True
        self._drained = True
        self._in_flight = 0
        self._opens = 0
        self._during = DuringBarrier.QUEUE
        self._deadline = math.inf
        self._paused_at: float | None = None
        self._last_pause: float | None = None
        self._terminating = False
        self._loading = False

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Current state; a pause whose time is up counts as closed from that moment."""
        self._expire()
        return self._state

    @property
    def reason(self) -> str:
        """Why the gate is closed; empty while it is not."""
        return self._reason if self.state is State.CLOSED else ""

    @property
    def fence(self) -> Fence:
        """Highest position of any accepted command."""
        return self._fence

    @property
    def stamp(self) -> Stamp | None:
        """Epoch and version of the last admission, None before the first."""
        return self._stamp

    @property
    def admitted(self) -> bool:
        """Whether the admission in ``stamp`` still holds: closing ends it."""
        self._expire()
        return self._admitted

    @property
    def clean(self) -> bool:
        """Whether no KV of any request can be in the local caches."""
        return self._clean

    @property
    def drained(self) -> bool:
        """Whether nothing runs and nothing is still on its way to the store."""
        return self._drained

    @property
    def in_flight(self) -> int:
        """Requests that passed and have not ended."""
        return self._in_flight

    @property
    def opens(self) -> int:
        """How often the gate opened; compare two readings to know that it stayed shut between them."""
        return self._opens

    @property
    def during(self) -> DuringBarrier:
        """What a pause does with new requests."""
        return self._during

    @property
    def loading(self) -> bool:
        """Whether weights are being loaded."""
        return self._loading

    @property
    def paused_seconds(self) -> float | None:
        """Length of the pause so far, None outside a pause."""
        if self.state is not State.PAUSED or self._paused_at is None:
            return None
        return self._clock() - self._paused_at

    @property
    def last_pause_seconds(self) -> float | None:
        """Length of the last pause that ended with a resume."""
        return self._last_pause

    @property
    def pause_remaining(self) -> float | None:
        """Seconds until the pause runs out, None outside a pause."""
        if self.state is not State.PAUSED:
            return None
        return self._deadline - self._clock()

    # -- requests ------------------------------------------------------------------------------------------------

    def enter(self) -> Entry:
        """Ask for one request. PASS counts it as in flight: the caller owes one ``leave``; ``stamp`` is its stamp."""
        state = self.state
        if state is State.OPEN:
            self._in_flight += 1
            return Entry.PASS
        if state is State.PAUSED and self._during is DuringBarrier.QUEUE:
            return Entry.HOLD
        return Entry.REFUSE

    def leave(self) -> None:
        """One request that passed has ended, body and all."""
        if self._in_flight <= 0:
            raise RuntimeError("a request left the gate that never passed it")
        self._in_flight -= 1

    # -- commands ------------------------------------------------------------------------------------------------

    def accept(self, fence: Fence, boot_id: str) -> None:
        """Let a command in, or raise Refusal: it is for another process, or from a leader or epoch that is over."""
        if boot_id != self.boot_id:
            raise Refusal("BootIdMismatch", f"this process is {self.boot_id}, the command is for {boot_id}")
        if fence < self._fence:
            raise Refusal(
                "Fenced",
                f"term {fence.term}, epoch {fence.epoch} is lower than term {self._fence.term}, "
                f"epoch {self._fence.epoch}, which was seen before",
            )
        self._fence = fence

    def quiesce(self, during: DuringBarrier, ttl: float) -> None:
        """Pause for at most ``ttl`` seconds from now. A closed gate stays closed."""
        if not (math.isfinite(ttl) and ttl > 0):
            raise ValueError("ttl must be positive and finite")
        state = self.state
        if state is State.CLOSED:
            return
        self._during = during
        self._deadline = self._clock() + ttl
        if state is State.OPEN:
            self._paused_at = self._clock()
            self._set(State.PAUSED, "")

    def set_drained(self) -> None:
        """Record that all queues are empty and nothing runs. Raises Refusal if open or with requests in flight."""
        self._require_still("drained")
        self._drained = True

    def set_clean(self) -> None:
        """Record that every local cache was emptied. Raises Refusal if open or with requests in flight."""
        self._require_still("clean")
        self._clean = True

    def admit(self, epoch: int, version: str | None, salted: bool = False) -> None:
        """Admit this process to an epoch. A closed gate becomes paused and has ``admit_ttl`` seconds to be resumed.

        ``salted``: the epoch's salt is in its keys by now, so it need be neither clean nor drained.
        """
        state = self.state
        stamp = Stamp(epoch, version)
        if self._admitted and self._stamp == stamp:
            return
        self._require_life()
        if self._loading:
            raise Refusal("Loading", "weights are being loaded, so what they are is not known yet")
        if salted and state is State.OPEN:
            raise Refusal("NotQuiesced", "an open engine is fenced, not admitted, to another epoch")
        if not salted and not (self._clean and self._drained):
            missing = " and ".join(n for n, ok in (("drained", self._drained), ("reset", self._clean)) if not ok)
            raise Refusal("NotClean", f"the engine is {state} and was not {missing} since it last ran requests")
        self._stamp = stamp
        self._admitted = True
        if state is State.CLOSED:
            now = self._clock()
            self._during = DuringBarrier.QUEUE
            self._deadline = now + self._admit_ttl
            self._paused_at = now
            self._set(State.PAUSED, "")

    def check_move(self, epoch: int, version: str | None) -> bool:
        """Whether a move to ``epoch`` has work to do (False: open in it already). Raises Refusal if not allowed."""
        state = self.state
        if state is not State.OPEN:
            raise Refusal("NotOpen", f"the engine is {state}; admit and resume it")
        self._require_life()
        return self._stamp != Stamp(epoch, version)

    def move(self, epoch: int, version: str | None) -> None:
        """Go on, open, in another epoch, whose salt is in the keys by now. Raises Refusal unless open."""
        if self.check_move(epoch, version):
            self._stamp = Stamp(epoch, version)
            self._set(State.OPEN, "")

    def check_resume(self, epoch: int) -> bool:
        """Whether a resume to ``epoch`` has work to do (False: open in it already). Raises Refusal if not allowed."""
        state = self.state
        if not self._admitted or self._stamp is None or self._stamp.epoch != epoch:
            known = f"admitted to epoch {self._stamp.epoch}" if self._admitted and self._stamp else "not admitted"
            raise Refusal("NotAdmitted", f"the engine is {state}, {known}; epoch {epoch} was asked for")
        return state is not State.OPEN

    def resume(self, epoch: int) -> None:
        """Open in ``epoch``. Raises Refusal unless admitted to exactly that one."""
        if not self.check_resume(epoch):
            return
        self._last_pause = None if self._paused_at is None else self._clock() - self._paused_at
        self._paused_at = None
        self._deadline = math.inf
        self._clean = False
        self._drained = False
        self._opens += 1
        self._set(State.OPEN, "")

    def begin_load(self, standing: bool = False) -> None:
        """Weights are about to change: the admission ends, and there is none until ``end_load``.

        ``standing``: requests that are in flight are held in a paused scheduler. Raises Refusal if anything may run.
        """
        self._require_life()
        if self._loading:
            raise Refusal("Loading", "weights are being loaded")
        if self.state is State.OPEN:
            raise Refusal("NotQuiesced", "an open engine cannot change its weights")
        if self._in_flight and not (standing and self._state is State.PAUSED):
            raise Refusal("RequestsRunning", f"{self._in_flight} requests are still in flight")
        self._loading = True
        self._admitted = False
        if self._state is State.CLOSED:
            self._reason = "Loading"

    def end_load(self, loaded: bool) -> None:
        """Weights are not being changed any more. The gate stays as it is: an admission comes next."""
        self._loading = False
        if self.state is State.CLOSED and not self._terminating:
            self._reason = "Loaded" if loaded else "LoadFailed"

    def close(self, reason: str) -> None:
        """Close, and end the admission. Closing again keeps the first reason."""
        self._expire()
        if self._state is not State.CLOSED:
            self._shut(reason)

    def terminate(self) -> None:
        """The process is about to end: close, and refuse every later admission."""
        self._terminating = True
        self._expire()
        if self._state is State.CLOSED:
            self._reason = "Terminating"
        else:
            self._shut("Terminating")

    @property
    def terminating(self) -> bool:
        """Whether the process is about to end. What is in flight may then finish."""
        return self._terminating

    # -- inside --------------------------------------------------------------------------------------------------

    def _require_life(self) -> None:
        if self._terminating:
            raise Refusal("Terminating", "this process is shutting down")

    def _require_still(self, what: str) -> None:
        if self.state is State.OPEN:
            raise Refusal("NotQuiesced", f"an open engine cannot be {what}")
        if self._in_flight:
            raise Refusal("RequestsRunning", f"{self._in_flight} requests are still in flight")

    def _expire(self) -> None:
        if self._state is State.PAUSED and self._clock() >= self._deadline:
            self._shut("PauseExpired")

    def _shut(self, reason: str) -> None:
        self._admitted = False
        self._paused_at = None
        self._deadline = math.inf
        self._set(State.CLOSED, reason)

    def _set(self, state: State, reason: str) -> None:
        self._state = state
        self._reason = reason
        for listener in list(self.listeners):
            listener(self)
