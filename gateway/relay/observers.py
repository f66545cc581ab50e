"""The observers of an exchange, such as the recorder and shadow drafting. What is off costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from mypy_extensions import mypyc_attr

from backends import background
from backends.backend import Backend
from gateway.dialects.sse import EventStream
from gateway.dialects.usage import Usage
from gateway.routing.keys import Client
from gateway.routing.model import Upstream
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.sticky import Home, ResponseLocations
from policies.policy import Decision, Outcome


class EndedExchange:
    """The record of an exchange that has ended; times are by `time.perf_counter`, 0.0 for what did not happen."""

    routed: RoutedRequest

    def __init__(self, request_id: bytes, client: Client, arrived_s: float) -> None:
        self.request_id = request_id  # for the client and in records
        self.client = client
        # decision, upstream: None if no backend was up.
        self.decision: Decision | None = None
        self.upstream: Upstream | None = None
        self.retried_from = ""  # name of the backend that failed first; empty without a retry
        self.status = 0  # HTTP status of the answer; 0 before its head
        self.label = ""  # one of `gateway.routing.series.OUTCOMES`
        self.arrived_s = arrived_s  # arrival of the request
        # first_s, last_s: first and last chunk of the answer, the latter only of a stream; ended_s: its end; waited_s:
        # seconds in the gateway's queue.
        self.first_s = self.last_s = self.ended_s = self.waited_s = 0.0
        self.usage: Usage | None = None  # as the engine reported it; None without a report
        self.stream: EventStream | None = None  # the events of a stream; None for other answers
        self.outcome: Outcome | None = None  # None if the request was not answered
        self.unread_bytes = 0  # of an answer in one piece that was passed on without reading its usage
        self.was_paused = False  # whether the client was ever too slow for the answer
        # Name of the backend that began a stream which another one resumed, and the tokens of the answer until then.
        self.rescued_from = ""
        self.rescued_at = 0
        # Tokens that the key is charged: prompt, answer, and their sum.
        self.prompt_tokens = self.output_tokens = self.tokens = 0

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer, if known; else 0."""
        if self.outcome is not None:
            return self.outcome.output_tokens
        return 0 if self.usage is None else self.usage.output_tokens or 0

    def conclude(self, usage: Usage | None, outcome: Outcome | None, prompt_tokens: int, output_tokens: int) -> None:
        """Store the account of the exchange: see `gateway.relay.accounting.account_of`."""
        self.usage, self.outcome = usage, outcome
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.tokens = prompt_tokens + output_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class Observer:
    """Follows one exchange. Each event does nothing unless a subclass overrides it.

    Attributes
    ----------
    needs_answer
        Whether it is useless without the answer, which is costly to see where a proxy carries it.
    """

    needs_answer: ClassVar[bool] = True

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Handle the choice of a backend, just before each attempt to send the request."""

    def on_retry(self, kind: str) -> None:
        """Handle a failed attempt, before the next one; `kind` is the failure as the metrics name it."""

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Handle complete events of a stream, just before they are passed on."""

    def on_answer(self, body: bytes, document: object) -> None:
        """Handle a complete answer in one piece, with its JSON if the request succeeded."""

    def on_end(self, ended: EndedExchange) -> None:
        """Handle the end, after the answer has been passed on."""


class Traced(Observer):
    """An observer that makes the gateway part of the trace of a request."""

    def __init__(self, lines: bytes) -> None:
        self.lines = lines  # header lines for the next backend


class Follower(Protocol):
    """Provides observers of exchanges."""

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer | None:
        """Return an observer of the exchange of a request; None to ignore it."""


def follow(followers: Sequence[Follower], routed: RoutedRequest, body: bytes) -> list[Observer]:
    """Return the observers that the followers want for a request."""
    observers: list[Observer] = []
    for follower in followers:
        try:
            if (observer := follower.follow(routed, body)) is not None:
                observers.append(observer)
        except Exception as error:  # noqa: BLE001
            _note(error, follower)
    return observers


def tell(observers: list[Observer], event: Callable[[Observer], None]) -> None:
    """Notify all observers of an event; an exception in one is recorded, and does not affect the request."""
    for observer in observers:
        try:
            event(observer)
        except Exception as error:  # noqa: BLE001
            _note(error, observer)


def tell_send(observers: list[Observer], decision: Decision, candidates: Sequence[Backend]) -> None:
    """Notify all observers of the chosen backend; like `tell`, but without creating a function per request."""
    for observer in observers:
        try:
            observer.on_send(decision, candidates)
        except Exception as error:  # noqa: BLE001
            _note(error, observer)


def tell_chunk(observers: list[Observer], data: bytes, now_s: float) -> None:
    """Notify all observers of events of a stream; like `tell_send`, without creating a function."""
    for observer in observers:
        try:
            observer.on_chunk(data, now_s)
        except Exception as error:  # noqa: BLE001
            _note(error, observer)


def tell_answer(observers: list[Observer], body: bytes, document: object) -> None:
    """Notify all observers of a complete answer that was not streamed."""
    for observer in observers:
        try:
            observer.on_answer(body, document)
        except Exception as error:  # noqa: BLE001
            _note(error, observer)


def tell_end(observers: list[Observer], ended: EndedExchange) -> None:
    """Notify all observers that the exchange has ended."""
    for observer in observers:
        try:
            observer.on_end(ended)
        except Exception as error:  # noqa: BLE001
            _note(error, observer)


def _note(error: Exception, failed: object) -> None:
    background.note("observers", error, of=type(failed).__name__)


class LocationObserver(Observer):
    """Records which backend holds a stored response, and its tokens including all before it."""

    def __init__(self, locations: ResponseLocations, model: str, conversation: str = "") -> None:
        self._locations = locations
        self._conversation = conversation  # id of the conversation that the request continues; empty without one
        self._home = Home(model, "")
        self._response: str | None = None  # its id; None before the answer

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Keep the name of the backend."""
        self._home = Home(self._home.model, decision.backend)

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Read the location from the first events."""
        if self._response is None:
            self.on_answer(data, None)

    def on_answer(self, body: bytes, document: object) -> None:
        """Read the location from the answer."""
        self._response = self._locations.note_answer(body, self._home)

    def on_end(self, ended: EndedExchange) -> None:
        """Record the tokens of the stored response and conversation, if the engine reported usage."""
        usage = ended.usage
        if usage is not None and usage.prompt_tokens is not None and usage.output_tokens is not None:
            for stored in (self._response, self._conversation):
                if stored:
                    self._locations.note_tokens(stored, usage.prompt_tokens + usage.output_tokens)
