"""What follows in a gateway process from what its pool says of a replica."""

from __future__ import annotations

from backends.backend import Backend, EngineChange
from backends.health import Books
from backends.pool import Listener
from gateway.gateway import Gateway


class ReplicaEvents(Listener):
    """Passes on each event to the part that it is for, as a reload has left it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def went_down(self, backend: Backend) -> None:
        """Retry elsewhere the requests that wait there for a first byte."""
        self._gateway.relay.abandon(backend)

    def became_ready(self, backend: Backend) -> None:
        """Send it requests that wait."""
        self._gateway.relay.ready(backend)

    def was_ejected(self, backend: Backend, duration_s: float, reason: str) -> None:
        """Report the ejection to the peers."""
        self._gateway.peers.note_ejection(backend, duration_s, reason)

    def engine_changed(self, backend: Backend, change: EngineChange) -> None:
        """Have the policy forget what may no longer hold."""
        self._gateway.models[backend.model].engine_changed(backend.name, change)

    def difference_changed(self, backend: Backend) -> None:
        """Have the policy correct what answers show, by what the engine counts."""
        found = backend.difference
        self._gateway.models[backend.model].correct(backend.name, 1.0 if found is None else found.counted / found.shown)

    def reported_implausible(self, backend: Backend, what: str) -> None:
        """Count and log it."""
        self._gateway.relay.metrics.note_implausible(backend, what)

    def books(self, backend: Backend) -> Books:
        """Return what the requests in flight tell of it."""
        return self._gateway.relay.books(backend)
