"""What the gate tells Prometheus, at ``/moontide/v1/metrics`` of the inference port, beside vLLM's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moontide_engine.gate import Gate, State

if TYPE_CHECKING:
    from moontide_engine.middleware import GateMiddleware

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class _Reading(Collector):
    """One look at the gate and what is in front of it."""

    def __init__(self, gate: Gate, middleware: GateMiddleware) -> None:
        self._gate = gate
        self._middleware = middleware

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Called once a scrape."""
        gate, front = self._gate, self._middleware
        state, reason = gate.state, gate.reason
        states = GaugeMetricFamily(
            "moontide_engine_state", "1 for the gate's state; why it is closed.", labels=["state", "reason"]
        )
        for each in State:
            states.add_metric([each, reason if each is state else ""], float(each is state))
        yield states
        stamp = gate.stamp
        if stamp is not None:
            yield GaugeMetricFamily("moontide_engine_epoch", "Epoch of the last admission.", value=stamp.epoch)
        text = "Requests that passed the gate and have not ended."
        yield GaugeMetricFamily("moontide_engine_requests_in_flight", text, value=gate.in_flight)
        yield GaugeMetricFamily("moontide_engine_requests_held", "Requests that wait for a resume.", value=front.held)
        if gate.last_pause_seconds is not None:
            text = "How long the last pause took."
            yield GaugeMetricFamily("moontide_engine_last_pause_seconds", text, value=gate.last_pause_seconds)
        text = "Requests that were answered 503 because the gate was closed or too many waited."
        yield CounterMetricFamily("moontide_engine_requests_refused", text, value=front.refused)


def exposition(gate: Gate, middleware: GateMiddleware) -> bytes:
    """The page of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reading(gate, middleware))
    return generate_latest(registry)
