"""The data plane's side of ext_proc: the messages that Envoy sends a picker, in any order, and a limit on each wait.

Whatever a picker does wrong is an `AssertionError`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Self

import grpc

from gateway.rooms.picker import ext_proc_pb2 as ext_proc

from .answer import LB, Answer

SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_HINT = "envoy.lb.subset_hint"

Headers = Iterable[tuple[str, str]]
Metadata = dict[str, dict[str, object]]

_PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
FULL_DUPLEX = ext_proc.ProcessingMode.FULL_DUPLEX_STREAMED
NONE = ext_proc.ProcessingMode.NONE
_LONGEST_STREAM = 12
"""A stream ends after this many time limits, whatever the picker does."""


class NoAnswerError(AssertionError):
    """The picker did not answer within the time limit."""


class StreamEndedError(AssertionError):
    """The picker ended the stream instead of answering.

    Attributes
    ----------
    code
        Status of gRPC; `OK` where it closed the stream in an orderly way.
    """

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"the picker ended the stream with {code.name}: {details or 'no details'}")
        self.code = code


class Stream:
    """One ext_proc stream, for one HTTP request and its answer. At its end as a context it is cancelled.

    Parameters
    ----------
    modes
        How the bodies of requests and of answers are sent, as the first message tells; None does not tell.
    observe
        Whether the picker is only to look on.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        limit_s: float,
        modes: tuple[int, int] | None,
        observe: bool,
    ) -> None:
        self.limit_s = limit_s
        self._modes = modes
        self._observe = observe
        self._outgoing: queue.SimpleQueue[ext_proc.ProcessingRequest | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[ext_proc.ProcessingResponse | StreamEndedError] = queue.SimpleQueue()
        self._headers: dict[str, list[tuple[str, str]]] = {}
        self._last: dict[str, str] = {}
        process = channel.stream_stream(
            _PROCESS,
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )
        self._call = process(iter(self._outgoing.get, None), timeout=_LONGEST_STREAM * limit_s)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._incoming.put(message)
        except grpc.RpcError:
            pass  # its status follows
        self._incoming.put(StreamEndedError(self._call.code(), self._call.details()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Reset the stream, as Envoy does when the client has gone."""
        self._call.cancel()
        self.close()

    def close(self) -> None:
        """Close our side of the stream, so that the picker sees its end."""
        self._outgoing.put(None)

    def send_headers(
        self,
        path: str,
        headers: Headers = (),
        *,
        end: bool = False,
        subset: list[str] | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        """Send the headers of a request: a GET if they end it, else a POST.

        Parameters
        ----------
        subset
            The endpoints that the picker is to choose from; None sends no such list.
        metadata
            Sent where no subset is, as the data plane's metadata by namespace.
        """
        start = [
            (":method", "GET" if end else "POST"),
            (":path", path),
            (":scheme", "http"),
            (":authority", "inference.example"),
        ]
        if subset is not None:
            metadata = {SUBSET_HINT: {SUBSET: subset}}
        self._send_headers("request", [*start, *headers], end, metadata or {})

    def send_body(self, body: bytes, *, end: bool = True) -> None:
        self._send_body("request", body, end)

    def send_trailers(self) -> None:
        self._send_trailers("request")

    def send_response_headers(
        self, content_type: str = "application/json", *, status: int = 200, end: bool = False, served: str | None = None
    ) -> None:
        """Send the headers of the answer.

        Parameters
        ----------
        served
            The endpoint of which the data plane says that it has served the request; None says nothing.
        """
        metadata: Metadata = {} if served is None else {LB: {SERVED: served}}
        self._send_headers("response", [(":status", str(status)), ("content-type", content_type)], end, metadata)

    def send_response_body(self, body: bytes, *, end: bool = True) -> None:
        self._send_body("response", body, end)

    def send_response_trailers(self) -> None:
        self._send_trailers("response")

    def _send_headers(self, side: str, headers: list[tuple[str, str]], end: bool, metadata: Metadata) -> None:
        self._headers[side] = headers
        self._last[side] = "headers" if end else ""
        message = ext_proc.HttpHeaders(headers=_header_map(headers), end_of_stream=end)
        self._send(metadata, **{f"{side}_headers": message})

    def _send_body(self, side: str, body: bytes, end: bool) -> None:
        self._last[side] = "body" if end else ""
        self._send({}, **{f"{side}_body": ext_proc.HttpBody(body=body, end_of_stream=end)})

    def _send_trailers(self, side: str) -> None:
        self._last[side] = "trailers"
        self._send({}, **{f"{side}_trailers": ext_proc.HttpTrailers(trailers=_header_map([("x-checksum", "0")]))})

    def _send(self, metadata: Metadata, **message: object) -> None:
        request = ext_proc.ProcessingRequest(observability_mode=self._observe, **message)
        if self._modes is not None:
            request.protocol_config.request_body_mode, request.protocol_config.response_body_mode = self._modes
            self._modes = None
        for namespace, entries in metadata.items():
            request.metadata_context.filter_metadata[namespace].update(entries)
        self._outgoing.put(request)

    def receive(self, within_s: float | None = None) -> ext_proc.ProcessingResponse:
        """Return the next message of the picker.

        Raises
        ------
        NoAnswerError
            If none comes within `within_s` seconds; by default, within the time limit.
        StreamEndedError
            If the picker has ended the stream.
        """
        limit_s = self.limit_s if within_s is None else within_s
        try:
            message = self._incoming.get(timeout=limit_s)
        except queue.Empty:
            raise NoAnswerError(f"the picker sent nothing for {limit_s:g} s") from None
        if isinstance(message, StreamEndedError):
            self._incoming.put(message)  # for whoever asks again
            raise message
        return message

    def until_end(self) -> tuple[grpc.StatusCode, list[ext_proc.ProcessingResponse]]:
        """Return how the picker ends the stream, and what it sends before."""
        messages: list[ext_proc.ProcessingResponse] = []
        while True:
            try:
                messages.append(self.receive())
            except StreamEndedError as end:
                return end.code, messages

    def request(self, received: Iterable[ext_proc.ProcessingResponse] = ()) -> Answer:
        """Collect what the picker makes of the request, which has been sent to its end.

        Parameters
        ----------
        received
            Its messages that have been received before.
        """
        return self._collect("request", received)

    def response(self) -> Answer:
        """Collect what the picker makes of the answer, which has been sent to its end."""
        return self._collect("response", ())

    def begun_response(self) -> Answer:
        """Return what the picker has made of the answer so far: nothing. Its messages are to be added."""
        return Answer("response", self._headers["response"])

    def _collect(self, side: str, received: Iterable[ext_proc.ProcessingResponse]) -> Answer:
        answer, last = Answer(side, self._headers[side]), self._last[side]
        for message in received:
            answer.take(message)
        while not answer.immediate and not (
            answer.has_headers if last == "headers" else answer.ended if last == "body" else answer.has_trailers
        ):
            answer.take(self.receive())
        return answer


def _header_map(headers: Headers) -> ext_proc.HeaderMap:
    return ext_proc.HeaderMap(headers=[ext_proc.HeaderValue(key=k, raw_value=v.encode()) for k, v in headers])
