"""What users add in ``engine.args``: LoRA adapters and speculative decoding, with the gate, the epoch and the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import enginekit as kit
import httpx
import pytest
import torch
from safetensors.torch import save_file

MASTER_PORT, MASTER_METRICS = 18154, 18155
HIDDEN, LAYERS, RANK = 256, 4, 8
PROMPT = "the tide comes in and the tide goes out, and what was written on the sand is gone " * 12


def adapter(folder: Path) -> Path:
    """A LoRA adapter of the tiny model that changes its answers."""
    folder.mkdir()
    made = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=made)
        weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=made)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[kit.Fleet]:
    """One engine that has both, and a store of its own."""
    folder = tmp_path_factory.mktemp("arguments")
    kit.store_config(folder, MASTER_PORT)
    master = kit.Master(folder, MASTER_PORT, MASTER_METRICS)
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    arguments = [
        *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"tide={adapter(folder / 'tide')}"),
        *("--speculative-config", json.dumps(speculation)),
    ]
    master.start()
    command = [*kit.engine_command(models["a"], 8), *arguments]
    environment = {**kit.engine_environment(folder, 8), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    process = kit.spawn(command, environment, folder / "engine.log")
    with ThreadPoolExecutor(4) as pool:
        try:
            replica = kit.Replica(8, process)
            kit.wait_for("engine", lambda: kit.get(f"{replica.inference}/health"), kit.START_SECONDS, process)
            replica.boot_id = replica.status()["bootId"]
            yield kit.Fleet(folder, models, master, (replica,), pool)
        finally:
            process.end()
            if master.process is not None:
                master.process.end(10)


def ask(replica: kit.Replica, model: str) -> tuple[list[int], dict[str, float]]:
    """The greedy answer of the base model or an adapter, and the hits that it had."""
    before = replica.counters()
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    url = f"{replica.inference}/v1/completions"
    answer = httpx.post(url, json={**body, "return_token_ids": True}, timeout=120, verify=False)
    assert answer.status_code == 200, answer.text
    after = replica.counters()
    return answer.json()["choices"][0]["token_ids"], {key: after[key] - before[key] for key in before}


def test_adapters_and_speculation_keep_to_gate_epoch_and_store(fleet: kit.Fleet) -> None:
    (replica,) = fleet.replicas
    url = f"{replica.inference}/v1/completions"
    assert httpx.post(url, json={}, timeout=kit.PATIENCE, verify=False).status_code == 503
    status = replica.status()
    assert status["fence"]["supported"] is True, status["fence"]
    fleet.bump(salted=True)
    base, hits = ask(replica, "tiny")
    assert hits == {"local": 0, "external": 0}
    kit.wait_for("puts", lambda: fleet.master.keys() and fleet.settled(), 60)
    # The base model's blocks are not the adapter's.
    tide, hits = ask(replica, "tide")
    assert hits == {"local": 0, "external": 0}
    assert tide != base
    kit.wait_for("puts to end", fleet.settled, 60)

    # Each finds its own again, from the store too, and the answers are the same ones.
    for model, wanted in (("tiny", base), ("tide", tide)):
        answer, hits = ask(replica, model)
        assert (answer, hits["local"] > 0) == (wanted, True)
    assert replica.stock_reset()["success"] is True
    for model, wanted in (("tiny", base), ("tide", tide)):
        answer, hits = ask(replica, model)
        assert (answer, hits["external"] > 0) == (wanted, True)

    # Neither finds anything of an older epoch, although nothing was wiped.
    before = len(fleet.master.keys())
    fleet.bump(wipe=False, salted=True)
    assert len(fleet.master.keys()) >= before
    for model, wanted in (("tiny", base), ("tide", tide)):
        answer, hits = ask(replica, model)
        assert (answer, hits) == (wanted, {"local": 0, "external": 0})
    kit.wait_for("puts to end", fleet.settled, 60)

    # A wipe takes the adapter's keys too.
    fleet.bump()
    assert fleet.master.keys() == []

    text = httpx.get(f"{replica.inference}/metrics", timeout=kit.PATIENCE, verify=False).text
    drafted = [line for line in text.splitlines() if line.startswith("vllm:spec_decode_num_draft_tokens_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in drafted) > 0


def test_adapters_are_loaded_with_the_admin_token_only(fleet: kit.Fleet) -> None:
    (replica,) = fleet.replicas
    fleet.bump(salted=True)
    route, body = "/v1/load_lora_adapter", {"lora_name": "again", "lora_path": str(fleet.folder / "tide")}
    answer = httpx.post(replica.inference + route, json=body, timeout=kit.PATIENCE, verify=False)
    assert answer.status_code in (401, 403, 404), answer.text
    assert replica.post(route, body, token=None).status_code == 401
    assert replica.post(route, body).status_code == 200
    again, hits = ask(replica, "again")
    assert hits == {"local": 0, "external": 0}
    assert again == ask(replica, "tide")[0]
