"""The protocol under anything: random faults, crashes of the operator and jumps of the clock."""

from __future__ import annotations

import datetime as dt

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moontide.api.v1alpha1 import PolicyVersionSpec
from moontide.planning import protocol
from moontide.planning.model import Command, Replace, Step, Wipe
from tests.unit.planning.world import Pod, World

PHASES = [p for p in Phase if p is not Phase.shrink]
INDEX = st.integers(min_value=0, max_value=50)


def opens(command: Command) -> bool:
    """Whether a replica serves in the epoch once it has done this."""
    return command.step is Step.RESUME or bool(command.body.get("resume"))


class Fleet(RuleBasedStateMachine):
    """Two fleets that follow one policy, and everything that may happen to them."""

    @initialize(
        sizes=st.tuples(st.integers(0, 3), st.integers(0, 2)),
        weights=st.sampled_from(["External", "Load", "Unchecked"]),
        mode=st.sampled_from(["Wait", "Abort", "Keep"]),
        failure=st.sampled_from(["Isolate", "Replace", "Hold"]),
        strategy=st.sampled_from(["Barrier", "Fence"]),
        fences=st.booleans(),
        opens=st.booleans(),
        served=st.booleans(),
        store_failure=st.sampled_from(["Detach", "Hold"]),
    )
    def begin(
        self,
        sizes: tuple[int, int],
        weights: str,
        mode: str,
        failure: str,
        strategy: str,
        fences: bool,
        opens: bool,
        served: bool,
        store_failure: str,
    ) -> None:
        spec = {"version": "1", "weights": weights, "runningRequests": mode, "onReplicaFailure": failure}
        if weights == "Load":
            spec["weightsSource"] = "/models/policy-{version}"
        elif strategy == "Fence":
            spec |= {"strategy": strategy, "runningRequests": "Wait"}
        if spec.get("strategy") != "Fence":
            spec["onStoreFailure"] = store_failure
        self.world = World(PolicyVersionSpec.model_validate(spec), fences=fences, opens=opens)
        self.world.add_fleet("a", sizes[0])
        self.world.add_fleet("b", sizes[1])
        self.highest = 0
        if served:
            self.operator_turns(8)
            self.serve()
            self.upload()

    def any_pod(self, index: int) -> Pod | None:
        pods = self.world.pods
        return pods[index % len(pods)] if pods else None

    @property
    def loads(self) -> bool:
        """The engines load their weights; a trainer that pushes to open ones besides would be on its own."""
        return bool(self.world.spec.weights == "Load")

    @rule(version=st.sampled_from(["1", "2", "3"]), push=st.booleans())
    def bump(self, version: str, push: bool) -> None:
        if push and not self.loads:
            # The trainer swaps weights: what is cached is now old KV, which is what the epochs stand for.
            self.world.push_weights(version)
        if str(self.world.spec.version) != version:
            self.world.bump(version)

    @rule(version=st.sampled_from(["1", "2", "3"]), turns=st.integers(3, 6))
    def a_change_under_load(self, version: str, turns: int) -> None:
        """What usually happens, so that much of it happens here: new weights, a bump, requests all along."""
        self.bump(version, True)
        for _ in range(turns):
            self.serve()
            self.upload()
            self.check(self.world.turn().actions)

    @precondition(lambda self: self.loads)
    @rule(version=st.sampled_from(["1", "2", "3"]), bad=st.booleans())
    def a_source_is_bad(self, version: str, bad: bool) -> None:
        (self.world.sources.add if bad else self.world.sources.discard)(f"/models/policy-{version}")

    @precondition(lambda self: self.loads)
    @rule(seconds=st.sampled_from([0, 0, 1, 30, 200]))
    def loads_take(self, seconds: float) -> None:
        self.world.load_seconds = seconds

    @precondition(lambda self: not self.loads)
    @rule(version=st.sampled_from([None, "1", "2", "3"]))
    def prepare(self, version: str | None) -> None:
        if self.world.spec.preparing != version:
            self.world.bump(self.world.spec.version, preparing=version)

    @rule(nonce=st.sampled_from(["", "a", "b"]), suspend=st.booleans())
    def ask(self, nonce: str, suspend: bool) -> None:
        self.world.bump(self.world.spec.version, reset_nonce=nonce, suspend=suspend)

    @rule(able=st.booleans(), opens=st.booleans())
    def what_starts_from_now_on_is_another_engine(self, able: bool, opens: bool) -> None:
        """A rollout of engines with another connector, or another release of vLLM or of the plugin."""
        self.world.fences, self.world.opens = able, opens

    @rule(index=INDEX)
    def one_gets_its_weights(self, index: int) -> None:
        if (pod := self.any_pod(index)) and not (self.loads and pod.engine.state == "open"):
            self.world.give_weights(pod, str(self.world.spec.version))

    @rule(crash=st.one_of(st.none(), st.integers(0, 3)), recent=st.booleans(), lags=st.booleans())
    def operator(self, crash: int | None, recent: bool, lags: bool) -> None:
        self.check(self.world.turn(crash_after=crash, recent=recent, lags=lags).actions)

    @rule(count=st.integers(1, 8), lags=st.booleans())
    def operator_turns(self, count: int, lags: bool = False) -> None:
        """One run of the reconcile: only its first turn reads everything anew."""
        for number in range(count):
            self.check(self.world.turn(recent=number > 0, lags=lags).actions)

    def check(self, actions: tuple[object, ...]) -> None:
        """I2: while a plain fleet is wiped, nothing that served can still write. I5: see below. A load is asked for
        only of engines that nothing else is asked of, and a pod that has never served is not replaced."""
        for action in actions:
            if isinstance(action, Command) and action.step is Step.LOAD:
                assert action.replica.status is not None
                assert action.replica.status.state != "open"
            if isinstance(action, Replace):
                assert action.replica.may_have_served or not action.message.startswith("load")
            if isinstance(action, Wipe):
                for pod in self.world.fleets[action.fleet.name]:
                    served = pod.mark == pod.container
                    assert not served or (not pod.engine.queue and pod.engine.state != "open")
                    # Who has hung since it said that it was drained has nothing left to write.
                    assert not served or not pod.engine.hung or pod.uid in self.world.believed
            if isinstance(action, Command) and opens(action) and self.world.spec.strategy == "Barrier":
                self.check_alone(action)
                if self.world.spec.on_store_failure == "Hold":
                    self.check_erased(action)

    def check_alone(self, resume: Command) -> None:
        """I5: when one is resumed, no other of its fleet that answers is open in an older epoch."""
        fleet = next(name for name in self.world.fleets if f"fleet-{name}" == resume.replica.fleet)
        for pod in self.world.fleets[fleet]:
            engine = self.world.before.get(pod.uid, pod.engine)
            assert engine.hung or engine.core_hung or engine.state != "open" or engine.epoch >= resume.epoch

    def check_erased(self, resume: Command) -> None:
        """``Hold``: when one is resumed, nothing old is in its fleet's store, nor on its way there."""
        fleet = next(name for name in self.world.fleets if f"fleet-{name}" == resume.replica.fleet)
        queued = {kv for pod in self.world.fleets[fleet] if pod.engine.state != "open" for kv in pod.engine.queue}
        assert {epoch for _, epoch in self.world.store[fleet] | queued} <= {resume.epoch}

    @rule()
    def serve(self) -> None:
        self.world.serve()

    @rule()
    def upload(self) -> None:
        self.world.upload()

    @rule(index=INDEX, count=st.integers(0, 3))
    def requests_run(self, index: int, count: int) -> None:
        pod = self.any_pod(index)
        if pod and (pod.engine.state == "open" or count == 0):
            pod.engine.running = count

    @rule(index=INDEX)
    def hang(self, index: int) -> None:
        if pod := self.any_pod(index):
            pod.engine.hung = True

    @rule(index=INDEX)
    def engine_behind_the_gate_hangs(self, index: int) -> None:
        if pod := self.any_pod(index):
            pod.engine.core_hung = True

    @rule(index=INDEX)
    def go_on(self, index: int) -> None:
        if pod := self.any_pod(index):
            pod.engine.hung = pod.engine.core_hung = False

    @rule(index=INDEX, refuses=st.booleans())
    def reset_is_refused(self, index: int, refuses: bool) -> None:
        if pod := self.any_pod(index):
            pod.engine.refuses_reset = refuses

    @rule(index=INDEX)
    def container_restarts(self, index: int) -> None:
        if pod := self.any_pod(index):
            self.world.restart(pod)

    @rule(index=INDEX)
    def pod_is_replaced(self, index: int) -> None:
        if pod := self.any_pod(index):
            self.world.remove(pod)

    @rule(index=INDEX)
    def pod_terminates(self, index: int) -> None:
        if pod := self.any_pod(index):
            pod.terminating = True

    @precondition(lambda self: len(self.world.pods) < 8)
    @rule(fleet=st.sampled_from(["a", "b"]))
    def scale_up(self, fleet: str) -> None:
        self.world.add_pod(fleet)

    @rule(up=st.booleans())
    def store(self, up: bool) -> None:
        self.world.store_up = up

    @rule(seconds=st.sampled_from([0.01, 1, 25, 130, 4000, -30]))
    def clock(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def epochs_only_rise_and_are_written_first(self) -> None:
        if not hasattr(self, "world"):
            return
        assert self.world.status.epoch >= self.highest
        self.highest = self.world.status.epoch
        assert max(self.world.told, default=0) <= self.world.written.epoch

    @invariant()
    def current_means_no_engine_is_open_elsewhere(self) -> None:
        if not hasattr(self, "world") or not self.world.status.conditions:
            return
        # Judged on a fresh look: the condition that would be written now.
        plan = self.world.plan()
        current = next(c for c in plan.status.conditions if c.type == "Current")
        if current.status == "True":
            for pod in self.world.pods:
                assert pod.engine.hung or pod.engine.state != "open" or pod.engine.epoch == plan.status.epoch

    @invariant()
    def prepared_means_no_engine_serves_the_old_version_or_shares_its_keys(self) -> None:
        if not hasattr(self, "world") or not self.world.status.conditions:
            return
        preparation = self.world.plan().status.preparation
        if preparation is None or preparation.outcome or preparation.prepared_at is None:
            return
        for name, pods in self.world.fleets.items():
            for pod in pods:
                engine = pod.engine
                if engine.state == "open" and not engine.hung and not engine.core_hung:
                    assert self.world.spec.strategy == "Fence", name
                    assert engine.epoch == preparation.epoch

    def teardown(self) -> None:
        """Once the faults end, it ends: current, and every replica with the right weights serves."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.store_up = True
        world.sources.clear()
        world.load_seconds = min(world.load_seconds, 1)
        if world.spec.suspend or world.spec.preparing is not None:
            world.bump(world.spec.version, suspend=False, preparing=None)
        for pod in list(world.pods):
            pod.engine.hung = pod.engine.core_hung = pod.engine.refuses_reset = False
            pod.engine.running = 0
            if pod.terminating:
                world.remove(pod)
        # It comes in the seconds in which this ends, perhaps.
        view = protocol.View(world.spec, world.status, world.now + dt.timedelta(seconds=10))
        if view.late_puts_are_over and any(epoch < view.epoch for pod in world.pods for _, epoch in pod.engine.queue):
            # A hang that outlasts the last collection: what is put after it stays, unfound, until the next change.
            world.upload()
            world.bump(world.spec.version, reset_nonce="again")
        for _ in range(60):
            # The trainer gives newcomers their weights too, those that replace a failed replica included.
            if not self.loads:
                world.push_weights(str(world.spec.version))
            self.check(world.turn().actions)
            world.serve()
            if self.loads:
                # A load that failed is tried again after a minute at most; by then late puts have come.
                world.upload()
            world.pass_time(5 if self.loads else 0.1)
        assert world.condition("Current") == ("True", "Current"), world.status.conditions
        assert world.status.target_version == str(world.spec.version)
        assert {(p.engine.state, p.engine.epoch) for p in world.pods} <= {("open", world.status.epoch)}
        assert world.status.failures == ()
        # Nothing old is left behind in any store, late puts included.
        world.upload()
        world.pass_time(40)
        world.run()
        plain = {member.name for member in world.status.members if not member.salted}
        old = {
            name: {salt for salt, epoch in store if epoch < world.status.epoch} for name, store in world.store.items()
        }
        if any(old[name] for name in plain):
            # Since its last collection a fleet got engines that cannot fence. They ask for no key that has a salt; the
            # next change wipes the store.
            assert all("" not in old[name] for name in plain)
            world.bump(world.spec.version, reset_nonce="once more")
            world.run()
            assert world.condition("Current") == ("True", "Current"), world.status.conditions
        for name, store in world.store.items():
            assert {epoch for _, epoch in store} <= {world.status.epoch}, name


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=PHASES
)
