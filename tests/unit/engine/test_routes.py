"""Which path is for whom, tricks included."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide_engine.routes import Kind, classify

ADMIN = (
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/pause",
    "/resume",
    "/is_paused",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/update_weights",
    "/update_weight_version",
    "/weight_info",
    "/server_info",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/scale_elastic_ep",
    "/start_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/docs",
    "/openapi.json",
    "/load",
    "/moontide/v1/status",
    "/moontide/v1/admit",
)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/invocations"]
)
def test_inference(path: str) -> None:
    assert classify(path) is Kind.INFERENCE


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics"])
def test_public(path: str) -> None:
    assert classify(path) is Kind.PUBLIC


def test_ready() -> None:
    assert classify("/moontide/v1/ready") is Kind.READY
    assert classify("/moontide/v1/metrics") is Kind.METRICS


@pytest.mark.parametrize("path", ADMIN)
def test_admin_routes_are_hidden(path: str) -> None:
    assert classify(path) is Kind.HIDDEN


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/moontide/v1/ready", "/metrics"])
@pytest.mark.parametrize(
    "trick",
    [
        lambda p: "/" + p,
        lambda p: p + "//",
        lambda p: p.upper(),
        lambda p: "/v1/.." + p,
        lambda p: "/." + p,
        lambda p: p + "/..",
        lambda p: p + "\x00",
        lambda p: p + ";x",
        lambda p: p + "%2f",
        lambda p: p.replace("/", "%2f"),
        lambda p: p.replace("/", "\\"),
        lambda p: " " + p,
    ],
)
def test_variants_of_open_paths_are_not_open(path: str, trick: object) -> None:
    assert callable(trick)
    assert classify(trick(path)) is Kind.HIDDEN


@pytest.mark.parametrize("path", ADMIN)
def test_open_prefix_does_not_open_what_follows(path: str) -> None:
    for prefix in ("/v1/completions", "/health", "/metrics", "/metrics/", "/v1"):
        assert classify(prefix + path) is Kind.HIDDEN


def test_root_path_is_taken_off_as_the_router_does() -> None:
    assert classify("/api/v1/completions", "/api") is Kind.INFERENCE
    assert classify("/api/pause", "/api") is Kind.HIDDEN
    assert classify("/apiv1/completions", "/api") is Kind.HIDDEN
    # A root that looks like an open path opens nothing.
    assert classify("/v1/completions/pause", "/v1/completions") is Kind.HIDDEN


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_nothing_but_listed_paths_is_open(tail: str) -> None:
    if tail.strip("/"):
        assert classify("/pause/" + tail) is Kind.HIDDEN
        assert classify("/moontide/v1/" + tail) in (Kind.HIDDEN, Kind.READY, Kind.METRICS)
