"""The admission of a request: the limits of its key, its model and its features, and its place in the queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Final

from backends import background
from backends.backend import Backend
from backends.health import State
from gateway.dialects.errors import GatewayError
from gateway.relay.context import RelayContext
from gateway.relay.delivery import Delivery
from gateway.relay.exchange import Exchange
from gateway.relay.failover import answerable
from gateway.relay.limits import TOO_MANY
from gateway.relay.observers import LocationObserver, Observer, follow
from gateway.relay.roles import Refused, Reply, Sender
from gateway.relay.waiting.queue import rank_of
from gateway.routing.access import RequestHeaders
from gateway.routing.keys import Client
from gateway.routing.router import SMALL_BYTES
from gateway.routing.sticky import Home
from policies.features.prompt import stored_in
from policies.features.request import Endpoint

_now_s: Final = time.perf_counter
_monotonic_s: Final = time.monotonic
_UP: Final = State.UP
_DOWN: Final = State.DOWN
_OTHER: Final = Endpoint.OTHER
_NOTHING: Final[dict[str, object]] = {}
_RELAYED: Final = Sender()

_PERIOD_S: Final = 0.05
_PERIODS: Final = 10
"""Length and number of the waits for a place of the request's key that a peer may already have released."""


def begin(
    relay: RelayContext,
    request: RequestHeaders,
    body: bytes,
    reply: Reply,
    sender: Sender = _RELAYED,
    observers: Sequence[Observer] = (),
    closed: tuple[str, ...] = (),
) -> None:
    """Check the limits of the key before anything is parsed; then route and send, or answer with an error.

    Parameters
    ----------
    observers
        Observers of this exchange, in addition to those of all exchanges.
    closed
        Names of backends that have no room for the request.
    """
    request_id = request.request_id or relay.new_request_id()
    delivery = Delivery(reply, request, request_id, _now_s(), [*observers])
    try:
        relay.limits.enter(request.client)
    except GatewayError as error:
        if error.code == TOO_MANY and relay.limits.wait(request.client):
            turn = _Turn(relay, None)
            reply.answered_by(turn)
            background.start("requests", _enter_later(turn, delivery, body, reply, sender, closed))
        else:
            _refuse(relay, delivery, sender, error)
        return
    _admit(relay, delivery, body, reply, sender, closed)


async def _enter_later(
    turn: _Turn, delivery: Delivery, body: bytes, reply: Reply, sender: Sender, closed: tuple[str, ...]
) -> None:
    """Admit a request once its key has a place, or refuse it if peers have reported and still leave none."""
    relay, client = turn.relay, delivery.request.client
    try:
        for left in range(_PERIODS, 0, -1):
            await asyncio.sleep(_PERIOD_S)
            if not turn.is_open:
                return
            try:
                relay.limits.enter(client)
            except GatewayError as error:
                if left > 1 and error.code == TOO_MANY:
                    continue
                turn.end()
                _refuse(relay, delivery, sender, error)
            else:
                turn.end()
                _admit(relay, delivery, body, reply, sender, closed)
            return
    finally:
        relay.limits.wait_no_longer(client)


def _admit(
    relay: RelayContext, delivery: Delivery, body: bytes, reply: Reply, sender: Sender, closed: tuple[str, ...]
) -> None:
    """Route a request that has a place; if its body is large, in turn."""
    if len(body) <= SMALL_BYTES:
        _route(relay, delivery, body, reply, sender, closed)
    else:
        client = delivery.request.client
        turn = _Turn(relay, client)
        reply.answered_by(turn)
        relay.turns.add(client.id, _route_in_turn(turn, delivery, body, reply, sender, closed))


def _refuse(relay: RelayContext, delivery: Delivery, sender: Sender, error: GatewayError) -> None:
    """Answer a request that was not admitted."""
    error, request = sender.shown(error), delivery.request
    refused = Refused(
        delivery.request_id, request.method, request.path, request.lines, delivery.arrived_s, request.client.name
    )
    relay.note_refused(refused, error)
    delivery.answer_with(error)


class _Turn:
    """A request that waits for a place of its key, for its large body to be parsed, or for its model to be found."""

    def __init__(self, relay: RelayContext, client: Client | None) -> None:
        self.relay = relay
        self._client = client  # whose place in flight it holds, if any
        self.is_open = True

    def end(self) -> None:
        """Stop waiting."""
        self.is_open = False

    def client_gone(self) -> None:
        """Release the key's place in flight, if the request holds one."""
        if self.is_open:
            self.is_open = False
            if self._client is not None:
                self.relay.limits.leave(self._client, 0)

    def pause(self) -> None:
        """Do nothing: there is no answer yet."""

    def resume(self) -> None:
        """Do nothing."""


def _route_in_turn(
    turn: _Turn, delivery: Delivery, body: bytes, reply: Reply, sender: Sender, closed: tuple[str, ...]
) -> Iterator[None]:
    """Check step by step, before parsing it, what the body costs to parse; then route the request."""
    relay = turn.relay
    try:
        for _ in relay.router.check(body):
            if not turn.is_open:
                return
            yield
    except Exception as error:  # noqa: BLE001 -- as in `_send`
        turn.client_gone()
        _refuse(relay, delivery, sender, _known(error, delivery, None))
        return
    if turn.is_open:
        turn.end()
        _route(relay, delivery, body, reply, sender, closed)


def _route(
    relay: RelayContext, delivery: Delivery, body: bytes, reply: Reply, sender: Sender, closed: tuple[str, ...]
) -> None:
    """Send a request to a backend of its model, once that is known."""
    if wanted := relay.router.unplaced(delivery.request):
        turn = _Turn(relay, delivery.request.client)
        reply.answered_by(turn)
        background.start("requests", _find_model(turn, wanted, delivery, body, reply, sender, closed))
    else:
        _send(relay, delivery, body, reply, sender, closed)


async def _find_model(
    turn: _Turn, wanted: str, delivery: Delivery, body: bytes, reply: Reply, sender: Sender, closed: tuple[str, ...]
) -> None:
    """Ask the engines of all models that a client may use for the response that it reads, and send the request."""
    relay, client = turn.relay, delivery.request.client
    try:
        async with relay.lookups.place(client):
            if not turn.is_open:
                return
            up = [each for each in relay.pool if each.health.state is _UP and client.may_use(each.model)]
            said = await _holds(relay, wanted, up)
        if not turn.is_open:
            return
        if True in said:
            found = up[said.index(True)]
            relay.router.locations.remember(wanted, Home(found.model, found.name))
        elif up and None not in said:
            raise _not_found(wanted, "response_id")  # noqa: TRY301
    except Exception as error:  # noqa: BLE001 -- as in `_send`
        if turn.is_open:
            turn.client_gone()
            _refuse(relay, delivery, sender, _known(error, delivery, None))
    else:
        turn.end()
        _send(relay, delivery, body, reply, sender, closed)


async def _holds(relay: RelayContext, wanted: str, backends: Sequence[Backend]) -> list[bool | None]:
    """Return whether each backend holds a response; None where its engine does not tell."""
    return await asyncio.gather(*[relay.pool.watch(each).probe.has_response(wanted) for each in backends])


def _not_found(wanted: str, param: str, lost: str = "") -> GatewayError:
    return GatewayError(404, f"Response with id '{wanted}' not found{lost}.", code="response_not_found", param=param)


def _send(
    relay: RelayContext, delivery: Delivery, body: bytes, reply: Reply, sender: Sender, closed: tuple[str, ...]
) -> None:
    exchange, rank = None, 0
    try:
        exchange, rank = _routed(relay, delivery, body, sender, closed)
        reply.answered_by(exchange)
        if exchange.routed.response_id and _is_homeless(exchange):
            background.start("requests", _find_home(exchange, rank))
        else:
            exchange.begin(rank)
    except Exception as error:  # noqa: BLE001
        known = _known(error, delivery, exchange)
        if exchange is not None and exchange.is_open:
            exchange.end_with_error(known)
        elif exchange is None:
            relay.limits.leave(delivery.request.client, 0)
            _refuse(relay, delivery, sender, known)


def _known(error: Exception, delivery: Delivery, exchange: Exchange | None) -> GatewayError:
    """Return the error for a client; a defect of the gateway must be answered too."""
    model = "" if exchange is None else exchange.routed.model.name
    return answerable(error, delivery.request_id, model)


def _routed(
    relay: RelayContext, delivery: Delivery, body: bytes, sender: Sender, closed: tuple[str, ...]
) -> tuple[Exchange, int]:
    """Return the exchange of a request, and its rank in the queue."""
    request, endpoint, now_s, rank = delivery.request, delivery.endpoint, _monotonic_s(), 0
    routed = relay.router.route(request, body, now_s)
    model, queue, rescuer, observers = routed.model, None, None, delivery.observers
    traced = None if relay.reporter is None else relay.reporter.follow(request, delivery.request_id)
    if traced is not None:
        observers.append(traced)
    model.traffic.arrive(now_s)
    if endpoint is not _OTHER or (request.method == "POST" and body):
        if followers := relay.followers.get(model.name):
            observers.extend(follow(followers, routed, body))
        if endpoint is Endpoint.RESPONSES:
            conversation = "" if routed.response_id else stored_in(routed.document or {})
            observers.append(LocationObserver(relay.router.locations, model.name, conversation))
        if relay.queues and (queue := relay.queues.get(model.name)) is not None:
            sent = routed.headers.priority if routed.priority is None else routed.priority
            rank = rank_of(request.client.priority, sent)
            if endpoint is not _OTHER:
                body = queue.body_for_engine(body, routed.priority, rank)
    is_rescued = model.rescue and sender.is_relayed and (routed.document or _NOTHING).get("stream") is True
    if is_rescued and relay.rescuer_for is not None and len(relay.pool.of(model.name)) > 1:
        rescuer = relay.rescuer_for(request, body, routed)
    routed.parsed()
    exchange = Exchange(relay, body, routed, delivery, sender, rescuer, queue, closed=closed, traced=traced)
    model.traffic.begin(routed.client)
    relay.exchanges.add(exchange)
    return exchange, rank


def _is_homeless(exchange: Exchange) -> bool:
    """Return whether the backend that holds the response to which a request refers is unknown, or gone."""
    routed = exchange.routed
    members = exchange.relay.pool.of(routed.model.name)
    is_there = [each.health.state is not _DOWN for each in members if each.name == routed.home]
    return len(members) > 1 and not any(is_there) and not routed.headers.backend


async def _find_home(exchange: Exchange, rank: int) -> None:
    """Ask all engines for the response to which a request refers, and send the request to the one that holds it.

    The response may be older than this gateway, or have been relayed by another one. If no engine holds it, the client
    gets an error: an engine must not make up an answer to a lost conversation.
    """
    relay, routed = exchange.relay, exchange.routed
    try:
        wanted = routed.response_id
        async with relay.lookups.place(routed.client):
            if not exchange.is_open:  # its client has gone, or its time is up
                return
            up = relay.pool.up(routed.model.name)
            said = await _holds(relay, wanted, up)
        if not exchange.is_open:
            return
        if True in said:
            home = Home(routed.model.name, up[said.index(True)].name)
            routed.found_at(home.backend)
            relay.router.locations.remember(wanted, home)
        elif exchange.sender.is_relayed and up and None not in said:
            lost = f"; it was lost with its replica {routed.home}" if routed.home else ""
            param = "response_id" if exchange.delivery.endpoint is _OTHER else "previous_response_id"
            raise _not_found(wanted, param, lost)  # noqa: TRY301
        exchange.begin(rank)
    except Exception as error:  # noqa: BLE001
        known = _known(error, exchange.delivery, exchange)
        if exchange.is_open:
            exchange.end_with_error(known)
