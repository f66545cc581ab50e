"""A proxy that the tests play, message by message: what it says to the picker, and what it is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from backends.health import Health, State
from benchmarks.metrics_page import total
from gateway.config.pool_file import PoolFile
from gateway.rooms.picker.destinations import Destinations
from gateway.rooms.picker.ext_proc_pb2 import (
    HeaderMap,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from gateway.rooms.picker.server import Observation
from gateway.rooms.picker.stream import Picking, Stream
from gateway.routing.keys import digest
from gateway.service.assembly import assemble
from gateway.service.replicas import plan

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
JSON = [("content-type", "application/json")]
EVENTS = [("content-type", "text/event-stream")]
ANSWER = json.dumps({"choices": [{"text": ""}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()
FULL_DUPLEX, NONE = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.NONE
STREAMED = ProcessingMode.STREAMED


@dataclass
class RecordingWire:
    """The way back to the proxy: keeps what is sent."""

    sent: list[ProcessingResponse] = field(default_factory=list)
    has_ended: bool = False

    def send(self, message: bytes) -> None:
        self.sent.append(ProcessingResponse.FromString(message))

    def end(self) -> None:
        self.has_ended = True


class PlayedProxy:
    """The gateway of a pool file, with replicas `a`, `b` and `c` that are up, and the proxy that asks it."""

    def __init__(self, pool: Mapping[str, Any] | None = None, *, model: Mapping[str, Any] | None = None) -> None:
        drafts = {"speculative_config": {"num_speculative_tokens": 3}}
        backends = {
            "a": {"method": "baseline", "url": "http://10.0.0.1:8000"},
            "b": {"method": "ngram", "url": "http://10.0.0.2:8000"} | drafts,
            "c": {"method": "suffix", "url": "http://10.0.0.3:8000"} | drafts,
        }
        served = {"policy": {"name": "static", "backend": "a"}, "backends": backends, "default_temperature": 1.0}
        settings = {"models": {"m": served | dict(model or {})}, "picker": {}, "state": "none"}
        self.settings = PoolFile.model_validate(settings | dict(pool or {}))
        self.backends = {backend.name: backend for backend in plan(self.settings, Path()).backends}
        for backend in self.backends.values():
            backend.health = Health(State.UP)
        self.gateway = assemble(self.settings, list(self.backends.values()), digest("admin"))
        self.picking = Picking(self.gateway, Destinations(self.gateway.pool), httpx.AsyncClient())

    def stream(self, response_mode: Any = FULL_DUPLEX) -> PlayedStream:
        """Return a new stream of the picker's filter."""
        return PlayedStream(self, response_mode)

    def picked(self, response_mode: Any = FULL_DUPLEX, body: bytes = BODY, **headers: Any) -> PlayedStream:
        """Return a stream whose request has been sent on."""
        stream = self.stream(response_mode)
        stream.request(**headers)
        stream.body(body)
        return stream

    def in_flight(self) -> dict[str, int]:
        return {name: backend.in_flight for name, backend in self.backends.items()} | {
            "exchanges": len(self.gateway.relay.exchanges),
            "unfinished": self.picking.unfinished.held_bytes,
        }

    def count(self, name: str, **labels: str) -> float:
        """Return a counter's sum over all labels that match."""
        metrics = self.gateway.metrics
        metrics.flush()
        return total(metrics.page().decode(), name, **labels)


IDLE = {"a": 0, "b": 0, "c": 0, "exchanges": 0, "unfinished": 0}


class PlayedStream:
    """One stream of ext_proc."""

    def __init__(self, proxy: PlayedProxy, response_mode: Any) -> None:
        self.wire = RecordingWire()
        self.handler = Stream(proxy.picking, self.wire.send, self.wire.end)
        self._response_mode = response_mode

    def request(
        self,
        headers: Sequence[tuple[str, str]] = (),
        *,
        path: str = CHAT,
        method: str = "POST",
        subset: list[str] | str | None = None,
        is_last: bool = False,
        request_mode: Any = FULL_DUPLEX,
    ) -> None:
        """Send the headers of a request."""
        received = [(":method", method), (":path", path), (":authority", "gateway"), *headers]
        message = ProcessingRequest(request_headers=http_headers(received, is_last=is_last))
        message.protocol_config.request_body_mode = request_mode
        message.protocol_config.response_body_mode = self._response_mode
        if subset is not None:
            hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint["x-gateway-destination-endpoint-subset"] = subset
        self.handler.handle(message)

    def piece(self, piece: bytes) -> None:
        """Send a piece of the body of a request."""
        self.handler.handle(ProcessingRequest(request_body={"body": piece}))

    def body(self, *pieces: bytes) -> None:
        """Send the body of a request, and its end, which is an empty piece."""
        for piece in pieces:
            self.piece(piece)
        self.handler.handle(ProcessingRequest(request_body={"end_of_stream": True}))

    def head(self, status: int = 200, headers: Sequence[tuple[str, str]] = tuple(JSON), served: str = "") -> None:
        """Send the headers of an answer."""
        self.handler.handle(response_headers(status, headers, served))

    def answer_piece(self, piece: bytes) -> None:
        """Send a piece of the body of an answer."""
        self.handler.handle(ProcessingRequest(response_body={"body": piece}))

    def answer(self, *pieces: bytes) -> None:
        """Send the body of an answer, and its end."""
        for piece in pieces:
            self.answer_piece(piece)
        self.handler.handle(ProcessingRequest(response_body={"end_of_stream": True}))

    # What the proxy was told

    @property
    def forwarded(self) -> ProcessingResponse:
        return next(message for message in self.wire.sent if message.HasField("request_headers"))

    @property
    def destinations(self) -> str:
        """Where the request goes, which header and metadata must agree on."""
        value = self.set_headers["x-gateway-destination-endpoint"]
        assert self.metadata["x-gateway-destination-endpoint"] == value
        return value

    @property
    def set_headers(self) -> dict[str, str]:
        mutation = self.forwarded.request_headers.response.header_mutation
        return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}

    @property
    def removed_headers(self) -> list[str]:
        return list(self.forwarded.request_headers.response.header_mutation.remove_headers)

    @property
    def metadata(self) -> dict[str, str]:
        fields = self.forwarded.dynamic_metadata.fields["envoy.lb"].struct_value.fields
        return {name: value.string_value for name, value in fields.items()}

    @property
    def bodies(self) -> list[tuple[bytes, bool]]:
        """The pieces of the request's body for the backend, each with whether it is the last."""
        return self._pieces("request_body")

    @property
    def answers(self) -> list[tuple[bytes, bool]]:
        """The pieces of the answer for the client, each with whether it is the last."""
        return self._pieces("response_body")

    def _pieces(self, kind: str) -> list[tuple[bytes, bool]]:
        bodies = [getattr(message, kind) for message in self.wire.sent if message.HasField(kind)]
        pieces = [body.response.body_mutation.streamed_response for body in bodies]
        return [(piece.body, piece.end_of_stream) for piece in pieces]

    @property
    def told(self) -> dict[str, str]:
        """The headers that the last message adds to the answer."""
        headers = self.wire.sent[-1].response_headers.response.header_mutation.set_headers
        return {each.header.key: each.header.raw_value.decode() for each in headers}

    @property
    def error(self) -> tuple[int, str]:
        """Status and code of the error that the client gets."""
        response = self.wire.sent[-1].immediate_response
        return response.status.code, json.loads(response.body)["error"]["code"]


class PlayedObservation:
    """One stream of a filter that only shows the answer of another stream."""

    def __init__(self, proxy: PlayedProxy, shown: PlayedStream) -> None:
        self.handler = Observation(proxy.picking)
        self._name = shown.metadata["x-gateway-request"]

    def head(self, status: int = 200, headers: Sequence[tuple[str, str]] = tuple(EVENTS)) -> None:
        message = response_headers(status, headers, "")
        message.metadata_context.filter_metadata["envoy.lb"]["x-gateway-request"] = self._name
        self.handler.handle(message)

    def answer(self, *pieces: bytes, is_complete: bool = True) -> None:
        for piece in pieces:
            self.handler.handle(ProcessingRequest(response_body={"body": piece}))
        if is_complete:
            self.handler.handle(ProcessingRequest(response_body={"end_of_stream": True}))


def http_headers(headers: Sequence[tuple[str, str]], *, is_last: bool = False) -> HttpHeaders:
    values = [{"key": name, "raw_value": value.encode()} for name, value in headers]
    return HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=is_last)


def response_headers(status: int, headers: Sequence[tuple[str, str]], served: str) -> ProcessingRequest:
    message = ProcessingRequest(response_headers=http_headers([(":status", str(status)), *headers]))
    if served:
        message.metadata_context.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] = served
    return message
