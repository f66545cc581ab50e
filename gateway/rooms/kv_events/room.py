"""The room that reports to the policies, in the background, what engines have evicted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from backends import background
from backends.background import Seldom
from gateway.gateway import Room
from gateway.relay.observers import EndedExchange, Follower, Observer
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.router import Sent
from gateway.telemetry.series import Count, Family

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings
    from gateway.gateway import Gateway
    from gateway.rooms.kv_events.cache import EngineCache

log = logging.getLogger(__name__)

_Name = tuple[str, str]
"""Model and backend."""
_LATE_S: Final = 30.0
"""An engine with requests that is silent for this long is no longer trusted: it must have filled blocks."""
_HELD_UP_S: Final = 1.0
"""Longest delay of a report to a policy on a busy machine; the policy counts back from its arrival."""
_POLL_MS: Final = 200
_HEARTBEAT_MS: Final = 10_000
"""Interval of heartbeats: a connection to a vanished host would stay open forever."""
_MOST_WAITING: Final = 8
"""Most messages of an engine that wait in this process; further ones wait at the engine."""
_TURN_S: Final = 0.02
"""Seconds for which one engine is read before the next gets its turn; a message is read to its end."""
_MOST_BLOCKS: Final = 1 << 20
"""Most blocks tracked for all engines together; beyond that, the engine with the most is not followed."""


@dataclass(slots=True)
class _Engine:
    """An engine whose events are read."""

    endpoint: str
    cache: EngineCache
    socket: Any
    said: str = ""  # last log message about it


class KvEventsRoom(Room):
    """Reads the events of the engines whose backends have `kv_events`."""

    order = 8
    work = ("kv events",)
    own_keys = ("kv_events",)

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._endpoints: dict[_Name, str] = {}
        self._engines: dict[_Name, _Engine] = {}  # changed only by the thread
        self._logged = Seldom()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-events")
        self._known = gateway.metrics.gauge("gateway_kv_events_known")
        self._tokens = gateway.metrics.counter("gateway_prefix_tokens")
        self._messages = gateway.metrics.counter("gateway_kv_events_problems")

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return which dependencies are missing."""
        asked = any(backend.kv_events for model in settings.models.values() for backend in model.backends.values())
        if asked and (find_spec("zmq") is None or find_spec("msgspec") is None):
            how = "pip install '.[kv-events]' in a checkout (deploy/README.md#install)"
            return f"kv_events needs pyzmq and msgspec: {how}"
        return ""

    def follow(self) -> Mapping[str, Follower]:
        """Follow the engines that have events under the current settings."""
        before = self._endpoints
        self._endpoints = {
            (name, backend): settings.kv_events
            for name, model in self.gateway.settings.models.items()
            for backend, settings in model.backends.items()
            if settings.kv_events is not None
        }
        for name, backend in before.keys() - self._endpoints.keys():
            if (model := self.gateway.models.get(name)) is not None:
                model.evicted(backend, None, is_full=False)
        sent = self.gateway.relay.router.sent
        return {name: _Comparison(name, self._tokens, sent) for name in {name for name, _ in self._endpoints}}

    def start(self) -> None:
        """Start to read events."""
        self.running = background.keep_running("kv events", self._read)

    async def stop(self) -> None:
        """Stop reading, and close the sockets."""
        await super().stop()
        self._thread.submit(self._subscribe, {})
        self._thread.shutdown(wait=False)

    def tick(self) -> None:
        """Report to the policies how long each engine's evicted blocks had been unused."""
        now_s, in_use_s = time.monotonic(), self._in_use_s() if self._engines else {}
        for name, engine in [*self._engines.items()]:
            model, cache = self.gateway.models.get(name[0]), engine.cache
            if model is None or name[1] not in model.upstreams or name not in self._endpoints:
                continue
            is_late = model.upstreams[name[1]].backend.in_flight > 0 and now_s - cache.heard_s > _LATE_S
            is_known = cache.is_known and not is_late
            unused_s = max(now_s - cache.evicted_s, in_use_s.get(name, 0.0)) if is_known else None
            model.evicted(name[1], unused_s, is_full=cache.is_full)
            self._known.labels(*name).set(is_known)
            said = "by its events" if is_known else "by what was sent there"
            if engine.said != said and self._logged.may_say((name, said)):
                engine.said = said
                log.info("%s/%s: what it has cached is expected %s", *name, said)

    def _in_use_s(self) -> dict[_Name, float]:
        """Return the age of each engine's oldest request in flight, whose blocks are not evicted."""
        now_s, found = time.perf_counter(), dict[_Name, float]()
        for exchange in self.gateway.relay.exchanges:
            if (attempt := exchange.attempt) is not None:
                name = exchange.routed.model.name, attempt.upstream.backend.name
                found[name] = max(found.get(name, 0.0), now_s - exchange.arrived_s + _HELD_UP_S)
        return found

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._endpoints or self._engines:
                await loop.run_in_executor(self._thread, self._read_some)
            else:
                await asyncio.sleep(1e-3 * _POLL_MS)

    # In the thread

    def _read_some(self) -> None:
        """Read what engines have sent, for at most half of the time: the rest is for requests."""
        import zmq

        self._subscribe(self._endpoints)
        poller = zmq.Poller()
        for engine in self._engines.values():
            poller.register(engine.socket, zmq.POLLIN)
        ready, began_s = dict(poller.poll(_POLL_MS)), time.monotonic()
        for name, engine in self._engines.items():
            if engine.socket in ready:
                with background.guarded("kv events", of="/".join(name)):
                    self._read_turn(name, engine)
        caches = [engine.cache for engine in self._engines.values()]
        while sum(map(len, caches)) > _MOST_BLOCKS:
            max(caches, key=len).give_up()
        time.sleep(time.monotonic() - began_s)

    def _read_turn(self, name: _Name, engine: _Engine) -> None:
        """Read from one engine as much as its turn allows."""
        import zmq

        cache, now_s = engine.cache, time.monotonic()
        end_s = now_s + _TURN_S
        with suppress(zmq.Again):
            while now_s < end_s:
                cache.read(engine.socket.recv_multipart(zmq.NOBLOCK), now_s)
                now_s = time.monotonic()
        for problem in cache.problems:
            self._messages.labels(*name, problem).inc()
        cache.problems.clear()

    def _subscribe(self, endpoints: Mapping[_Name, str]) -> None:
        """Open and close sockets, so that there is one for each endpoint."""
        from gateway.rooms.kv_events.cache import EngineCache

        for name, engine in [*self._engines.items()]:
            if endpoints.get(name) != engine.endpoint:
                engine.socket.close(linger=0)
                del self._engines[name]
        for name in endpoints.keys() - self._engines.keys():
            with background.guarded("kv events", of="/".join(name)):  # a socket that cannot be opened is retried
                self._engines[name] = _Engine(endpoints[name], EngineCache(), _subscribed(endpoints[name]))


def _subscribed(endpoint: str) -> Any:
    """Return a socket that receives what an engine publishes."""
    import zmq

    from gateway.rooms.kv_events.cache import MOST_BYTES

    socket: Any = zmq.Context.instance().socket(zmq.SUB)
    try:
        socket.set(zmq.RCVHWM, _MOST_WAITING)
        socket.set(zmq.MAXMSGSIZE, MOST_BYTES)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.subscribe(b"")
        socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket


class _Comparison(Observer):
    """Compares the prompt tokens expected in caches with those that engines found there.

    At its end, a prompt is reported to other gateways again, since it was in use until then.
    """

    needs_answer = False

    def __init__(self, model: str, tokens: Family[Count], sent: Sent | None) -> None:
        self._model = model
        self._tokens = tokens
        self._sent = sent

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer:
        """Return itself: it needs only the end of each request."""
        return self

    def on_end(self, ended: EndedExchange) -> None:
        """Count the tokens of a prompt, if the answer says how many were cached."""
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
