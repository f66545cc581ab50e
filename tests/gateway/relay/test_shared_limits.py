"""Limits over several processes, in virtual time: they admit what one process would, to one request each."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from random import Random

import pytest

from gateway.dialects.errors import GatewayError
from gateway.relay.limits import KeyUse, Limits
from gateway.routing.keys import Client

PERIOD_S = 0.04
PROCESSES = 20
Arrivals = Sequence[tuple[float, int]]
"""Times and processes."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def play(
    client: Client, arrivals: Arrivals, seed: int, *, takes_s: float = 0.0, late_s: float = 0.0
) -> tuple[list[float], int]:
    """Send requests to processes that report to each other, each at its own times.

    Parameters
    ----------
    late_s
        Most seconds by which an exchange is late.

    Returns
    -------
    admitted, most_in_flight
        The times at which requests were admitted, and how many were in flight at most.
    """
    clock, rng, admitted, most_in_flight = Clock(), Random(seed), list[float](), 0
    limits = [Limits(clock=clock) for _ in range(PROCESSES)]
    board: dict[int, KeyUse] = {}
    heard: list[dict[int, KeyUse]] = [{} for _ in limits]
    count, in_flight = itertools.count(), 0
    events: list[tuple[float, int, str, int]] = []

    def at(time_s: float, what: str, process: int) -> None:
        heapq.heappush(events, (time_s, next(count), what, process))

    def exchange(process: int) -> None:
        use = limits[process].report().get(client.id)
        if use is not None and (process not in board or use.steady() != board[process].steady()):
            board[process] = use
        for peer, use in board.items():
            if peer != process and heard[process].get(peer) is not use:
                limits[process].hear(str(peer), client, use, is_new=False)
                heard[process][peer] = use
        limits[process].divide(PROCESSES - 1)

    for process in range(PROCESSES):
        at(PERIOD_S * rng.random(), "exchange", process)
    for arrived_s, process in arrivals:
        at(arrived_s, "request", process)
    while events and events[0][0] <= arrivals[-1][0]:
        clock.now_s, _, what, process = heapq.heappop(events)
        if what == "exchange":
            exchange(process)
            at(clock.now_s + PERIOD_S + late_s * rng.random(), "exchange", process)
        elif what == "end":
            limits[process].leave(client, 0)
            in_flight -= 1
        elif admits(limits[process], client):
            admitted.append(clock.now_s)
            in_flight += 1
            most_in_flight = max(in_flight, most_in_flight)
            at(clock.now_s + takes_s, "end", process)
    return admitted, most_in_flight


def admits(limits: Limits, client: Client) -> bool:
    try:
        limits.enter(client)
    except GatewayError:
        return False
    return True


def over(admitted: Sequence[float], per_minute: float) -> float:
    """Return the most requests by which what is admitted in any time exceeds what the limit allows in it."""
    worst, lowest = -math.inf, math.inf
    for index, time_s in enumerate(admitted):
        allowed = time_s * per_minute / 60.0
        lowest = min(lowest, index - allowed)
        worst = max(worst, index + 1 - allowed - lowest)
    return worst - per_minute


def poisson(rate_per_s: float, pick: Callable[[float, Random], int], seed: int, until_s: float = 50.0) -> Arrivals:
    rng, arrivals, now_s = Random(seed), [], 1.0
    while now_s < until_s:
        now_s += rng.expovariate(rate_per_s)
        arrivals.append((now_s, pick(now_s, rng)))
    return arrivals


DEMANDS: dict[str, Callable[[float, Random], int]] = {
    "even": lambda _, rng: rng.randrange(PROCESSES),
    "uneven": lambda _, rng: 0 if rng.random() < 0.9 else rng.randrange(PROCESSES),
    "moving": lambda now_s, _: int(now_s / 3.0) % PROCESSES,
    "bursts": lambda now_s, _: int(now_s / 0.15) * 7 % PROCESSES,
}


@pytest.mark.parametrize(("demand", "per_minute"), [("even", 4), ("uneven", 60), ("moving", 60), ("bursts", 600)])
def test_a_flood_is_held_to_the_limit(demand: str, per_minute: int) -> None:
    arrivals = poisson(max(60.0, per_minute / 20.0), DEMANDS[demand], per_minute)
    admitted, _ = play(Client("k", id="k", requests_per_minute=per_minute), arrivals, seed=1, late_s=0.01)
    assert over(admitted, per_minute) <= PROCESSES
    assert len(admitted) >= per_minute * (1.0 + 48.0 / 60.0) - PROCESSES, "what one process would admit in this time"


@pytest.mark.parametrize("per_minute", [20, 600])
def test_none_is_refused_while_the_use_is_below_the_limit(per_minute: int) -> None:
    arrivals = poisson(0.5 * per_minute / 60.0, DEMANDS["even"], per_minute)
    admitted, _ = play(Client("k", id="k", requests_per_minute=per_minute), arrivals, seed=2)
    assert admitted == [at_s for at_s, _ in arrivals]


def test_a_burst_at_one_process_gets_its_share_at_once_and_the_rest_later() -> None:
    client = Client("k", id="k", requests_per_minute=600)
    burst = [(5.0 + 1e-6 * number, 3) for number in range(100)]
    assert len(play(client, burst, seed=4)[0]) == 600 // PROCESSES + 1
    again = [(time_s + pause_s, 3) for pause_s in (1.0, 2.0, 3.0, 4.0) for time_s, _ in burst]
    assert len(play(client, burst + again, seed=4)[0]) >= 100


@pytest.mark.parametrize("most", [8, 100])
def test_requests_in_flight_are_held_to_the_limit(most: int) -> None:
    arrivals = poisson(2.0 * most, DEMANDS["even"], most, until_s=12.0)
    admitted, most_in_flight = play(Client("k", id="k", max_in_flight=most), arrivals, seed=5, takes_s=1.0)
    assert most_in_flight <= most + PROCESSES
    assert len(admitted) >= 0.8 * 11 * most, "a place that becomes free is known late"


def test_requests_that_have_ended_take_no_places_until_the_next_exchange() -> None:
    """It may be late by seconds, as where Redis stands still."""
    pair, client = Pair(), Client("k", id="k", max_in_flight=4)
    pair.here.divide(1)
    for _ in range(50):
        assert admits(pair.here, client)
        pair.here.leave(client, 0)
    assert [admits(pair.here, client) for _ in range(3)] == [True, True, False], "the other may take as many"


class Pair:
    """Two processes and a client with a limit."""

    def __init__(self) -> None:
        self.clock, self.client = Clock(), Client("k", id="k", requests_per_minute=60, max_in_flight=100)
        self.here, self.there = (Limits(clock=self.clock) for _ in range(2))

    def ask_there(self, times: int) -> int:
        """Return how many of some requests the other process admits."""
        admitted = 0
        for _ in range(times):
            if admits(self.there, self.client):
                admitted += 1
                self.there.leave(self.client, 0)
        return admitted

    def hear(self, *, is_new: bool) -> None:
        self.clock.now_s += PERIOD_S
        self.here.hear("there", self.client, self.there.report()["k"], is_new=is_new)
        self.here.divide(1)


def test_a_process_that_joins_takes_over_what_is_left() -> None:
    pair = Pair()
    assert pair.ask_there(70) == 60
    pair.hear(is_new=True)
    assert not admits(pair.here, pair.client)


def test_use_while_the_peer_was_out_of_reach_is_not_charged_afterwards() -> None:
    pair = Pair()
    pair.ask_there(1)
    pair.hear(is_new=True)
    pair.here.forget("there")
    pair.here.divide(0)
    for _ in range(600):
        pair.clock.now_s += 2.0
        pair.ask_there(1)
    pair.hear(is_new=True)
    assert admits(pair.here, pair.client)


def test_a_report_that_was_lost_is_made_up_for_by_the_next() -> None:
    pair = Pair()
    pair.ask_there(1)
    pair.hear(is_new=True)
    pair.ask_there(20)
    pair.there.report()  # lost
    pair.clock.now_s += PERIOD_S
    pair.ask_there(38)
    for _ in range(2):  # the second changes nothing
        pair.hear(is_new=False)
    assert sum(admits(pair.here, pair.client) for _ in range(5)) <= 1


def test_a_key_that_was_not_used_for_long_is_reported_again_with_what_is_new() -> None:
    pair = Pair()
    pair.ask_there(50)
    pair.clock.now_s += PERIOD_S
    pair.there.report()
    pair.clock.now_s += 100.0
    assert pair.there.report() == {}, "its limits are full again"
    pair.ask_there(3)
    pair.hear(is_new=False)
    assert pair.there.report()["k"].requests_before == 50
    assert pair.here._accounts["k"].requests is not None
    assert pair.here._accounts["k"].requests.level == pytest.approx(57.0, abs=0.2)


def test_limits_that_change_apply_to_what_peers_have_used_too() -> None:
    pair = Pair()
    pair.ask_there(50)
    pair.hear(is_new=True)
    smaller = Client("k", id="k", requests_per_minute=5)
    pair.here.update([smaller], None)
    bucket = pair.here._accounts["k"].requests
    assert bucket is not None
    assert (bucket.per_minute, bucket.level) == (5, 5)
    pair.here.update([Client("k", id="k")], None)
    pair.clock.now_s += PERIOD_S
    assert pair.here.report() == {}, "a key without limits is not reported"


def test_a_key_that_gets_a_limit_is_charged_only_what_it_uses_from_then_on() -> None:
    clock, free, client = Clock(), Client("a"), Client("a", requests_per_minute=10)
    one, two = Limits(clock=clock), Limits(clock=clock)
    exchanged = one, two
    for limits in exchanged:
        limits.divide(1)
        for _ in range(1000):
            limits.enter(free)
            limits.leave(free, 0)
        limits.update([client], None)
    assert admits(two, client)
    one.divide(1)
    two.divide(1)
    for reader, writer in (exchanged, exchanged[::-1]):
        for use in writer.report().values():
            reader.hear("peer", client, use, is_new=False)
    assert admits(one, client)


def test_a_limit_that_comes_back_takes_no_account_of_peers_that_have_left_meanwhile() -> None:
    clock, client = Clock(), Client("a", max_in_flight=1)
    one, two = Limits(clock=clock), Limits(clock=clock)
    two.enter(client)
    one.hear("two", client, two.report()[client.id], is_new=True)
    one.divide(1)
    assert not admits(one, client)
    one.update([Client("a")], None)
    one.forget("two")
    one.divide(0)
    one.update([client], None)
    assert admits(one, client)


def test_a_key_that_is_gone_is_forgotten_although_a_peer_had_its_last_place() -> None:
    client = Client("a", max_in_flight=1)
    one, two = Limits(), Limits()
    two.enter(client)
    one.hear("two", client, two.report()[client.id], is_new=True)
    one.divide(1)
    one.update([Client("a")], None)
    one.update([], None)
    assert not one._accounts
