"""The load generator: sends requests when due, and records when each chunk of an answer arrives."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.http.address import Address
from backends.http.client import Call, UpstreamClient
from backends.http.receiver import HeaderList, Receiver, UpstreamError
from backends.http.wire import request_head
from lab.live.record import AnswerReader, Record, error_message

INTERRUPTED = "interrupted"
"""`Record.error` of a request aborted because the run was stopped."""

_CONNECT_S = 10.0
_EARLY_S = 0.0005  # the event loop's timers have a resolution of a millisecond
_ERROR_BODY_BYTES = 4096
_BACKEND = b"x-gateway-backend"
_PREPARED_REQUESTS = 5_000  # made before the run; making later ones delays the reading of chunks


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send."""

    path: str
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ()  # in addition to those of all requests


@dataclass(frozen=True, slots=True)
class GeneratorHealth:
    """The generator's own health during a run."""

    cpu_share: float  # share of one core used, 0 to 1; near 1, the generator is the bottleneck
    late_s: float  # delay of requests behind their due time, 99th percentile; chunks are recorded equally late


class InFlightRequest(Receiver):
    """A request in flight, and the receiver of its response."""

    def __init__(self, record: Record, on_end: Callable[[InFlightRequest], None]) -> None:
        self.record = record
        self.call: Call | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._on_end = on_end
        self._reader = AnswerReader(record)
        self._status = 0
        self._error_body = b""

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Handle status and headers."""
        self._status = status
        self.record.backend = next((value.decode("latin-1") for name, value in headers if name == _BACKEND), "")

    def on_data(self, data: bytes) -> None:
        """Handle data of the body: read its chunks, or keep the start of an error."""
        if self._status == 200:
            self._reader.feed(data, time.perf_counter())
        elif len(self._error_body) < _ERROR_BODY_BYTES:
            self._error_body += data

    def on_end(self) -> None:
        """Handle the end of the response."""
        if self._status == 200:
            self._reader.close()
        else:
            self.record.fail(f"http {self._status}", error_message(self._error_body))
        self._end()

    def on_error(self, error: UpstreamError) -> None:
        """Handle a failed connection."""
        self.record.fail(error.kind, str(error))
        self._end()

    def abort(self, kind: str, detail: str) -> None:
        """Close the connection, so that the engine aborts the request."""
        if self.call is not None:
            self.call.cancel()
        self.record.fail(kind, detail)
        self._end()

    def _end(self) -> None:
        self.record.ended_s = time.perf_counter()
        if self.timer is not None:
            self.timer.cancel()
        self._on_end(self)


class Generator:
    """Sends the requests of one run to one server, each when it is due, regardless of the others.

    With `at_once`, at most that many are in flight, and a due request waits for another to end.
    """

    def __init__(
        self,
        address: Address,
        request: Callable[[int], Request],
        due_s: Sequence[float],
        headers: Sequence[tuple[str, str]] = (),
        *,
        timeout_s: float,
        at_once: int | None = None,
    ) -> None:
        self._at_once = at_once
        self._client = UpstreamClient(address, connect_timeout_s=_CONNECT_S, max_idle=100_000)
        self._request = request  # function that returns request `index`
        self._due_s = due_s  # send times in seconds after the start, ascending
        self._timeout_s = timeout_s  # seconds after which a request is aborted
        self._headers = [(b"host", address.authority), (b"content-type", b"application/json")]
        self._headers += [(b"accept", b"text/event-stream")]
        self._headers += [(name.encode(), value.encode()) for name, value in headers]
        self._flights: set[InFlightRequest] = set()
        self._done = asyncio.Event()
        self._prepared: list[Request] = []
        self._next_timer: asyncio.TimerHandle | None = None
        self._start_s = 0.0
        self._pending = bool(due_s)  # whether there are more requests to send
        self.records: list[Record] = []  # of all requests sent, in order; those in flight have `ended_s` 0

    async def run(self) -> GeneratorHealth:
        """Send all requests, and return when all have ended."""
        self._prepared = [self._request(index) for index in range(min(len(self._due_s), _PREPARED_REQUESTS))]
        gc.collect()
        gc.freeze()  # shorter collections while chunks arrive
        cpu_s = time.process_time()
        self._start_s = time.perf_counter()
        try:
            self._send_due()
            await self._done.wait()
        finally:
            self._client.close()
            gc.unfreeze()
        wall_s = max(time.perf_counter() - self._start_s, 1e-9)
        late_s = [record.sent_s - record.due_s for record in self.records]
        return GeneratorHealth(
            (time.process_time() - cpu_s) / wall_s, float(np.percentile(late_s, 99)) if late_s else 0.0
        )

    def stop(self) -> None:
        """Stop sending and abort the requests in flight."""
        self._pending = False
        if self._next_timer is not None:
            self._next_timer.cancel()
        for flight in list(self._flights):
            flight.abort(INTERRUPTED, "the run was stopped")
        self._check_done()

    def _send_due(self) -> None:
        loop, now_s = asyncio.get_running_loop(), time.perf_counter()
        while self._pending:
            if self._at_once is not None and len(self._flights) >= self._at_once:
                return
            index = len(self.records)
            due_s = self._start_s + self._due_s[index]
            if due_s - now_s > _EARLY_S:
                self._next_timer = loop.call_later(due_s - now_s, self._send_due)
                return
            self._pending = index + 1 < len(self._due_s)
            record = Record(index, due_s if self._at_once is None else now_s)
            self._send(record, self._prepared[index] if index < len(self._prepared) else self._request(index))
        self._check_done()

    def _send(self, record: Record, request: Request) -> None:
        length = (b"content-length", b"%d" % len(request.body))
        head = request_head(b"POST", request.path.encode(), [*self._headers, *request.headers, length])
        flight = InFlightRequest(record, self._ended)
        self.records.append(record)
        self._flights.add(flight)
        record.sent_s = time.perf_counter()
        flight.call = self._client.send(Call(head, request.body, flight))
        flight.timer = asyncio.get_running_loop().call_later(
            self._timeout_s, flight.abort, "timeout", "took longer than --timeout"
        )

    def _ended(self, flight: InFlightRequest) -> None:
        self._flights.discard(flight)
        if self._at_once is not None:
            asyncio.get_running_loop().call_soon(self._send_due)
        self._check_done()

    def _check_done(self) -> None:
        if not self._pending and not self._flights:
            self._done.set()
