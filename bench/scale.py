"""What it costs to reconcile many objects: requests, time, CPU and memory of the operator, on a real API server.

The operator is the real process with the rights of its chart. What it asks the API server is counted in the API
server's audit log, by the name of its service account. There is no node and no controller: fleets have 0 replicas, so
children are made and no pod is. One master, a double, answers for all pools.
"""

from __future__ import annotations

import argparse
import collections
import http.server
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.apiserver import Connections, Object, Plane, cpu_seconds, plane, quantile, resident_mib

from hack.cluster.settings import load
from moontide import labels, naming
from tests.integration.conftest import (
    SERVICE_ACCOUNT,
    SYSTEM,
    Operator,
    chart_rights,
    released_lease,
    service_account_kubeconfig,
)
from tests.integration.stage import RESOLVING, address

ROOT = Path(__file__).resolve().parents[1]
API = "moontide.dev/v1alpha1"
USER = f"system:serviceaccount:{SYSTEM}:{SERVICE_ACCOUNT}"
FLEETS, POOLS = "inferencedeployments", "kvcachepools"
LEASE = "leases"
TAIL = 3.0
"""Seconds after a phase in which requests and CPU time are still counted."""
PROFILED = """
import cProfile, pstats, sys
profile = cProfile.Profile()
profile.enable()
try:
    exec({code!r})
finally:
    profile.disable()
    profile.dump_stats({path!r})
"""


GAUGES = ("active_clients", "key_count", "total_capacity_bytes", "allocated_bytes")
OTHERS = tuple(f"of_which_the_operator_reads_nothing_{number}" for number in range(129))
PAGE = "".join(
    f"# HELP master_{name} As long as what a Mooncake master says\n# TYPE master_{name} gauge\nmaster_{name} 0\n"
    for name in (*GAUGES, *OTHERS)
)
"""399 lines: as many as Mooncake 0.3.13 writes."""


class MasterDouble(http.server.BaseHTTPRequestHandler):
    """Answers as an idle Mooncake master and its wiper do, for every pool."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = (json.dumps({"service_ready": True}) if self.path == "/health" else PAGE).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """A wiper's answer, of a store without a key."""
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"success": True, "removed": 0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def masters(host: str) -> Iterator[None]:
    """The double, where the operator finds every master."""
    http.server.ThreadingHTTPServer.request_queue_size = 256
    made = [
        http.server.ThreadingHTTPServer((host, port), MasterDouble)
        for port in (naming.MASTER_METRICS_PORT, naming.WIPER_PORT)
    ]
    for server in made:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        for server in made:
            server.shutdown()
            server.server_close()


class World:
    """The objects of one arm."""

    def __init__(self, made: Plane, options: argparse.Namespace) -> None:
        self.plane = made
        self.api = made.api
        self.namespaces = [f"team-{number}" for number in range(options.namespaces)]
        self.fleets = [(self._place(number), f"fleet-{number}") for number in range(options.fleets)]
        self.pools = [(self._place(number), f"pool-{number}") for number in range(options.pools)]
        self.policies = options.policies
        self._pools_of: dict[str, list[str]] = collections.defaultdict(list)
        for namespace, name in self.pools:
            self._pools_of[namespace].append(name)

    def _place(self, number: int) -> str:
        return self.namespaces[number % len(self.namespaces)]

    def prepare(self) -> None:
        """CRDs, namespaces, and in each the claim that fleets name and the account that pods need."""
        kubectl = self.plane.kubectl
        kubectl("apply", "-f", str(ROOT / "crds"))
        kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(ROOT / "crds"))
        kubectl("create", "namespace", SYSTEM)
        for name in self.namespaces:
            kubectl.make_namespace(name)
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            self.api("POST", f"/api/v1/namespaces/{name}/serviceaccounts", account)

    @staticmethod
    def path(plural: str, namespace: str, name: str = "") -> str:
        return f"/apis/{API}/namespaces/{namespace}/{plural}{name and '/'}{name}"

    def fleet(self, namespace: str, name: str) -> Object:
        """A fleet of a pool of its namespace."""
        pools = self._pools_of[namespace]
        spec: Object = {
            **({"policyRef": {"name": "policy"}} if self.policies else {}),
            "model": {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"},
            "replicas": 0,
            "kvCache": {"poolRef": {"name": pools[sum(name.encode()) % len(pools)]}},
        }
        metadata = {"name": name, "namespace": namespace}
        return {"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata, "spec": spec}

    def create(self) -> None:
        """All pools and fleets, as fast as the API server takes them."""
        pools = []
        for namespace, name in self.pools:
            body = {"apiVersion": API, "kind": "KVCachePool", "metadata": {"name": name}, "spec": {}}
            pools.append((self.path(POOLS, namespace), body))
        for namespace in self.namespaces if self.policies else ():
            body = {"apiVersion": API, "kind": "PolicyVersion", "metadata": {"name": "policy"}, "spec": {"version": 7}}
            pools.append((self.path("policyversions", namespace), body))
        self.api.each("POST", pools)
        self.api.each("POST", [(self.path(FLEETS, where), self.fleet(where, name)) for where, name in self.fleets])

    def change(self, number: int) -> None:
        """One more variable for the engines of every fleet."""
        body = {"spec": {"engine": {"env": [{"name": "ROUND", "value": str(number)}]}}}
        self.api.each("PATCH", [(self.path(FLEETS, *one), body) for one in self.fleets])

    def converged(self) -> tuple[set[str], int]:
        """UIDs of the objects whose status is of their spec and says that all was applied; and how many there are."""
        done, found = set(), 0
        for plural in (FLEETS, POOLS):
            for each in self.api("GET", f"/apis/{API}/{plural}")["items"]:
                status, found = each.get("status") or {}, found + 1
                said = {one["type"]: one["reason"] for one in status.get("conditions") or ()}
                good = said.get("Ready") == "Serving" if plural == POOLS else said.get("Progressing") == "Updating"
                if good and status.get("observedGeneration") == each["metadata"]["generation"]:
                    done.add(each["metadata"]["uid"])
        return done, found

    def settle(self, seconds: float) -> list[float]:
        """Wait until all have converged, or the time is up. Seconds from now until each was seen so, sorted."""
        began, times, objects = time.monotonic(), dict[str, float](), len(self.fleets) + len(self.pools)
        while len(times) < objects and time.monotonic() - began < seconds:
            done, found = self.converged()
            for uid in done:
                times.setdefault(uid, time.monotonic() - began)
            # An object that has gone back since is counted all the same; what is gone is not.
            if len(done) == found == objects:
                break
            time.sleep(0.25)
        return sorted(times.values())


class Subject:
    """One controller at work: what it costs from one call of :meth:`measured` to the next."""

    def __init__(self, made: Plane, pid: int, user: str = USER) -> None:
        self.plane = made
        self.pid = pid
        self.user = user

    def measured(self, work: Callable[[], list[float]], objects: int) -> Object:
        """Do ``work``; requests for each of ``objects`` while it lasted, without those of the election."""
        audit, pid = self.plane.audit, self.pid
        server = self.plane.pid("kube-apiserver")
        audit.read()
        cpu, theirs, began = cpu_seconds(pid), cpu_seconds(server), time.monotonic()
        times = work()
        took = time.monotonic() - began
        # What is under way belongs to it.
        time.sleep(TAIL)
        found = audit.count(self.user)
        lease = sum(count for (_, resource, _), count in found.items() if resource == LEASE)
        rows = [{"verb": verb, "resource": what, "status": code, "count": n} for (verb, what, code), n in found.items()]
        total = sum(found.values()) - lease
        return {
            "seconds": took,
            "converged": len(times),
            "p50": quantile(times, 0.5),
            "p99": quantile(times, 0.99),
            "requests": total,
            "of_the_election": lease,
            "requests_each": total / objects,
            "requests_a_second": total / (took + TAIL),
            "cpu_seconds": cpu_seconds(pid) - cpu,
            "apiserver_cpu_seconds": cpu_seconds(server) - theirs,
            "rss_mib": resident_mib(pid),
            "peak_mib": resident_mib(pid, peak=True),
            "by": sorted((row for row in rows if row["resource"] != LEASE), key=lambda row: -row["count"]),
        }


def start(world: World, folder: Path, host: str, tree: Path, profile: Path | None, resync: float) -> Operator:
    """The operator of the code in ``tree``, ready. What it did until then is in the audit log."""
    kubectl, tools = world.plane.kubectl, world.plane.tools
    kubectl("apply", "-f", "-", stdin=chart_rights(tools))
    kubectl.apply(released_lease(SYSTEM))
    environ = {
        "PYTHONPATH": str(tree / "operator"),
        "MOONTIDE_LEASE_SECONDS": "120",
        "MOONTIDE_POD_NAME": "bench",
        "MOONTIDE_POD_UID": "bench",
        "MOONTIDE_RESYNC_SECONDS": str(resync),
    }
    code = RESOLVING.format(services=host)
    if profile is not None:
        code = PROFILED.format(code=code, path=str(profile))
    config = service_account_kubeconfig(kubectl, folder)
    made = Operator(config, folder / "operator.log", environ=environ, code=code)
    made.start()
    return made


def first_reconcile(world: World, began: float) -> float:
    """Seconds from ``began`` (of the clock of the day) to the operator's first write of a child."""
    for event in world.plane.audit.read():
        where = event.get("objectRef") or {}
        if event["verb"] in ("create", "patch") and where.get("namespace") in world.namespaces:
            at = event["requestReceivedTimestamp"]
            moment = time.mktime(time.strptime(at[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone + float(f"0{at[19:-1]}")
            return moment - began
    return float("nan")


def watch_pods(world: World, pid: int, count: int) -> Object:
    """Create pods with the labels of fleets' engines; what the operator's memory grows by for a thousand."""
    before = resident_mib(pid)
    requests = []
    for number in range(count):
        namespace, fleet = world.fleets[number % len(world.fleets)]
        metadata = {
            "name": f"pod-{number}",
            "labels": {**labels.engine_labels(fleet), labels.MANAGED_BY: labels.MANAGER},
        }
        env = [{"name": f"VARIABLE_{index}", "value": "x" * 40} for index in range(30)]
        container = {"name": naming.ENGINE_CONTAINER, "image": "engine.test/moontide:1", "env": env}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        requests.append((f"/api/v1/namespaces/{namespace}/pods", body))
    world.api.each("POST", requests)
    time.sleep(30)
    after = resident_mib(pid)
    return {"pods": count, "before_mib": before, "after_mib": after, "mib_a_thousand": (after - before) / count * 1000}


def restarting(subject: Subject, operator: Operator, seconds: float) -> Object:
    """End it and start it: what it costs to look at all there is, in ``seconds`` from when it is ready."""
    operator.stop()
    operator.start()
    subject.pid = operator.pid

    def resting() -> list[float]:
        time.sleep(seconds)
        return []

    return subject.measured(resting, 1)


def churn(world: World, pid: int, minutes: float) -> list[Object]:
    """Changes, deletions and creations, round and round. Memory after each round."""
    rows: list[Object] = []
    began = time.monotonic()
    number = 100
    while time.monotonic() - began < minutes * 60:
        number += 1
        world.change(number)
        some = world.fleets[number % 5 :: 5]
        world.api.each("DELETE", [(world.path(FLEETS, *one), None) for one in some])
        world.api.each("POST", [(world.path(FLEETS, where), world.fleet(where, name)) for where, name in some])
        settled = world.settle(600)
        if len(settled) < len(world.fleets) + len(world.pools):
            print(f"  churn: {len(settled)} converged in ten minutes", flush=True)
        rows.append({"minutes": (time.monotonic() - began) / 60, "rss_mib": resident_mib(pid)})
        print(f"  churn {rows[-1]['minutes']:5.1f} min {rows[-1]['rss_mib']:7.1f} MiB", flush=True)
    return rows


@contextmanager
def garbage_collector(made: Plane, folder: Path) -> Iterator[None]:
    """The real one: without it the children of fleets that are gone stay, and new fleets cannot have their names."""
    settings = load(made.name)
    assert settings is not None
    manager = made.tools / "kube-controller-manager"
    command = [str(manager), f"--kubeconfig={settings.kubeconfig}", "--leader-elect=false"]
    alone = ["--controllers=garbage-collector-controller", "--secure-port=0", "--bind-address=127.0.0.1"]
    with (folder / "garbage-collector.log").open("wb") as log:
        process = subprocess.Popen([*command, *alone], stdout=log, stderr=log)
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError((folder / "garbage-collector.log").read_text()[-2000:])
    finally:
        process.terminate()
        process.wait(60)


def slope(rows: Sequence[Object]) -> float:
    """MiB an hour over the second half."""
    half = rows[len(rows) // 2 :]
    if len(half) < 2:
        return float("nan")
    return statistics.linear_regression([each["minutes"] / 60 for each in half], [each["rss_mib"] for each in half])[0]


def imports(tree: Path) -> Object:
    """What importing the operator takes, by package, in milliseconds; and its memory after that."""
    environ = {**os.environ, "PYTHONPATH": str(tree / "operator")}
    command = [sys.executable, "-X", "importtime", "-c", "import moontide.app"]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stderr
    own: collections.Counter[str] = collections.Counter()
    for line in said.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[0].strip().isdigit():
            own[parts[2].strip().partition(".")[0]] += int(parts[0])
    took = []
    code = "import time; t = time.perf_counter(); import moontide.app; t = time.perf_counter() - t; "
    code += "import resource; print(t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    for _ in range(5):
        out = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        ).stdout
        took.append([float(each) for each in out.split()])
    return {
        "seconds": statistics.median(each[0] for each in took),
        "rss_mib": statistics.median(each[1] for each in took) / 1024,
        "by_ms": {name: round(spent / 1000, 1) for name, spent in own.most_common(8)},
    }


def measure(label: str, tree: Path, options: argparse.Namespace, folder: Path) -> Object:
    """One arm, on an API server of its own."""
    folder.mkdir()
    host = address()
    print(f"{label}:", flush=True)
    row: Object = {"label": label, "imports": imports(tree)}
    with masters(host), plane(f"scale-{os.getpid()}", folder) as made:
        world = World(made, options)
        world.prepare()
        extra = {"apiVersion": API, "kind": "KVCachePool", "metadata": {"name": "first"}, "spec": {}}
        made.api("POST", world.path(POOLS, world.namespaces[0]), extra)
        made.audit.read()
        began = time.time()
        profile = options.profile.absolute() / f"{label}.prof" if options.profile else None
        operator = start(world, folder, host, tree, profile, options.resync)
        try:
            time.sleep(2)
            row["first_reconcile_seconds"] = first_reconcile(world, began)
            made.api("DELETE", world.path(POOLS, world.namespaces[0], "first"))
            row["idle_mib"] = resident_mib(operator.pid)
            subject, objects = Subject(made, operator.pid), len(world.fleets) + len(world.pools)
            row["objects"] = objects
            counted = Connections(operator.pid, made.api.port)

            def creating() -> list[float]:
                world.create()
                return world.settle(options.patience)

            def changing() -> list[float]:
                world.change(1)
                return world.settle(options.patience)

            def resting() -> list[float]:
                time.sleep(options.rest)
                return []

            row["create"] = subject.measured(creating, objects)
            say("create", row["create"])
            row["change"] = subject.measured(changing, len(world.fleets))
            say("change", row["change"])
            if options.restart:
                row["restart"] = restarting(subject, operator, options.restart)
                say("restart", row["restart"])
            row["connections"] = {"opened": len(counted.seen), "at_once": counted.most}
            counted.close()
            time.sleep(options.calm)
            row["rest"] = subject.measured(resting, objects)
            say("rest", row["rest"])
            if options.pods:
                row["pods"] = watch_pods(world, operator.pid, options.pods)
                print(f"  pods {row['pods']}", flush=True)
            if options.churn:
                with garbage_collector(made, folder):
                    row["churn"] = churn(world, operator.pid, options.churn)
                row["churn_mib_an_hour"] = slope(row["churn"])
        finally:
            # One that is kept busy does not end in time, and is killed.
            with suppress(subprocess.TimeoutExpired):
                operator.stop()
            if options.logs:
                shutil.copy(folder / "operator.log", options.logs / f"{label}.log")
    return row


def say(name: str, found: Object) -> None:
    """One line of progress."""
    print(
        f"  {name:7} {found['seconds']:7.1f} s  {found['converged']} converged  "
        f"{found['requests_each']:6.1f} requests an object "
        f"{found['requests_a_second']:7.1f} a second  CPU {found['cpu_seconds']:6.1f} s  "
        f"API server {found['apiserver_cpu_seconds']:6.1f} s  {found['rss_mib']:6.1f} MiB",
        flush=True,
    )


LINES: tuple[tuple[str, Callable[[Object], str]], ...] = (
    ("start to the first write, s", lambda row: f"{row['first_reconcile_seconds']:.1f}"),
    ("of it imports, s", lambda row: f"{row['imports']['seconds']:.1f}"),
    ("memory before any object, MiB", lambda row: f"{row['idle_mib']:.0f}"),
    ("**create all**: until all have converged, s", lambda row: _time(row, "create")),
    ("the median object, s", lambda row: f"{row['create']['p50']:.1f}"),
    ("requests for each", lambda row: f"{row['create']['requests_each']:.1f}"),
    ("CPU of the controller, s", lambda row: f"{row['create']['cpu_seconds']:.1f}"),
    ("CPU of the API server, s", lambda row: f"{row['create']['apiserver_cpu_seconds']:.1f}"),
    ("**change the spec of each fleet**: until all have converged, s", lambda row: _time(row, "change")),
    ("the median fleet, s", lambda row: f"{row['change']['p50']:.1f}"),
    ("requests for each", lambda row: f"{row['change']['requests_each']:.1f}"),
    ("CPU of the controller, s", lambda row: f"{row['change']['cpu_seconds']:.1f}"),
    ("CPU of the API server, s", lambda row: f"{row['change']['apiserver_cpu_seconds']:.1f}"),
    ("**at rest**: requests a second", lambda row: f"{row['rest']['requests_a_second']:.1f}"),
    ("CPU of the controller, % of a core", lambda row: f"{_share(row['rest'], 'cpu_seconds'):.1f}"),
    ("CPU of the API server, % of a core", lambda row: f"{_share(row['rest'], 'apiserver_cpu_seconds'):.1f}"),
    ("**restart with all there**: requests in all", lambda row: f"{row['restart']['requests']}"),
    ("CPU of the controller, s", lambda row: f"{row['restart']['cpu_seconds']:.1f}"),
    ("**memory** with all objects, MiB", lambda row: f"{row['rest']['rss_mib']:.0f}"),
    ("for a thousand pods more, MiB", lambda row: f"{row['pods']['mib_a_thousand']:.1f}"),
    ("an hour of churn, MiB", lambda row: f"{row['churn_mib_an_hour']:+.1f}"),
    ("**connections** opened, at once", lambda row: "{opened}, {at_once}".format(**row["connections"])),
)


def _time(row: Object, phase: str) -> str:
    found, all_ = row[phase], row["objects"]
    done, took = found["converged"], f"{found['seconds']:.0f}"
    return took if done >= all_ or (phase == "change" and done) else f"{done} of {all_} in {took}"


def _cell(row: Object, text: Callable[[Object], str]) -> str:
    try:
        return text(row)
    except KeyError:
        return ""


def _share(found: Object, key: str) -> float:
    return float(100 * found[key] / (found["seconds"] + TAIL))


def table(rows: Sequence[Object]) -> str:
    """For people, as Markdown."""
    made = [f"| | {' | '.join(row['label'] for row in rows)} |", f"| --- |{' --- |' * len(rows)}"]
    made += [f"| {title} | {' | '.join(_cell(row, text) for row in rows)} |" for title, text in LINES]
    return "\n".join(made)


@contextmanager
def tree_of(revision: str | None) -> Iterator[Path]:
    """The code of a revision; without one, as it is here."""
    if revision is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["git", "worktree", "add", "-q", "--detach", f"{scratch}/tree", revision], cwd=ROOT, check=True)
        try:
            yield Path(scratch) / "tree"
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", f"{scratch}/tree"], cwd=ROOT, check=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50 fleets, 5 pools, 20 s at rest, 200 pods")
    parser.add_argument("--fleets", type=int, default=500)
    parser.add_argument("--pools", type=int, default=50)
    parser.add_argument("--namespaces", type=int, default=10)
    parser.add_argument("--policies", action="store_true", help="a policy in each namespace, which its fleets follow")
    parser.add_argument("--pods", type=int, default=1000, help="pods to watch (default 1000; 0: none)")
    parser.add_argument("--rest", type=float, default=120.0, help="seconds to count at rest (default 120)")
    parser.add_argument("--calm", type=float, default=15.0, help="seconds before that (default 15)")
    parser.add_argument("--churn", type=float, default=0.0, help="minutes of changes and deletions; none by default")
    parser.add_argument("--resync", type=float, default=60.0, help="MOONTIDE_RESYNC_SECONDS (default 60)")
    parser.add_argument(
        "--patience", type=float, default=300.0, help="seconds in which all must converge (default 300)"
    )
    parser.add_argument("--against", help="a revision to measure first, in the same run")
    parser.add_argument("--without", action="store_true", help="measure not the tree as it is, only what else is named")
    parser.add_argument("--restart", type=float, default=30.0, help="seconds to count after a restart (default 30)")
    parser.add_argument("--peer-binary", type=Path, help="LeaderWorkerSet's manager, to measure beside")
    parser.add_argument("--peer-crds", type=Path, help="folder of its CRDs")
    parser.add_argument("--profile", type=Path, help="folder for a profile of each operator (slows it down)")
    parser.add_argument("--logs", type=Path, help="folder for each operator's log")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "scale.json")
    options = parser.parse_args()
    if options.quick:
        options.fleets, options.pools, options.namespaces, options.rest, options.pods = 50, 5, 5, 20.0, 200
    arms = [(options.against, options.against)] if options.against else []
    arms += [] if options.without else [("now", None)]
    rows: list[Object] = []

    def keep(row: Object) -> None:
        """Write what there is: a run that is cut short has it."""
        rows.append(row)
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        sizes = {key: getattr(options, key) for key in ("fleets", "pools", "namespaces", "policies", "rest")}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**machine, **sizes, "rows": rows}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        for label, revision in arms:
            with tree_of(revision) as tree:
                keep(measure(label, tree, options, Path(scratch) / label))
        if options.peer_binary:
            from bench import peer

            keep(peer.measure(options.peer_binary.absolute(), options.peer_crds, options, Path(scratch) / "peer"))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
