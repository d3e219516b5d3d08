"""Arguments of ``vllm serve`` that Moontide sets itself, and the rules that refuse them in ``engine.args``.

vLLM's parser takes more than a flag's full name: ``_`` for ``-``, ``--flag=value``, ``--json-flag.key value``, any
prefix that only one flag has (``--kv-transfer``), and short forms with the value behind them (``-n2``). So a name in
``engine.args`` is refused if a managed flag begins with it.
"""

from __future__ import annotations

from typing import Any

from moontide.api.v1alpha1.common import rule

MODEL_FLAGS = ("--model", "--served-model-name", "--revision", "--hf-token")
STORE_FLAGS = ("--kv-transfer-config",)
DRAIN_FLAGS = ("--shutdown-timeout",)
SERVER_FLAGS = (
    "--host",
    "--port",
    "--uds",
    "--grpc-port",
    "--root-path",
    "--api-key",
    "--middleware",
    "--config",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--ssl-cert-reqs",
    "--ssl-ciphers",
)
"""The gate, its probes and the Service depend on them; ``--config`` names a file with any of them."""
NODE_FLAGS = (
    "--headless",
    "--api-server-count",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--data-parallel-rank",
    "--data-parallel-start-rank",
    "--data-parallel-size-local",
    "--data-parallel-address",
    "--data-parallel-rpc-port",
    "--data-parallel-hybrid-lb",
    "--data-parallel-external-lb",
    "--data-parallel-multi-port-external-lb",
    "--data-parallel-supervisor-port",
)
"""They make of one engine a part of one that spans pods, or several servers behind one gate."""
SIZE_FLAGS = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
"""Refused only beside ``spec.parallelism``, which sets them."""

MANAGED_FLAGS = (*MODEL_FLAGS, *STORE_FLAGS, *DRAIN_FLAGS, *SERVER_FLAGS, *NODE_FLAGS)

_NODE_SHORT = "^-(n|r|as|dp[a-z])"
_SIZE_SHORT = "^-(t|pp|p$|p=|dp)"
_NAME = "a.split('=', 2)[0].split('.', 2)[0].replace('_', '-')"


def _held(arguments: str, flags: tuple[str, ...], short: str = "", but: tuple[str, ...] = ()) -> str:
    """CEL that is true if the list ``arguments`` holds one of ``flags`` in any form that vLLM's parser takes.

    ``but``: names that are flags of their own, although one of ``flags`` begins with them.
    """
    names = "[" + ", ".join(f"'{flag}'" for flag in flags) + "]"
    own = "".join(f" && n != '{name}'" for name in but)
    long = (
        f"{arguments}.filter(a, a.startsWith('--')).map(a, {_NAME}).exists(n, {names}.exists(f, f.startsWith(n)){own})"
    )
    return f"({long} || {arguments}.exists(a, a.matches('{short}')))" if short else long


def _refusal(flags: tuple[str, ...], instead: str, short: str = "", but: tuple[str, ...] = ()) -> dict[str, Any]:
    text = f"engine.args holds a flag that Moontide sets itself ({', '.join(flags)}, or short for it); remove it"
    return rule(f"!{_held('self.args', flags, short, but)}", f"{text}{instead}")


def rules() -> tuple[dict[str, Any], ...]:
    """Of ``spec.engine``."""
    served = ": the gate serves plain HTTP on port 8000, and TLS and API keys belong in front of the Service"
    return (
        _refusal(MODEL_FLAGS, ", and write spec.model.source, servedName, revision or tokenSecretRef"),
        _refusal(STORE_FLAGS, ", and write spec.kvCache"),
        _refusal(DRAIN_FLAGS, ", and write spec.rollout.drainSeconds"),
        _refusal(SERVER_FLAGS, served),
        _refusal(NODE_FLAGS, ", and write spec.parallelism", _NODE_SHORT, but=("--data-parallel-size",)),
    )


def sizes_rule() -> dict[str, Any]:
    """Of the spec: with ``parallelism`` its sizes are written there alone."""
    return rule(
        f"!has(self.parallelism) || !{_held('self.engine.args', SIZE_FLAGS, _SIZE_SHORT)}",
        f"engine.args holds {', '.join(SIZE_FLAGS)} or short for it beside spec.parallelism, which sets them; remove "
        "it, and write spec.parallelism.tensor, pipeline or data",
    )
