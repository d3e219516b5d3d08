"""Two replicas with one store, started once for all tests of this folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import enginekit as kit


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    """Two sets of weights. Folders of the same name: the store's keys carry the name of the model's folder."""
    cache = Path(os.environ.get("MOONTIDE_CACHE") or Path.home() / ".cache" / "moontide")
    target = cache / f"component-models-{hashlib.sha256(kit.MAKER.read_bytes()).hexdigest()[:12]}"
    found = {}
    for seed, name in enumerate("ab", 1):
        folder = target / name / "tiny"
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, str(kit.MAKER), str(folder), str(seed)], check=True, capture_output=True)
            (folder / "complete").touch()
        found[name] = folder
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working folder with the token and the store's configuration."""
    made = tmp_path_factory.mktemp("engine")
    kit.store_config(made)
    return made


@pytest.fixture(scope="session")
def fleet(folder: Path, models: dict[str, Path]) -> Iterator[kit.Fleet]:
    """Both replicas up, and what they answered before anybody admitted them."""
    master = kit.Master(folder)
    processes = []
    pool = ThreadPoolExecutor(16)
    try:
        master.start()
        for number in (1, 2):
            log = folder / f"engine{number}.log"
            processes.append(
                kit.spawn(kit.engine_command(models["a"], number), kit.engine_environment(folder, number), log)
            )
        replicas = []
        for number, process in enumerate(processes, 1):
            replica = kit.Replica(number, process)
            kit.wait_for(
                f"engine {number}", lambda r=replica: kit.get(f"{r.inference}/health"), kit.START_SECONDS, process
            )
            first = replica.complete("hello")
            replica.at_start = {
                "status": replica.status(),
                "answer": first,
                "ready": httpx.get(f"{replica.inference}/moontide/v1/ready", timeout=kit.PATIENCE),
            }
            replica.boot_id = replica.at_start["status"]["bootId"]
            replicas.append(replica)
        yield kit.Fleet(folder, models, master, (replicas[0], replicas[1]), pool)
    finally:
        for process in processes:
            if process.popen.poll() is None:
                process.signal(signal.SIGCONT)
        with ThreadPoolExecutor(2) as enders:
            list(enders.map(lambda p: p.end(), processes))
        if master.process is not None:
            master.process.signal(signal.SIGCONT) if master.process.popen.poll() is None else None
            master.process.end(10)
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def open_fleet(fleet: kit.Fleet) -> kit.Fleet:
    """Both replicas open in a new epoch with empty caches, local and external."""
    fleet.bump()
    return fleet
