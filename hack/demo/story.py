"""The main job, told on a running fleet: share KV, change the policy under load, prove that nothing old is left."""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.demo import cold, prompts
from hack.demo.cold import LOGPROB_TOLERANCE, Cold, References
from hack.demo.fleet import Answer, Fleet, Replica, push_weights
from hack.demo.install import CLAIM, KINDS
from hack.demo.judge import Window, judge
from hack.demo.kube import Object, moment
from hack.demo.load import Load
from hack.demo.say import Voice

MODELS = {"policy-a": "/models/policy-a", "policy-b": "/models/policy-b"}
_BUMP_SECONDS = 150.0
_COLLECT_SECONDS = 60.0
_LOAD_SECONDS = 60.0
_ENOUGH = 60


def side_of(version: int) -> str:
    """The weights that the demo and the tests give a numbered version: odd ones policy-a's, even ones policy-b's."""
    return tuple(MODELS)[(version + 1) % 2]


@dataclass(frozen=True)
class Summary:
    """The figures of the last lines."""

    replicas: int
    reset: int
    old_keys: int
    keys_left: int
    keys_removed: int
    pause_seconds: float | None
    equal: int
    replayed: int

    def lines(self) -> tuple[str, ...]:
        """The last lines of the demo."""
        pause = "unknown" if self.pause_seconds is None else f"{self.pause_seconds * 1000:.0f} ms"
        says = "equals" if self.equal == self.replayed else "does NOT equal"
        return (
            f"replicas reset {self.reset}/{self.replicas}",
            f"keys left {self.keys_left} (of {self.old_keys} only the old policy used; removed: {self.keys_removed})",
            f"pause {pause}",
            f"answer after the bump {says} the cold engine's, token for token ({self.equal} of {self.replayed})",
        )


def tell(
    fleet: Fleet,
    image: str,
    voice: Voice,
    *,
    old: str = "1",
    new: str = "2",
    references: Path | None = None,
    claim: str | None = CLAIM,
) -> Summary:
    """Run the whole story on a fleet that serves version ``old`` with policy-a; every claim goes to ``voice``.

    The cold engine's answers are also written to ``references`` where one is given. ``claim`` has the weights, or, if
    None, the image.
    """
    texts = prompts.make()
    kept = dict(enumerate(texts.kept))
    loaded = {number: text for number, text in enumerate(texts.all) if number not in kept}

    voice.head("What a cold engine answers (no cache, no store), for both sets of weights")
    reference = cold.answers(fleet.kube, fleet.namespace, image, claim, MODELS, texts.all, voice)
    if references is not None:
        cold.save(reference, references)
    by_version = {old: reference["policy-a"], new: reference["policy-b"]}
    differ = sum(one.tokens != other.tokens for one, other in zip(*by_version.values(), strict=True))
    voice.claim(f"the two policies give different answers to {differ} of {len(texts.all)} prompts", differ > 0)

    replicas = fleet.replicas()
    boots = {each.name: str(each.look()["bootId"]) for each in replicas}
    old_keys = _share(fleet, replicas, kept, by_version[old], voice)

    voice.head("Load: greedy clients over shared prefixes, on every replica")
    with Load(replicas, fleet.model, loaded) as load:
        load.until(_ENOUGH, _LOAD_SECONDS)
        before = judge(load.answers, by_version, [])
        voice.say(before.line())
        voice.claim("under the old policy every answer equals the cold engine's", not before.stale)
        voice.claim("at least half of the answers began with a cache hit", 2 * before.cached >= before.checked > 0)

        pushed = _push(fleet, replicas, kept, reference, new, voice)

        voice.head(f"The change: kubectl patch polv {fleet.policy}, under load")
        namespace, store = fleet.key_namespace, fleet.store()
        there = store.keys(namespace)
        voice.say(f"keys before: {len(there)} in the store (the wiper counts {store.counted(namespace)})")
        voice.claim(
            f"the {len(old_keys)} keys that only steps under the old policy used are among them", old_keys <= there
        )
        patched_at = time.time()
        fleet.bump(int(new))
        policy = fleet.until_current(new, _BUMP_SECONDS, lambda text: voice.say(f"  {text}"))
        current_at = time.time()
        voice.say(f"Current=True {current_at - patched_at:.2f} s after the patch")
        policy = fleet.until_collected(_COLLECT_SECONDS)
        left = old_keys & fleet.store().keys(namespace)
        voice.say(f"keys of the old policy collected {time.time() - patched_at:.2f} s after the patch, under load")
        load.until(_ENOUGH, _LOAD_SECONDS)
    answers = load.answers
    update: Object = policy["status"]["lastUpdate"]
    epoch = int(update["epoch"])

    voice.head("After the change")
    during = judge(answers, by_version, [Window(pushed, current_at, epoch)])
    fresh = [each for each in answers if each.status == 200 and each.epoch == epoch]
    voice.say(during.line())
    voice.claim(
        f"every answer admitted to epoch {epoch} equals the cold engine's with the new weights", not during.stale
    )
    voice.claim(f"{len(fresh)} answers under load were admitted to epoch {epoch}", len(fresh) > 0)
    failed = [each for each in answers if each.status != 200]
    voice.claim(f"{len(failed)} requests failed: those that arrived during the change waited", not failed)
    removed = int(update.get("keysRemoved") or 0)
    voice.claim(f"keys of the old policy in the store: {len(left)} of {len(old_keys)}", not left)
    voice.claim(
        f"{removed} old keys were removed, and a second removal that had to find none verified it",
        removed >= len(old_keys),
    )
    equal, replayed = _replay(replicas, kept, reference["policy-b"], epoch, voice)

    statuses = {each.name: each.look() for each in replicas}
    reset = [name for name, seen in statuses.items() if _is_reset(seen, new, epoch)]
    voice.claim(f"replicas in epoch {epoch}: {len(reset)} of {len(replicas)}", len(reset) == len(replicas))
    salt = f"{policy['metadata']['uid']}/{epoch}"
    salted = sum(seen.get("salt") == salt for seen in statuses.values())
    voice.claim(
        f"block hashes carry the policy's UID and epoch: on {salted} of {len(replicas)}", salted == len(replicas)
    )
    same = all(str(seen["bootId"]) == boots[name] for name, seen in statuses.items())
    voice.claim("no engine was restarted: the boot ids are the same", same)

    _tables(fleet, policy, statuses, there, answers, patched_at, current_at, epoch, voice)
    pause = update.get("pauseSeconds")
    voice.claim("the replicas measured the pause", isinstance(pause, (int, float)) and pause > 0)
    return Summary(len(replicas), len(reset), len(old_keys), len(left), removed, pause, equal, replayed)


def _share(
    fleet: Fleet, replicas: Sequence[Replica], kept: dict[int, str], reference: tuple[Cold, ...], voice: Voice
) -> frozenset[str]:
    """A prefix computed on one replica hits on the other; returns the keys that this put into the store."""
    voice.head("A prefix computed on one replica hits on another, through the store")
    first, second = replicas[0], replicas[1]
    namespace, store = fleet.key_namespace, fleet.store()
    counters = {each.name: each.counters() for each in replicas}
    asked = [first.ask(fleet.model, number, text) for number, text in kept.items()]
    keys = _settled(lambda: store.keys(namespace))
    asked += [second.ask(fleet.model, number, text) for number, text in kept.items()]
    rows = []
    for replica in (first, second):
        mine = [each for each in asked if each.replica == replica.name]
        now, then = replica.counters(), counters[replica.name]
        tokens = sum(each.prompt_tokens for each in mine)
        rows.append((replica.name, str(tokens), str(now.local - then.local), str(now.external - then.external)))
    voice.table(("replica", "prompt tokens", "local hits", "hits through the store"), rows)
    hits, tokens = int(rows[1][3]), int(rows[1][1])
    voice.claim(f"{second.name} took {hits} of {tokens} tokens from the store", hits > tokens // 2)
    _all_equal(asked, reference, "both replicas give the cold engine's answers", voice)
    return keys


def _push(
    fleet: Fleet,
    replicas: Sequence[Replica],
    kept: dict[int, str],
    reference: References,
    new: str,
    voice: Voice,
) -> float:
    """Switch the weights of the running engines; returns when that began, in seconds since 1970."""
    voice.head("A trainer pushes new weights into the running engines")
    began = time.time()
    for name, seconds in push_weights(replicas, MODELS["policy-b"], new).items():
        voice.say(f"{name}: {MODELS['policy-b']} loaded and labelled {new!r} in {seconds:.2f} s")
    number, text = next(iter(kept.items()))
    salted = [each.ask(fleet.model, number, text, salt=f"weights-{began}-{each.name}") for each in replicas]
    _all_equal(
        salted, reference["policy-b"], "without any cache (a salt of its own) they answer with the new weights", voice
    )
    replays = [each.ask(fleet.model, number, text) for each in replicas for number, text in kept.items()]
    hybrid = [each for each in replays if not any(cold_[each.prompt].equals(each) for cold_ in reference.values())]
    voice.say("the same prompts again, before the policy is bumped: new weights on old KV")
    if hybrid:
        shown = hybrid[0]
        rows = [("this answer", _tokens(shown.tokens))]
        rows += [(f"cold {name}", _tokens(cold_[shown.prompt].tokens)) for name, cold_ in reference.items()]
        voice.table(("", "first tokens"), rows)
    voice.claim(f"{len(hybrid)} of {len(replays)} answers are of neither policy", bool(hybrid))
    return began


def _replay(
    replicas: Sequence[Replica], kept: dict[int, str], reference: tuple[Cold, ...], epoch: int, voice: Voice
) -> tuple[int, int]:
    """The kept prompts again: nothing old is hit, and every answer is the cold engine's."""
    answers = [replicas[0].ask("tiny", number, text) for number, text in kept.items()]
    voice.claim(
        f"asked again on {replicas[0].name}, the prompts find no cached token",
        all(each.status == 200 and each.cached == 0 for each in answers),
    )
    time.sleep(1.0)
    for replica in replicas[1:]:
        again = [replica.ask("tiny", number, text) for number, text in kept.items()]
        found = sum(each.cached or 0 for each in again)
        voice.claim(f"{replica.name} then takes {found} tokens of the new epoch from the store", found > 0)
        answers += again
    voice.claim(f"all of them were admitted to epoch {epoch}", all(each.epoch == epoch for each in answers))
    return _all_equal(answers, reference, "the answers equal the cold engine's", voice), len(answers)


def _all_equal(answers: Sequence[Answer], reference: tuple[Cold, ...], text: str, voice: Voice) -> int:
    equal = sum(reference[each.prompt].equals(each) for each in answers)
    distances = [reference[each.prompt].distance(each) for each in answers]
    worst = max(distances, default=math.inf)
    voice.claim(f"{text}, token for token: {equal} of {len(answers)}", equal == len(answers) > 0)
    voice.claim(
        f"their log-probs differ by {worst:.4f} at most (allowed: {LOGPROB_TOLERANCE})", worst <= LOGPROB_TOLERANCE
    )
    return equal


def _is_reset(seen: Object, version: str, epoch: int) -> bool:
    return bool(seen["state"] == "open" and seen["epoch"] == epoch and seen["version"] == version)


def _settled(look: Callable[[], frozenset[str]], seconds: float = 10.0) -> frozenset[str]:
    """A set that has stopped growing for a second: puts go on for a moment after an answer."""
    deadline, last = time.monotonic() + seconds, look()
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = look()
        if now == last and now:
            return now
        last = now
    return last


def _tables(
    fleet: Fleet,
    policy: Object,
    statuses: dict[str, Object],
    there: frozenset[str],
    answers: Sequence[Answer],
    patched_at: float,
    current_at: float,
    epoch: int,
    voice: Voice,
) -> None:
    update = policy["status"]["lastUpdate"]
    voice.head("What happened")
    rows = []
    for name, seen in statuses.items():
        pause = seen.get("lastPauseSeconds")
        shown = "-" if pause is None else f"{pause * 1000:.0f} ms"
        rows.append((name, str(seen["bootId"])[:12], str(seen["epoch"]), str(seen["version"]), shown))
    voice.table(("replica", "boot id", "epoch", "version", "pause"), rows)
    voice.plain(f"  store: {len(there)} keys before, {update.get('keysRemoved')} removed")
    voice.head("Timeline (seconds after the patch)")
    points = [(patched_at, "client: kubectl patch"), (current_at, "client: Current=True seen")]
    points += [
        (moment(update[name]), f"operator: {name}")
        for name in ("startedAt", "quiescedAt", "drainedAt", "invalidatedAt", "wipedAt", "resumedAt")
        if update.get(name)
    ]
    old = [each for each in answers if each.status == 200 and (each.epoch or 0) < epoch]
    new = [each for each in answers if each.status == 200 and each.epoch == epoch]
    if old:
        points.append((max(each.ended for each in old), "client: last answer of the old epoch ends"))
    if new:
        points.append((min(each.ended for each in new), "client: first answer of the new epoch ends"))
    for event in fleet.kube.list("events", fleet.namespace):
        at = event.get("eventTime") or event.get("lastTimestamp")
        if event["involvedObject"]["kind"] == "PolicyVersion" and at and moment(at) >= math.floor(patched_at):
            points.append((moment(at), f"event: {event['reason']}: {event['message'][:100]}"))
    for at, text in sorted(points):
        clock = dt.datetime.fromtimestamp(at, dt.UTC).strftime("%H:%M:%S.%f")[:-3]
        voice.plain(f"  {clock} {at - patched_at:+8.3f}  {text}")
    spanning = [each for each in answers if each.began < current_at and each.ended > patched_at]
    if spanning:
        usual = sorted(each.seconds for each in answers)[len(answers) // 2]
        longest = max(each.seconds for each in spanning)
        voice.plain(
            f"  longest wait of a client during the change: {longest * 1000:.0f} ms (median {usual * 1000:.0f} ms)"
        )
    voice.head(f"kubectl get {KINDS}")
    voice.plain(fleet.kube.run("get", KINDS, "--namespace", fleet.namespace))


def _tokens(tokens: Sequence[int]) -> str:
    return " ".join(str(token) for token in tokens[:10])
