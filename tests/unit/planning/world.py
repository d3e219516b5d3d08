"""A small world to drive the planner in: engines, a store, pods and a clock, with faults. No I/O.

The engines keep the rules of docs/engine-admin-api.md (what admit, resume and reset need, fencing, time to live), and
every piece of KV is labelled with the salt it can be found under and the epoch it was computed in, so that a stale read
can be seen.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field, replace

from moontide.api.v1alpha1 import PolicyVersionSpec, PolicyVersionStatus
from moontide.planning import protocol
from moontide.planning.model import (
    Action,
    Collect,
    Command,
    EngineStatus,
    FenceStatus,
    Fleet,
    LoadStatus,
    Observed,
    Plan,
    Replace,
    Replica,
    Result,
    Wipe,
)

KV = tuple[str, int]
"""The salt in its key, and the epoch in which it was computed."""
RECENT_SECONDS, HEARD_SECONDS = 10.0, 2.0
"""As :mod:`moontide.reconcile.rounds` has them, where reading takes as long as it may."""
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class StaleReadError(AssertionError):
    """A request read KV of another epoch."""


@dataclass
class Engine:
    """One engine process."""

    boot_id: str
    weights: str
    state: str = "closed"
    epoch: int = 0
    version: str | None = None
    clean: bool = True
    running: int = 0
    local: set[KV] = field(default_factory=set)
    """In the local cache."""
    queue: set[KV] = field(default_factory=set)
    """Waits to be put into the store."""
    hung: bool = False
    """Nothing of it answers."""
    core_hung: bool = False
    """Its gate answers, the engine behind it does not."""
    fences: bool = False
    opens: bool = False
    """It resumes with its admission, where it is told to."""
    salt: str = ""
    refuses_reset: bool = False
    source: str = ""
    """Of the last load of weights."""
    loads_as: str = ""
    """The version that is being loaded; empty: none."""
    load_error: str = ""
    load_attempts: int = 0
    load_version: str = ""
    load_at: dt.datetime = START
    mixed: bool = False
    """A load began and has not ended well: nobody knows what its weights are."""
    highest: int = 0
    expires: dt.datetime | None = None
    reason: str = "Starting"

    @property
    def drained(self) -> bool:
        return self.state != "open" and not self.queue and self.running == 0


@dataclass
class Pod:
    """One pod: its engine process, and the mark that the operator left on it."""

    name: str
    uid: str
    engine: Engine
    container: str
    mark: str | None = None
    terminating: bool = False


@dataclass
class World:
    """Everything outside the planner."""

    spec: PolicyVersionSpec
    fleets: dict[str, list[Pod]] = field(default_factory=dict)
    fences: bool = False
    """Engines that start can put an epoch into their keys."""
    opens: bool = False
    """They take an admission and a resume as one command."""
    multimodal: bool = False
    """They cannot change it while requests run."""
    store: dict[str, set[KV]] = field(default_factory=dict)
    store_up: bool = True
    generation: int = 1
    status: PolicyVersionStatus = field(default_factory=PolicyVersionStatus)
    now: dt.datetime = START
    base_weights: str = "1"
    sources: set[str] = field(default_factory=set)
    """Sources that are bad: missing, or of another shape."""
    load_seconds: float = 0.0
    """0: a load has ended when the call that began it has; more: when so much time has passed."""
    serial: int = 0
    reads: int = 0
    plans: list[Plan] = field(default_factory=list)
    before: dict[str, Engine] = field(default_factory=dict)
    """Engines by pod UID, as they were when the last plan was made."""
    told: set[int] = field(default_factory=set)
    """Epochs that any engine has heard of."""
    written: PolicyVersionStatus = field(default_factory=PolicyVersionStatus)
    """What the API server has of ``status``, which is what a next operator begins with."""
    elapsed: float = 0.0
    """Seconds of a clock that never jumps back."""
    heard: dict[str, tuple[float, EngineStatus]] = field(default_factory=dict)
    """By pod uid: what an engine said of itself with its last answer, and when."""
    believed: frozenset[str] = frozenset()
    """Pod uids of those whose last answer stood for a question in the last look."""
    listed: tuple[float, tuple[Fleet, ...]] | None = None
    """The pods of the last list, and when that was."""

    def add_fleet(self, name: str, size: int) -> None:
        self.fleets[name], self.store[name] = [], set()
        for _ in range(size):
            self.add_pod(name)

    def add_pod(self, fleet: str) -> Pod:
        self.serial += 1
        n = self.serial
        pod = Pod(f"{fleet}-{n}", f"uid-{n}", self._engine(n), f"container-{n}")
        self.fleets[fleet].append(pod)
        return pod

    def _engine(self, number: int) -> Engine:
        return Engine(f"boot-{number}", self.base_weights, fences=self.fences, opens=self.opens)

    @property
    def pods(self) -> list[Pod]:
        return [pod for pods in self.fleets.values() for pod in pods]

    def pod(self, index: int) -> Pod:
        return self.pods[index]

    def bump(self, version: str | int, **changes: object) -> None:
        self.spec = self.spec.model_copy(update={"version": version, **changes})
        self.generation += 1

    def push_weights(self, version: str) -> None:
        for pod in self.pods:
            self.give_weights(pod, version)

    def give_weights(self, pod: Pod, version: str) -> None:
        """What a trainer does to one engine; one that loads takes nothing."""
        engine = pod.engine
        if not engine.loads_as:
            engine.weights, engine.mixed, engine.load_error = version, False, ""

    # Faults -----------------------------------------------------------------------------------------------------

    def restart(self, pod: Pod) -> None:
        """The container restarts in place: same pod, same mark, a new process with base weights."""
        self.serial += 1
        pod.engine = self._engine(self.serial)
        pod.container = f"container-{self.serial}"

    def remove(self, pod: Pod) -> None:
        """The pod ends; its Deployment makes another."""
        for name, pods in self.fleets.items():
            if pod in pods:
                pods.remove(pod)
                self.add_pod(name)

    def pass_time(self, seconds: float) -> None:
        self.now += dt.timedelta(seconds=seconds)
        self.elapsed += max(seconds, 0.0)
        for pod in self.pods:
            engine = pod.engine
            if engine.state == "paused" and engine.expires is not None and engine.expires <= self.now:
                engine.state, engine.reason, engine.running = "closed", "PauseExpired", 0
            stands = engine.hung or engine.core_hung
            if engine.loads_as and not stands and (self.now - engine.load_at).total_seconds() >= self.load_seconds:
                self._end_load(engine)

    # What engines do of themselves --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Every open engine answers one request: reads what it can hit, and queues what it computed."""
        for name, pods in self.fleets.items():
            for pod in pods:
                engine = pod.engine
                if engine.state != "open" or engine.hung or engine.core_hung:
                    continue
                self.reads += 1
                assert not engine.mixed, f"{pod.name} serves while nobody knows its weights"
                assert self.spec.weights != "Load" or engine.weights == engine.version, f"{pod.name} has other weights"
                there = engine.local | (self.store[name] if self.store_up else set())
                hits = {epoch for salt, epoch in there if salt == engine.salt}
                if hits - {engine.epoch}:
                    raise StaleReadError(f"{pod.name} in epoch {engine.epoch} read KV of {sorted(hits)}")
                engine.local.add((engine.salt, engine.epoch))
                engine.queue.add((engine.salt, engine.epoch))

    def upload(self) -> None:
        """Every engine that runs puts what it has queued."""
        for name, pods in self.fleets.items():
            for pod in pods:
                if not (pod.engine.hung or pod.engine.core_hung) and self.store_up:
                    self.store[name] |= pod.engine.queue
                    pod.engine.queue.clear()

    # The operator ---------------------------------------------------------------------------------------------------

    def observe(self, recent: bool = False) -> Observed:
        """``recent``: as one run of the reconcile looks from its second turn on (:mod:`moontide.reconcile.rounds`): by
        a list of pods that is up to RECENT_SECONDS old, and not asking engines that have just said how they are."""
        if not recent or self.listed is None or self.elapsed - self.listed[0] > RECENT_SECONDS:
            self.listed = (
                self.elapsed,
                tuple(
                    Fleet(name, f"fleet-{name}", "pool", "pool-uid", tuple(self._replica(name, pod) for pod in pods))
                    for name, pods in self.fleets.items()
                ),
            )
        heard = {uid: said for uid, (at, said) in self.heard.items() if self.elapsed - at <= HEARD_SECONDS}
        self.heard.clear()
        self.believed = frozenset(heard) if recent else frozenset()
        now = {pod.uid: pod for pod in self.pods}
        fleets = []
        for fleet in self.listed[1]:
            replicas = []
            for replica in fleet.replicas:
                pod, said = now.get(replica.pod_uid), heard.get(replica.pod_uid) if recent else None
                status = said if said is not None else self.status_of(pod.engine) if pod is not None else None
                error = "" if status is not None else "Timeout: no answer"
                replicas.append(replace(replica, status=status, error=error))
            fleets.append(replace(fleet, replicas=tuple(replicas)))
        return Observed(tuple(fleets), self.now, "policy")

    def _replica(self, fleet: str, pod: Pod) -> Replica:
        return Replica(
            name=pod.name,
            pod_uid=pod.uid,
            fleet=f"fleet-{fleet}",
            address="10.0.0.1:8001",
            container_id=pod.container,
            may_have_served=pod.mark == pod.container,
            terminating=pod.terminating,
        )

    def status_of(self, engine: Engine) -> EngineStatus | None:
        """What it says of itself; None where nothing of it answers."""
        if engine.hung:
            return None
        # An engine that loads is not asked: its gate answers for it.
        silent = engine.core_hung and not engine.loads_as
        return EngineStatus(
            boot_id=engine.boot_id,
            state=engine.state,  # type: ignore[arg-type]
            epoch=engine.epoch,
            version=engine.version,
            weights_version=None if engine.mixed else engine.weights,
            loading=self._loading(engine),
            clean=engine.clean,
            drained=engine.drained,
            running=None if silent or engine.loads_as else engine.running,
            in_flight=engine.running,
            responsive=not silent,
            fault="no answer within 2 s" if silent else "",
            salt=engine.salt,
            admit_resumes=engine.opens,
            fence=FenceStatus(
                supported=engine.fences,
                live=engine.fences and not self.multimodal,
                reason="" if engine.fences else "its connector hashes tokens",
            ),
            reason=engine.reason,
        )

    def _loading(self, engine: Engine) -> LoadStatus | None:
        if not engine.mixed:
            return None
        return LoadStatus(
            source=engine.source,
            version=engine.loads_as or engine.load_version,
            running=bool(engine.loads_as),
            seconds=max((self.now - engine.load_at).total_seconds(), 0.0),
            attempts=engine.load_attempts,
            error=engine.load_error,
        )

    def plan(self) -> Plan:
        return protocol.plan(self.spec, self.generation, self.status, self.observe())

    def turn(self, crash_after: int | None = None, *, recent: bool = False, lags: bool = False) -> Plan:
        """One turn of the reconcile. ``crash_after=n``: killed after the status write (0) or the n-th action.

        ``recent``: see :meth:`observe`. ``lags``: what need not be written before the actions is not written yet, and
        is lost with the operator.
        """
        self.before = {pod.uid: replace(pod.engine) for pod in self.pods}
        plan = protocol.plan(self.spec, self.generation, self.status, self.observe(recent))
        assert plan.status.epoch >= self.status.epoch
        self.status = plan.status
        if not lags or protocol.must_precede(self.written, plan.status):
            self.written = plan.status
        self.plans.append(plan)
        results = []
        for done, action in enumerate(plan.actions):
            if crash_after is not None and done >= crash_after:
                break
            results.append(self.perform(action))
        if crash_after is not None:
            # The next operator knows what is written, and has heard nothing.
            self.status, self.listed = self.written, None
            self.heard.clear()
            return plan
        self.status = protocol.record(self.status, results, self.now)
        if not lags:
            self.written = self.status
        return plan

    def run(self, turns: int = 40, seconds: float = 0.1) -> Plan:
        """Turns until a plan asks for nothing, at most ``turns``."""
        for _ in range(turns):
            plan = self.turn()
            self.pass_time(seconds)
            if not plan.actions and plan.requeue_after > protocol.BUSY_REQUEUE:
                break
        return plan

    def perform(self, action: Action) -> Result:
        if isinstance(action, Replace):
            for pod in [p for p in self.pods if p.uid == action.replica.pod_uid]:
                self.remove(pod)
            return Result(action, True)
        if isinstance(action, Wipe):
            if not self.store_up:
                return Result(action, False, "StoreTimeout", "the master is dead")
            removed = len(self.store[action.fleet.name])
            self.store[action.fleet.name].clear()
            return Result(action, True, "Verified", removed=removed)
        if isinstance(action, Collect):
            if not self.store_up:
                return Result(action, False, "StoreUnavailable", "the master is dead")
            store = self.store[action.fleet.name]
            old = {kv for kv in store if kv[0] not in action.keep}
            store -= old
            return Result(action, True, "Verified", removed=len(old))
        return self.command(action)

    def command(self, action: Command) -> Result:
        self.told.add(action.epoch)
        pod = next((p for p in self.pods if p.uid == action.replica.pod_uid), None)
        assert action.replica.status is not None
        if pod is None or pod.engine.hung:
            return Result(action, False, "Timeout", "no answer")
        if action.step.value == "admit":
            assert action.replica.container_id is not None
            pod.mark = action.replica.container_id
            if not action.replica.may_have_served:
                self.listed = None
        engine = pod.engine
        if engine.boot_id != action.replica.status.boot_id:
            return Result(action, False, "BootIdMismatch")
        if action.epoch < engine.highest:
            return Result(action, False, "Fenced")
        engine.highest = action.epoch
        result: Result = getattr(self, f"_{action.step.value}")(engine, action)
        said = self.status_of(engine)
        if result.success and said is not None:
            self.heard[pod.uid] = self.elapsed, said
        return result

    def _salt(self, engine: Engine, action: Command) -> Result | None:
        """What an admission or a fence with a salt does in the engine; None when that went well."""
        if engine.core_hung:
            return Result(action, False, "EngineTimeout", "the engine did not switch in time")
        if not engine.fences:
            return Result(action, False, "FenceUnsupported")
        engine.salt = str(action.body["salt"])
        return None

    def _fence(self, engine: Engine, action: Command) -> Result:
        if engine.state != "open":
            return Result(action, False, "NotOpen")
        if failed := self._salt(engine, action):
            return failed
        version = action.body["version"]
        engine.epoch, engine.version = action.epoch, None if version is None else str(version)
        return Result(action, True)

    def _quiesce(self, engine: Engine, action: Command) -> Result:
        if engine.state == "closed":
            return Result(action, True)
        ttl = action.body["ttlSeconds"]
        assert isinstance(ttl, float | int)
        assert ttl > 0
        engine.state, engine.expires = "paused", self.now + dt.timedelta(seconds=ttl)
        if engine.core_hung:
            return Result(action, False, "EngineTimeout", "the engine did not answer in time")
        if action.body["mode"] == "keep":
            return Result(action, True)
        if action.body["mode"] == "abort":
            engine.running = 0
        return Result(action, engine.running == 0, "" if engine.running == 0 else "RequestsRunning")

    def _drain(self, engine: Engine, action: Command) -> Result:
        if engine.state == "open" or not self.store_up or engine.core_hung:
            return Result(action, False, "PutsPending")
        fleet = next(name for name, pods in self.fleets.items() if any(p.engine is engine for p in pods))
        self.store[fleet] |= engine.queue
        engine.queue.clear()
        return Result(action, True)

    def _reset(self, engine: Engine, action: Command) -> Result:
        if engine.state == "open":
            return Result(action, False, "NotQuiesced")
        if engine.refuses_reset or engine.running or engine.queue or engine.core_hung:
            return Result(action, False, "BlocksHeld")
        engine.local.clear()
        engine.clean = True
        return Result(action, True)

    def _admit(self, engine: Engine, action: Command) -> Result:
        if "salt" in action.body:
            if engine.state == "open":
                return Result(action, False, "NotQuiesced")
            if failed := self._salt(engine, action):
                return failed
        elif not (engine.clean and engine.drained):
            return Result(action, False, "NotClean")
        if engine.loads_as:
            return Result(action, False, "Loading")
        assert not engine.mixed, "an engine whose load has failed was to be admitted"
        assert action.body["version"] == engine.weights or self.spec.weights == "Unchecked"
        engine.epoch, engine.version = action.epoch, str(action.body["version"])
        engine.state = "paused"
        engine.expires = self.now + dt.timedelta(seconds=self.spec.deadline_seconds)
        if action.body.get("resume"):
            assert engine.opens, "it was told what it does not know"
            return self._resume(engine, action)
        return Result(action, True)

    def _load(self, engine: Engine, action: Command) -> Result:
        source, version = str(action.body["source"]), str(action.body["version"])
        if engine.loads_as:
            same = (engine.source, engine.loads_as) == (source, version)
            return Result(action, False, "Loading", "" if same else f"{engine.source} is being loaded")
        if engine.state == "open":
            return Result(action, False, "NotQuiesced")
        if engine.running and not action.body["keep"]:
            return Result(action, False, "RequestsRunning")
        if engine.core_hung:
            return Result(action, False, "EngineTimeout")
        again = engine.load_error and (engine.source, engine.load_version) == (source, version)
        engine.load_attempts = engine.load_attempts + 1 if again else 1
        engine.load_error = engine.load_error if again else ""
        engine.source, engine.loads_as, engine.load_version = source, version, version
        engine.mixed, engine.load_at = True, self.now
        if self.load_seconds:
            return Result(action, False, "Loading")
        self._end_load(engine)
        return Result(action, not engine.load_error, "LoadFailed" if engine.load_error else "", engine.load_error)

    def _end_load(self, engine: Engine) -> None:
        version, engine.loads_as, engine.load_at = engine.loads_as, "", self.now
        if engine.source in self.sources:
            engine.load_error = f"{engine.source} is not a folder in the engine's pod"
        else:
            engine.weights, engine.mixed, engine.load_error = version, False, ""

    def _resume(self, engine: Engine, action: Command) -> Result:
        if engine.state == "closed" or engine.epoch != action.epoch:
            return Result(action, False, "NotAdmitted")
        if engine.core_hung:
            return Result(action, False, "EngineTimeout")
        engine.state, engine.clean = "open", False
        return Result(action, True)

    def _close(self, engine: Engine, action: Command) -> Result:
        if engine.state != "closed":
            engine.state, engine.running, engine.reason = "closed", 0, str(action.body["reason"])
        return Result(action, True)

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(c for c in self.status.conditions if c.type == kind)
        return found.status, found.reason
