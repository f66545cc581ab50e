"""Requests that come before any replica of their model has been up: they wait for the first one, in place of a 503."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from backends import background
from backends.backend import Backend, State
from gateway.dialects.errors import GatewayError

if TYPE_CHECKING:
    from gateway.relay.exchange import Exchange

logger = logging.getLogger(__name__)

LONGEST_S: Final = 120.0
_MOST: Final = 256
_MOST_BYTES: Final = 64 << 20


class FirstStart:
    """The requests that wait for the first replica of a model, until one has been up."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[Exchange, float]]] = {}  # with the time since which it waits, by model
        self._started: set[str] = set()  # models of which a replica has been up

    def hold(self, exchange: Exchange) -> bool:
        """Keep a request that no replica can take yet; return whether it waits."""
        relay, routed = exchange.relay, exchange.routed
        assert routed is not None
        model = routed.model.name
        if model in self._started or all(each.state is not State.STARTING for each in relay.router.members(routed)):
            return False
        waiting = [(each, since_s) for each, since_s in self._waiting.get(model, ()) if each in relay.exchanges]
        held = sum(len(each.inbound.body) for each, _ in waiting) + len(exchange.inbound.body)
        if len(waiting) >= _MOST or held > _MOST_BYTES:
            return False
        if not waiting:
            logger.info("%s: requests wait for its first replica, for at most %.0f s", model, LONGEST_S)
        self._waiting[model] = [*waiting, (exchange, time.perf_counter())]
        return True

    def ready(self, backend: Backend) -> None:
        """Send what waits for a model, since one of its replicas is up."""
        self._started.add(backend.model)
        for exchange, since_s in self._waiting.pop(backend.model, ()):
            with background.guarded("requests"):
                if exchange in exchange.relay.exchanges:
                    exchange.delivery.times.waited_s = time.perf_counter() - since_s
                    _send(exchange)

    def end_overdue(self, now_s: float) -> None:
        """End the requests that have waited for as long as they may."""
        for model, waiting in list(self._waiting.items()):
            self._waiting[model] = [each for each in waiting if now_s - each[1] < LONGEST_S]
            for exchange, since_s in waiting:
                if now_s - since_s >= LONGEST_S and exchange in exchange.relay.exchanges:
                    _send(exchange)


def _send(exchange: Exchange) -> None:
    """Send a request that has waited, or say why it cannot be sent."""
    try:
        exchange.send(exchange.candidates(()))
    except GatewayError as error:
        exchange.end_with_error(error)
    except Exception:  # noqa: BLE001 -- a defect of the gateway, which must be answered too
        exchange.end_with_error(exchange.defect())
