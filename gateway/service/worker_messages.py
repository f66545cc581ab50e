"""Messages between the worker processes of a gateway, passed on by their parent process.

Draining a replica and the limits of a key apply to all workers. With a single worker, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway


@dataclass(frozen=True, slots=True)
class Drained:
    """An operator has drained or resumed a replica."""

    model: str
    backend: str
    drained: bool
    move: bool = False


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


WorkerMessage = Drained | Reported | Launched | WorkerDied | WorkerStarted | ResponseStored


@dataclass(slots=True)
class WorkerMessages:
    """One worker's connection to the other workers.

    Parameters
    ----------
    worker
        Number of this worker, from 0.
    send
        Function that sends a message to all other workers; None if there are none.

    Attributes
    ----------
    launched
        Status of the replicas that the gateway started: `pid`, `restarts`, ... by `model/backend`.

    Examples
    --------
    >>> sent = []
    >>> messages = WorkerMessages(worker=1, send=sent.append)
    >>> messages.share_drain("llama", "plain", drained=True)
    >>> sent
    [Drained(model='llama', backend='plain', drained=True, move=False)]
    """

    worker: int = 0
    send: Callable[[WorkerMessage], None] | None = None
    launched: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _writers: dict[int, str] = field(default_factory=dict)  # names of the workers in their reports

    def share_drain(self, model: str, backend: str, *, drained: bool, move: bool = False) -> None:
        """Send that an operator has drained or resumed a replica; `move` as in `RelayContext.move`."""
        if self.send is not None:
            self.send(Drained(model, backend, drained, move))

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
            case Drained(model, name, drained, move):
                for backend in gateway.pool.of(model):
                    if backend.name == name:
                        gateway.pool.set_drained(backend, drained=drained)
                        if move:
                            gateway.relay.move(backend)
            case Reported(worker, report):
                self._writers[worker] = gateway.peers.receive(report)
            case ResponseStored(response_id, backend):
                gateway.relay.router.locations.remember(response_id, backend)
            case WorkerDied(worker):
                if (writer := self._writers.pop(worker, None)) is not None:
                    gateway.peers.died(writer)
