"""Which paths of the inference port are for whom. An allow-list: what vLLM may add stays shut until it is listed."""

from __future__ import annotations

import enum


class Kind(enum.Enum):
    """What the inference port does with a path."""

    READY = "ready"
    METRICS = "metrics"
    PUBLIC = "public"
    INFERENCE = "inference"
    HIDDEN = "hidden"


READY_PATH = "/moontide/v1/ready"
METRICS_PATH = "/moontide/v1/metrics"

_PUBLIC = frozenset({"/health", "/ping", "/version", "/metrics", "/metrics/"})

_INFERENCE = frozenset(
    {
        "/v1/models",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/v1/systemone",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v2/embed",
        "/v2/rerank",
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/inference/v1/generate",
        "/invocations",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
        "/generative_scoring",
    }
)


def classify(path: str, root_path: str = "") -> Kind:
    """Kind of a decoded ASGI path.

    The match is exact and no form is normalised: the router behind matches the same decoded string, so a variant that
    is not listed here (double slash, other case, trailing slash, dot segments) is refused before it can match a route.
    """
    if root_path and path.startswith(root_path) and (len(path) == len(root_path) or path[len(root_path)] == "/"):
        path = path[len(root_path) :]
    if path == READY_PATH:
        return Kind.READY
    if path == METRICS_PATH:
        return Kind.METRICS
    if path in _PUBLIC:
        return Kind.PUBLIC
    if path in _INFERENCE:
        return Kind.INFERENCE
    return Kind.HIDDEN
