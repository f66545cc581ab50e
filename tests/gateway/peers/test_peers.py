"""Processes of one pool that report to each other: loads, limits and ejections, in virtual time."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.backend import EngineLoad
from backends.health import Health, State, Strike
from gateway.dialects.errors import GatewayError
from gateway.peers.exchange import PeerExchange
from gateway.peers.live import LiveFolder
from gateway.peers.peers import SILENT_S
from gateway.peers.report import decode
from gateway.relay.limits import Limits
from gateway.routing.keys import Keyring
from gateway.routing.sticky import Home
from gateway.telemetry.registry import Registry
from policies.features.request import Endpoint, RequestFeatures
from policies.roles import Price
from tests.support.peer_process import TEAM, TEAM_KEY, PeerProcess


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def exchange(*processes: PeerProcess, rounds: int = 1, passed_s: float = 0.04) -> None:
    """Exchange the reports of processes; each round advances the clock."""
    for _ in range(rounds):
        clock: Any = processes[0].peers._clock
        clock.now_s += passed_s
        for process in processes:
            process.peers.update()
        for reader, writer in itertools.permutations(processes, 2):
            reader.peers.receive(writer.peers.report)
        for process in processes:
            process.peers.settle("here", is_reported=True, is_out=False)


def known(count: int, **options: str) -> list[PeerProcess]:
    """Return processes that know each other."""
    clock = Clock()
    processes = [PeerProcess(clock, **options) for _ in range(count)]
    exchange(*processes, rounds=2, passed_s=1.0)
    return processes


def test_requests_of_others_count_at_the_next_exchange() -> None:
    one, two, three = known(3)
    one.backends[0].in_flight = 4
    two.backends[0].in_flight = 2
    exchange(one, two, three)
    assert [process.load() for process in (one, two, three)] == [[6, 0], [6, 0], [6, 0]]
    late, one.backends[0].in_flight, one.backends[1].in_flight = one.peers.report, 1, 5
    exchange(one, two, three)
    assert three.load() == [3, 5]
    for _ in range(2):
        three.peers.receive(late)
        three.peers.settle("here", is_reported=True, is_out=False)
    assert three.load() == [3, 5], "what arrives late or twice changes nothing"
    number = one.peers.number
    exchange(one, two, three, rounds=5)
    assert one.peers.number == number, "nothing to report"


def test_what_others_answered_is_added_while_they_are_known() -> None:
    one, two, three = known(3)
    two.backends[0].answered_tokens, two.backends[0].answered_steps = 60.0, 20.0
    three.backends[0].answered_tokens, three.backends[0].answered_steps = 40.0, 40.0
    exchange(one, two, three, passed_s=1.0)
    assert one.answered_by_peers() == (100.0, 60.0)
    assert three.answered_by_peers() == (60.0, 20.0)
    exchange(one, two, rounds=8, passed_s=1.0)  # the third is silent
    assert one.answered_by_peers() == (100.0, 60.0)
    two.backends[0].answered_tokens, two.backends[0].answered_steps = 90.0, 30.0
    exchange(one, two, three, rounds=2, passed_s=1.0)
    assert one.answered_by_peers() == (130.0, 70.0)
    late = PeerProcess(one.peers._clock)
    late.backends[0].answered_tokens, late.backends[0].answered_steps = 500.0, 100.0
    exchange(one, two, late, rounds=3, passed_s=1.0)
    assert one.answered_by_peers() == (130.0, 70.0)  # what it answered before is not new


def test_what_the_engine_has_beyond_that_is_of_other_clients() -> None:
    one, two = known(2)
    one.backends[0].in_flight, two.backends[0].in_flight = 4, 2
    exchange(one, two)
    one.scrape(9, 1)
    assert one.load() == [9, 1]
    two.backends[0].in_flight = 7
    exchange(one, two)
    assert one.load() == [14, 1]
    assert one.backends[0].load.running == 9
    one.scrape(3, 0)
    assert one.load() == [11, 0], "the engine's report is older than those of the gateways"


def test_a_process_that_becomes_known_is_not_counted_twice() -> None:
    clock = Clock()
    one, two = PeerProcess(clock), PeerProcess(clock)
    two.backends[0].in_flight = 6
    one.scrape(8, 0)
    exchange(one, two, rounds=2, passed_s=1.0)
    assert one.load() == [8, 0]
    two.backends[0].in_flight = 0
    exchange(one, two)
    assert one.load() == [2, 0]


def test_a_silent_process_counts_until_the_engine_reports() -> None:
    one, two = known(2)
    two.backends[0].in_flight = 6
    exchange(one, two)
    exchange(one, rounds=2, passed_s=SILENT_S)
    assert one.load() == [6, 0], "Redis may be out of reach, and the requests still there"
    one.scrape(0, 0)
    assert one.load() == [0, 0]
    two.backends[0].in_flight = 3
    exchange(one, two)
    assert one.load() == [3, 0], "heard of again"


def test_a_report_left_by_a_process_that_has_ended_does_not_count() -> None:
    clock = Clock()
    one, two = PeerProcess(clock), PeerProcess(clock)
    two.backends[0].in_flight = 6
    two.peers.update()
    for _ in range(3):
        one.peers.receive(two.peers.report)
        exchange(one, passed_s=1.0)
    assert one.load() == [0, 0]
    exchange(one, rounds=70, passed_s=1.0)
    assert one.peers.gone() == [two.peers.writer]


def test_replicas_at_local_addresses_are_those_of_the_host() -> None:
    clock = Clock()
    here, also_here, there = (PeerProcess(clock, host, "http://127.0.0.1:800") for host in ("a", "a", "b"))
    exchange(here, also_here, there, rounds=2, passed_s=1.0)
    also_here.backends[0].in_flight, there.backends[0].in_flight = 2, 5
    exchange(here, also_here, there)
    assert here.load() == [2, 0]


def test_an_ejection_applies_to_all_for_the_time_left() -> None:
    one, two = known(2)
    one.pool.report(one.backends[0], Strike(1, "broke the connection"))
    assert one.backends[0].health.state is State.EJECTED
    exchange(one, two)
    assert two.backends[0].health.state is State.EJECTED
    assert two.backends[0].health.reason.startswith("broke the connection (seen by another gateway process); ejected")
    two.backends[0].health = Health(State.UP)  # after its time, or as its last one
    exchange(one, two, rounds=3)
    assert two.backends[0].health.state is State.UP, "an ejection is applied once"
    assert decode(two.peers.report).ejected == {}, "and not passed on"
    exchange(one, two, passed_s=120.0)
    assert not one.peers._ejections, "nothing is kept of ejections that are over"
    assert not any(peer.ejections for peer in two.peers._peers.values()), "nor at the peers"


def test_what_an_operator_said_last_counts_at_all() -> None:
    one, two = known(2)
    one.peers.set_drained(one.backends[0], drained=True)
    exchange(one, two)
    assert two.backends[0].health.state is State.DRAINING
    two.peers.set_drained(two.backends[0], drained=False)
    exchange(one, two, rounds=3)
    assert State.DRAINING not in {one.backends[0].health.state, two.backends[0].health.state}
    one.peers.set_drained(one.backends[1], drained=True)
    late = PeerProcess(one.peers._clock)
    exchange(one, two, late, rounds=3, passed_s=1.0)
    assert [backend.health.state for backend in late.backends] == [State.UP, State.DRAINING], "one that comes later too"


async def test_a_replica_that_leaves_one_process_after_the_other_is_not_drained_when_it_comes_back() -> None:
    one, two = known(2)
    left = one.backends[0]
    one.peers.set_drained(left, drained=True)
    exchange(one, two)
    for process in (one, two):
        process.pool.update(process.backends[1:], [], process.pool.rules)
        process.peers.follow(process.keyring, process.models, {})
        exchange(one, two, rounds=2, passed_s=1.0)
    assert [decode(process.peers.report).draining for process in (one, two)] == [{}, {}]
    late = PeerProcess(one.peers._clock)  # which has the replica again
    exchange(one, two, late, rounds=3, passed_s=1.0)
    assert late.backends[0].health.state is State.UP


async def test_nothing_is_kept_of_the_answers_of_replicas_that_have_left() -> None:
    one, two = known(2)
    for backend in two.backends:
        backend.answered_tokens, backend.answered_steps = 60.0, 20.0
    exchange(one, two, passed_s=1.0)
    one.peers.follow(one.keyring, one.models, {})
    assert len(one.peers._answered) == 2
    one.pool.update(one.backends[1:], [], one.pool.rules)
    one.peers.follow(one.keyring, one.models, {})
    assert one.peers._answered.keys() == {one.backends[1].url}


def test_stored_responses_are_found_by_all() -> None:
    one, two = known(2)
    one.locations.note_answer(b'{"id": "resp_1"}', Home("m", "2"))
    exchange(one, two)
    assert two.locations.home_of("resp_1") == Home("m", "2")
    exchange(one, two, rounds=4, passed_s=1.0)
    assert decode(one.peers.report).responses == {}, "not for ever"


def test_the_last_replica_that_is_up_stays() -> None:
    one, two = known(2)
    two.backends[1].health = Health(State.DOWN)
    one.pool.report(one.backends[0], Strike(1, "broke the connection"))
    exchange(one, two)
    assert two.backends[0].health.state is State.UP


def admits(limits: Limits) -> bool:
    try:
        limits.enter(TEAM)
    except GatewayError:
        return False
    limits.leave(TEAM, 0)
    return True


def test_what_a_slow_place_has_not_got_is_not_admitted_again_although_a_quick_one_has() -> None:
    one, _ = known(2)  # which share 60 requests a minute
    for place in ("slow", "here"):
        one.peers.settle(place, is_reported=True, is_out=False)
    assert sum(admits(one.limits) for _ in range(100)) == 30
    for _ in range(5):
        one.peers.settle("here", is_reported=True, is_out=False)
        assert not admits(one.limits)
    one.peers.settle("slow", is_reported=True, is_out=False)
    for _ in range(5):  # one that is out of reach is not waited for
        one.peers.settle("slow", is_reported=False, is_out=True)
        one.peers.settle("here", is_reported=True, is_out=False)
    assert admits(one.limits)


def test_a_place_that_has_not_been_reached_yet_is_not_waited_for() -> None:
    clock = Clock()
    one, two = PeerProcess(clock), PeerProcess(clock)  # which share 60 requests a minute
    one.peers.settle("slow", is_reported=False, is_out=False)
    exchange(one, two, rounds=3)
    assert sum(admits(one.limits) for _ in range(100)) == 30


def test_an_engine_without_metrics_is_known_by_what_the_gateways_sent() -> None:
    one, two = known(2)
    assert one.backends[0].load == EngineLoad()
    two.backends[0].in_flight = 2
    exchange(one, two)
    assert (one.backends[0].load.others, one.backends[0].load.running) == (2, 2)
    for in_flight in (2, 3, 0):
        one.backends[0].load = replace(one.backends[0].load, at_s=1.0)  # long after
        two.backends[0].in_flight = in_flight
        exchange(one, two)
        assert (one.load()[0], one.backends[0].load.running) == (in_flight, in_flight)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'["w",-1,{},{},{},{},{},{},[],{},5]',
        b'["w",1,{"http://a":18446744073709551615},{},{},{},{},{},[],{},5]',
        b'["w",1,{},{"k":[1,2,0,0,1,NaN,1.0]},{},{},{},{},[],{},5]',
        b'["w",1,{},{},{"http://a":[1,1e308,"for ever"]},{},{},{},[],{},5]',
        b'["w",1,{},{},{},{},{}]',
    ],
)
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)


def test_clients_are_charged_for_what_others_have_served_them() -> None:
    one, two = known(2)
    for process in (one, two):
        process.peers.follow(process.keyring, process.models, {"m": process.shares})
    mine, others = (process.shares.party(TEAM.id, 2.0) for process in (one, two))
    price = Price(1.0, 0.5, 4.0, 0.0)
    mine.charge(price)
    exchange(one, two, passed_s=1.0)
    assert others.served_s == 0.0, "what was served before it was known is not new"
    mine.settle(price, 8)
    mine.charge(price)
    exchange(one, two, passed_s=1.0)
    assert (mine.served_s, others.served_s) == (4.0, 2.5)
    exchange(one, two, rounds=3, passed_s=1.0)
    assert others.served_s == 2.5
    exchange(two, rounds=int(SILENT_S) + 1, passed_s=1.0)
    mine.charge(price)
    exchange(one, two, rounds=3, passed_s=1.0)
    assert others.served_s == 2.5


PROMPT = RequestFeatures("m", Endpoint.CHAT, prompt_tokens=1000, prefix=(1, 2), prefix_tokens=(500, 900))


def cached(process: PeerProcess) -> list[float]:
    """Return the scores of the two replicas for the prompt: its tokens that are expected not to be cached."""
    return [each.score for each in process.policy.assess(PROMPT, process.backends) if each.score is not None]


@pytest.mark.parametrize(
    ("prompt", "missed", "expected"),
    [(PROMPT, 0, 100), (PROMPT, 2, 100), (PROMPT, 3, 1000), (replace(PROMPT, prefix_tokens=(500,)), 0, 1000)],
)
def test_a_prompt_that_another_has_sent_is_known_though_two_reports_were_missed(
    prompt: RequestFeatures, missed: int, expected: float
) -> None:
    one, two = known(2)
    cached(two)
    one.sent.append((one.backends[1], prompt))
    for number in range(missed + 1):
        one.backends[0].in_flight = number
        one.peers.update()
    two.peers.receive(one.peers.report)
    assert cached(two) == [1000, expected]


def test_other_keys_are_followed() -> None:
    one, two = known(2)
    one.peers.follow(Keyring([]), {}, {})
    assert admits(two.limits)
    exchange(one, two)
    one.peers.follow(Keyring([(TEAM_KEY, TEAM)]), {}, {})
    assert admits(one.limits)
    account = one.limits._accounts[TEAM.id]
    assert account.peers == {}, "its key was unknown"
    assert admits(two.limits)
    exchange(one, two)
    assert [use.requests for use in account.peers.values()] == [2]


def test_strays_in_the_folder_stop_no_report(tmp_path: Path) -> None:
    one, two = LiveFolder(tmp_path, "one"), LiveFolder(tmp_path, "two")
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "a-pipe")
    for number in range(3):
        one.exchange(b"report %d" % number, ())
        assert two.exchange(b"", ()) == [b"report %d" % number]
    one.leave()
    two.exchange(b"", ())
    assert "one" not in two._known, "what has left is forgotten"


async def test_a_folder_of_reports_that_is_none_any_more_does_not_stop_the_end_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("")
    process = PeerProcess(time.monotonic)
    exchange = PeerExchange(process.peers, LiveFolder(tmp_path / "reports", process.peers.writer), Registry())
    exchange.start()
    await exchange.stop()


async def test_a_report_that_cannot_be_applied_stops_no_other(tmp_path: Path) -> None:
    good, reader = (PeerProcess(time.monotonic) for _ in range(2))
    exchange = PeerExchange(reader.peers, LiveFolder(tmp_path, reader.peers.writer), Registry())
    huge = "9" * 400  # as many requests as no float holds
    for number in range(1, 4):
        use = f"[{huge},{huge},0,0,1,1e300,1e300]"
        report = f'["broken",{number},{{}},{{"team":{use}}},{{}},{{}},{{}},{{}},[],{{}},5]'
        (tmp_path / "broken").write_text(report)
        (tmp_path / "nonsense").write_bytes(b"\xff" * number)
        good.backends[0].in_flight = number
        good.peers.update()
        LiveFolder(tmp_path, good.peers.writer).exchange(good.peers.report, ())
        assert await exchange._exchange()
    reader.peers.settle("here", is_reported=True, is_out=False)
    assert reader.load() == [3, 0]
