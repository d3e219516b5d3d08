"""Measure one vLLM release on one host, as it is and with the plugin. Run by bench/gpu/run.sh; the table is table.py's.

    python3 bench/gpu/rows.py right OUT      what is right: keys left, answers, stale answers, blocks, leases, changes
    python3 bench/gpu/rows.py cost OUT       what it costs: speed, pauses, prefill and hits
    python3 bench/gpu/rows.py ranks OUT      two cards: every rank drained before the wipe

Each writes OUT/RELEASE-NAME.json after every step, so that a run that is cut short has what it came to. *off*: stock
vLLM. *on*: with the plugin. ``--device cpu`` tries it all in miniature on vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "bench")]

import drive  # noqa: E402
import fleet as host_module  # noqa: E402
import httpx  # noqa: E402
import release_load  # noqa: E402
from fleet import NAMESPACE, Engine, Host, Late, Master, kit  # noqa: E402

ARMS = ("off", "on")
SENTENCE = "the tide comes in and the tide goes out, and what was written on the sand is gone "
TINY = ("--dtype", "float32", "--max-model-len", "4096", "--block-size", "32")
"""Single precision: in half, batching alone changes one greedy answer in twenty."""
HYBRID = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", str(release_load.LENGTH)),
    *("--num-gpu-blocks-override", str(release_load.BLOCKS), "--no-disable-hybrid-kv-cache-manager"),
)
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
LARGE_LAYERS = 16
"""Shape of a common model of a billion parameters; the vocabulary is that of the tiny tokenizer."""


@dataclass
class Size:
    """How much of everything."""

    prompts: int = 40
    repeats: int = 14
    """Of the sentence in one prompt: about 25 tokens each."""
    rounds: int = 6
    """Changes of policy under load."""
    load_seconds: float = 2.0
    clients: int = 6
    pressure_seconds: float = 40.0
    pressure_clients: int = 12
    running: tuple[int, ...] = (0, 8, 64)
    pauses: int = 5
    lengths: tuple[int, ...] = (2048, 8192, 32768)
    takes: int = 5
    burst: int = 64
    burst_tokens: int = 192
    bursts: int = 6
    story: int = 3000
    """Tokens of a request that must still run when a change reaches it."""


SMALL = Size(
    prompts=6,
    repeats=4,
    rounds=2,
    load_seconds=1.0,
    clients=2,
    pressure_seconds=6.0,
    pressure_clients=4,
    running=(0, 2),
    pauses=1,
    lengths=(256, 512),
    takes=2,
    burst=4,
    burst_tokens=16,
    bursts=2,
    story=600,
)


@dataclass
class Book:
    """The results, written after every entry."""

    path: Path
    rows: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, row: str, arm: str, value: Any) -> None:
        """Note a result and say it."""
        with self._lock:
            self.rows.setdefault(row, {})[arm] = value
            self._write()
            print(f"[{time.strftime('%H:%M:%S')}] {row} / {arm}: {json.dumps(value)[:700]}", flush=True)

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.rows, indent=1) + "\n")
        new.replace(self.path)

    def attempt(self, row: str, arm: str, work: Callable[[], Any]) -> Any:
        """Note what ``work`` returns, or the error that it ends with: the next row is measured all the same."""
        try:
            value = work()
        except (Exception, kit.pytest.fail.Exception) as error:
            traceback.print_exc()
            self.put(row, arm, {"error": f"{type(error).__name__}: {str(error)[:600]}"})
            return None
        self.put(row, arm, value)
        return value


def about(cuda: bool) -> dict[str, Any]:
    """Card, driver and versions."""
    found: dict[str, Any] = {"vllm": host_module.release(), "python": platform.python_version(), "card": "CPU"}
    for name in ("torch", "transformers", "triton", "mooncake-transfer-engine-cuda13"):
        try:
            found[name.partition("-")[0]] = host_module.importlib.metadata.version(name)
        except host_module.importlib.metadata.PackageNotFoundError:
            continue
    if cuda:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
        found["card"], found["driver"], found["memory"] = (part.strip() for part in lines[0].split(","))
        found["cards"] = len(lines)
    found["cores"] = os.cpu_count()
    return found


def make_models(folder: Path) -> dict[str, Path]:
    """Tiny weights ``a`` and ``b``, a tiny hybrid, and the shape of a large one (its weights are vLLM's dummies)."""
    found = {name: folder / name / "tiny" for name in ("a", "b", "hybrid")}
    found["large"] = folder / "large" / "tiny"
    work = [(found["a"], "1"), (found["b"], "2"), (found["hybrid"], "1", "--hybrid")]
    with ThreadPoolExecutor(3) as pool:
        for done in pool.map(lambda each: _make(*each), work):
            done.check_returncode()
    config = json.loads((found["a"] / "config.json").read_text())
    found["large"].mkdir(parents=True, exist_ok=True)
    for path in found["a"].iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            (found["large"] / path.name).write_bytes(path.read_bytes())
        if path.suffix == ".jinja":
            (found["large"] / path.name).write_bytes(path.read_bytes())
    config |= {**LARGE, "num_hidden_layers": LARGE_LAYERS, "head_dim": 64, "torch_dtype": "bfloat16"}
    (found["large"] / "config.json").write_text(json.dumps(config))
    return found


def _make(out: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    return subprocess.run([sys.executable, str(kit.MAKER), str(out), *arguments], env=env)


def prompts_of(size: Size) -> list[str]:
    """Long prompts that share no beginning."""
    return [f"{number} asks: " + SENTENCE * size.repeats for number in range(size.prompts)]


def both(engines: Sequence[Engine], work: Callable[[Engine], Any]) -> list[Any]:
    """Of each engine, side by side."""
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(work, engines))


def hits(engines: Sequence[Engine], work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``work`` returns, and the prompt tokens that hit meanwhile."""
    before = both(engines, Engine.counters)
    value = work()
    after = both(engines, Engine.counters)
    return value, {key: sum(a[key] - b[key] for a, b in zip(after, before, strict=True)) for key in before[0]}


# -- what is right -----------------------------------------------------------------------------------------------------


def reset_once(engine: Engine) -> dict[str, Any]:
    """vLLM's own reset with the store: what it answers."""
    began = time.monotonic()
    answer = engine.command("/reset_prefix_cache", reset_external=True)
    return {"status": answer.status_code, "body": answer.text[:300], "ms": round((time.monotonic() - began) * 1000, 1)}


def reset_row(engines: Sequence[Engine], master: Master, prompts: Sequence[str]) -> dict[str, Any]:
    """Prompts into both replicas and the store; a reset of both; keys that are left, and hits of the same prompts."""
    for index, prompt in enumerate(prompts):
        engines[index % 2].tokens(prompt, 4)
    before = master.settled()
    time.sleep(6)  # Leases of what was looked up run out.
    answers = [reset_once(engine) for engine in engines]
    left = len(master.keys())
    _, found = hits(engines, lambda: [engines[(i + 1) % 2].tokens(prompt, 4) for i, prompt in enumerate(prompts)])
    return {"keys_before": before, "answers": answers, "keys_left": left, "hit_after": found}


def differ(answers: Sequence[list[int]], right: Sequence[list[int]]) -> int:
    """Answers that are not token for token what they should be."""
    return sum(a != b for a, b in zip(answers, right, strict=True))


def cold_answers(cold: Engine, models: dict[str, Path], prompts: Sequence[str]) -> dict[str, list[list[int]]]:
    """By weights: what an engine without caches and without a store answers, one prompt at a time."""
    found = {}
    for name in ("a", "b"):
        cold.push(models[name], name)
        found[name] = [cold.tokens(prompt) for prompt in prompts]
    return found


def stale_row(
    engines: Sequence[Engine],
    master: Master,
    models: dict[str, Path],
    prompts: Sequence[str],
    right: dict[str, list[list[int]]],
    change: Callable[[str], None],
) -> dict[str, Any]:
    """Nothing else runs: prompts under ``a`` through the first replica, ``change`` to ``b``, the same through both."""
    for prompt in prompts:
        engines[0].tokens(prompt, 4)
    keys = master.settled()
    same, reused = hits(engines, lambda: [engines[1].tokens(prompt) for prompt in prompts])
    change("b")
    left = len(master.keys())
    after, found = hits(engines, lambda: [[engine.tokens(prompt) for prompt in prompts] for engine in engines])
    change("a")
    return {
        "keys": keys,
        "hit_before": reused,
        "wrong_before": differ(same, right["a"]),
        "asked_after": 2 * len(prompts),
        "stale_after": sum(differ(each, right["b"]) for each in after),
        "hit_after": found,
        "keys_left": left,
    }


@dataclass
class Judged:
    """Answers under load."""

    asked: int = 0
    wrong: int = 0
    failed: int = 0
    aborted: int = 0
    straddled: int = 0
    """Began under one version and ended under another: no single engine's answer is right."""
    wrong_at_first: int = 0
    """Of the wrong ones: those whose first token is wrong. Batching flips a tie somewhere later (row ``noise``)."""
    wrong_of_other: int = 0
    """Of the wrong ones: those that agree for longer with the other weights than with their own."""
    wrongs: list[dict[str, Any]] = field(default_factory=list)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def note_wrong(
    judged: Judged,
    found: Sequence[int],
    right: dict[str, list[list[int]]],
    weights: str,
    index: int,
    answer: httpx.Response,
) -> None:
    """Count it, and keep what tells noise from stale KV."""
    other = "b" if weights == "a" else "a"
    own, foreign = common(found, right[weights][index]), common(found, right[other][index])
    judged.wrong += 1
    judged.wrong_at_first += own == 0
    judged.wrong_of_other += foreign > own
    if len(judged.wrongs) < 12:
        epoch, version = answer.headers.get("x-moontide-epoch"), answer.headers.get("x-moontide-version")
        judged.wrongs.append({"own": own, "other": foreign, "prompt": index, "epoch": epoch, "version": version})


def noise_row(
    engines: Sequence[Engine], prompts: Sequence[str], right: dict[str, list[list[int]]], size: Size
) -> dict[str, Any]:
    """The same clients for as long, and nothing changes: what batching alone does to answers."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(ask_all_along, engines, prompts, right, size.clients, lambda _: "a", stop)
        time.sleep(size.load_seconds * (size.rounds + 1))
        stop.set()
        return dict(flight.result(120).__dict__)


def ask_all_along(
    engines: Sequence[Engine],
    prompts: Sequence[str],
    right: dict[str, list[list[int]]],
    clients: int,
    weights_now: Callable[[httpx.Response | None], str | None],
    stop: threading.Event,
) -> Judged:
    """Clients that ask at random and judge each answer by the weights under which it was computed."""
    judged, lock = Judged(), threading.Lock()

    def client(number: int) -> None:
        chance = random.Random(number)
        while not stop.is_set():
            index, engine = chance.randrange(len(prompts)), chance.choice(list(engines))
            before = weights_now(None)
            try:
                answer = engine.ask(prompts[index], timeout=60)
            except httpx.HTTPError:
                answer = None
            after = weights_now(answer)
            with lock:
                if answer is None or answer.status_code != 200:
                    judged.failed += 1
                elif answer.json()["choices"][0]["finish_reason"] == "abort":
                    judged.aborted += 1
                elif after is None or (before is not None and before != after):
                    judged.straddled += 1
                else:
                    judged.asked += 1
                    found = answer.json()["choices"][0]["token_ids"]
                    if found != right[after][index]:
                        note_wrong(judged, found, right, after, index, answer)
            if answer is None or answer.status_code != 200:
                time.sleep(0.05)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return judged


def fan_out_row(
    engines: Sequence[Engine],
    models: dict[str, Path],
    prompts: Sequence[str],
    right: dict[str, list[list[int]]],
    size: Size,
) -> dict[str, Any]:
    """What trainers do without Moontide, under load: pause (abort), push, reset, resume, each on both."""
    now: list[str | None] = ["a"]
    total = Judged()
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(ask_all_along, engines, prompts, right, size.clients, lambda _: now[0], stop)
        try:
            for number in range(size.rounds):
                time.sleep(size.load_seconds)
                name = "ba"[number % 2]
                now[0] = None
                both(engines, lambda engine: engine.command("/pause", mode="abort").raise_for_status())
                both(engines, lambda engine, n=name: engine.push(models[n], n))
                both(engines, reset_once)
                both(engines, lambda engine: engine.command("/resume").raise_for_status())
                now[0] = name
            time.sleep(size.load_seconds)
        finally:
            stop.set()
            total = flight.result(120)
    return {"changes": size.rounds, **total.__dict__}


def planner_row(
    driver: drive.Driver,
    engines: Sequence[Engine],
    models: dict[str, Path],
    prompts: Sequence[str],
    right: dict[str, list[list[int]]],
    size: Size,
    **spec: object,
) -> dict[str, Any]:
    """The same changes by the operator's planner: prepare, push, commit."""

    def stamped(answer: httpx.Response | None) -> str | None:
        if answer is None:
            return None
        began, ended = answer.headers.get("x-moontide-version"), answer.headers.get("x-moontide-last-epoch")
        if ended is not None and ended != answer.headers.get("x-moontide-epoch"):
            return None
        return (began or "").partition("-")[0] or None

    stop, log = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(ask_all_along, engines, prompts, right, size.clients, stamped, stop)
        try:
            for number in range(size.rounds):
                time.sleep(size.load_seconds)
                name = "ba"[number % 2]
                version = f"{name}-{NUMBERS.next()}"
                driver.change(preparing=version, **spec)
                lines = list(driver.steps.lines)
                both(engines, lambda engine, n=name, v=version: engine.push(models[n], v))
                status = driver.change(version=version, preparing=None, **spec)
                log.append({"update": status["lastUpdate"], "steps": lines + list(driver.steps.lines)})
            time.sleep(size.load_seconds)
        finally:
            stop.set()
            total = flight.result(120)
    pauses = [entry["update"].get("pauseSeconds") or 0.0 for entry in log]
    return {
        "changes": len(log),
        **total.__dict__,
        "pause_ms": [round(each * 1000, 1) for each in pauses],
        "log": log[-1:],
    }


class Numbers:
    """Versions that were never used."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """One more."""
        self._last += 1
        return self._last


NUMBERS = Numbers()


def lease_row(asker: Engine, giver: Engine, master: Master, late: Path, tag: str) -> dict[str, Any]:
    """A load is held back until its keys are gone, as when their lease has run out: what the request comes to."""
    prompt = f"{tag} loses its lease " + SENTENCE * 12
    giver.tokens(prompt, 4)
    master.settled()
    before = asker.counters()["external"]
    late.write_text(json.dumps({"rank": 0, "hold": "load"}))
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(1) as pool:
            flight = pool.submit(asker.ask, prompt, 12, 25.0)
            time.sleep(1.0)
            master.remove_all()
            late.unlink()
            released = time.monotonic()
            try:
                answer = flight.result()
                outcome = {"status": answer.status_code, "body": answer.text[:200] if answer.status_code != 200 else ""}
            except httpx.HTTPError as error:
                outcome = {"status": 0, "body": type(error).__name__}
    finally:
        late.unlink(missing_ok=True)
    ended = time.monotonic()
    try:
        matched = asker.counters()["external"] - before
    except httpx.HTTPError:
        matched = -1.0
    return {
        **outcome,
        "seconds_after": round(ended - released, 2),
        "held_seconds": round(released - began, 2),
        "matched": matched,
        "dead": asker.dead(),
    }


def right_tiny(
    host: Host, book: Book, arm: str, engines: Sequence[Engine], master: Master, models: dict[str, Path], size: Size,
    right: dict[str, list[list[int]]],
) -> None:  # fmt: skip
    """All rows of the tiny fleet, for one arm."""
    prompts, patched = prompts_of(size), arm == "on"
    if not patched:

        def fan_out(name: str) -> None:
            both(engines, lambda engine: engine.command("/pause", mode="wait").raise_for_status())
            both(engines, lambda engine: engine.push(models[name], name))
            both(engines, reset_once)
            both(engines, lambda engine: engine.command("/resume").raise_for_status())

        book.attempt("reset", arm, lambda: reset_row(engines, master, prompts))
        book.attempt("stale", arm, lambda: stale_row(engines, master, models, prompts, right, fan_out))
        book.attempt("noise", arm, lambda: noise_row(engines, prompts, right, size))
        book.attempt("stale_load", arm, lambda: fan_out_row(engines, models, prompts, right, size))
    else:
        urls = [engine.admin for engine in engines]
        with drive.Driver(urls, master.wiper, NAMESPACE, kit.TOKEN) as driver:

            def planned(name: str) -> None:
                version = f"{name}-{NUMBERS.next()}"
                driver.change(preparing=version)
                both(engines, lambda engine: engine.push(models[name], version))
                driver.change(version=version, preparing=None)
                driver.settle()

            def admit() -> dict[str, Any]:
                closed = engines[0].ask("hello").status_code
                status = driver.change(version="a", **BARRIER)
                return {"before": closed, "update": status["lastUpdate"], "steps": list(driver.steps.lines)}

            book.attempt("admit", arm, admit)
            book.put("patches", arm, engines[0].status().get("patches"))
            book.attempt("reset", arm, lambda: reset_row(engines, master, prompts))
            book.attempt("stale", arm, lambda: stale_row(engines, master, models, prompts, right, planned))
            book.attempt("noise", arm, lambda: noise_row(engines, prompts, right, size))
            for name, spec in (("Barrier", BARRIER), ("Fence", FENCE)):
                work = lambda s=spec: planner_row(driver, engines, models, prompts, right, size, **s)  # noqa: E731
                book.attempt(f"stale_load {name}", arm, work)
    for engine, other in ((engines[0], engines[1]), (engines[1], engines[0])):
        row = "lease recompute" if engine is engines[0] or patched else "lease fail"
        if engine is engines[1] and patched:
            break
        late = host.late_file(engine.name)
        book.attempt(row, arm, lambda e=engine, o=other, f=late: lease_row(e, o, master, f, f"{arm} {e.name}"))


BARRIER = {"strategy": "Barrier", "weights": "External", "runningRequests": "Wait", "onReplicaFailure": "Isolate"}
FENCE = {"strategy": "Fence", "weights": "External", "runningRequests": "Wait", "onReplicaFailure": "Isolate"}


def right_hybrid(host: Host, book: Book, arm: str, engines: Sequence[Engine], master: Master, size: Size) -> None:
    """Three groups of KV blocks, few blocks, evictions: blocks given out twice, and what the fleet comes to."""

    def work() -> dict[str, Any]:
        if arm == "on":
            with drive.Driver([engine.admin for engine in engines], master.wiper, NAMESPACE, kit.TOKEN) as driver:
                driver.change(version="a", **BARRIER)
        load = release_load.Arm(arm)
        began = time.monotonic()
        release_load.CLIENTS = size.pressure_clients
        release_load.load([engine.url for engine in engines], size.pressure_seconds, load)
        seconds = time.monotonic() - began
        blocks: dict[str, int] = {}
        for engine in engines:
            path = host.folder / f"blocks-{engine.name}.json"
            counts = json.loads(path.read_text()) if path.exists() else {}
            blocks = {key: blocks.get(key, 0) + int(value) for key, value in counts.items()}
        external = 0.0
        for engine in engines:
            try:
                external += engine.counters()["external"]
            except httpx.HTTPError:
                continue
        return {
            "requests": load.requests,
            "failed": load.failed,
            "seconds": round(seconds, 1),
            "external_tokens": external,
            "blocks": blocks,
            "dead": {engine.name: why for engine in engines if (why := engine.dead())},
        }

    book.attempt("pressure", arm, work)


def run_right(
    host: Host, book: Book, models: dict[str, Path], arms: Sequence[str], parts: Sequence[str], size: Size
) -> None:
    """Start everything at once, then one thread a fleet."""
    tiny = (*TINY, *(("--kv-cache-memory-bytes", str(1 << 29)) if host.cuda else ()))
    hybrid = (*HYBRID, *(("--kv-cache-memory-bytes", str(1 << 28)) if host.cuda else ()))
    fleets: dict[tuple[str, str], tuple[Master, list[Engine]]] = {}
    cold = None
    if "tiny" in parts:
        cold = host.engine("cold", models["a"], (*tiny, "--no-enable-prefix-caching"), store=None, patched=False)
    for arm in arms:
        for part in parts:
            name = f"{part}-{arm}"
            master = host.master(name, wiper=arm == "on", segment="512MB", buffer="128MB")
            engines = []
            for number in (1, 2):
                engines.append(
                    host.engine(
                        f"{name}-{number}",
                        models["a" if part == "tiny" else "hybrid"],
                        tiny if part == "tiny" else hybrid,
                        store=name,
                        patched=arm == "on",
                        late=host.late_file(f"{name}-{number}"),
                        # Stock: one as trainers set it up, one with vLLM's own default.
                        policy=None if (arm, part, number) == ("off", "tiny", 2) else "recompute",
                    )
                )
            fleets[arm, part] = master, engines
    waited = host.up([*(engine for _, each in fleets.values() for engine in each), *([cold] if cold else [])])
    book.put("started", "both", {"engines": len(host.engines), "seconds": round(waited, 1)})
    right: dict[str, list[list[int]]] = {}
    if cold is not None:
        right = book_cold(book, cold, models, prompts_of(size))

    def one(key: tuple[str, str]) -> None:
        (arm, part), (master, engines) = key, fleets[key]
        if part == "tiny":
            right_tiny(host, book, arm, engines, master, models, size, right)
        else:
            right_hybrid(host, book, arm, engines, master, size)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, fleets))


def book_cold(book: Book, cold: Engine, models: dict[str, Path], prompts: Sequence[str]) -> dict[str, list[list[int]]]:
    """The right answers. Also how many of them the weights decide at all."""
    right = cold_answers(cold, models, prompts)
    book.put("cold", "both", {"prompts": len(prompts), "weights_change": differ(right["a"], right["b"])})
    return right


# -- what it costs -----------------------------------------------------------------------------------------------------


def fresh(length: int) -> list[int]:
    """A prompt of so many tokens that nobody has asked before."""
    return [RANDOM.randrange(3, 500) for _ in range(length)]


RANDOM = random.Random(20261128)


def first_token(engine: Engine, prompt: Sequence[int]) -> float:
    """Milliseconds until a completion of one token is there."""
    began = time.monotonic()
    engine.ask(prompt, 1, 45.0).raise_for_status()
    return (time.monotonic() - began) * 1000


def prefill_take(engines: Sequence[Engine], master: Master, length: int) -> dict[str, float]:
    """One fresh prompt: cold on the first replica, again there, and on the second from the store."""
    prompt = fresh(length)
    cold = first_token(engines[0], prompt)
    master.settled(calm=0.15 if length < 8000 else 0.4)
    local = first_token(engines[0], prompt)
    before = engines[1].counters()["external"]
    external = first_token(engines[1], prompt)
    matched = engines[1].counters()["external"] - before
    return {"cold": cold, "local": local, "external": external, "matched": matched}


def middle(values: Sequence[float]) -> float:
    """The median, to a tenth."""
    return round(statistics.median(values), 1)


def prefill_rows(book: Book, fleets: dict[str, tuple[Master, list[Engine]]], size: Size) -> None:
    """Off and on in turn."""
    for length in size.lengths:
        try:
            prefill_row(book, fleets, size, length)
        except httpx.HTTPError as error:
            book.put(f"prefill {length}", "error", {"error": f"{type(error).__name__}: {error}"})
            calm([engine for _, engines in fleets.values() for engine in engines])


def calm(engines: Sequence[Engine]) -> None:
    """Wait until engines answer again: a transfer that failed holds its engine up for a minute."""
    for engine in engines:
        with contextlib.suppress(httpx.HTTPError):
            engine.ask(fresh(32), 1, 90.0)


def prefill_row(book: Book, fleets: dict[str, tuple[Master, list[Engine]]], size: Size, length: int) -> None:
    """One length, off and on in turn."""
    takes: dict[str, list[dict[str, float]]] = {arm: [] for arm in fleets}
    for number in range(size.takes + 1):
        for arm in sorted(fleets, reverse=bool(number % 2)):
            master, engines = fleets[arm]
            take = prefill_take(engines, master, length)
            if number:  # The first of a length compiles.
                takes[arm].append(take)
    for arm, found in takes.items():
        row: dict[str, Any] = {key: middle([take[key] for take in found]) for key in found[0]}
        row["takes"] = [{key: round(value, 1) for key, value in take.items()} for take in found]
        book.put(f"prefill {length}", arm, row)


def burst(engines: Sequence[Engine], size: Size) -> float:
    """Tokens a second of so many requests at once, half of them on each replica."""
    jobs = [(engines[number % len(engines)], fresh(256)) for number in range(size.burst)]
    began = time.monotonic()
    with ThreadPoolExecutor(size.burst) as pool:
        list(pool.map(lambda job: job[0].tokens(job[1], size.burst_tokens), jobs))
    return size.burst * size.burst_tokens / (time.monotonic() - began)


def hot_rows(book: Book, fleets: dict[str, tuple[Master, list[Engine]]], size: Size) -> None:
    """Off and on in turn: tokens a second under 64 requests, and one short request's first token on an idle engine."""
    speeds: dict[str, list[float]] = {arm: [] for arm in fleets}
    firsts: dict[str, list[float]] = {arm: [] for arm in fleets}
    for number in range(size.bursts + 1):
        for arm in sorted(fleets, reverse=bool(number % 2)):
            _, engines = fleets[arm]
            speed = burst(engines, size)
            times = [first_token(engines[0], fresh(512)) for _ in range(12)]
            if number:
                speeds[arm].append(round(speed, 1))
                firsts[arm].append(middle(times))
    for arm in fleets:
        book.put("hot", arm, {"tokens_s": middle(speeds[arm]), "first_ms": middle(firsts[arm]), "speeds": speeds[arm],
                              "firsts": firsts[arm]})  # fmt: skip
    if len(fleets) == len(ARMS):
        ratio = {
            "tokens_s": round(statistics.median(b / a for a, b in zip(speeds["off"], speeds["on"], strict=True)), 3),
            "first_ms": round(statistics.median(b / a for a, b in zip(firsts["off"], firsts["on"], strict=True)), 3),
        }
        book.put("hot", "ratio", ratio)


class Running:
    """So many long requests on the replicas; four of them are streamed, and tell when their tokens came."""

    def __init__(self, engines: Sequence[Engine], count: int, story: int) -> None:
        self._engines, self._count, self._story = engines, count, story
        self._stop = threading.Event()
        self.came: list[list[float]] = [[] for _ in range(min(4, count))]
        self.failed = 0
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(count)]

    def __enter__(self) -> Running:
        for thread in self._threads:
            thread.start()
        ends = time.monotonic() + 60
        while time.monotonic() < ends and not all(len(times) > 5 for times in self.came):
            time.sleep(0.05)
        time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _client(self, number: int) -> None:
        engine = self._engines[number % len(self._engines)]
        body = {
            "model": host_module.MODEL,
            "max_tokens": self._story,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.Client(verify=False, trust_env=False, timeout=120) as http:
            while not self._stop.is_set():
                try:
                    with http.stream(
                        "POST", f"{engine.url}/v1/completions", json={**body, "prompt": fresh(128)}
                    ) as answer:
                        answer.raise_for_status()
                        told = number < len(self.came)
                        # Who is not listened to reads now and then: 60 streams would take the measuring process whole.
                        for line in answer.iter_lines() if told else self._slowly(answer):
                            if told and line.startswith("data: {"):
                                self.came[number].append(time.monotonic())
                            if self._stop.is_set():
                                return
                except httpx.HTTPError:
                    self.failed += 1
                    time.sleep(0.1)

    def _slowly(self, answer: httpx.Response) -> Any:
        for chunk in answer.iter_raw(65536):
            yield chunk
            time.sleep(0.2)

    def gap(self, began: float, ended: float) -> float:
        """Milliseconds: the longest that one streaming client got no token, as far as it overlaps the stretch."""
        longest = 0.0
        for times in self.came:
            before = max((t for t in times if t < began), default=began)
            after = min((t for t in times if t > ended), default=ended)
            points = [before, *(t for t in times if began <= t <= ended), after]
            longest = max(longest, *(b - a for a, b in itertools.pairwise(points)))
        return round(longest * 1000, 1)


def measured(
    engines: Sequence[Engine], count: int, size: Size, change: Callable[[], dict[str, Any]], rounds: int
) -> dict[str, Any]:
    """``change`` so many times with so many requests running."""
    with Running(engines, count, size.story) as running:
        began = time.monotonic()
        time.sleep(1.0)
        quiet = running.gap(began, time.monotonic())
        walls, gaps, more = [], [], []
        for _ in range(rounds):
            began = time.monotonic()
            more.append(change())
            ended = time.monotonic()
            time.sleep(0.7)
            walls.append((ended - began) * 1000)
            gaps.append(running.gap(began, ended))
        failed = running.failed
    keys = sorted({key for each in more for key in each if isinstance(each[key], int | float)})
    return {
        "wall_ms": middle(walls),
        "gap_ms": middle(gaps),
        "quiet_gap_ms": quiet,
        **{key: middle([float(each[key]) for each in more]) for key in keys},
        "failed": failed,
        "dead": {engine.name: why for engine in engines if (why := engine.dead())},
        "walls": [round(each, 1) for each in walls],
        "gaps": gaps,
    }


def pause_on(book: Book, driver: drive.Driver, engines: Sequence[Engine], size: Size) -> None:
    """Barrier (idle: Wait; else Keep) and Fence by the planner."""

    def change(**spec: object) -> dict[str, Any]:
        began = time.monotonic()
        status = driver.change(version=f"p-{NUMBERS.next()}", weights="Unchecked", onReplicaFailure="Isolate", **spec)
        lasted = (time.monotonic() - began) * 1000
        pause = status["lastUpdate"].get("pauseSeconds")
        return {"change_ms": lasted, "pause_ms": (pause or 0.0) * 1000}

    for count in size.running:
        barrier = {"strategy": "Barrier", "runningRequests": "Keep" if count else "Wait"}
        fence = {"strategy": "Fence", "runningRequests": "Wait"}
        for name, spec in (("Barrier", barrier), ("Fence", fence)):
            work = lambda s=spec, n=count: measured(engines, n, size, lambda: change(**s), size.pauses)  # noqa: E731
            book.attempt(f"pause {name} {count}", "on", work)
            book.put(f"steps {name} {count}", "on", driver.steps.lines[-24:])


def pause_off(book: Book, engines: Sequence[Engine], size: Size) -> None:
    """What trainers do: pause (keep), reset with the store, resume, each on both replicas at once."""

    calls: tuple[tuple[str, dict[str, object]], ...] = (
        ("/pause", {"mode": "keep"}),
        ("/reset_prefix_cache", {"reset_external": True}),
        ("/resume", {}),
    )

    def change() -> dict[str, Any]:
        said: dict[str, float] = {}
        for path, query in calls:
            began = time.monotonic()
            both(engines, lambda engine, p=path, q=query: engine.command(p, timeout=20, **q).raise_for_status())
            said[path.strip("/") + "_ms"] = (time.monotonic() - began) * 1000
        return {**said, "pause_ms": sum(said.values())}

    for count in size.running:
        book.attempt(f"pause fan-out {count}", "off", lambda n=count: measured(engines, n, size, change, size.pauses))
        if any(engine.dead() for engine in engines):
            book.put(f"pause fan-out {count} after", "off", {engine.name: engine.dead() for engine in engines})
            return


def run_cost(host: Host, book: Book, models: dict[str, Path], arms: Sequence[str], size: Size) -> None:
    """Two large replicas an arm, all up at once, measured in turn."""
    if host.cuda:
        arguments = (
            *("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "36864", "--block-size", "64"),
            *("--kv-cache-memory-bytes", str(6 << 30)),
        )
        model, segment, buffer = models["large"], "8GB", "2GB"
    else:
        arguments, model, segment, buffer = (*TINY,), models["a"], "256MB", "64MB"
    fleets = {}
    for arm in arms:
        master = host.master(arm, wiper=arm == "on", segment=segment, buffer=buffer)
        engines = [
            host.engine(f"cost-{arm}-{number}", model, arguments, store=arm, patched=arm == "on") for number in (1, 2)
        ]
        fleets[arm] = master, engines
    waited = host.up([engine for _, engines in fleets.values() for engine in engines])
    book.put("started", "both", {"engines": len(host.engines), "seconds": round(waited, 1)})
    driver = None
    try:
        if "on" in fleets:
            master, engines = fleets["on"]
            driver = drive.Driver([engine.admin for engine in engines], master.wiper, NAMESPACE, kit.TOKEN).__enter__()
            status = driver.change(version="first", weights="Unchecked", onReplicaFailure="Isolate")
            book.put("admit", "on", {"update": status["lastUpdate"], "steps": driver.steps.lines})
        prefill_rows(book, fleets, size)
        try:
            hot_rows(book, fleets, size)
        except httpx.HTTPError as error:
            book.put("hot", "error", {"error": f"{type(error).__name__}: {error}"})
        if driver is not None:
            pause_on(book, driver, fleets["on"][1], size)
        if "off" in fleets:
            pause_off(book, fleets["off"][1], size)
    finally:
        if driver is not None:
            driver.__exit__()


# -- two cards ---------------------------------------------------------------------------------------------------------


def run_ranks(host: Host, book: Book, models: dict[str, Path], arms: Sequence[str], size: Size) -> None:
    """One replica of two tensor-parallel ranks, and a reset while the second rank's saves are held back."""
    arguments = (*TINY, "--tensor-parallel-size", "2")
    arguments += ("--kv-cache-memory-bytes", str(1 << 29)) if host.cuda else ()
    fleets = {}
    for arm in arms:
        master = host.master(f"ranks-{arm}", wiper=arm == "on")
        late = host.late_file(f"ranks-{arm}")
        fleets[arm] = (
            master,
            late,
            host.engine(f"ranks-{arm}", models["a"], arguments, store=f"ranks-{arm}", patched=arm == "on", late=late),
        )
    waited = host.up([engine for _, _, engine in fleets.values()])
    book.put("started", "both", {"engines": len(host.engines), "seconds": round(waited, 1)})

    def held(engine: Engine, master: Master, late: Path) -> int:
        late.write_text(json.dumps({"rank": 1, "hold": "save"}))
        engine.tokens("orphans " + SENTENCE * 20, 4)
        host_module.wait_for("keys of the first rank", lambda: master.keys(), 60)
        return master.settled()

    def off(engine: Engine, master: Master, late: Path) -> dict[str, Any]:
        engine.tokens("warm " + SENTENCE * 2, 4)
        early = held(engine, master, late)
        answer = reset_once(engine)
        after = len(master.keys())
        late.unlink()
        time.sleep(3)
        return {"keys_before": early, "answer": answer, "keys_after_reset": after, "keys_at_last": master.settled()}

    def on(engine: Engine, master: Master, late: Path) -> dict[str, Any]:
        with drive.Driver([engine.admin], master.wiper, NAMESPACE, kit.TOKEN) as driver:
            driver.change(version="a", **BARRIER)
            engine.tokens("warm " + SENTENCE * 2, 4)
            # The first change of a fleet has its keys wiped; one that is salted removes them afterwards.
            early = held(engine, master, late)
            route = reset_once(engine)
            with ThreadPoolExecutor(1) as pool:
                spec = {**BARRIER, "onStoreFailure": "Hold", "version": "b", "weights": "Unchecked"}
                flight = pool.submit(driver.change, 60, **spec)
                time.sleep(3)
                waiting, status = not flight.done(), engine.status()
                late.unlink()
                done = flight.result(90)
            driver.settle()
            time.sleep(3)
            return {
                "keys_before": early,
                "answer": route,
                "waited_for_rank": waiting,
                "drained_meanwhile": status.get("drained"),
                "keys_at_last": master.settled(),
                "ranks": status.get("ranks"),
                "update": done["lastUpdate"],
                "steps": driver.steps.lines,
            }

    for arm, (master, late, engine) in fleets.items():
        work = on if arm == "on" else off
        book.attempt("ranks", arm, lambda w=work, e=engine, m=master, f=late: w(e, m, f))


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("right", "cost", "ranks"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arm", choices=ARMS, action="append")
    parser.add_argument("--part", choices=("tiny", "hybrid"), action="append")
    parser.add_argument("--models", type=Path, help="folder of the models, made if it is not there")
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder")
    options = parser.parse_args(arguments)
    cuda, arms = options.device == "cuda", options.arm or list(ARMS)
    size = Size() if cuda else SMALL
    options.out.mkdir(parents=True, exist_ok=True)
    book = Book(options.out / f"{host_module.release()}-{options.what}.json")
    with tempfile.TemporaryDirectory() as scratch:
        models = make_models(options.models or Path(scratch) / "models")
        book.put("about", "both", about(cuda))
        with Host(options.keep or Path(scratch) / "host", cuda) as host:
            try:
                if options.what == "right":
                    run_right(host, book, models, arms, options.part or ("tiny", "hybrid"), size)
                elif options.what == "cost":
                    run_cost(host, book, models, arms, size)
                else:
                    run_ranks(host, book, models, arms, size)
            except Late as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
