"""Which answers a policy's reference must explain, and whether it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hack.demo.cold import LOGPROB_TOLERANCE, Cold
from hack.demo.fleet import Answer


@dataclass(frozen=True)
class Window:
    """A stretch of time in which no single policy holds: from the first byte of new weights to ``Current=True``."""

    opened: float
    closed: float
    """Seconds since 1970; infinite while it lasts."""
    epoch: int | None
    """The epoch that the change ended in; None while that is not known."""

    def blurs(self, answer: Answer) -> bool:
        """Whether an answer may be of neither policy: it overlaps the window and was not admitted to its epoch."""
        admitted = self.epoch is not None and answer.epoch is not None and answer.epoch >= self.epoch
        return answer.began < self.closed and answer.ended > self.opened and not admitted


@dataclass
class Verdict:
    """What became of a set of answers."""

    right: int = 0
    stale: list[Answer] = field(default_factory=list)
    """Wrong: not the tokens of a cold engine with the weights that the answer claims."""
    cached: int = 0
    """Right or stale answers that began with a cache hit."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Answers that were not judged, by reason."""
    blurred: int = 0
    """Answers inside a window, which are promised nothing."""
    straddled: int = 0
    """Answers that say themselves that they ended in another epoch than they began in."""
    in_transit: int = 0
    """Answers that claim no version: they ran while weights were pushed, and say so."""
    worst_logprob: float = 0.0

    @property
    def checked(self) -> int:
        """Answers that were held against a reference."""
        return self.right + len(self.stale)

    @property
    def left_out_share(self) -> float:
        """Of all answers outside windows, the share that was not judged."""
        total = self.checked + self.left_out.total()
        return self.left_out.total() / total if total else 0.0

    def line(self) -> str:
        """For people."""
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(self.left_out.items())) or "none"
        return (
            f"{self.checked} answers checked, {len(self.stale)} stale, {self.cached} began with a cache hit, "
            f"{self.blurred} inside a change, {self.straddled} straddled, {self.in_transit} in transit, "
            f"left out: {reasons}; log-probs differ by {self.worst_logprob:.4f} at most"
        )


def explain(answer: Answer, by_version: Mapping[str, tuple[Cold, ...]]) -> str:
    """For people: where a wrong answer leaves the reference, and how far off its log-probs were up to there.

    Stale KV moves log-probs from the first token on; where they are equal up to the first other token, two tokens were
    (nearly) as likely and the batch decided. This tells the two apart; it excuses neither.
    """
    reference = by_version[str(answer.version)][answer.prompt]
    pairs = list(zip(answer.tokens, reference.tokens, strict=False))
    first = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    drift = max(
        (abs(a - b) for a, b in zip(answer.logprobs[:first], reference.logprobs[:first], strict=True)), default=0.0
    )
    others = [version for version, each in by_version.items() if each[answer.prompt].equals(answer)]
    return (
        f"prompt {answer.prompt} on {answer.replica}, version {answer.version}, epoch {answer.epoch}, "
        f"{answer.cached} tokens cached: first other token at {first}, log-probs off by {drift:.4f} before it"
        + (f"; it is the answer of version {', '.join(others)}" if others else "")
    )


def judge(answers: Iterable[Answer], by_version: Mapping[str, tuple[Cold, ...]], windows: Iterable[Window]) -> Verdict:
    """Hold every answer against the cold engine's for the version that the answer's own header claims.

    ``by_version`` maps a version label to the reference of its weights.
    """
    verdict, spans = Verdict(), list(windows)
    for answer in answers:
        if any(span.blurs(answer) for span in spans):
            verdict.blurred += 1
        elif answer.status == 0:
            verdict.left_out[f"connection: {answer.error}"] += 1
        elif answer.status != 200:
            verdict.left_out[f"HTTP {answer.status}"] += 1
        elif answer.error:
            verdict.left_out[answer.error] += 1
        elif answer.last_epoch is not None:
            verdict.straddled += 1
        elif answer.version is None and answer.epoch is not None:
            verdict.in_transit += 1
        elif answer.version is None or answer.version not in by_version:
            verdict.left_out[f"claims version {answer.version}"] += 1
        else:
            reference = by_version[answer.version][answer.prompt]
            verdict.cached += bool(answer.cached)
            if reference.equals(answer) and reference.distance(answer) <= LOGPROB_TOLERANCE:
                verdict.right += 1
                verdict.worst_logprob = max(verdict.worst_logprob, reference.distance(answer))
            else:
                verdict.stale.append(answer)
    return verdict
