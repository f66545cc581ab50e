"""Serving of requests for text: composition on a thread, playback on the engine, and clients that leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

import orjson

from backends.drafting.script import Script
from backends.simulator.drafting.proposers import Proposer
from backends.simulator.server.answer import Answer, sampling
from backends.simulator.server.composing import Served
from backends.simulator.server.driver import Driver
from backends.simulator.server.http import Exchange
from backends.simulator.server.playback import Play
from backends.simulator.server.protocol import RequestError, SampledBody, busy, read_json, validate
from backends.simulator.server.rendering import DONE, Head, spaced_event


class Choices(Protocol):
    """The composed answers to a request."""

    @property
    def answers(self) -> Sequence[Answer]:
        """The answers to play."""
        ...


class Renderer(Protocol):
    """Writer of an answer while it is played."""

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        """Write the tokens from `start` to `end` of one step."""

    def done(self, plays: Sequence[Play]) -> None:
        """End the answer, all choices of which are complete."""


B = TypeVar("B", bound=SampledBody)
C = TypeVar("C", bound=Choices)


@dataclass(frozen=True, slots=True)
class Api(Generic[B, C]):
    """One of vLLM's APIs for text."""

    prefix: str  # prefix of answer ids, with the hyphen or underscore
    read: Callable[[Any], B]  # function from the request's JSON to its body; may raise `RequestError`, as may `compose`
    compose: Callable[[Served, B], C]  # function from the body to the content of the answers
    # whole, stream: functions that write an answer in one piece, and step by step.
    whole: Callable[[Head, C, Sequence[Play]], dict[str, Any]]
    stream: Callable[[Exchange, Head, C], Renderer]
    error: Callable[[RequestError], dict[str, Any]] = RequestError.body  # function that formats an error


class TextService:
    """Handler of the requests for text of one replica."""

    def __init__(
        self,
        served: Served,
        driver: Driver,
        proposer: Proposer,
        executor: Executor,
        fingerprint: str,
        max_queued: int | None,
    ) -> None:
        self.in_flight = 0
        self._served = served
        self._driver = driver
        self._proposer = proposer
        # Executor with one thread (proposers are stateful), on which answers are composed, so that running streams stay
        # on time.
        self._executor = executor
        self._fingerprint = fingerprint
        # Largest number of requests waiting for the engine; more are refused. None for no limit.
        self._max_queued = max_queued
        self._loop = asyncio.get_running_loop()

    def handle(self, api: Api[B, C], exchange: Exchange) -> None:
        """Answer a request, at once if it is refused, else when the engine has played it."""
        self.in_flight += 1
        request = exchange.request
        try:
            body = api.read(read_json(request.headers.get("content-type", ""), request.body))
            if body.temperature is None:
                body.temperature = self._served.default_temperature
            head = self._head(api.prefix, exchange, body)
        except RequestError as error:
            self._refuse(api, exchange, error)
            return
        composing = self._loop.run_in_executor(self._executor, self._compose, api, body)
        exchange.on_gone = composing.cancel
        composing.add_done_callback(partial(self._play, api, exchange, head, body))

    def _head(self, prefix: str, exchange: Exchange, body: SampledBody) -> Head:
        asked_id = exchange.request.headers.get("x-request-id") or body.request_id or uuid4().hex[:16]
        name = self._served.name_for(body.model)
        return Head(prefix + asked_id, int(time.time()), name, self._fingerprint, self._served.num_speculative_tokens)

    def _compose(self, api: Api[B, C], body: B) -> tuple[C, list[Script]]:
        choices = api.compose(self._served, body)
        temperature = sampling(body, 0).temperature
        return choices, [
            self._proposer.script(answer.prompt_ids, answer.ids, temperature, answer.kind) for answer in choices.answers
        ]

    def _play(
        self,
        api: Api[B, C],
        exchange: Exchange,
        head: Head,
        body: B,
        composing: asyncio.Future[tuple[C, list[Script]]],
    ) -> None:
        if exchange.gone or composing.cancelled():
            self.in_flight -= 1
            return
        try:
            choices, scripts = composing.result()
        except RequestError as error:
            self._refuse(api, exchange, error)
            return
        answers, tallies = choices.answers, self._driver.tallies
        if self._max_queued is not None and self._driver.load().waiting + len(answers) > self._max_queued:
            tallies.rejected += len(answers)
            self._refuse_busy(api, exchange, streaming=bool(body.stream))
            return
        renderer: Renderer
        if body.stream:
            exchange.start()
            renderer = api.stream(exchange, head, choices)
        else:
            renderer = _Whole(exchange, partial(api.whole, head, choices))
        generation = _Generation(self._driver, renderer, len(answers), self._count_finished)
        exchange.on_gone = generation.abort
        temperature = sampling(body, 0).temperature
        for index, (answer, script) in enumerate(zip(answers, scripts, strict=True)):
            generation.plays.append(self._driver.play(index, answer, script, generation, temperature))
            tallies.request_n.observe(body.n or 1)
            if body.max_tokens is not None:
                tallies.request_max_tokens.observe(body.max_tokens)

    def _refuse_busy(self, api: Api[B, C], exchange: Exchange, *, streaming: bool) -> None:
        """Refuse a request because the queue is full; a stream gets an error event, as its status has been sent."""
        if not streaming:
            self._refuse(api, exchange, busy())
            return
        self.in_flight -= 1
        exchange.start()
        exchange.end(spaced_event(api.error(busy())) + DONE)

    def _refuse(self, api: Api[B, C], exchange: Exchange, error: RequestError) -> None:
        self.in_flight -= 1
        exchange.respond(error.code, orjson.dumps(api.error(error)))

    def _count_finished(self) -> None:
        self.in_flight -= 1


class _Whole:
    """Writer of an answer in one piece."""

    def __init__(self, exchange: Exchange, body: Callable[[Sequence[Play]], dict[str, Any]]) -> None:
        self._exchange = exchange
        self._body = body

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        """Ignore partial answers."""

    def done(self, plays: Sequence[Play]) -> None:
        """Send the complete answer."""
        self._exchange.respond(200, orjson.dumps(self._body(plays)))


class _Generation:
    """The choices of one request while they are played."""

    def __init__(self, driver: Driver, renderer: Renderer, count: int, on_done: Callable[[], None]) -> None:
        self.plays: list[Play] = []
        self._driver = driver
        self._renderer = renderer
        self._left = count
        self._on_done = on_done

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        """Pass tokens on; after the last one, end the answer."""
        self._renderer.on_tokens(play, start, end)
        if play.finished:
            self._left -= 1
            if self._left == 0:
                self._on_done()
                self._renderer.done(self.plays)

    def abort(self) -> None:
        """Cancel the unfinished choices, because the client has disconnected."""
        if self._left:
            self._left = 0
            self._on_done()
            for play in self.plays:
                self._driver.cancel(play)


def reader(shape: type[B]) -> Callable[[Any], B]:
    """Return a function that parses the JSON of a request as `shape`."""
    return partial(validate, shape)
