"""Moontide's engine plugin: gate, admin plane and truthful cache resets for stock vLLM."""

from __future__ import annotations

__version__ = "0.1.0"
