"""A receiver of OpenTelemetry's protocol over HTTP, as a collector has it: it decodes what is exported to it."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def plain(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict."""
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@dataclass
class Received:
    """What was received.

    Attributes
    ----------
    resources
        The attributes of each export's resource.
    status
        Status with which exports are answered.
    """

    url: str
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(plain(of_resource.resource.attributes))
            for scope in of_resource.scope_spans:
                self.spans.extend(scope.spans)


@contextlib.contextmanager
def otlp_receiver() -> Iterator[Received]:
    """Run a receiver in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.headers.append({name.lower(): value for name, value in self.headers.items()})
            if received.status == 200:
                received.take(self.path, body)
            self.send_response(received.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Received(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
