"""An external metrics API that says what a file says: ``python -m tests.integration.metrics_double FOLDER``.

A double of what Prometheus' adapter or KEDA serve. The HorizontalPodAutoscaler's controller, and the aggregation in
front of this, are the real ones. ``FOLDER`` has ``tls.crt`` and ``tls.key``; the metric ``queue`` has the value in
``FOLDER/queue``. Prints its port.
"""

from __future__ import annotations

import datetime as dt
import json
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GROUP_VERSION = "external.metrics.k8s.io/v1beta1"


class Handler(BaseHTTPRequestHandler):
    """Discovery, and one metric of any namespace."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        body: dict[str, Any]
        if path == f"apis/{GROUP_VERSION}":
            queue = {"name": "queue", "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList"}
            resources = [{**queue, "verbs": ["get"]}]
            body = {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": GROUP_VERSION,
                "resources": resources,
            }
        elif path.startswith(f"apis/{GROUP_VERSION}/namespaces/") and path.endswith("/queue"):
            value = (self.folder / "queue").read_text().strip()
            now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            item = {"metricName": "queue", "metricLabels": {}, "timestamp": now, "value": value}
            body = {"kind": "ExternalMetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": [item]}
        else:
            self._answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404})
            return
        self._answer(200, body)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """What is asked is no news."""


def main() -> None:
    """Serve until killed."""
    Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Handler.folder / "tls.crt", Handler.folder / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
