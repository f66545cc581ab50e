"""The admission of a request: the limits of its key, its model and its features, and its place in the queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from backends import background
from backends.backend import State
from gateway.dialects.errors import GatewayError
from gateway.relay.observers import LocationObserver, follow
from gateway.relay.queue import rank_of
from gateway.routing.router import SMALL_BYTES
from policies.features.prompt import stored_in
from policies.features.request import Endpoint

if TYPE_CHECKING:
    from gateway.relay.exchange import Exchange

_DOWN: Final = State.DOWN
_OTHER: Final = Endpoint.OTHER
_NOTHING: Final[Mapping[str, object]] = {}


def admit(exchange: Exchange) -> None:
    """Check the limits of the key before anything is parsed; then route and send, or answer with an error."""
    relay, client, body = exchange.relay, exchange.inbound.request_headers.client, exchange.inbound.body
    try:
        relay.limits.enter(client)
    except GatewayError as error:
        exchange.refuse(error)
        return
    if len(body) <= SMALL_BYTES:
        _route(exchange)
    else:
        exchange.has_turn = True
        relay.turns.add(client.id, _route_in_turn(exchange))


def _route_in_turn(exchange: Exchange) -> Iterator[None]:
    """Find out, step by step, what it costs to parse the body before that is done; then route the request."""
    relay, inbound = exchange.relay, exchange.inbound
    try:
        for _ in relay.router.check(inbound.body):
            if not exchange.has_turn:
                return
            yield
    except GatewayError as error:
        exchange.has_turn = False
        relay.limits.leave(inbound.request_headers.client, 0)
        exchange.refuse(error)
        return
    if exchange.has_turn:
        exchange.has_turn = False
        _route(exchange)


def _route(exchange: Exchange) -> None:
    relay = exchange.relay
    try:
        _route_and_send(exchange)
    except Exception as error:  # noqa: BLE001
        known = _known(error, exchange)
        if exchange in relay.exchanges:
            exchange.end_with_error(known)
        else:
            relay.limits.leave(exchange.inbound.request_headers.client, 0)
            exchange.refuse(known)


def _known(error: Exception, exchange: Exchange) -> GatewayError:
    """Return the error for a client; a defect of the gateway must be answered too."""
    return error if isinstance(error, GatewayError) else exchange.defect()


def _route_and_send(exchange: Exchange) -> None:
    relay, inbound, delivery = exchange.relay, exchange.inbound, exchange.delivery
    headers, endpoint, now_s, rank = inbound.request_headers, delivery.endpoint, time.monotonic(), 0
    routed = exchange.routed = relay.router.route(headers, inbound.body, now_s)
    model = routed.model
    if relay.reporter is not None:
        delivery.observers.extend(relay.reporter.follow(inbound, delivery.request_id))
    model.traffic.arrive(now_s)
    model.traffic.begin(routed.client)
    relay.exchanges.add(exchange)
    if headers.timeout_s < relay.timeouts.total_s:
        exchange.timer = asyncio.get_running_loop().call_later(headers.timeout_s, exchange.expire)
    else:
        exchange.deadline_s = inbound.arrived_s + relay.timeouts.total_s  # checked by `check_silence`
    if endpoint is not _OTHER or (headers.method == "POST" and inbound.body):
        if followers := relay.followers.get(model.name):
            delivery.observers.extend(follow(followers, routed, inbound.body))
        if endpoint is Endpoint.RESPONSES:
            conversation = "" if routed.response_id else stored_in(routed.document or {})
            delivery.observers.append(LocationObserver(relay.router.locations, conversation))
        if relay.queues and (queue := relay.queues.get(model.name)) is not None:
            exchange.queue, rank = queue, rank_of(headers.client.priority, routed.priority)
            if endpoint is not _OTHER:
                inbound.body = queue.body_for_engine(inbound.body, routed.priority, rank)
    is_rescued = model.rescue and exchange.is_relayed and (routed.document or _NOTHING).get("stream") is True
    if is_rescued and relay.rescuer_for is not None and len(relay.pool.of(model.name)) > 1:
        exchange.rescuer = relay.rescuer_for(exchange)
    routed.document = None
    if routed.response_id and _is_homeless(exchange):
        background.start("requests", _find_home(exchange, rank))
    else:
        _send(exchange, rank)


def _is_homeless(exchange: Exchange) -> bool:
    """Return whether it is not known where the response is to which a request refers, or that backend is gone."""
    routed = exchange.routed
    assert routed is not None
    members = exchange.relay.pool.of(routed.model.name)
    is_there = [each.state is not _DOWN for each in members if each.name == routed.home]
    return len(members) > 1 and not any(is_there) and not routed.headers.backend


async def _find_home(exchange: Exchange, rank: int) -> None:
    """Ask all engines for the response to which a request refers, and send the request to the one that holds it.

    This gateway may have begun after the response was made, or another one have passed it on. No engine makes up an
    answer to a conversation that is lost: where none holds it, the client is told so.
    """
    relay, routed = exchange.relay, exchange.routed
    assert routed is not None
    try:
        wanted = routed.response_id
        async with relay.lookups.place(routed.client):
            if exchange not in relay.exchanges:  # its client has gone, or its time is over
                return
            up = relay.pool.up(routed.model.name)
            said = await asyncio.gather(*[relay.pool.watch(each).probe.has_response(wanted) for each in up])
        if exchange not in relay.exchanges:
            return
        if True in said:
            routed.home = up[said.index(True)].name
            relay.router.locations.remember(wanted, routed.home)
        elif exchange.is_relayed and up and None not in said:
            lost = f"; it was lost with its replica {routed.home}" if routed.home else ""
            message = f"Response with id '{wanted}' not found{lost}."
            param = "response_id" if exchange.delivery.endpoint is _OTHER else "previous_response_id"
            raise GatewayError(404, message, code="response_not_found", param=param)  # noqa: TRY301
        _send(exchange, rank)
    except Exception as error:  # noqa: BLE001
        exchange.end_with_error(_known(error, exchange))


def _send(exchange: Exchange, rank: int) -> None:
    relay, inbound, routed = exchange.relay, exchange.inbound, exchange.routed
    assert routed is not None
    if exchange.queue is None:
        try:
            candidates = exchange.candidates(())
        except GatewayError as none_up:
            if none_up.status != 503 or not exchange.is_relayed or not relay.first_start.hold(exchange):
                raise
        else:
            exchange.send(candidates)
    else:
        exchange.queue.send_or_enter(exchange, relay.router.members(routed), rank, len(inbound.body))
