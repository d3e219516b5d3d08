"""Runs in a pod of the engine's image: answers of engines with no cache and no store, one prompt at a time.

Reads /cold/request.json {"models": {name: folder}, "prompts": [...], "tokens": n, "settings": {...}} and prints a line
``COLD {"model": ..., "prompt": ..., "tokens": [...], "logprobs": [...]}`` for each model and prompt.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    """One fresh engine a model."""
    request = json.loads(Path("/cold/request.json").read_text())
    count = int(request["tokens"])
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=1)
    for model, folder in request["models"].items():
        began = time.monotonic()
        engine = LLM(model=folder, enable_prefix_caching=False, disable_log_stats=True, **request["settings"])
        print(f"COLD-NOTE {model}: engine up in {time.monotonic() - began:.1f} s", flush=True)
        for number, prompt in enumerate(request["prompts"]):
            output = engine.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
            tokens = list(output.token_ids)
            logprobs = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
            line = {"model": model, "prompt": number, "tokens": tokens, "logprobs": logprobs}
            print("COLD " + json.dumps(line), flush=True)
        del engine
    print("COLD-NOTE done", flush=True)


if __name__ == "__main__":
    main()
