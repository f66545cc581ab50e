"""A stream of ext_proc that only shows an answer: that of a second filter, with `observability_mode`."""

from __future__ import annotations

from gateway.rooms.picker.exchange import Picked
from gateway.rooms.picker.ext_proc_pb2 import ProcessingRequest
from gateway.rooms.picker.messages import REQUEST, text_of
from gateway.rooms.picker.stream import Picking


class Observation:
    """An answer that is shown. When the stream ends, the proxy shows no more, and the answer goes on."""

    def __init__(self, picking: Picking) -> None:
        self._picking = picking
        self._exchange: Picked | None = None
        self.has_ended = False  # whether nothing more needs to be shown

    def handle(self, message: ProcessingRequest) -> None:
        """Handle one message of the proxy, which expects no answer."""
        kind = message.WhichOneof("request")
        if kind == "response_headers":
            self._begin(message)
        elif self._exchange is None or kind == "response_trailers":
            self.has_ended = True
        elif kind == "response_body":
            self._exchange.on_data(message.response_body.body)
            self.has_ended = message.response_body.end_of_stream
        if self.has_ended and self._exchange is not None:
            self._exchange.on_end()

    def _begin(self, message: ProcessingRequest) -> None:
        stream = self._picking.streams.get(text_of(message.metadata_context, REQUEST))
        if stream is None or stream.exchange is None or not stream.exchange.needs_answer():
            self.has_ended = True  # perhaps another process knows the request
            return
        self._exchange, stream.is_observed = stream.exchange, True
        stream.on_answer_begun(message, is_read=True)
        self.has_ended = message.response_headers.end_of_stream

    def close(self) -> None:
        """Handle the end of the stream: that of the answer, or because it was cut off."""
        if self._exchange is not None:
            self._exchange.client_gone()
