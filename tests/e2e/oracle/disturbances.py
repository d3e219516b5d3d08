"""What goes wrong during a change, and when: each fault begins with a phase of the change and is over by itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hack.cluster import settings as cluster_settings
from hack.cluster.processes import Daemon
from hack.demo.fleet import Fleet
from hack.demo.install import SYSTEM_NAMESPACE
from hack.demo.kube import Kube, Object, wait
from moontide import labels
from tests.e2e.faults import found, pids, signal_all
from tests.e2e.oracle.clients import Router

Fire = Callable[[], None]
"""Does it, and returns when it is over."""

PHASES = ("quiesce", "push", "commit", "collect")
"""``quiesce``: from the announcement until weights may be pushed. ``push``: while they are. ``commit``: from the new
version until every replica serves it. ``collect``: until the old keys are gone."""

BACK_SECONDS = 90.0


@dataclass(frozen=True)
class Scene:
    """What faults happen to."""

    kube: Kube
    fleet: Fleet
    router: Router
    deployment: str
    """The Deployment whose pods are disturbed."""
    victims: list[str] = field(default_factory=list)
    """Names of replicas that were disturbed in this round."""

    def victim(self) -> Object:
        """The pod that it happens to: the last one that is ready, so that the first serves on."""
        ready = self.router.ready()
        if len(ready) < 2:
            raise LookupError("fewer than two replicas are ready: no victim is taken from them")
        self.victims.append(ready[-1].name)
        return ready[-1].pod


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and the phase with which it begins."""

    name: str
    phase: str
    arm: Callable[[Scene], Fire]
    """Finds its target before the phase begins, since the phase may be short."""
    follow: str = ""
    """What the trainer does in this round beside a prepared change; see :mod:`tests.e2e.oracle.arms`."""
    spec: tuple[tuple[str, object], ...] = ()
    """Fields of the PolicyVersion for this round."""
    barrier_only: bool = False


def nothing(_: Scene) -> Fire:
    """No fault."""
    return lambda: None


def _freeze(targets: list[int], seconds: float) -> Fire:
    def fire() -> None:
        signal_all(targets, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            signal_all(targets, signal.SIGCONT)

    return fire


def _kill(pod: Object, needle: str, *, whole: bool = False) -> Fire:
    """SIGKILL; over when the kubelet has put another process in its place."""
    targets = found(pod, needle)
    # Killing the parent too leaves nobody to say goodbye.
    targets = [*targets, *(found(pod, "api_server") if whole else [])]

    def fire() -> None:
        signal_all(targets, signal.SIGKILL)
        wait(
            lambda: any(pid not in targets for pid in pids(pod, needle)),
            BACK_SECONDS,
            f"another {needle} of {pod['metadata']['name']}",
            every=0.1,
        )

    return fire


def freeze_engine(seconds: float) -> Callable[[Scene], Fire]:
    """EngineCore stands still; its API server, and ``/health``, answer on."""
    return lambda scene: _freeze(found(scene.victim(), "EngineCore"), seconds)


def kill_engine_core(scene: Scene) -> Fire:
    """EngineCore dies; its API server follows, and the container starts again in place with base weights."""
    return _kill(scene.victim(), "EngineCore")


def kill_engine(scene: Scene) -> Fire:
    """Both of its processes die at once."""
    return _kill(scene.victim(), "EngineCore", whole=True)


def delete_pod(scene: Scene) -> Fire:
    """The pod is deleted: it is Terminating, in preStop, while the change runs; another one starts."""
    meta = scene.victim()["metadata"]

    def fire() -> None:
        scene.kube.run("delete", "pod", meta["name"], "--namespace", meta["namespace"], "--wait=true")

    return fire


def _operator(scene: Scene) -> Object:
    pods = [pod for pod in scene.kube.list("pods", SYSTEM_NAMESPACE) if pids(pod, "moontide")]
    if not pods:
        raise LookupError("no operator runs")
    return pods[0]


def fresh_operator(scene: Scene) -> None:
    """Another pod in place of one that has restarted: the kubelet lets each restart wait for twice as long as the last.

    Returns when it runs. Raises NotInTime.
    """
    meta = _operator(scene)["metadata"]
    scene.kube.run("delete", "pod", meta["name"], "--namespace", meta["namespace"], "--wait=true")

    def runs() -> bool:
        pods = scene.kube.list("pods", SYSTEM_NAMESPACE)
        return any(each.get("ready") for pod in pods for each in pod["status"].get("containerStatuses", []))

    wait(runs, BACK_SECONDS, "another operator", every=0.1)


def kill_operator(scene: Scene) -> Fire:
    """SIGKILL; the kubelet starts the next one."""
    return _kill(_operator(scene), "moontide")


def freeze_operator(seconds: float) -> Callable[[Scene], Fire]:
    """For longer than its Lease: when it goes on it leads no more, and ends."""
    return lambda scene: _freeze(found(_operator(scene), "moontide"), seconds)


def _master(scene: Scene) -> Object:
    pods = scene.kube.list("pods", scene.fleet.namespace, labels.selector(labels.store_labels(scene.fleet.pool)))
    running = [pod for pod in pods if pids(pod, "mooncake_master")]
    if not running:
        raise LookupError("no master runs")
    return running[0]


def freeze_master(seconds: float) -> Callable[[Scene], Fire]:
    """The store answers nobody."""
    return lambda scene: _freeze(found(_master(scene), "mooncake_master"), seconds)


def kill_master(scene: Scene) -> Fire:
    """The store comes back empty, and its clients have to register again."""
    return _kill(_master(scene), "mooncake_master")


def freeze_api_server(seconds: float) -> Callable[[Scene], Fire]:
    """Neither the operator nor the trainer can read or write anything."""

    def arm(_: Scene) -> Fire:
        found = cluster_settings.load(cluster_settings.DEFAULT_NAME)
        pid = None if found is None else Daemon("kube-apiserver", found.run_dir).pid
        if pid is None:
            raise LookupError("no API server of ours runs")
        return _freeze([pid], seconds)

    return arm


def scale_in(scene: Scene) -> Fire:
    """One replica fewer while the change runs, and one more again, as an autoscaler does it."""
    meta, count = scene.victim()["metadata"], len(scene.router.all)
    kind = "ifd" if scene.deployment == scene.fleet.deployment else "deployment"

    def scale(wanted: int) -> None:
        scene.kube.run(
            *("scale", kind, scene.deployment, "--namespace", meta["namespace"], f"--replicas={wanted}"),
        )

    def fire() -> None:
        scale(count - 1)
        time.sleep(3)
        scale(count)

    return fire


SCHEDULE: tuple[Fault, ...] = (
    Fault("none", "quiesce", nothing),
    Fault("EngineCore frozen 8 s", "quiesce", freeze_engine(8)),
    Fault("operator killed", "quiesce", kill_operator),
    Fault("EngineCore killed", "push", kill_engine_core),
    Fault("master frozen 5 s", "commit", freeze_master(5)),
    Fault("operator killed", "commit", kill_operator),
    Fault("none, the same version again", "commit", nothing, follow="again"),
    Fault("master killed", "push", kill_master),
    Fault("none, three changes at once", "quiesce", nothing, follow="burst"),
    Fault("EngineCore frozen 8 s", "commit", freeze_engine(8)),
    Fault("API server frozen 5 s", "quiesce", freeze_api_server(5)),
    Fault("pod deleted", "commit", delete_pod),
    Fault("none, given up by the trainer", "quiesce", nothing, follow="abort"),
    Fault("operator killed", "push", kill_operator),
    Fault(
        "none, running requests aborted", "quiesce", nothing, spec=(("runningRequests", "Abort"),), barrier_only=True
    ),
    Fault("API server frozen 5 s", "commit", freeze_api_server(5)),
    Fault("engine killed", "quiesce", kill_engine),
    Fault("master frozen 5 s", "quiesce", freeze_master(5)),
    Fault("none, running requests kept", "quiesce", nothing, spec=(("runningRequests", "Keep"),), barrier_only=True),
    Fault("none, the trainer dies", "push", nothing, follow="death", spec=(("prepareDeadlineSeconds", 6),)),
    Fault("operator frozen 20 s", "quiesce", freeze_operator(20)),
    Fault("one replica fewer, then more", "quiesce", scale_in),
    Fault(
        "none, new requests refused",
        "quiesce",
        nothing,
        spec=(("requestsDuringBarrier", "Refuse"),),
        barrier_only=True,
    ),
    Fault("EngineCore frozen 8 s", "push", freeze_engine(8)),
    Fault("operator killed", "collect", kill_operator),
    Fault("master killed", "commit", kill_master),
    Fault("engine killed", "commit", kill_engine),
    Fault("master frozen 5 s", "collect", freeze_master(5)),
    Fault("EngineCore frozen 8 s", "collect", freeze_engine(8)),
    Fault("none", "quiesce", nothing),
)
"""One round each; the same for every arm."""
