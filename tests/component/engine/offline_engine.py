"""vLLM's offline ``LLM`` for a test: one JSON command a line on stdin, one answer a line on stdout, after ``@``."""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Arguments: the model's folder, the transfer configuration."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=2048,
        block_size=32,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=json.loads(sys.argv[2]),
    )
    engine = llm.llm_engine

    def external() -> int:
        return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")

    def sampling(tokens: int) -> Any:
        return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    def finish(least: int = 0) -> None:
        while engine.has_unfinished_requests() or least > 0:
            engine.step()
            least -= 1

    def complete(prompt: str) -> dict[str, Any]:
        before = external()
        (output,) = llm.generate([prompt], sampling(12), use_tqdm=False)
        return {"tokens": list(output.outputs[0].token_ids), "external": external() - before}

    def reset(running: bool, connector: bool) -> dict[str, Any]:
        return {"answer": llm.reset_prefix_cache(running, connector)}

    def start(prompt: str) -> dict[str, Any]:
        engine.add_request("held", prompt, sampling(400))
        for _ in range(20):
            engine.step()
        return {"unfinished": engine.get_num_unfinished_requests()}

    def end() -> dict[str, Any]:
        finish()
        return {"unfinished": engine.get_num_unfinished_requests()}

    commands = {"complete": complete, "reset": reset, "start": start, "end": end}
    print("@{}", flush=True)
    for line in sys.stdin:
        body = json.loads(line)
        answer = commands[body.pop("do")](**body)
        print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
