"""Messages between the worker processes of a gateway, passed on by their parent process.

Draining a replica and the limits of a key apply to all workers. With a single worker, nothing is sent. Nobody waits for
a process that does not read: what others can do without is dropped then.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backends import background
from backends.health import Drain

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway


@dataclass(frozen=True, slots=True)
class Drained:
    """An operator has drained or resumed a replica."""

    model: str
    backend: str
    drained: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """The report of a worker to its peers: requests in flight, use of keys, ejections (`gateway.state.report`)."""

    worker: int
    report: bytes


@dataclass(frozen=True, slots=True)
class Launched:
    """Status of the replicas that the gateway started, by `model/backend`."""

    replicas: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker process has ended, with all of its requests."""

    worker: int


@dataclass(frozen=True, slots=True)
class ResponseStored:
    """A backend has created a response of the Responses API, which it may have stored."""

    response_id: str
    backend: str


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker accepts connections; read by the parent process only."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerAlive:
    """The event loop of a worker runs; read by the parent process only."""


WorkerMessage = Drained | Reported | Launched | WorkerDied | WorkerStarted | WorkerAlive | ResponseStored
_DISPENSABLE = (Reported, WorkerAlive, ResponseStored)
"""What may be lost: it comes again, or costs one request its best backend."""

_MOST_WAITING_BYTES = 2**20
_READ_BYTES = 2**18
_LENGTH_BYTES = 4


class Channel:
    """One end of the messages between a worker and its parent. Sending never waits."""

    def __init__(self, opened: socket.socket, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        opened.setblocking(False)
        self.dropped = 0  # messages that were not sent, since the other process does not read
        self._socket = opened
        self._on_message = on_message  # called with each message that arrives
        self._on_end = on_end  # called when the other process has ended
        self._received = bytearray()
        self._sending = memoryview(b"")  # the rest of the frame that has been begun
        self._needed: deque[bytes] = deque()
        self._dispensable: deque[bytes] = deque()
        self._dispensable_bytes = 0
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(opened, self._read)

    def send(self, message: object) -> None:
        """Send a message; if the other process does not read, the oldest that can be done without are dropped."""
        if not self._is_open:
            return
        data = pickle.dumps(message)
        frame = len(data).to_bytes(_LENGTH_BYTES) + data
        if isinstance(message, _DISPENSABLE):
            self._dispensable.append(frame)
            self._dispensable_bytes += len(frame)
        else:
            self._needed.append(frame)
        self._write()
        while self._dispensable_bytes > _MOST_WAITING_BYTES:
            self._dispensable_bytes -= len(self._dispensable.popleft())
            self.dropped += 1

    def close(self) -> None:
        """Close this end; nothing is sent or received any more."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _write(self) -> None:
        try:
            while self._is_open and (self._sending or self._take()):
                self._sending = self._sending[self._socket.send(self._sending) :]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:  # the other process has ended, which `_read` notices
            self._sending = memoryview(b"")
            self._needed.clear()
            self._dispensable.clear()
            self._dispensable_bytes = 0
        if self._is_open:
            self._loop.remove_writer(self._socket)

    def _take(self) -> bool:
        """Begin with the next frame; return whether there is one."""
        if self._needed:
            self._sending = memoryview(self._needed.popleft())
        elif self._dispensable:
            self._sending = memoryview(self._dispensable.popleft())
            self._dispensable_bytes -= len(self._sending)
        else:
            return False
        return True

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end()
            return
        received = self._received
        received += data
        while len(received) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES])
            if len(received) < end:
                break
            frame = bytes(received[_LENGTH_BYTES:end])
            del received[:end]
            with background.guarded("workers", of="messages"):
                self._on_message(pickle.loads(frame))  # noqa: S301 -- of a process of this gateway


@dataclass(slots=True)
class WorkerMessages:
    """One worker's connection to the other workers.

    Examples
    --------
    >>> sent = []
    >>> messages = WorkerMessages(worker=1, send=sent.append)
    >>> messages.share_drain("llama", "plain", drained=True)
    >>> sent
    [Drained(model='llama', backend='plain', drained=True)]
    """

    worker: int = 0  # number of this worker, from 0
    # Function that sends a message to all other workers; None if there are none.
    send: Callable[[WorkerMessage], None] | None = None
    # Status of the replicas that the gateway started: `pid`, `restarts`, ... by `model/backend`.
    launched: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _writers: dict[int, str] = field(default_factory=dict)  # names of the workers in their reports

    def share_drain(self, model: str, backend: str, *, drained: bool) -> None:
        """Send that an operator has drained or resumed a replica."""
        if self.send is not None:
            self.send(Drained(model, backend, drained))

    def share_response(self, response_id: str, backend: str) -> None:
        """Send which backend created a response that later requests may refer to."""
        if self.send is not None:
            self.send(ResponseStored(response_id, backend))

    def share_report(self, report: bytes) -> None:
        """Send a report of this worker to its peers."""
        if self.send is not None:
            self.send(Reported(self.worker, report))

    def receive(self, message: WorkerMessage, gateway: Gateway) -> None:
        """Apply a message from another worker."""
        match message:
            case Launched(replicas):
                self.launched = replicas
            case Drained(model, name, drained):
                for backend in gateway.pool.of(model):
                    if backend.name == name:
                        gateway.pool.report(backend, Drain(drained))
            case Reported(worker, report):
                self._writers[worker] = gateway.peers.receive(report)
            case ResponseStored(response_id, backend):
                gateway.relay.router.locations.remember(response_id, backend)
            case WorkerDied(worker):
                if (writer := self._writers.pop(worker, None)) is not None:
                    gateway.peers.died(writer)
