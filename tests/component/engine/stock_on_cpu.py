"""A vLLM plugin for the tests: what stock vLLM needs to run with the store on the CPU, and nothing of ours besides."""

from __future__ import annotations


def register() -> None:
    """Entry point of the plugin."""
    from moontide_engine import cpu_build

    cpu_build.prepare()
