"""Deadlines of requests, and the retry budget, without sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from backends.health import State
from backends.http.receiver import UpstreamError
from gateway.dialects.errors import GatewayError
from gateway.relay.exchange import Exchange
from gateway.routing.router import SMALL_BYTES
from tests.gateway.relay.test_attempts import ANSWER, FIRST, TIMEOUTS, Relay, body_of, later
from tests.support.waiting import eventually

# Deadlines


def limited(*names: str, total_s: float = 30.0) -> Relay:
    relay = Relay(*names)
    relay.context.timeouts = replace(TIMEOUTS, first_byte_s=600.0, idle_s=600.0, total_s=total_s)
    return relay


def test_a_request_without_a_first_byte_at_its_deadline_is_given_up() -> None:
    relay = limited("a", "b")
    exchange, reply = relay.send(headers=[(b"x-request-timeout", b"3600")])  # which cannot lengthen it
    exchange.check_silence(later(29.0))
    assert reply.status == 0
    exchange.check_silence(later(31.0))
    assert (reply.status, reply.code) == (504, "deadline_exceeded")
    assert b"within the 30 s" in reply.body
    assert not relay.backends["a"].health.strikes
    assert relay.clients["b"].calls == []
    assert relay.in_flight() == [0] * 5


def test_a_stream_that_goes_on_at_its_deadline_ends_with_an_error_event() -> None:
    relay = limited("a")
    exchange, reply = relay.send()
    relay.begin_stream("a", FIRST)
    exchange.pause()  # a client that reads slowly has no longer
    exchange.check_silence(later(31.0))
    assert b'"code":"deadline_exceeded"' in reply.chunks[-1]
    assert reply.chunks[-1].endswith(b"data: [DONE]\n\n")
    assert reply.ended
    assert relay.count("gateway_requests_total", outcome="interrupted") == 1
    assert relay.in_flight() == [0] * 4


@pytest.mark.parametrize("total_s", [30.0, float("inf")])
async def test_a_request_can_shorten_its_time(total_s: float) -> None:
    relay = limited("a", total_s=total_s)
    _, reply = relay.send(headers=[(b"x-request-timeout", b"0.01")])
    await eventually(lambda: reply.ended)
    assert (reply.status, reply.code) == (504, "deadline_exceeded")
    assert b"within the 0.01 s" in reply.body
    assert relay.in_flight() == [0] * 4


async def test_the_wait_of_a_large_body_for_its_turn_is_part_of_the_time() -> None:
    relay, loop = limited("a", total_s=60.0), asyncio.get_running_loop()

    def long_step() -> Iterator[None]:
        end_s = time.perf_counter() + 0.05
        while time.perf_counter() < end_s:
            pass
        yield

    relay.context.turns.add("another", long_step())
    body = b'{"model": "m", "messages": [], "user": "%b"}' % (b"x" * SMALL_BYTES)
    relay.send(body, headers=[(b"x-request-timeout", b"30")])
    sent_s = loop.time()
    await eventually(lambda: relay.context.exchanges)
    (exchange,) = relay.context.exchanges
    assert isinstance(exchange, Exchange)
    assert exchange.timer is not None
    assert exchange.timer.when() < sent_s + 30.0 + 0.04
    exchange.client_gone()


async def test_a_request_that_is_answered_in_time_leaves_no_timer_and_is_not_ended_again() -> None:
    relay = limited("a")
    exchange, reply = relay.send(headers=[(b"x-request-timeout", b"0.05")])
    timer = exchange.timer
    assert timer is not None
    relay.answer("a")
    assert timer.cancelled()
    exchange.check_silence(later(31.0))
    assert (reply.status, reply.body, relay.in_flight()) == (200, ANSWER, [0] * 4)


@pytest.mark.parametrize("value", [b"", b"soon", b"0", b"-1", b"nan", b"inf", b"1" * 999, b"1_0", b"0x5"])
def test_a_bad_header_is_refused_with_what_would_be_right(value: bytes) -> None:
    relay = Relay("a")
    with pytest.raises(GatewayError, match="expected a positive number of seconds") as caught:
        relay.send(headers=[(b"x-request-timeout", value)])
    assert (caught.value.status, caught.value.code) == (400, "invalid_header")
    assert len(caught.value.message) < 150


# The retry budget


def test_when_every_replica_breaks_its_answers_few_requests_are_sent_twice() -> None:
    relay = Relay("a", "b")
    codes = []
    for number in range(200):
        _, reply = relay.send(body_of(number))
        relay.receiver("a").on_error(UpstreamError("broken", "closed the connection"))
        if relay.backends["b"].in_flight:
            relay.receiver("b").on_error(UpstreamError("broken", "closed the connection"))
        codes.append(reply.code)
        assert relay.backends["a"].health.state is State.UP, "without a second attempt there is no evidence"
    assert set(codes) == {"backend_broken"}
    retried = len(relay.clients["b"].calls)
    assert 10 + 0.2 * 190 <= retried <= 10 + 0.2 * 200 + 1 + 60, "and one for each second that this takes"
    assert relay.count("gateway_retries_refused_total", model="m") == 200 - retried


def test_all_requests_of_a_replica_that_dies_are_retried() -> None:
    relay = Relay("a", "b")
    replies = [relay.send(body_of(number))[1] for number in range(100)]
    for number in range(100):
        relay.receiver("a", number).on_error(UpstreamError("broken", "closed the connection"))
    assert len(relay.clients["b"].calls) == 100
    for number in range(100):
        relay.answer("b", number=number)
    assert {reply.status for reply in replies} == {200}
