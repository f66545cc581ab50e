"""A receiver of OpenTelemetry's protocol over HTTP, as a collector has it: it decodes what is exported to it."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.upstream import Wire, upstreams_in_thread


def plain(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict."""
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}


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

    url: str = ""
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
    """Run a receiver on an event loop of its own."""
    received = Received()

    async def take(wire: Wire) -> None:
        body, headers = wire.seen.body, {name.lower(): value for name, value in wire.seen.headers}
        received.headers.append(headers)
        if received.status == 200:
            received.take(wire.seen.target, gzip.decompress(body) if "content-encoding" in headers else body)
        await wire.json({}, received.status)

    with upstreams_in_thread(["receiver"], "", take) as (server,):
        received.url = server.url
        yield received
