"""What the whole plugin costs an engine that computes: requests a second with it over without it, in turn in one run.

    python3 -m bench.plugin_share                     # vLLM 0.32.0 on the CPU, about 6 minutes
    .venv/bin/python -m bench.plugin_share --against REVISION      # the plugin of that commit, too, in the same run

Real vLLM with the tiny model, real Mooncake master, store client, saves, lookups and loads; offline, so that there is
no HTTP to hide behind. What vLLM's loop does between the steps of an engine that serves is done here, too: without it a
load waits for the interpreter, which is busy with steps of nothing, and so much the longer the more threads it takes.

All arms are processes that live at the same time, with keys of their own, and take turns, a round each; whose turn is
first changes. A round is 2 x 48 requests that share prefixes, 48 tokens each: computed and saved, then once more after
the local cache was emptied, so that they load from the store. ``bench.plugin_cost`` has the scheduler's part alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REQUESTS, TOKENS, HEADS, VOCABULARY = 48, 48, 6, 500
LOOKUP_PORT = 18190
EMPTY_STEP_SECONDS = 0.001
"""What vLLM's loop of an engine process leaves to other threads; an engine in the caller's process does not do so."""
Row = dict[str, Any]


# -- one arm, in the engine's interpreter ------------------------------------------------------------------------------


def prompts(seed: int) -> list[list[int]]:
    """Token ids of the requests of a round."""
    source = random.Random(seed)

    def text(length: int) -> list[int]:
        return [source.randrange(3, VOCABULARY) for _ in range(length)]

    heads = [text(source.randrange(64, 400)) for _ in range(HEADS)]
    return [source.choice(heads) + text(source.randrange(16, 160)) for _ in range(REQUESTS)]


def be_arm(model: str, arm: str, patched: bool, port: int, left_out: list[str]) -> None:
    """Answer rounds until the input ends. ``left_out`` are patches that a patched arm does without."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if left_out:
        from moontide_engine import patches, plugin

        plugin.PATCHES = patches.Registry(patch for patch in plugin.PATCHES.patches if patch.name not in left_out)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=2048,
        block_size=32,
        max_num_seqs=32,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lookup_rpc_port": port, "cache_prefix": f"share-{arm}"},
        },
    )
    core: Any = llm.llm_engine.engine_core.engine_core
    if patched:
        core.moontide_switch("policy/1")
    scheduler = core.scheduler
    spent = {"steps": 0, "schedule": 0.0}
    timing = False

    def watched(name: str) -> None:
        function = getattr(scheduler, name)

        def watching(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                if timing:
                    spent["schedule"] += time.perf_counter() - began
                    spent["steps"] += name == "schedule"

        setattr(scheduler, name, watching)

    step = core.step_fn

    def served() -> Any:
        """The step of an engine that serves: one that computed nothing is followed by a pause for other threads."""
        outputs, computed = step()
        if not computed and scheduler.has_requests():
            time.sleep(EMPTY_STEP_SECONDS)
        return outputs, computed

    watched("schedule")
    watched("update_from_output")
    core.step_fn = served
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    print(json.dumps({"patched": patched}), file=out, flush=True)
    for line in sys.stdin:
        texts = [{"prompt_token_ids": tokens} for tokens in prompts(json.loads(line))]
        spent.update(steps=0, schedule=0.0)
        wall, cpu, tokens, cached = 0.0, 0.0, 0, 0
        for _ in range(2):
            timing, began, used = True, time.perf_counter(), time.process_time()
            answers = llm.generate(texts, sampling, use_tqdm=False)
            wall += time.perf_counter() - began
            cpu += time.process_time() - used
            timing = False
            tokens += sum(len(answer.outputs[0].token_ids) for answer in answers)
            cached += sum(answer.num_cached_tokens or 0 for answer in answers)
            while scheduler.has_requests():
                llm.llm_engine.step()
            for _ in range(200):
                if llm.reset_prefix_cache():
                    break
                time.sleep(0.01)
        print(json.dumps({"wall": wall, "cpu": cpu, "tokens": tokens, "cached": cached, **spent}), file=out, flush=True)


# -- both --------------------------------------------------------------------------------------------------------------


class Arm:
    """A process with one of them."""

    def __init__(self, python: Path, name: str, tree: Path | None, folder: Path, left_out: list[str]) -> None:
        """``tree``: the sources whose plugin it has; None: none."""
        scratch = folder / name
        scratch.mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MOONTIDE_", "VLLM_"))}
        environment |= {
            "PYTHONPATH": str((tree or ROOT) / "engine_patches"),
            "PYTHONHASHSEED": "0",
            "TMPDIR": str(scratch),
            "MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if tree is not None:
            environment["MOONTIDE_ENABLED"] = "1"
        port = str(LOOKUP_PORT + len(list(folder.glob("*.log"))))
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(str(python), str(Path(__file__).resolve()), "--arm", str(folder / "tiny")),
                    *(name, "patched" if tree is not None else "stock", port, *left_out),
                ],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=python.parent,
            )

    def read(self) -> Row:
        """Its next answer. Raises RuntimeError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._log.read_text(errors="replace")[-3000:])
        found: Row = json.loads(line)
        return found

    def round(self, seed: int) -> Row:
        """One round."""
        assert self._process.stdin is not None
        print(json.dumps(seed), file=self._process.stdin, flush=True)
        return self.read()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def master(python: Path, folder: Path) -> subprocess.Popen[bytes]:
    """A Mooncake master, and the arms' configuration of it."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as one:
            ports.append(one.getsockname()[1])
    store = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{ports[0]}",
        "global_segment_size": "512MB",
        "local_buffer_size": "64MB",
        "protocol": "tcp",
        "device_name": "",
    }
    (folder / "mooncake.json").write_text(json.dumps(store))
    command = [str(python.with_name("mooncake_master")), f"-rpc_port={ports[0]}", f"-metrics_port={ports[1]}"]
    with (folder / "master.log").open("wb") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", ports[0]), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return started
    started.kill()
    raise RuntimeError((folder / "master.log").read_text(errors="replace")[-2000:])


def take_turns(python: Path, trees: dict[str, Path | None], options: argparse.Namespace) -> list[dict[str, Row]]:
    """Rows of the rounds, by arm. ``trees``: the arms, and the sources whose plugin each has."""
    found: list[dict[str, Row]] = []
    for pair in range(options.processes):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            maker = ROOT / "hack" / "tinymodels" / "make.py"
            subprocess.run([str(python), str(maker), str(folder / "tiny"), "1"], check=True, capture_output=True)
            store = master(python, folder)
            arms: dict[str, Arm] = {}
            try:
                for name, tree in trees.items():
                    arms[name] = Arm(python, name, tree, folder, options.without)
                for arm in arms.values():
                    arm.read()
                for number in range(-1, options.rounds):
                    turn = number % len(arms)
                    order = [*arms][turn:] + [*arms][:turn]
                    rows = {name: arms[name].round(1 + pair * (options.rounds + 1) + number) for name in order}
                    # The first round warms up.
                    if number >= 0:
                        found.append(rows)
            finally:
                for arm in arms.values():
                    arm.end()
                store.kill()
                store.wait()
    return found


def against_stock(found: list[dict[str, Row]], arm: str) -> Row:
    """Medians of an arm and of the one without the plugin, in milliseconds, and medians of the rounds' ratios."""
    made: Row = {}
    for part in ("wall", "cpu", "schedule"):
        each = [
            tuple(
                1000 * row[part] / (row["steps"] if part == "schedule" else 2 * REQUESTS)
                for row in (rows["off"], rows[arm])
            )
            for rows in found
        ]
        ratios = sorted(on / off for off, on in each)
        made[part] = {
            "off_ms": statistics.median(off for off, _ in each),
            "on_ms": statistics.median(on for _, on in each),
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        }
    for name in ("steps", "tokens", "cached"):
        made[name] = [sum(rows[which][name] for rows in found) for which in ("off", arm)]
    made["requests_per_second"] = [
        statistics.median(2 * REQUESTS / rows[which]["wall"] for rows in found) for which in ("off", arm)
    ]
    return made


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["--arm"]:
        _, _, model, arm, patched, port, *left_out = sys.argv
        be_arm(model, arm, patched == "patched", int(port), left_out)
        return 0
    from hack.setup.steps import engine_python

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="sets of processes, one after another (default 2)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each set (default 12)")
    parser.add_argument("--without", action="append", default=[], help="without this patch; may be repeated")
    parser.add_argument("--against", metavar="REVISION", help="the plugin of that commit, too")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "plugin-share.json")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        trees: dict[str, Path | None] = {"off": None, "on": ROOT}
        if options.against:
            from bench.fanout import trees as trees_of

            trees["before"] = stack.enter_context(trees_of(options.against))["before"]
        found = take_turns(engine_python(), trees, options)
    made: Row = {"rounds": len(found), "requests": 2 * REQUESTS, "without": options.without}
    made["arms"] = {name: against_stock(found, name) for name in trees if name != "off"}
    if options.against:
        made["before"] = options.against
    options.json.write_text(json.dumps(made, indent=1) + "\n")
    for name, arm in made["arms"].items():
        print(f"{'ms':34} {'off':>8} {name:>8} {'ratio':>7} (quartiles)")
        for part, label in (("wall", "a request"), ("cpu", "a request, CPU"), ("schedule", "a step's scheduling")):
            one = arm[part]
            print(f"{label:34} {one['off_ms']:8.3f} {one['on_ms']:8.3f} {one['ratio']:7.3f} ", end="")
            print(f"({one['quartiles'][0]:.3f} to {one['quartiles'][1]:.3f})")
        print(f"requests a second {arm['requests_per_second']}; steps {arm['steps']}; cached tokens {arm['cached']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
