"""A call of `Process`: a request, or an answer that is only shown."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc
from google.protobuf.message import DecodeError

from backends import background
from gateway.rooms.picker.exchange import Picked
from gateway.rooms.picker.ext_proc_pb2 import ProcessingRequest
from gateway.rooms.picker.messages import REQUEST, text_of
from gateway.rooms.picker.stream import Picking, ProtocolError, Stream


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


class Call:
    """Hands the proxy's messages to a stream, and writes what it answers: at once, or from a task if that comes later.

    No message is read while the proxy does not take those that are for it.
    """

    def __init__(self, picking: Picking, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._picking = picking
        self._context = context
        self._reader = asyncio.current_task()
        self._stream: Stream | Observation | None = None
        self._unsent: deque[bytes] = deque()
        self._turn = asyncio.Lock()  # to write
        self._late: asyncio.Task[None] | None = None
        self._has_ended = False

    async def serve(self) -> None:
        """Serve the call until one of both sides ends it."""
        try:
            while not self._has_ended:
                data = await self._context.read()
                if not isinstance(data, bytes):  # the end
                    break
                self._handle(data)
                await self._write()
        except (ProtocolError, DecodeError) as error:
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if not self._has_ended:  # by this side: see `_write_late`
                raise
        finally:
            self._has_ended = True
            if self._late is not None:
                self._late.cancel()
            stream, self._stream = self._stream, None  # they hold each other, and the body
            if stream is not None:
                stream.close()

    def _handle(self, data: bytes) -> None:
        message = ProcessingRequest.FromString(data)
        if self._stream is None:
            is_shown = message.observability_mode
            self._stream = Observation(self._picking) if is_shown else Stream(self._picking, self)
        self._stream.handle(message)
        self._has_ended = self._has_ended or self._stream.has_ended

    def send(self, message: bytes) -> None:
        """Send a message, after those before."""
        self._unsent.append(message)
        self._wake()

    def end(self) -> None:
        """End the call well, once all messages have been sent."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._late is None and asyncio.current_task() is not self._reader:
            self._late = background.start("picker", self._write_late(), of="a call", raises=grpc.aio.BaseError)

    async def _write(self) -> None:
        async with self._turn:
            while self._unsent:
                await self._context.write(self._unsent.popleft())

    async def _write_late(self) -> None:
        await self._write()
        self._late = None
        if self._has_ended and self._reader is not None:
            self._reader.cancel()
