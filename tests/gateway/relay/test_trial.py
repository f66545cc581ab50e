"""Requests on trial to a replica that returns from an ejection, without sockets."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from backends.engine_metrics import EngineMetrics
from backends.health import Ejected, Health, Probed, State
from backends.http.receiver import UpstreamError
from gateway.http.headers import Header
from gateway.routing.access import read_head
from tests.gateway.relay.test_attempts import CHAT, FIRST, Relay, body_of, fail, later

RANDOM = {"name": "least_loaded"}


def recovering(*names: str) -> Relay:
    """Return a relay whose first backend `a` is back from an ejection, on trial."""
    relay = Relay(*names, policy=dict(RANDOM))
    assert relay.pool.report(relay.backends["a"], Ejected(1e-9, "broke its answers"))
    relay.pool.report(relay.backends["a"], Probed())
    assert relay.pool.recovery.is_on_trial(relay.backends["a"])
    return relay


def sent(relay: Relay) -> dict[str, int]:
    return {name: len(client.calls) for name, client in relay.clients.items()}


def test_one_request_at_a_time_is_sent_on_trial_whatever_the_policy_would_choose() -> None:
    relay = recovering("a", "b", "c")
    relay.backends["a"].in_flight = 9  # from before its ejection
    for number in range(3):
        relay.send(body_of(number))
    assert sent(relay) == {"a": 1, "b": 1, "c": 1}
    assert relay.count("gateway_decisions_total", policy="override", reason="trial") == 1


@pytest.mark.parametrize("fault", ["broken", "500", "text/html", "stream error"])
def test_the_failure_of_a_request_on_trial_ejects_and_reaches_no_client(fault: str) -> None:
    relay = recovering("a", "b")
    _, reply = relay.send()
    fail(relay, "a", fault)
    relay.answer("b")
    assert (reply.status, reply.headers["x-gateway-retried-from"]) == (200, "a")
    assert relay.backends["a"].health.state is State.EJECTED
    assert relay.in_flight() == [0] * 5


def test_a_failure_from_before_a_replica_came_back_does_not_eject_it_when_another_one_serves_the_request() -> None:
    """The answer may take a minute: the engine that failed was replaced meanwhile."""
    relay = Relay("a", "b")
    relay.send()
    fail(relay, "a", "broken")
    back = relay.backends["a"]
    assert relay.pool.report(back, Ejected(1e-9, "broke its answers"))
    relay.pool.report(back, Probed())
    relay.answer("b")
    assert back.health.state is State.RECOVERING


@pytest.mark.parametrize("ending", ["client gone", "400", "no replica serves it"])
def test_an_end_without_a_verdict_leaves_the_replica_on_trial(ending: str) -> None:
    relay = recovering("a", "b")
    exchange, _ = relay.send(body_of(1))
    if ending == "400":
        relay.answer("a", b'{"error": "bad"}', 400)
    elif ending == "client gone":
        exchange.client_gone()
    else:
        fail(relay, "a", "500")
        fail(relay, "b", "500")
    assert relay.pool.recovery.is_on_trial(relay.backends["a"])
    relay.send(body_of(2))
    assert sent(relay)["a"] == 2


def test_a_stream_proves_a_replica_with_its_first_event() -> None:
    relay = recovering("a", "b")
    relay.send()
    relay.begin_stream("a")
    assert relay.pool.recovery.is_on_trial(relay.backends["a"])
    relay.receiver("a").on_data(FIRST)
    assert not relay.pool.recovery.is_on_trial(relay.backends["a"])


@pytest.mark.parametrize(
    ("path", "method", "headers"),
    [("/tokenize", "POST", []), ("/version", "GET", []), (CHAT, "POST", [(b"x-gateway-backend", b"b")])],
)
def test_a_request_that_cannot_be_sent_elsewhere_is_not_sent_on_trial(
    path: str, method: str, headers: list[Header]
) -> None:
    relay = recovering("a", "b")
    relay.send(path=path, method=method, headers=headers)
    assert sent(relay) == {"a": 0, "b": 1}


def test_a_request_that_only_the_replica_on_trial_can_serve_is_sent_there() -> None:
    relay = recovering("a", "b")
    relay.send(headers=[(b"x-gateway-backend", b"a")])
    relay.send(json.dumps({"model": "m", "messages": [], "min_p": 0.1}).encode())
    assert sent(relay) == {"a": 2, "b": 0}


@pytest.mark.parametrize(
    ("running", "progress_s", "is_moved"), [(None, 0.0, True), (0, 0.0, True), (1, 0.0, False), (1, 60.0, True)]
)
def test_a_silent_request_on_trial_is_moved_unless_the_engine_makes_progress(
    running: int | None, progress_s: float, is_moved: bool
) -> None:
    relay = recovering("a", "b")
    watch = relay.pool.watch(relay.backends["a"])
    if running is not None:
        relay.backends["a"].engine.metrics = EngineMetrics(running=running)
    watch.backend.health = replace(watch.backend.health, progress_at_s=time.monotonic() - progress_s)
    exchange, reply = relay.send()
    exchange.check_silence(later(6.5))
    assert sent(relay)["b"] == 0
    exchange.check_silence(later(7.5))
    assert sent(relay)["b"] == is_moved
    assert relay.backends["a"].health.state is (State.EJECTED if is_moved else State.RECOVERING)
    relay.answer("b" if is_moved else "a")
    assert reply.status == 200
    assert relay.count("gateway_retries_total", kind="trial") == is_moved


def test_a_replica_on_trial_is_not_what_explain_shows() -> None:
    relay = recovering("a", "b")
    routed = relay.context.router.route(read_head("POST", relay.client, CHAT, CHAT.encode(), []), body_of(1), 0.0)
    assert [backend.name for backend in relay.context.router.candidates(routed)] == ["b"]


def test_a_failure_counts_once_another_replica_has_begun_to_answer() -> None:
    relay = Relay("a", "b")
    for number in range(3):
        relay.send(json.dumps({"model": "m", "stream": True, "messages": [{"content": str(number)}]}).encode())
        relay.receiver("a").on_error(UpstreamError("broken", "closed the connection"))
        relay.begin_stream("b")
        assert relay.backends["a"].health.state is State.UP
        relay.receiver("b").on_data(FIRST)
    assert relay.backends["a"].health.state is State.EJECTED, "before any of the long answers is complete"


def test_a_silent_request_on_trial_stays_where_no_other_replica_can_serve_it() -> None:
    relay = recovering("a", "b")
    exchange, reply = relay.send()
    relay.backends["b"].health = Health(State.DOWN)
    exchange.check_silence(later(9.5))
    assert reply.status == 0
    relay.answer("a")
    assert reply.status == 200
