"""KV events as a room of the gateway: beside the requests, it tells the policies what engines have evicted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from backends import background
from gateway.relay.observers import EndedExchange, Follower, Observer
from gateway.rooms import Room
from gateway.routing.router import RoutedRequest, Sent
from gateway.telemetry.series import Count, Family

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings
    from gateway.kv_events.cache import EngineCache
    from gateway.service.assembly import Gateway

log = logging.getLogger(__name__)

_Name = tuple[str, str]
"""Model and backend."""
_LATE_S: Final = 30.0
"""An engine with requests that has told nothing for so long is believed no more: it fills blocks meanwhile."""
_POLL_MS: Final = 200
_MOST_MESSAGES: Final = 1000
"""Messages that wait for this process at most, and that are read before those of the next engine."""
_MOST_BYTES: Final = 1 << 24


class KvEventsRoom(Room):
    """Reads the events of the engines whose backends have `kv_events`."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._endpoints: dict[_Name, str] = {}
        self._caches: dict[_Name, EngineCache] = {}
        self._sockets: dict[_Name, tuple[str, Any]] = {}  # of the thread
        self._told: dict[_Name, str] = {}  # what was said last of each
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-events")
        self._reading: asyncio.Task[None] | None = None
        self._known = gateway.metrics.gauge("gateway_kv_events_known")
        self._tokens = gateway.metrics.counter("gateway_prefix_tokens")
        self._messages = gateway.metrics.counter("gateway_kv_events_problems")

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return what is not installed."""
        asked = any(backend.kv_events for model in settings.models.values() for backend in model.backends.values())
        if asked and (find_spec("zmq") is None or find_spec("msgspec") is None):
            how = "pip install '.[kv-events]' in a checkout (deploy/README.md#install)"
            return f"kv_events needs pyzmq and msgspec: {how}"
        return ""

    def follow(self) -> Mapping[str, Follower]:
        """Follow the engines that have events now."""
        self._endpoints = {
            (name, backend): settings.kv_events
            for name, model in self.gateway.settings.models.items()
            for backend, settings in model.backends.items()
            if settings.kv_events is not None
        }
        sent = self.gateway.relay.router.sent
        return {name: _Comparison(name, self._tokens, sent) for name in {name for name, _ in self._endpoints}}

    def start(self) -> None:
        """Start reading, where there is something to read."""
        self._reading = background.keep_running("kv events", self._read)

    async def stop(self) -> None:
        """End it."""
        if self._reading is not None:
            self._reading.cancel()
        self._thread.submit(self._subscribe, {})
        self._thread.shutdown(wait=False)

    def tick(self) -> None:
        """Report to the policies how long ago the prefixes were used that each engine has evicted."""
        now_s, in_use_s = time.monotonic(), self._in_use_s() if self._caches else {}
        for name, cache in [*self._caches.items()]:
            model = self.gateway.models.get(name[0])
            if model is None or name[1] not in model.upstreams or name not in self._endpoints:
                continue
            is_late = model.upstreams[name[1]].backend.in_flight > 0 and now_s - cache.heard_s > _LATE_S
            is_known = cache.is_known and not is_late
            unused_s = max(now_s - cache.evicted_s, in_use_s.get(name, 0.0)) if is_known else None
            model.evicted(name[1], unused_s, is_full=cache.is_full)
            self._known.labels(*name).set(is_known)
            state = "by its events" if is_known else "by what was sent there"
            if self._told.get(name) != state:
                self._told[name] = state
                log.info("%s/%s: what it has cached is expected %s", *name, state)

    def _in_use_s(self) -> dict[_Name, float]:
        """Return for how long the oldest request of each engine has been in flight: what it uses is not evicted."""
        now_s, found = time.perf_counter(), dict[_Name, float]()
        for exchange in self.gateway.relay.exchanges:
            if exchange.routed is not None and exchange.attempt is not None:
                name = exchange.routed.model.name, exchange.attempt.decision.backend
                found[name] = max(found.get(name, 0.0), now_s - exchange.delivery.times.arrived_s)
        return found

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._endpoints or self._sockets:
                await loop.run_in_executor(self._thread, self._read_some)
            else:
                await asyncio.sleep(1e-3 * _POLL_MS)

    # In the thread

    def _read_some(self) -> None:
        import zmq

        self._subscribe(self._endpoints)
        poller = zmq.Poller()
        for _, socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(_POLL_MS))
        for name, (_, socket) in self._sockets.items():
            cache = self._caches[name]
            for _ in range(_MOST_MESSAGES if socket in ready else 0):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                before = cache.gaps, cache.nonsense
                cache.read(frames, time.monotonic())
                for kind, was, now in zip(("gap", "nonsense"), before, (cache.gaps, cache.nonsense), strict=True):
                    if now > was:
                        self._messages.labels(*name, kind).inc()

    def _subscribe(self, endpoints: Mapping[_Name, str]) -> None:
        """Open and close sockets, so that there is one for each endpoint."""
        import zmq

        from gateway.kv_events.cache import EngineCache

        for name, (endpoint, socket) in [*self._sockets.items()]:
            if endpoints.get(name) != endpoint:
                socket.close(linger=0)
                del self._sockets[name], self._caches[name]
        for name in endpoints.keys() - self._sockets.keys():
            socket = zmq.Context.instance().socket(zmq.SUB)
            socket.set(zmq.RCVHWM, _MOST_MESSAGES)
            socket.set(zmq.MAXMSGSIZE, _MOST_BYTES)
            socket.set(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(endpoints[name])
            self._caches[name] = EngineCache()
            self._sockets[name] = endpoints[name], socket


class _Comparison(Observer):
    """Compares the tokens of prompts that were expected in caches with those that engines found there.

    Other gateways are told of a prompt again at its end, until which it was in use.
    """

    needs_answer = False

    def __init__(self, model: str, tokens: Family[Count], sent: Sent | None) -> None:
        self._model = model
        self._tokens = tokens
        self._sent = sent

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer:
        """Return itself, which needs to know only the end of each request."""
        return self

    def on_end(self, ended: EndedExchange) -> None:
        """Count the tokens of a prompt, if the answer tells how many of them were cached."""
        outcome = ended.outcome
        if self._sent is not None and outcome is not None and ended.upstream is not None and outcome.request.prefix:
            self._sent.append((ended.upstream.backend, outcome.request))
        if outcome is None or outcome.cached_tokens is None or not outcome.decision.cached_by:
            return
        decision, cached = outcome.decision, outcome.cached_tokens
        counts = {
            "found": min(cached, decision.cached_tokens),
            "missed": decision.cached_tokens - cached,
            "unexpected": cached - decision.cached_tokens,
        }
        for what, tokens in counts.items():
            if tokens > 0:
                self._tokens.labels(self._model, decision.backend, decision.cached_by, what).inc(tokens)
