"""The conclusion of an exchange: what it is charged, and who is told of its end."""

from __future__ import annotations

import time
from typing import Final

from backends import background
from gateway.relay.accounting import account, charge, count
from gateway.relay.attempt import Attempt
from gateway.relay.context import Inbound, RelayContext
from gateway.relay.delivery import Delivery
from gateway.relay.observers import EndedExchange
from gateway.relay.rescue import Handover
from gateway.routing.router import RoutedRequest
from policies.features.request import Endpoint

_OTHER: Final = Endpoint.OTHER


def conclude(
    relay: RelayContext,
    inbound: Inbound,
    routed: RoutedRequest,
    attempt: Attempt | None,
    delivery: Delivery,
    handover: Handover | None,
    status: int,
    label: str,
    *,
    is_over: bool = False,
) -> None:
    """Account for an exchange, give up its place, and have its observers see its end, whatever one of these raises."""
    answer = delivery.answer
    routed.model.traffic.in_flight -= 1
    delivery.times.ended_s = time.perf_counter()
    ended = EndedExchange(
        delivery.request_id,
        inbound.request_headers.client,
        routed,
        None if attempt is None else attempt.decision,
        None if attempt is None else attempt.upstream,
        delivery.retried_from,
        status,
        label,
        delivery.times,
        None if answer is None else answer.usage,
        None if answer is None else answer.events,
        unread_bytes=0 if answer is None else answer.unread_bytes,
    )
    try:
        if handover is not None:
            handover.note(ended)
        if delivery.endpoint is _OTHER:
            count(ended, relay.metrics)
            method, body = inbound.request_headers.method, inbound.body
            charge(ended, relay.metrics, inbound.path, method, body, answer, is_over=is_over)
        else:
            account(ended, relay.metrics, is_observed=bool(delivery.observers.all), is_over=is_over)
        if ended.tokens:
            relay.metrics.keys.labels(ended.client.name).inc(ended.tokens)
    except Exception as error:  # noqa: BLE001 -- a defect here must not keep the place of a key
        background.note("accounting", error, of=routed.model.name)
    try:
        relay.limits.leave(ended.client, ended.tokens)
    except Exception as error:  # noqa: BLE001 -- the place is free; what it is charged cannot be added up
        background.note("accounting", error, of=ended.client.name)
    delivery.observers.on_end(ended)
