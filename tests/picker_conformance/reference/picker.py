"""The smallest picker that conforms: round robin over the endpoints that it is given.

python -m picker_conformance.reference.picker --port 9002 --endpoints 10.0.0.1:8000,10.0.0.2:8000 --model llama
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping

import grpc
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from .. import ext_proc_pb2 as ext_proc
from ..ext_proc_pb2 import CommonResponse
from ..ext_proc_pb2 import ProcessingRequest as Request
from ..ext_proc_pb2 import ProcessingResponse as Response

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = dict.fromkeys(("", "liveness", "readiness", SERVICE), SERVING)
"""State of the services of the picker, by name."""


class Picker:
    """Picks the endpoints in turn, each with all others behind it as fallbacks."""

    largest_piece = 64 * 1024

    def __init__(self, endpoints: list[str], model: str, max_body_bytes: int = 1 << 26, limited_key: str = "") -> None:
        self.endpoints = endpoints
        self.model = model
        self.max_body_bytes = max_body_bytes
        self.limited_key = limited_key
        self.turn = 0

    async def Process(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> AsyncIterator[Response]:
        """Answer the messages of one HTTP request, and of the answer to it."""
        head: Request | None = None
        body: bytearray | None = bytearray()
        async for message in requests:
            if message.observability_mode:
                continue
            kind = message.WhichOneof("request")
            if kind == "request_headers":
                if head is not None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the headers came twice")
                head = message
                if message.request_headers.end_of_stream:
                    yield self.destination(message, 0)
            elif kind in ("request_body", "request_trailers") and body is not None:
                if head is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the headers must come first")
                body += message.request_body.body
                if len(body) > self.max_body_bytes:
                    yield refusal(413, f"the body has more than {self.max_body_bytes} bytes")
                    return
                if kind == "request_trailers" or message.request_body.end_of_stream:
                    for response in self.whole_request(head, bytes(body), kind == "request_trailers"):
                        yield response
                    body = None  # Envoy may send the last piece twice: https://github.com/envoyproxy/envoy/issues/46237
            elif kind == "response_headers":
                yield Response(response_headers=ext_proc.HeadersResponse())
            elif kind == "response_body":
                yield Response(response_body=piece(message.response_body.body, message.response_body.end_of_stream))
            elif kind == "response_trailers":
                yield Response(response_trailers=ext_proc.TrailersResponse())

    def whole_request(self, head: Request, body: bytes, trailers: bool) -> Iterator[Response]:
        """Yield the answers to a request whose body is complete: headers, then the body, then the trailers."""
        first = self.judged(head, body) or self.destination(head, len(body))
        yield first
        if first.HasField("immediate_response"):
            return
        for start in range(0, max(len(body), 1), self.largest_piece):
            end = start + self.largest_piece >= len(body) and not trailers
            yield Response(request_body=piece(body[start : start + self.largest_piece], end))
        if trailers:
            yield Response(request_trailers=ext_proc.TrailersResponse())

    def judged(self, head: Request, body: bytes) -> Response | None:
        """Return why a request is refused, if it is."""
        try:
            model = json.loads(body)["model"]
        except (ValueError, TypeError, KeyError) as error:
            return refusal(400, f"expected a JSON object with a model: {error!r}")
        if model != self.model:
            return refusal(404, f"there is no model {model!r}")
        keys = [value.raw_value for value in head.request_headers.headers.headers if value.key == "authorization"]
        return refusal(429, "too many requests") if self.limited_key.encode() in keys else None

    def candidates(self, head: Request) -> list[str]:
        """Return the endpoints that the data plane allows."""
        hint = head.metadata_context.filter_metadata.get("envoy.lb.subset_hint")
        if hint is None or SUBSET not in hint.fields:
            return self.endpoints
        subset = hint.fields[SUBSET]
        allowed = [value.string_value for value in subset.list_value.values] or subset.string_value.split(",")
        return [endpoint for endpoint in self.endpoints if endpoint in allowed]

    def destination(self, head: Request, length: int) -> Response:
        """Return the answer to the headers: where the request goes, and the length of its body if it has one."""
        candidates = self.candidates(head)
        if not candidates:
            return refusal(503, "no endpoint is ready")
        self.turn += 1
        first = self.turn % len(candidates)
        value = ",".join(candidates[first:] + candidates[:first])
        metadata = struct_pb2.Struct()
        metadata.update({"envoy.lb": {DESTINATION: value}})
        changes = [changed(DESTINATION, value)] + ([changed("content-length", str(length))] if length else [])
        common = CommonResponse(header_mutation=ext_proc.HeaderMutation(set_headers=changes), clear_route_cache=True)
        return Response(request_headers=ext_proc.HeadersResponse(response=common), dynamic_metadata=metadata)


def changed(name: str, value: str) -> ext_proc.HeaderValueOption:
    """Return the order to set a header, whatever the client has sent."""
    return ext_proc.HeaderValueOption(
        header=ext_proc.HeaderValue(key=name, raw_value=value.encode()),
        append_action=ext_proc.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def piece(body: bytes, end: bool) -> ext_proc.BodyResponse:
    """Return a piece of a body on its way on."""
    streamed = ext_proc.StreamedBodyResponse(body=body, end_of_stream=end)
    mutation = ext_proc.BodyMutation(streamed_response=streamed)
    return ext_proc.BodyResponse(response=CommonResponse(body_mutation=mutation))


def refusal(status: int, message: str) -> Response:
    """Return an error for the client, in place of a pick."""
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    code = ext_proc.HttpStatus(code=status)
    return Response(immediate_response=ext_proc.ImmediateResponse(status=code, body=body))


async def serve(
    picker: Picker,
    address: str,
    states: Mapping[str, int] = HEALTH,
    credentials: grpc.ServerCredentials | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Start a picker with its health service, and return the server and its port."""
    server = grpc.aio.server()
    process = grpc.stream_stream_rpc_method_handler(picker.Process, Request.FromString, Response.SerializeToString)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Process": process})])
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for service, state in states.items():
        await servicer.set(service, state)
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    return server, port


async def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9002)
    parser.add_argument("--endpoints", required=True, help="ip:port[,ip:port...]")
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    picker = Picker(arguments.endpoints.split(","), arguments.model)
    server, port = await serve(picker, f"127.0.0.1:{arguments.port}")
    print(f"Picking at 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
