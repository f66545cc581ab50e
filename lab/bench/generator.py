"""The load generator: sends requests when they are due and notes when every chunk of an answer arrives."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from backends.http.client import Call, HeaderList, UpstreamClient, UpstreamError, request_head
from lab.bench.record import AnswerReader, Record, error_message

_EARLY_S = 0.0005  # the loop's timers have a resolution of a millisecond
_TICK_S = 0.02
_GIVE_UP_AFTER = 100
_ERROR_BODY_BYTES = 4096
_BACKEND = b"x-gateway-backend"


@dataclass(frozen=True, slots=True)
class Health:
    """How the generator itself fared.

    Parameters
    ----------
    cpu_share
        Of one core, 0 to 1: near 1 it is the generator that is measured.
    late_s
        For each request of an open loop, how much later than due it was sent.
    stall_s
        How much later than asked the event loop came back, some fifty times a second: the error of the timestamps.
    """

    cpu_share: float
    late_s: list[float]
    stall_s: list[float]


class Sender(Protocol):
    """What sends the requests of a run."""

    def post(self, record: Record, body: bytes, on_end: Callable[[Flight], None]) -> Flight:
        """Send request `record.index` now; `on_end` is told when its answer has ended or failed."""


class Wire:
    """Where requests go, and what they all have in common.

    Parameters
    ----------
    target
        Path that is posted to.
    headers
        Sent with every request.
    """

    def __init__(self, client: UpstreamClient, target: str, headers: list[tuple[str, str]], timeout_s: float) -> None:
        self._client = client
        self._target = target.encode()
        self._timeout_s = timeout_s
        self._headers = [(b"host", client.address.authority), (b"content-type", b"application/json")]
        self._headers += [(b"accept", b"text/event-stream")]
        self._headers += [(name.encode(), value.encode()) for name, value in headers]

    def post(
        self,
        record: Record,
        body: bytes,
        on_end: Callable[[Flight], None],
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> Flight:
        """Send a request now, with headers of its own; `on_end` is told when its answer has ended or failed."""
        length = (b"content-length", b"%d" % len(body))
        head = request_head(b"POST", self._target, [*self._headers, *headers, length])
        flight = Flight(record, on_end)
        record.sent_s = time.perf_counter()
        flight.call = self._client.send(head, body, flight)
        flight.timer = asyncio.get_running_loop().call_later(self._timeout_s, flight.time_out)
        return flight


class Flight:
    """One request under way; the receiver of its call."""

    __slots__ = ("_error_body", "_on_end", "_reader", "_status", "call", "record", "timer")

    def __init__(self, record: Record, on_end: Callable[[Flight], None]) -> None:
        self.record = record
        self.call: Call | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._on_end = on_end
        self._reader = AnswerReader(record)
        self._status = 0
        self._error_body = b""

    def on_head(self, status: int, headers: HeaderList) -> None:
        """Take the status, and who answers."""
        self._status = status
        self.record.backend = next((value.decode("latin-1") for name, value in headers if name == _BACKEND), "")

    def on_data(self, data: bytes) -> None:
        """Note the chunks in it; of an answer that is an error, keep the beginning."""
        if self._status == 200:
            self._reader.feed(data, time.perf_counter())
        elif len(self._error_body) < _ERROR_BODY_BYTES:
            self._error_body += data

    def on_end(self) -> None:
        """Judge the answer."""
        if self._status == 200:
            self._reader.close()
        else:
            self.record.fail(f"http {self._status}", error_message(self._error_body))
        self._end()

    def on_error(self, error: UpstreamError) -> None:
        """Note how the connection failed."""
        self.record.fail(error.kind, str(error))
        self._end()

    def time_out(self) -> None:
        """Give it up as too slow."""
        self.give_up("timeout", "took longer than --timeout")

    def give_up(self, kind: str, detail: str) -> None:
        """Close the connection, at which the engine drops the request."""
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
    """Sends the requests of one run.

    Parameters
    ----------
    body
        Writes the body of request `index`.
    on_progress
        Called as each request ends.

    Attributes
    ----------
    records
        All that was sent, in the order of sending; those still under way have `ended_s` 0.
    gave_up
        Whether a closed loop ended early because nothing but failures came.
    """

    def __init__(
        self, wire: Sender, body: Callable[[int], bytes], on_progress: Callable[[Record], None] | None = None
    ) -> None:
        self._wire = wire
        self._body = body
        self._on_progress = on_progress or (lambda _record: None)
        self._flights: set[Flight] = set()
        self._done = asyncio.Event()
        self._next_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._refill: Callable[[], None] | None = None
        self._pending = False  # more are to be sent
        self._failed_in_a_row = 0
        self._stall_s: list[float] = []
        self._start_s = 0.0
        self.records: list[Record] = []
        self.gave_up = False

    async def open_loop(self, due_s: list[float]) -> Health:
        """Send request i when `due_s[i]` seconds have passed, whatever became of the others; return when all ended."""
        begin = self._begin()
        self._pending = bool(due_s)
        bodies = [self._body(index) for index in range(min(len(due_s), _AHEAD))]

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
        """Keep `concurrency` requests under way until `count` were sent or `duration_s` passed; then let them end.

        After a hundred failures in a row it sends no more.
        """
        begin = self._begin()
        bodies = [self._body(index) for index in range(min(count, _AHEAD) if count is not None else concurrency)]
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
        """When the run began, by `time.perf_counter`."""
        return self._start_s

    def stop(self) -> None:
        """Send nothing more and give up what is under way."""
        self._pending = False
        self._refill = None
        if self._next_timer is not None:
            self._next_timer.cancel()
        for flight in list(self._flights):
            flight.give_up("interrupted", "the benchmark was stopped")
        self._check_done()

    def _send(self, index: int, due_s: float, body: bytes) -> None:
        record = Record(index, due_s)
        self.records.append(record)
        self._flights.add(self._wire.post(record, body, self._ended))

    def _ended(self, flight: Flight) -> None:
        self._flights.discard(flight)
        self._failed_in_a_row = self._failed_in_a_row + 1 if flight.record.error is not None else 0
        if self._refill is not None and self._failed_in_a_row >= _GIVE_UP_AFTER:
            self.gave_up, self._pending = True, False  # nothing else slows a closed loop that fails at once
        self._on_progress(flight.record)
        if self._refill is not None and self._pending:
            self._refill()
        self._check_done()

    def _check_done(self) -> None:
        if not self._pending and not self._flights:
            self._done.set()

    def _begin(self) -> tuple[float, float]:
        gc.collect()
        gc.freeze()  # what lives already is not gone through again while chunks arrive
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


_AHEAD = 5_000
"""Bodies written before the run begins; a later one costs its time while chunks arrive."""
