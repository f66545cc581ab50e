"""Waiting in the gateway: bounds, priorities, deadlines and backends that hang, without sockets."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from backends.backend import Backend
from backends.health import Probed, Unreachable
from backends.http.receiver import AnswerHead, UpstreamError
from backends.speculation import Method
from gateway.config.pool_file import PoolFile
from gateway.config.settings.queue import QueueSettings
from gateway.http.headers import Header
from gateway.relay.exchange import Exchange
from gateway.relay.waiting.queue import ModelQueue
from gateway.relay.waiting.shares import FairShares
from gateway.routing.access import Access
from gateway.routing.keys import Client, Keyring, digest
from gateway.service.assembly import assemble
from tests.gateway.relay.test_attempts import (
    ANSWER,
    CHOICE,
    FIRST,
    JSON_HEAD,
    RecordingReply,
    Relay,
    body_of,
    fail,
    later,
)
from tests.support.waiting import eventually


def bounded(bound: int, waiting: int, size: int, **settings: Any) -> QueueSettings:
    return QueueSettings(max_in_flight_per_backend=bound, max_waiting=waiting, max_waiting_mib=size / 2**20, **settings)


def queued(*names: str, bound: int = 1, waiting: int = 10, size: int = 1 << 20, **bounds: Any) -> Relay:
    """Return a relay with a queue, and keys: `big` has weight 2, `batch` priority 10, and `app` tenants."""
    relay = Relay(*names, policy={"name": "least_loaded"})
    keys = [
        (digest("sk"), relay.client),
        (digest("batch"), Client("batch", priority=10)),
        (digest("greedy"), Client("greedy")),
        (digest("big"), Client("big", weight=2.0)),
        (digest("app"), Client("app", tenant_header=b"x-tenant")),
    ]
    relay.context.access = Access(Keyring(keys), ["/*"])
    relay.context.queues = {"m": ModelQueue("m", bounded(bound, waiting, size, **bounds))}
    return relay


def ask(relay: Relay, label: str, key: str = "sk", tenant: str = "", **fields: Any) -> tuple[Exchange, RecordingReply]:
    body = json.dumps({"model": "m", "messages": [], "user": label, **fields}).encode()
    return relay.send(body, headers=[(b"authorization", b"Bearer " + key.encode()), (b"x-tenant", tenant.encode())])


def users(relay: Relay, name: str = "a") -> str:
    """Return the labels of the requests that a backend has got, in order."""
    return "".join(json.loads(body)["user"] for body in relay.clients[name].bodies)


def waiting(relay: Relay) -> int:
    queue = relay.context.queues["m"]
    assert (queue.waiting_bytes > 0) == (queue.waiting > 0)
    return queue.waiting


def drain(relay: Relay, name: str = "a", answered: int = 0) -> None:
    """Answer the requests of a backend but the first ones, one after the other, until none is left."""
    while answered < len(relay.clients[name].calls):
        relay.answer(name, number=answered)
        answered += 1


def test_a_request_cannot_raise_itself_above_others_of_its_key() -> None:
    relay = queued("a")
    ask(relay, "-")
    ask(relay, "1")
    ask(relay, "2", priority=-5)
    ask(relay, "3", "batch", priority=-100)
    ask(relay, "4", "batch")
    ask(relay, "5")
    ask(relay, "6", priority="high")  # no number counts as none
    ask(relay, "7", priority=True)
    drain(relay)
    assert users(relay) == "-1256734"


def test_a_full_queue_refuses_with_the_time_after_which_to_try_again() -> None:
    relay = queued("a", waiting=2)
    replies = [ask(relay, label)[1] for label in "1234"]
    assert (replies[3].status, replies[3].code, replies[3].headers["retry-after"]) == (503, "queue_full", "30")
    assert [reply.status for reply in replies[:3]] == [0, 0, 0]
    relay.answer("a")  # one is sent: 0.1 per second so far
    ask(relay, "5")
    _, refused = ask(relay, "6")
    assert 25 <= int(refused.headers["retry-after"]) <= 40
    drain(relay, answered=1)
    assert (users(relay), waiting(relay)) == ("1235", 0)
    assert relay.context.queues["m"].refused["full"] == 2


def test_a_full_queue_gives_up_its_last_request_for_one_of_higher_priority() -> None:
    relay = queued("a", waiting=3)
    ask(relay, "-")
    _, first = ask(relay, "1", "batch")
    _, second = ask(relay, "2", "batch")
    ask(relay, "3")
    ask(relay, "4")
    assert (second.status, second.code, first.status) == (503, "queue_full", 0)
    assert b"higher priority" in second.body
    _, third = ask(relay, "5", "batch")
    assert third.status == 503, "of equal priority, the last to come goes"
    drain(relay)
    assert users(relay) == "-341"
    assert relay.context.queues["m"].refused == {"full": 1, "evicted": 1, "timeout": 0, "deadline": 0}


def test_a_request_to_be_evicted_that_the_end_of_another_lets_go_is_served() -> None:
    relay = queued("a", "b", size=200)
    for name in "ab":
        relay.send(body_of(0), headers=[(b"authorization", b"Bearer sk"), (b"x-gateway-backend", name.encode())])
    _, first = ask(relay, "1", "batch")
    _, second = ask(relay, "2", "batch")
    relay.backends["a"].in_flight = 0  # as in a slow start, in which time alone makes room
    large = json.dumps({"model": "m", "messages": [], "user": "3" * 150}).encode()
    _, third = relay.send(large, headers=[(b"authorization", b"Bearer sk"), (b"x-gateway-backend", b"b")])
    assert (first.status, second.status, third.status, waiting(relay)) == (0, 503, 0, 1)
    assert relay.context.queues["m"].refused["evicted"] == 1


async def test_a_deadline_ends_a_wait() -> None:
    relay = queued("a")
    ask(relay, "-")
    _, reply = relay.send(body_of(1), headers=[(b"x-request-timeout", b"0.01")])
    await eventually(lambda: reply.ended)
    assert (reply.status, reply.code, waiting(relay)) == (504, "deadline_exceeded", 0)
    assert relay.context.queues["m"].refused["deadline"] == 1
    drain(relay)
    assert relay.in_flight() == [0] * 4


def test_the_longest_wait_ends_with_an_error() -> None:
    relay = queued("a")
    ask(relay, "-")
    _, reply = ask(relay, "1")
    relay.context.queues["m"].end_overdue(later(29.0))
    assert reply.status == 0
    relay.context.queues["m"].end_overdue(later(31.0))
    assert (reply.status, reply.code, waiting(relay)) == (503, "queue_timeout", 0)
    assert "retry-after" in reply.headers


def test_an_overdue_request_that_the_end_of_another_lets_go_is_served() -> None:
    relay = queued("a")
    replies = [ask(relay, label)[1] for label in "123"]
    queue = relay.context.queues["m"]
    queue.bounds = bounded(2, 10, 1 << 20)
    queue.end_overdue(later(31.0))
    assert [reply.status for reply in replies] == [0, 503, 0]
    drain(relay)
    assert (replies[2].status, users(relay), relay.in_flight()) == (200, "13", [0] * 4)


def test_requests_wait_for_the_only_backend_to_come_back() -> None:
    relay = queued("a")
    relay.pool.report(relay.backends["a"], Unreachable("refused"))
    exchange, late = ask(relay, "1")
    _, reply = ask(relay, "2")
    assert (late.status, waiting(relay)) == (0, 2)
    assert exchange.place is not None
    exchange.place.since_s -= 10.0
    relay.context.queues["m"].end_overdue(later(25.0))
    assert (late.status, late.code) == (503, "no_backend")
    assert b"refused" in late.body
    relay.pool.report(relay.backends["a"], Probed())
    assert users(relay) == "2"
    relay.answer("a")
    assert reply.status == 200


@pytest.mark.parametrize("seed", range(4))
def test_nothing_waits_that_could_be_sent_and_nothing_is_lost(seed: int) -> None:
    rng, names = random.Random(seed), "abc"
    relay = queued(*names, bound=2, waiting=12, size=4000)
    queue = relay.context.queues["m"]
    exchanges: list[tuple[Exchange, RecordingReply]] = []
    for _ in range(400):
        act = rng.random()
        ongoing = [each for each in exchanges if each[0] in relay.context.exchanges]
        sent = [each for each in ongoing if each[0].attempt is not None and each[0].attempt.call is not None]
        if act < 0.5:
            headers: list[Header] = [(b"authorization", b"Bearer " + rng.choice([b"sk", b"batch"]))]
            if rng.random() < 0.3:
                headers.append((b"x-gateway-backend", rng.choice(names).encode()))
            body = {"model": "m", "messages": [], "priority": rng.randrange(3), "text": "x" * rng.randrange(600)}
            exchanges.append(relay.send(json.dumps(body).encode(), headers=headers))
        elif act < 0.6 and ongoing:
            rng.choice(ongoing)[0].client_gone()
        elif act < 0.65:
            backend = relay.backends[rng.choice(names)]
            relay.pool.report(backend, Unreachable("refused"))
            relay.context.abandon(backend)
        elif act < 0.75:
            name = rng.choice(names)
            relay.pool.report(relay.backends[name], Probed())
        elif sent:
            exchange, _ = rng.choice(sent)
            assert exchange.attempt is not None
            call = exchange.attempt.call
            assert call is not None
            if rng.random() < 0.2:
                call.receiver.on_error(UpstreamError("broken", "closed the connection"))
            else:
                call.receiver.on_whole(AnswerHead(200, JSON_HEAD), ANSWER)  # type: ignore[attr-defined]
        places = [exchange for exchange, _ in exchanges if exchange.place is not None]
        places = [exchange for exchange in places if exchange in relay.context.exchanges]
        assert len(places) == queue.waiting <= 12
        assert queue.waiting_bytes == sum(len(exchange.body) for exchange in places) <= 4000
        assert not any(
            queue._free_for(each, each.place.party, len(each.place.members)) for each in places if each.place
        )
        in_flight = [
            sum(
                attempt.call is not None and attempt.upstream.backend is backend
                for attempt in [exchange.attempt for exchange, _ in exchanges]
                if attempt is not None
            )
            for backend in relay.backends.values()
        ]
        assert in_flight == [backend.in_flight for backend in relay.backends.values()]
    for exchange, _ in exchanges:
        exchange.client_gone()
    assert (queue.waiting, relay.in_flight()) == (0, [0] * 6)
    assert all(reply.status or not reply.ended for _, reply in exchanges)


def test_each_worker_has_its_part_of_the_bounds() -> None:
    queue = {"max_in_flight_per_backend": 9, "max_waiting": 10, "max_waiting_mib": 3.0, "max_wait_s": 5}
    models = {
        name: {"backends": {"a": {"method": "baseline", "url": f"http://{name}"}}, "queue": bounds}
        for name, bounds in (("m", queue | {"pass_priority": True}), ("n", None))
    }
    keys = [{"name": "batch", "key": "sk", "priority": 10}]
    settings = PoolFile.model_validate({"server": {"workers": 4}, "models": models, "state": "none", "keys": keys})
    gateway = assemble(settings, [Backend(name, name, Method.BASELINE, "http://127.0.0.1:1") for name in "mn"], b"")
    bounds = {name: queue.bounds for name, queue in gateway.relay.queues.items()}
    assert bounds == {"m": bounded(3, 3, 786_432, max_wait_s=5.0, pass_priority=True)}
    client = gateway.relay.access.keyring.named("batch")
    assert client is not None
    assert client.priority == 10


def test_a_retry_prefers_a_backend_with_room_and_frees_the_place_at_the_first() -> None:
    relay = queued("a", "b", "c")
    for label in "12":
        ask(relay, label)
    name = next(name for name in "abc" if users(relay, name) == "1")
    other = next(each for each in "abc" if users(relay, each) == "2")
    empty = next(each for each in "abc" if not users(relay, each))
    fail(relay, name, "broken")
    assert users(relay, empty) == "1"
    ask(relay, "3")
    assert users(relay, name) == "13"
    ask(relay, "4")
    fail(relay, name, "broken")  # all are full: it goes beyond the bound of one, and the next takes its place
    assert len(users(relay, other) + users(relay, empty)) == 3
    assert users(relay, name) == "134"


def test_what_is_passed_through_waits_only_if_it_makes_an_engine_work() -> None:
    relay = queued("a")
    ask(relay, "-")
    relay.send(b"", "/version", "GET")
    assert len(relay.clients["a"].calls) == 2
    relay.send(b'{"model": "m", "user": "t", "priority": 3}', "/tokenize")
    assert waiting(relay) == 1
    assert len(relay.clients["a"].calls) == 2


def test_the_end_of_the_drain_time_ends_what_waits_and_sends_nothing_more() -> None:
    relay = queued("a")
    replies = [ask(relay, label)[1] for label in "123"]
    relay.context.stop()
    assert {(reply.status, reply.code) for reply in replies} == {(503, "gateway_stopping")}
    assert users(relay) == "1"
    assert (waiting(relay), relay.in_flight()) == (0, [0] * 4)


def test_the_time_of_waiting_is_no_time_of_the_backend() -> None:
    relay = queued("a")
    outcomes: list[Any] = []
    relay.model.observe = outcomes.append
    ask(relay, "-")
    exchange, _ = ask(relay, "1")
    assert exchange.place is not None
    exchange.delivery.arrived_s -= 100.0
    exchange.place.since_s -= 100.0
    relay.answer("a")
    relay.begin_stream("a", FIRST)
    relay.receiver("a").on_end()
    assert outcomes[1].e2e_s < 50.0
    assert outcomes[1].ttft_s < 50.0
    assert relay.count("gateway_ttft_seconds_sum") > 50.0
    assert relay.count("gateway_overhead_seconds_sum") < 50.0


def test_a_prompt_goes_beyond_the_range_of_a_replica_only_where_that_has_no_room() -> None:
    relay = queued("a", "b")
    ranges = {"a": (0, 4096), "b": (4096, 32_768)}
    for backend in relay.context.pool.of("m"):
        backend.context_range = ranges[backend.name]
    for label in "123":
        ask(relay, label)
    assert (users(relay, "a"), users(relay, "b"), waiting(relay)) == ("1", "2", 1)
    drain(relay, "b")
    assert users(relay, "b") == "23", "it does not wait for the one that is meant for it"


# The priority that engines get


@pytest.mark.parametrize(
    ("key", "header", "sent", "passes", "got"),
    [
        ("sk", "", None, False, None),
        ("sk", "", 7, False, 0),
        ("sk", "", "high", False, "high"),
        ("batch", "", None, False, None),
        ("sk", "", None, True, None),
        ("sk", "", 7, True, 7),
        ("sk", "", -7, True, 0),
        ("sk", "", "-7", True, 0),
        ("batch", "", None, True, 10),
        ("batch", "", 10, True, 20),
        ("sk", "7", None, True, 7),
        ("batch", "-7", None, True, 10),
        ("sk", "7", 3, True, 3),
        ("sk", "9" * 400, None, True, None),
    ],
)
def test_engines_get_a_priority_only_if_they_schedule_by_it(
    key: str, header: str, sent: Any, passes: bool, got: Any
) -> None:
    """That of the body, or of vLLM's header where it has none."""
    relay = queued("a", pass_priority=passes)
    body = {"model": "m", "messages": []} | ({} if sent is None else {"priority": sent})
    headers = [(b"authorization", b"Bearer " + key.encode()), (b"x-vllm-priority", header.encode())]
    relay.send(json.dumps(body).encode(), headers=headers)
    assert json.loads(relay.clients["a"].bodies[0]).get("priority") == got
    assert b"x-vllm-priority" not in relay.clients["a"].calls[0].head


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize(
    "fields", [rb'"priority": 3, "prior\u0069ty": -5', rb'"prior\u0069ty": -5, "metadata": {"priority": 1}']
)
def test_a_priority_written_with_escapes_is_bounded_too(fields: bytes, passes: bool) -> None:
    relay = queued("a", pass_priority=passes)
    relay.send(b'{"model": "m", "messages": [], %b}' % fields)
    pairs = json.loads(relay.clients["a"].bodies[0], object_pairs_hook=lambda pairs: pairs)
    assert [value for name, value in pairs if name == "priority"] == [0]


def test_shares_follow_the_weights_and_priorities_come_first() -> None:
    relay = queued("a", waiting=100)
    ask(relay, "-", "greedy")
    for label in "1A2B3C4D5E6F":
        ask(relay, label, "greedy" if label.isdigit() else "big", max_tokens=200)
    ask(relay, "b", "batch")
    ask(relay, "x", "big", priority=1)
    drain(relay)
    order = users(relay)
    assert order[-2:] == "xb"
    first = order[1:8]
    assert 4 <= sum(label.isupper() for label in first) <= 5, "twice as many"
    assert sorted(order[1:-2]) == sorted("1A2B3C4D5E6F")


def test_a_request_is_charged_what_it_has_cost() -> None:
    """The answers of one are far shorter than expected, those of the other as long: so it gets more of them."""
    relay = queued("a", waiting=1000)
    ask(relay, "-")
    for number in range(60):
        ask(relay, str(number), "greedy", max_tokens=200)
        ask(relay, f"big {number}", "big", max_tokens=200)
    for number in range(60):
        text = json.loads(relay.clients["a"].bodies[number])["user"]
        tokens = 200 if text.startswith("big") else 10
        answer = {"choices": [CHOICE], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}}
        relay.answer("a", json.dumps(answer).encode(), number=number)
    sent = [json.loads(body)["user"].startswith("big") for body in relay.clients["a"].bodies[1:60]]
    assert 0.05 < sum(sent) / len(sent) < 0.25, "20 times the cost at twice the weight"


def test_who_comes_after_a_pause_has_saved_up_nothing() -> None:
    relay = queued("a", waiting=100)
    for label in "123456":
        ask(relay, label, "greedy", max_tokens=200)
    drain(relay)
    for label in "789":
        ask(relay, label, "greedy", max_tokens=200)
    for label in "ABCDEF":
        ask(relay, label, max_tokens=200)
    drain(relay, answered=6)
    assert users(relay)[6:] in {"7A8B9CDEF", "78A9BCDEF"}


def test_tenants_share_what_is_their_keys() -> None:
    relay = queued("a", waiting=100)
    ask(relay, "-", "app", "one")
    for label in "123456":
        ask(relay, label, "app", "one")
    for label in "AB":
        ask(relay, label, "app", "two")
    for label in "xyz":
        ask(relay, label)
    drain(relay)
    order = users(relay)
    assert order.index("z") < 8, "another key gets as much as all tenants together"
    assert order.index("B") < order.index("4")
    assert sorted(order[1:]) == sorted("123456ABxyz")


def test_tenants_without_number_neither_gain_nor_take_memory() -> None:
    relay = queued("a", waiting=5000)
    ask(relay, "-")
    for number in range(300):
        ask(relay, f"app {number}", "app", f"tenant {number}")
    for number in range(20):
        ask(relay, f"other {number}")
    drain(relay)
    sent = [json.loads(body)["user"] for body in relay.clients["a"].bodies[1:41]]
    assert sum(text.startswith("other") for text in sent) >= 19
    assert len(tenants(relay)) <= 101
    ask(relay, "-", "app", "\xff" * 10_000)
    assert max(map(len, tenants(relay))) == 128


def tenants(relay: Relay) -> set[str]:
    """Return the tenants that are known of the key that has some."""
    parties = relay.context.queues["m"].shares._parties.values()
    return {name for party in parties if party.tenants is not None for name in party.tenants.totals_s}


def test_who_has_nothing_here_is_forgotten() -> None:
    relay, now_s = queued("a", waiting=5000), 0.0
    queue = relay.context.queues["m"]
    queue.shares = FairShares(clock=lambda: now_s)
    ask(relay, "-", "app", "sent")
    for number in range(50):
        ask(relay, str(number), "app", f"tenant {number}")[0].client_gone()
    assert tenants(relay) == {"sent"}, "who waited and left was charged nothing"
    for number in range(3):
        ask(relay, str(number), "app", "more")
    drain(relay)
    queue.end_overdue(0.0)
    assert tenants(relay) == {"sent", "more"}, "they had something of late"
    now_s = 100.0
    queue.end_overdue(0.0)
    assert tenants(relay) == {"more"}, "it was served more than the other"
    assert (waiting(relay), queue._lines) == (0, {})


def test_places_are_kept_for_a_client_that_asks_seldom() -> None:
    relay = queued("a", bound=8, waiting=100)
    ask(relay, "A")
    drain(relay)
    for number in range(20):
        ask(relay, str(number), "greedy")
    assert relay.in_flight()[0] == 7, "the other has had one request at a time: a place is kept for it"
    ask(relay, "B")
    assert relay.in_flight()[0] == 8
    assert users(relay)[-1] == "B"


def test_long_prompts_of_a_client_leave_a_replica_to_others() -> None:
    relay = queued("a", "b", bound=8, waiting=100)
    long = [{"role": "user", "content": "green house " * 2400}]  # 0.15 s, under a policy without prices
    ask(relay, "0", "greedy", messages=long)
    ask(relay, "1", "greedy", messages=long)
    assert relay.in_flight()[:2] == [1, 1], "nobody else is there"
    drain(relay, "a")
    drain(relay, "b")
    ask(relay, "A")
    for number in range(2, 12):
        ask(relay, str(number), "greedy", messages=long)
    assert relay.in_flight()[0] == 8
    assert not set(users(relay, "b")) & set("23456789"), "they are left to the first"
    ask(relay, "x", "greedy")
    assert users(relay, "b")[-1] == "x", "short ones may go to the other"


def test_a_bound_that_is_lowered_while_more_wait_admits_none() -> None:
    relay = queued("a", waiting=5)
    for label in "-123":
        ask(relay, label)
    relay.context.queues["m"].bounds = bounded(1, 2, 1 << 20)
    assert ask(relay, "4")[1].code == "queue_full"
    drain(relay)
    assert users(relay) == "-123"


def test_the_queue_is_bounded_in_bytes() -> None:
    relay = queued("a", size=1000)
    ask(relay, "-")
    text = "x" * 300
    for label in "12":
        ask(relay, label, "batch", text=text)
    _, refused = ask(relay, "3", "batch", text=text)
    assert refused.status == 503
    ask(relay, "4", text="x" * 600)  # takes the room of both
    assert waiting(relay) == 1
    _, too_large = ask(relay, "5", text="x" * 1000)
    assert (too_large.status, waiting(relay)) == (503, 1), "nobody gives way for what cannot fit"
    drain(relay)
    assert users(relay) == "-4"
