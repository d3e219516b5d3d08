"""One cluster: its components in order, up, down, and each of them alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hack.cluster import binaries, cleanup, network, pki, render
from hack.cluster import settings as defaults
from hack.cluster.apiclient import ApiClient
from hack.cluster.archives import SmallImage, write_small_image
from hack.cluster.errors import ClusterError
from hack.cluster.processes import Daemon, resident_mib, wait_until
from hack.cluster.progress import Progress
from hack.cluster.runtime import Runtime
from hack.cluster.settings import Settings
from hack.cluster.shell import run

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager")
NODE = ("kube-scheduler", "containerd", "kubelet", "kube-proxy", "fake-gpu")


@dataclass(frozen=True)
class Component:
    """How one component is prepared, started and known to serve; `stop_seconds` pass before it is killed."""

    argv: Callable[[], list[str]]
    ready: Callable[[], bool]
    ready_seconds: float
    stop_seconds: float = 10.0
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True)
class ComponentStatus:
    """A component as it is now."""

    name: str
    pid: int | None
    resident_mib: float
    serving: bool


class Cluster:
    """A cluster by its settings. Methods that change it hold a lock, so that two commands do not meet."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings = settings
        self._progress = progress
        self._bin_dir = binaries.bin_dir()
        self.runtime = Runtime(settings.containerd_socket)

    @property
    def component_names(self) -> tuple[str, ...]:
        """Its components in the order of their start."""
        if self.settings.control_plane_only:
            return CONTROL_PLANE if self.settings.controller_manager else CONTROL_PLANE[:2]
        return CONTROL_PLANE + NODE

    @property
    def kubectl(self) -> list[str]:
        """The beginning of a kubectl command that talks to this cluster and no other."""
        kubeconfig = f"--kubeconfig={self.settings.kubeconfig}"
        return [f"{self._bin_dir}/kubectl", kubeconfig, f"--context={self.settings.context}"]

    # Commands ----------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Bring the cluster up, or start again whatever of it does not run; returns when it serves."""
        with self._locked():
            self._refuse_without_means()
            # Build before anything of the machine is touched.
            self._bin_dir = binaries.ensure(self._progress)
            self.settings.save()
            if not self.settings.control_plane_only and not cleanup.baseline_file(self.settings).exists():
                baseline = cleanup.Baseline.take()
                baseline.save(cleanup.baseline_file(self.settings))
                baseline.save(self.settings.last_baseline)
            if not pki.exists(self.settings):
                with self._progress.step("certificates"):
                    pki.create(self.settings)
            self._write_kubeconfigs()
            if not self.settings.control_plane_only:
                network.apply()
            for name in self.component_names:
                self._start(name)
            if not self.settings.control_plane_only:
                with self._progress.step("node and DNS ready"):
                    self._apply_dns()
                    self._wait_for_node()

    def down(self) -> None:
        """End the cluster and take away everything that it brought. Raises, and names it, if anything stays."""
        with self._locked():
            baseline = cleanup.Baseline.read(cleanup.baseline_file(self.settings))
            for name in reversed(self.component_names):
                # Containers end while their runtime lives, after kubelet that would start them again.
                if name == "containerd" and self._daemon(name).pid is not None:
                    with self._progress.step("containers removed"):
                        self.runtime.remove_containers()
                self._daemon(name).stop(self._components()[name].stop_seconds)
            cleanup.kill_processes(self.settings)
            cleanup.unmount(self.settings)
            self._keep_logs()
            for folder in (self.settings.run_dir, self.settings.state_dir):
                shutil.rmtree(folder, ignore_errors=True)
            if not self.settings.control_plane_only:
                self._restore_machine(baseline)
            left = cleanup.leftovers(self.settings, baseline)
        self.lock_file.unlink(missing_ok=True)
        if left:
            raise ClusterError("still on the machine:\n" + "\n".join(f"  {line}" for line in left))
        self._progress.say(f"{self.settings.name} is down, nothing is left")

    def start(self, name: str) -> None:
        """Start one component and wait until it serves."""
        self._known(name)
        with self._locked():
            self._start(name)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End one component and wait until it is gone; the rest of the cluster goes on without it."""
        self._known(name)
        with self._locked():
            self._daemon(name).stop(self._components()[name].stop_seconds, number)
            self._progress.say(f"{name} stopped")

    def status(self) -> list[ComponentStatus]:
        """Every component, with its memory and whether it serves."""
        found = []
        components = self._components()
        for name in self.component_names:
            pid = self._daemon(name).pid
            serving = pid is not None and components[name].ready()
            found.append(ComponentStatus(name, pid, resident_mib(pid) if pid else 0.0, serving))
        return found

    def load_image(self, archive: Path) -> None:
        """Import an image archive into the node's runtime."""
        if self.settings.control_plane_only:
            raise ClusterError("a control plane has no node to load images into")
        if self._daemon("containerd").pid is None:
            raise ClusterError("containerd does not run; bring the cluster up first")
        with self._progress.step(f"loaded {archive.name}"):
            self.runtime.import_file(archive)

    # Parts -------------------------------------------------------------------------------------------------------

    @property
    def lock_file(self) -> Path:
        """Held while the cluster is being changed; outside the run folder, which `down` removes."""
        return defaults.cache_root() / "run" / f".{self.settings.name}.lock"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.lock_file.parent.mkdir(parents=True, exist_ok=True)
        with self.lock_file.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _known(self, name: str) -> None:
        if name not in self.component_names:
            raise ClusterError(f"{self.settings.name} has no component {name!r}: {', '.join(self.component_names)}")

    def _refuse_without_means(self) -> None:
        if self.settings.control_plane_only:
            return
        if os.geteuid() != 0:
            raise ClusterError("a full cluster needs root: it makes network devices, mounts and control groups")
        for other in (defaults.cache_root() / "run").glob("*/cluster.json"):
            stored = json.loads(other.read_text())
            if not stored["control_plane_only"] and stored["name"] != self.settings.name:
                raise ClusterError(
                    f"cluster {stored['name']!r} is there already, and its addresses fit one: end it first"
                )

    def _daemon(self, name: str) -> Daemon:
        return Daemon(name, self.settings.run_dir)

    def _start(self, name: str) -> None:
        component, daemon = self._components()[name], self._daemon(name)
        if daemon.pid is not None:
            if wait_until(component.ready, component.ready_seconds):
                self._progress.say(f"{name} runs (pid {daemon.pid})")
                return
            raise ClusterError(f"{name} runs but does not serve; the end of its log:\n{daemon.last_lines()}")
        with self._progress.step(name):
            if component.prepare is not None:
                component.prepare()
            daemon.start(component.argv(), self._environment())
            if not wait_until(lambda: daemon.pid is None or component.ready(), component.ready_seconds):
                raise ClusterError(f"{name} does not serve; the end of {daemon.log}:\n{daemon.last_lines()}")
            if daemon.pid is None:
                raise ClusterError(f"{name} ended at once; the end of {daemon.log}:\n{daemon.last_lines()}")

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key.lower() not in _PROXY_VARIABLES}
        standard = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {**kept, "PATH": f"{self._bin_dir}:{standard}"}

    def _components(self) -> dict[str, Component]:
        settings, folder = self.settings, self._bin_dir
        gpu_command = [
            sys.executable,
            "-m",
            "hack.cluster.fakegpu",
            f"--server={settings.server}",
            f"--pki={settings.pki_dir}",
            f"--node={defaults.NODE_NAME}",
            f"--count={settings.gpus}",
        ]
        return {
            "etcd": Component(
                lambda: render.etcd(settings, folder),
                lambda: ApiClient(f"http://127.0.0.1:{settings.ports.etcd}", None).ok("/health"),
                60,
            ),
            "kube-apiserver": Component(
                lambda: render.apiserver(settings, folder), lambda: self._admin().ok("/readyz"), 120, stop_seconds=5
            ),
            "kube-controller-manager": Component(
                lambda: render.controller_manager(settings, folder),
                self._controllers_work,
                60,
            ),
            "kube-scheduler": Component(
                lambda: render.scheduler(settings, folder), lambda: self._health(settings.ports.scheduler), 60
            ),
            "containerd": Component(
                lambda: render.containerd(settings), self._runtime_serves, 60, prepare=self._prepare_containerd
            ),
            "kubelet": Component(
                lambda: render.kubelet(settings, folder),
                lambda: ApiClient("http://127.0.0.1:10248", None).ok("/healthz"),
                60,
                prepare=self._prepare_kubelet,
            ),
            "kube-proxy": Component(
                lambda: render.proxy(settings, folder),
                lambda: ApiClient("http://127.0.0.1:10249", None).ok("/healthz"),
                60,
                prepare=self._prepare_proxy,
            ),
            "fake-gpu": Component(
                lambda: ["/usr/bin/env", f"PYTHONPATH={defaults.repository_root()}", *gpu_command], lambda: True, 10
            ),
        }

    def _admin(self) -> ApiClient:
        folder = self.settings.pki_dir
        return ApiClient(self.settings.server, folder / "ca.crt", folder / "admin.crt", folder / "admin.key")

    def _health(self, port: int) -> bool:
        return ApiClient(f"https://127.0.0.1:{port}", None).ok("/healthz")

    def _controllers_work(self) -> bool:
        """Its health port answers long before its controllers run; pods need the account that one of them makes."""
        healthy = self._health(self.settings.ports.controller_manager)
        return healthy and self._admin().ok("/api/v1/namespaces/default/serviceaccounts/default")

    def _write_kubeconfigs(self) -> None:
        settings, folder = self.settings, self.settings.pki_dir
        users = {"admin": settings.kubeconfig}
        for certificate in pki.certificates(settings):
            if certificate.name in ("controller-manager", "scheduler", "proxy", "kubelet"):
                users[certificate.name] = settings.run_dir / f"{certificate.name}.kubeconfig"
        for user, path in users.items():
            parts = (_base64(folder / name) for name in ("ca.crt", f"{user}.crt", f"{user}.key"))
            content = render.kubeconfig(settings.server, settings.context, user, *parts)
            path.write_text(render.as_json(content))
            path.chmod(0o600)

    def _system_images(self) -> dict[str, SmallImage]:
        return {
            "pause": SmallImage(("/pause",), {"/pause": self._bin_dir / "pause"}, user="65535:65535"),
            "coredns": SmallImage(("/coredns",), {"/coredns": self._bin_dir / "coredns"}, user="0:0"),
        }

    def _system_image_name(self, name: str) -> str:
        return f"moontide.local/{name}:{self._system_images()[name].key()}"

    def _prepare_containerd(self) -> None:
        settings = self.settings
        if len(str(settings.containerd_socket)) > 100:
            raise ClusterError(f"{settings.containerd_socket} is too long for a socket: use a shorter name")
        settings.state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        settings.image_dir.mkdir(parents=True, exist_ok=True)
        config_dir = settings.run_dir / "cni" / "net.d"
        config_dir.mkdir(parents=True, exist_ok=True)
        (config_dir / "10-moontide.conflist").write_text(render.as_json(render.cni(settings)))
        config = render.containerd_config(settings, self._system_image_name("pause"))
        (settings.run_dir / "containerd.toml").write_text(config)

    def _runtime_serves(self) -> bool:
        """A runtime without the images that the node itself needs does not serve."""
        if not self.runtime.answers():
            return False
        held = self.runtime.images()
        for name, image in self._system_images().items():
            full_name = self._system_image_name(name)
            if full_name not in held:
                archive = self.settings.run_dir / f"{name}.tar"
                write_small_image(image, full_name, archive)
                self.runtime.import_file(archive)
                archive.unlink()
        return True

    def _prepare_kubelet(self) -> None:
        run_dir = self.settings.run_dir
        # Pods that use the node's resolver find none: nothing outside is to be asked.
        (run_dir / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        (run_dir / "kubelet.json").write_text(render.as_json(render.kubelet_config(self.settings)))

    def _prepare_proxy(self) -> None:
        (self.settings.run_dir / "proxy.json").write_text(render.as_json(render.proxy_config(self.settings)))

    def _apply_dns(self) -> None:
        objects = {"apiVersion": "v1", "kind": "List", "items": render.dns_objects(self._system_image_name("coredns"))}
        command = [*self.kubectl, "apply", "--server-side", "--force-conflicts", "-f", "-"]
        # Namespaces and the default priority classes appear a moment after the API server does.
        if not wait_until(lambda: self._admin().ok("/api/v1/namespaces/kube-system"), 30):
            raise ClusterError("the API server did not make the namespace kube-system")
        run(command, stdin=json.dumps(objects))

    def _wait_for_node(self) -> None:
        node = ["wait", "--for=condition=Ready", f"node/{defaults.NODE_NAME}", "--timeout=90s"]
        if not wait_until(lambda: self._admin().ok(f"/api/v1/nodes/{defaults.NODE_NAME}"), 60):
            raise ClusterError(f"kubelet did not register its node:\n{self._daemon('kubelet').last_lines()}")
        run([*self.kubectl, *node])
        gpus = self.settings.gpus
        path = f"jsonpath={{.status.allocatable.nvidia\\.com/gpu}}={gpus}"
        if gpus:
            run([*self.kubectl, "wait", f"--for={path}", f"node/{defaults.NODE_NAME}", "--timeout=60s"])
        run(
            [*self.kubectl, "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s"],
            timeout=130,
        )

    def _keep_logs(self) -> None:
        if self.settings.log_dir.is_dir():
            shutil.rmtree(self.settings.last_logs, ignore_errors=True)
            shutil.copytree(self.settings.log_dir, self.settings.last_logs)

    def _restore_machine(self, baseline: cleanup.Baseline | None) -> None:
        cleanup.remove_cgroups()
        for link in cleanup.container_log_links(self.settings):
            link.unlink()
        network.remove(baseline.sysctls if baseline else {}, baseline.nft_tables if baseline else network.nft_tables())
        for path in cleanup.FIXED_DIRS:
            if baseline is not None and str(path) not in baseline.directories:
                shutil.rmtree(path, ignore_errors=True)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
