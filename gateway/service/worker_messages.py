"""What the worker processes of one gateway tell each other, through the process that started them.

A drain must hold in all of them, and a key's limits are for the gateway, not for a worker. With one worker there is
nobody to tell, and the same calls do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.relay.limits import KeyUse, Limits

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway


@dataclass(frozen=True, slots=True)
class Drained:
    """A replica was drained, or let back in, by an operator."""

    model: str
    backend: str
    drained: bool


@dataclass(frozen=True, slots=True)
class KeysUsed:
    """What keys used at one worker since it last told."""

    worker: int
    used: Mapping[str, KeyUse]


@dataclass(frozen=True, slots=True)
class Launched:
    """How the replicas are that the gateway started, by `model/backend`."""

    replicas: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker is gone, and with it what was under way there."""

    worker: int


@dataclass(frozen=True, slots=True)
class ResponseStored:
    """A response of the responses API was made by a backend, which may have stored it."""

    response_id: str
    backend: str


WorkerMessage = Drained | KeysUsed | Launched | WorkerDied | ResponseStored


@dataclass(slots=True)
class WorkerMessages:
    """The other workers, as one of them sees them.

    Parameters
    ----------
    worker
        Number of this worker, from 0.
    tell
        Sends a note to all others; None if there are none.

    Attributes
    ----------
    launched
        How the replicas are that the gateway started: `pid`, `restarts`, ... by `model/backend`.
    """

    worker: int = 0
    tell: Callable[[WorkerMessage], None] | None = None
    launched: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def share_drain(self, model: str, backend: str, *, drained: bool) -> None:
        """Tell that an operator drained a replica or let it back in."""
        if self.tell is not None:
            self.tell(Drained(model, backend, drained))

    def share_response(self, response_id: str, backend: str) -> None:
        """Tell where a response was made that later requests may refer to."""
        if self.tell is not None:
            self.tell(ResponseStored(response_id, backend))

    def share_limits(self, limits: Limits) -> None:
        """Tell what keys used here since the last time."""
        if self.tell is not None and (used := limits.take_used()):
            self.tell(KeysUsed(self.worker, used))

    def hear(self, note: WorkerMessage, gateway: Gateway) -> None:
        """Do what a note from the others asks for."""
        match note:
            case Launched(replicas):
                self.launched = replicas
            case Drained(model, name, drained):
                for backend in gateway.pool.of(model):
                    if backend.name == name:
                        gateway.pool.set_drained(backend, drained=drained)
            case KeysUsed(worker, used):
                for key, use in used.items():
                    if (client := gateway.relay.keyring.named(key)) is not None:
                        gateway.relay.limits.used_elsewhere(worker, client, use)
            case ResponseStored(response_id, backend):
                gateway.relay.router.locations.remember(response_id, backend)
            case WorkerDied(worker):
                gateway.relay.limits.worker_died(worker)
