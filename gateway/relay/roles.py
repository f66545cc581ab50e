"""The interfaces between the parts of the relay: each knows the others by these roles, not by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from backends.backend import Backend
from backends.http.client import Call
from backends.http.receiver import Receiver, UpstreamError
from gateway.dialects.errors import GatewayError
from gateway.dialects.sse import EventStream
from gateway.dialects.usage import Usage
from gateway.http.headers import lines_of, request_id_lines
from gateway.http.paths import format_of
from gateway.http.reply import Source
from gateway.relay.failures import Outlook
from gateway.relay.observers import Traced
from gateway.relay.waiting.shares import Charge
from gateway.routing.access import RequestHeaders
from gateway.routing.model import Upstream
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.router import Router


class Reply(Protocol):
    """The client's side of an exchange, implemented by a frontend."""

    def answered_by(self, source: Source) -> None:
        """Set the source of the answer, to notify when the client is slow, or has gone."""

    def head(self, status: int, lines: bytes) -> None:
        """Begin the answer with its status and header lines."""

    def data(self, chunk: bytes) -> None:
        """Send bytes of the body immediately."""

    def end(self) -> None:
        """End the answer."""

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a complete answer; `lines` lack its content length."""

    def abort(self) -> None:
        """Close the connection, which shows the client that the answer is incomplete."""


def send_error(reply: Reply, error: GatewayError, path: str, request_id: bytes, lines: bytes = b"") -> None:
    """Answer with an error in the format of a path's API; `lines` are additional header lines."""
    lines = lines_of(error.headers()) + request_id_lines(path, request_id) + lines
    reply.whole(error.status, lines, error.body(format_of(path)))


class Waiter(Protocol):
    """A request that may have to wait, as seen by its model's queue and `gateway.relay.waiting.first_start`."""

    request: RequestHeaders
    body: bytes
    routed: RoutedRequest
    is_open: bool  # False once it has ended

    def members(self) -> Sequence[Backend]:
        """Return the backends that can serve it, whatever their state."""

    def candidates(self, tried: tuple[str, ...], *, may_try: bool = True) -> list[Backend]:
        """Return the backends to which it may be sent, without those tried; raise if there is none."""

    def take_turn(self, waited_s: float, candidates: list[Backend] | None = None, charge: Charge | None = None) -> None:
        """Send it after a wait to one of the candidates, by default any; `charge` is what its client was charged."""

    def end_with_error(self, error: GatewayError) -> None:
        """End it with an error."""


class Ongoing(Waiter, Protocol):
    """An exchange in flight, as seen by the process."""

    arrived_s: float

    @property
    def attempt(self) -> Streaming | None:
        """The current attempt; None before the first."""

    def backend_is_down(self, backend: Backend) -> None:
        """Retry if this exchange waits for the first byte of a backend that is down."""

    def check_silence(self, now_s: float) -> None:
        """Handle a backend that has been silent for too long."""


class Silence(NamedTuple):
    """How long a backend has been silent on a request."""

    seconds: float
    prompt_tokens: int  # of the prompt, if none of the answer has arrived; else 0


class Rescued(NamedTuple):
    """A stream that another backend resumed."""

    backend: str  # name of the one that began it
    tokens: int  # of the answer until then
    usage: Usage  # as far as known without the engine's report


class Streaming(Protocol):
    """An attempt, as seen by the process and by a rescue of its stream."""

    request_id: bytes
    upstream: Upstream  # the backend

    def silence_of(self, backend: Backend, now_s: float) -> Silence | None:
        """Return how long a backend has been silent on this request; None if it is not expected to answer."""

    def leave_for(self, candidates: list[Backend]) -> Streaming:
        """Cancel the call, and return an attempt at one of the candidates; its `ask` must follow."""

    def ask(self, target: bytes, body: bytes, receiver: Receiver) -> None:
        """Send a request to the backend; its answer goes to a receiver."""

    def on_data(self, data: bytes) -> None:
        """Pass events on to the client."""

    def cancel(self) -> None:
        """Cancel the call; nothing more of the answer is read."""

    def on_end(self) -> None:
        """End the stream."""

    def on_error(self, error: UpstreamError) -> None:
        """Handle a failure of the backend."""

    def give_up(self, upstream: Upstream, message: str) -> None:
        """End the stream with the error of a backend that failed before."""


class Rescuer(Protocol):
    """Resumes the stream of one request at other backends if its backend fails: `gateway.rooms.rescue`."""

    left: list[str]  # the backends that failed in the middle of the stream
    is_waiting: bool  # whether the backend that should resume has not sent anything yet

    @property
    def body(self) -> bytes | None:
        """The body to send in place of the request's; None if no other backend could resume it."""

    @property
    def has_ids(self) -> bool:
        """Whether the engine has sent token ids."""

    def watch(self, events: EventStream) -> None:
        """Follow the events of a new stream."""

    def outlook(self) -> Outlook:
        """Return what can be done for the rest of the stream."""

    def go_on(self, attempt: Streaming, candidates: list[Backend], message: str) -> None:
        """Resume the stream on one of the candidates; `message` says what the current backend did."""

    def close(self, attempt: Streaming) -> None:
        """Write the missing end of a stream whose whole text has been passed on."""

    def rescued(self) -> Rescued | None:
        """Return what was rescued; None if no other backend resumed the stream."""


class Sender:
    """Sends requests to the backends; by default, the gateway itself sends and can resend them."""

    is_relayed: ClassVar[bool] = True

    def candidates(
        self, router: Router, routed: RoutedRequest, tried: tuple[str, ...], *, may_try: bool
    ) -> list[Backend]:
        """Return the backends to which a request may be sent this way, without those tried; raise if there is none."""
        return router.candidates(routed, tried, may_try=may_try)

    def send(
        self, call: Call, upstream: Upstream, candidates: Sequence[Backend], lines: bytes, engine_id: bytes
    ) -> None:
        """Send the request to a backend, chosen among the candidates."""
        upstream.client.send(call)

    def shown(self, error: GatewayError) -> GatewayError:
        """Return an error as the client sees it."""
        return error

    def goes_on(self, error: GatewayError) -> bool:
        """Return whether an answer that has begun continues without the gateway, despite this error."""
        return False

    def cut_off(self) -> None:
        """Cut off an answer that had begun before an error ended it."""


class Reporting(Protocol):
    """Reports requests to the outside: `gateway.rooms.reports`."""

    def follow(self, request: RequestHeaders, request_id: bytes) -> Traced | None:
        """Return an observer of a routed request; None to ignore it."""

    def refuse(self, refused: Refused, error: GatewayError) -> None:
        """Report a request that was refused before it was routed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was refused before it was routed."""

    request_id: bytes
    method: str
    path: str
    lines: bytes  # its header lines
    arrived_s: float
    client: str = ""  # name of its key; empty if that is not known
