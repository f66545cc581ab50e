"""The admission of a request: the limits of its key, its model and its features, and its place in the queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gateway.dialects.errors import GatewayError
from gateway.relay.observers import LocationObserver, follow
from gateway.relay.queue import rank_of
from gateway.routing.router import SMALL_BYTES
from policies.features.request import Endpoint

if TYPE_CHECKING:
    from gateway.relay.exchange import Exchange

_OTHER: Final = Endpoint.OTHER


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
        relay.turns.add(client.name, _route_in_turn(exchange))


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
        if not isinstance(error, GatewayError):  # a defect of the gateway, which must be answered too
            error = exchange.defect()
        if exchange in relay.exchanges:
            exchange.end_with_error(error)
        else:
            relay.limits.leave(exchange.inbound.request_headers.client, 0)
            exchange.refuse(error)


def _route_and_send(exchange: Exchange) -> None:
    relay, inbound, delivery = exchange.relay, exchange.inbound, exchange.delivery
    headers, endpoint, now_s, rank = inbound.request_headers, delivery.endpoint, time.monotonic(), 0
    routed = exchange.routed = relay.router.route(headers, inbound.body, now_s)
    model = routed.model
    if relay.reporter is not None:
        delivery.observers.extend(relay.reporter.follow(inbound, delivery.request_id))
    model.traffic.arrive(now_s)
    model.traffic.in_flight += 1
    relay.exchanges.add(exchange)
    if headers.timeout_s < relay.timeouts.total_s:
        exchange.timer = asyncio.get_running_loop().call_later(headers.timeout_s, exchange.expire)
    else:
        exchange.deadline_s = inbound.arrived_s + relay.timeouts.total_s  # checked by `check_silence`
    if endpoint is not _OTHER or (headers.method == "POST" and inbound.body):
        if followers := relay.followers.get(model.name):
            delivery.observers.extend(follow(followers, routed, inbound.body))
        if endpoint is Endpoint.RESPONSES:
            delivery.observers.append(LocationObserver(relay.router.locations))
        if relay.queues and (queue := relay.queues.get(model.name)) is not None:
            exchange.queue, rank = queue, rank_of(headers.client.priority, routed.priority)
            if endpoint is not _OTHER:
                inbound.body = queue.body_for_engine(inbound.body, routed.priority, rank)
    if model.rescue and exchange.is_relayed and relay.rescuer_for is not None:
        exchange.rescuer = relay.rescuer_for(exchange)
    routed.document = None
    if exchange.queue is None:
        exchange.send(exchange.candidates(()))
    else:
        exchange.queue.send_or_enter(exchange, relay.router.members(routed), rank, len(inbound.body))
