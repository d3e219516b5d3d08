"""Make a tiny random Llama with a byte-level tokenizer of its own: ``python make.py OUTDIR SEED``.

``--hybrid`` makes a Gemma 3 instead, with a window of 128 tokens in two of three layers: three groups of KV blocks.

Two seeds stand for two policies: same shape and tokenizer, different weights, so that an answer computed with the KV of
the wrong one is a different answer. Runs in an engine environment (torch and transformers), offline, in seconds.

Serve them with ``--dtype float32`` where answers are compared token for token: in half precision batching alone changes
one greedy answer in twenty, in single precision none of hundreds. Replicas that share a store must serve them from
folders of the same name: vLLM puts the last part of the model's path into every key.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
HIDDEN = 256
LAYERS = 4
MAX_POSITIONS = 4096
WINDOW = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GAINS = {"q_proj": 4.0, "k_proj": 4.0, "v_proj": 1.2, "o_proj": 1.2, "mlp": 0.7}
SPECIAL = ("<s>", "</s>", "<pad>")
CORPUS = (
    "hello world, this is a tiny model used to test a fleet of engines that share one cache",
    "the tide comes in and the tide goes out, and what was written on the sand is gone",
    "when the policy changes no replica may serve what it computed with the old one",
)


def make_tokenizer(out: Path) -> None:
    """Train and save a byte-level tokenizer; the same for every seed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(CORPUS) * 4, trainer)
    bos, eos, pad = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(out)


def scale(name: str, inputs: int) -> float:
    """Standard deviation of a weight matrix with so many inputs."""
    if "embed" in name:
        return 1.0
    for part, gain in GAINS.items():
        if part in name:
            return gain / math.sqrt(inputs)
    return 1.0 / math.sqrt(inputs)


def random_llama() -> Any:
    """Full attention in every layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, tie_word_embeddings=False, **SHAPE))


def random_gemma() -> Any:
    """Two layers with a sliding window to each one with full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=2 * len(kinds),
        layer_types=kinds * 2,
        sliding_window=WINDOW,
        head_dim=HIDDEN // 4,
        **SHAPE,
    )
    return Gemma3ForCausalLM(config)


def make_model(out: Path, seed: int, hybrid: bool = False) -> None:
    """Save random weights.

    The usual initial scale makes greedy decoding repeat one token whatever the prompt. With these gains every answer
    depends on the whole prompt, which is what makes a stale block visible.
    """
    import torch

    torch.manual_seed(seed)
    model = random_gemma() if hybrid else random_llama()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, scale(name, weight.shape[1]))
    model.to(torch.bfloat16).save_pretrained(out)
    # Written 0600 by default; engines in pods run as another user.
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("outdir", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--hybrid", action="store_true", help="sliding windows in two of three layers")
    parsed = parser.parse_args(arguments)
    parsed.outdir.mkdir(parents=True, exist_ok=True)
    make_tokenizer(parsed.outdir)
    make_model(parsed.outdir, parsed.seed, parsed.hybrid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
