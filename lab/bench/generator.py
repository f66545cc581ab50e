"""The load generator: sends requests when they are due and records when each chunk of an answer arrives."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from backends.http.client import Call, HeaderList, UpstreamClient, UpstreamError, request_head
from lab.bench.record import AnswerReader, Record, error_message

_EARLY_S = 0.0005  # timers of the event loop have a resolution of a millisecond
_TICK_S = 0.02
_MAX_CONSECUTIVE_FAILURES = 100
_ERROR_BODY_BYTES = 4096
_BACKEND = b"x-gateway-backend"


@dataclass(frozen=True, slots=True)
class Health:
    """Health of the generator itself during a run."""

    cpu_share: float  # share of one core used, 0 to 1; near 1, the generator is the bottleneck
    late_s: list[float]  # delay of each request of an open loop behind its due time
    stall_s: list[float]  # delays of a timer that fires fifty times a second: the error of the timestamps


class Sender(Protocol):
    """Sends the requests of a run."""

    def post(self, record: Record, body: bytes, on_end: Callable[[InFlightRequest], None]) -> InFlightRequest:
        """Send request `record.index` now; `on_end` is called when its answer has ended or failed."""


class HttpSender:
    """Sends requests to one path of one server."""

    def __init__(self, client: UpstreamClient, target: str, headers: list[tuple[str, str]], timeout_s: float) -> None:
        self._client = client
        self._target = target.encode()  # request path
        self._timeout_s = timeout_s  # seconds after which a request is aborted
        # Headers of every request.
        self._headers = [(b"host", client.address.authority), (b"content-type", b"application/json")]
        self._headers += [(b"accept", b"text/event-stream")]
        self._headers += [(name.encode(), value.encode()) for name, value in headers]

    def post(
        self,
        record: Record,
        body: bytes,
        on_end: Callable[[InFlightRequest], None],
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> InFlightRequest:
        """Send a request now, with extra headers; `on_end` is called when its answer has ended or failed."""
        length = (b"content-length", b"%d" % len(body))
        head = request_head(b"POST", self._target, [*self._headers, *headers, length])
        flight = InFlightRequest(record, on_end)
        record.sent_s = time.perf_counter()
        flight.call = self._client.send(head, body, flight)
        flight.timer = asyncio.get_running_loop().call_later(self._timeout_s, flight.time_out)
        return flight


class InFlightRequest:
    """A request in flight, and the receiver of its response."""

    __slots__ = ("_error_body", "_on_end", "_reader", "_status", "call", "record", "timer")

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
        """Handle data of the body: read its chunks, or keep the beginning of an error."""
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

    def time_out(self) -> None:
        """Abort the request because it takes too long."""
        self.abort("timeout", "took longer than --timeout")

    def abort(self, kind: str, detail: str) -> None:
        """Close the connection, so that the engine drops the request."""
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
    """Sends the requests of one run."""

    def __init__(
        self, sender: Sender, body: Callable[[int], bytes], on_progress: Callable[[Record], None] | None = None
    ) -> None:
        self._sender = sender
        self._body = body  # function that returns the body of request `index`
        self._on_progress = on_progress or (lambda _record: None)  # called as each request ends
        self._flights: set[InFlightRequest] = set()
        self._done = asyncio.Event()
        self._next_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._refill: Callable[[], None] | None = None
        self._pending = False  # whether more requests are to be sent
        self._consecutive_failures = 0
        self._stall_s: list[float] = []
        self._start_s = 0.0
        self.records: list[Record] = []  # all requests sent, in order; those in flight have `ended_s` 0
        self.gave_up = False  # whether a closed loop stopped early after a hundred consecutive failures

    async def open_loop(self, due_s: list[float]) -> Health:
        """Send request i after `due_s[i]` seconds regardless of the others; return when all have ended."""
        begin = self._begin()
        self._pending = bool(due_s)
        bodies = [self._body(index) for index in range(min(len(due_s), _PREPARED_BODIES))]

        def send_due() -> None:
            now_s = time.perf_counter()
            while len(self.records) < len(due_s):
                index = len(self.records)
                wait_s = self._start_s + due_s[index] - now_s
                if wait_s > _EARLY_S:
                    self._next_timer = asyncio.get_running_loop().call_later(wait_s, send_due)
                    return
                body = bodies[index] if index < len(bodies) else self._body(index)
                self._send(index, self._start_s + due_s[index], body)
            self._pending = False
            self._check_done()

        self._start_s = time.perf_counter()
        send_due()
        await self._done.wait()
        late_s = [record.sent_s - record.due_s for record in self.records]
        return self._health(begin, late_s)

    async def closed_loop(self, concurrency: int, count: int | None, duration_s: float | None) -> Health:
        """Keep `concurrency` requests in flight until `count` are sent or `duration_s` has passed; wait for the last.

        Stop sending after a hundred consecutive failures.
        """
        begin = self._begin()
        bodies = [
            self._body(index) for index in range(min(count, _PREPARED_BODIES) if count is not None else concurrency)
        ]
        self._start_s = time.perf_counter()
        stop_s = self._start_s + duration_s if duration_s is not None else float("inf")

        def refill() -> None:
            while len(self._flights) < concurrency:
                index, now_s = len(self.records), time.perf_counter()
                if now_s >= stop_s or (count is not None and index >= count):
                    self._pending = False
                    return
                self._send(index, now_s, bodies[index] if index < len(bodies) else self._body(index))

        self._pending = True
        self._refill = refill
        refill()
        self._check_done()
        await self._done.wait()
        return self._health(begin, [])

    @property
    def start_s(self) -> float:
        """Start of the run, by `time.perf_counter`."""
        return self._start_s

    def stop(self) -> None:
        """Stop sending and abort the requests in flight."""
        self._pending = False
        self._refill = None
        if self._next_timer is not None:
            self._next_timer.cancel()
        for flight in list(self._flights):
            flight.abort("interrupted", "the benchmark was stopped")
        self._check_done()

    def _send(self, index: int, due_s: float, body: bytes) -> None:
        record = Record(index, due_s)
        self.records.append(record)
        self._flights.add(self._sender.post(record, body, self._ended))

    def _ended(self, flight: InFlightRequest) -> None:
        self._flights.discard(flight)
        self._consecutive_failures = self._consecutive_failures + 1 if flight.record.error is not None else 0
        if self._refill is not None and self._consecutive_failures >= _MAX_CONSECUTIVE_FAILURES:
            self.gave_up, self._pending = True, False  # else a closed loop whose requests fail at once would spin
        self._on_progress(flight.record)
        if self._refill is not None and self._pending:
            self._refill()
        self._check_done()

    def _check_done(self) -> None:
        if not self._pending and not self._flights:
            self._done.set()

    def _begin(self) -> tuple[float, float]:
        gc.collect()
        gc.freeze()  # shorter collections while chunks arrive
        self._tick_s = time.perf_counter()
        self._tick_timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        return time.perf_counter(), time.process_time()

    def _tick(self) -> None:
        now_s = time.perf_counter()
        self._stall_s.append(max(0.0, now_s - self._tick_s - _TICK_S))
        self._tick_s = now_s
        self._tick_timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _health(self, begin: tuple[float, float], late_s: list[float]) -> Health:
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        gc.unfreeze()
        wall_s = time.perf_counter() - begin[0]
        return Health((time.process_time() - begin[1]) / max(wall_s, 1e-9), late_s, self._stall_s)


_PREPARED_BODIES = 5_000
"""Bodies written before the run begins; writing later ones delays the reading of chunks."""
