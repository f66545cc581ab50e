"""Experience in a store: nothing is lost, nothing counts twice, whatever happens between."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.state.sqlite import SqliteStore
from gateway.state.store import Content, Push, Receipt, StateError
from policies.statistics import Table
from tests.gateway.state.conftest import Place
from tests.support.redis_server import RedisServer
from tests.support.state_member import LENGTH, STEPS, Clock, Member, in_step


def test_three_know_what_all_of_them_observed(place: Place) -> None:
    clock = Clock()
    members = [Member(place.store(), clock) for _ in range(3)]
    for number, member in enumerate(members):
        member.statistics.add(LENGTH, ("shared",), 1.0, float(number))
        member.statistics.add(LENGTH, (f"of {number}", "ü\n|"), 1.0, 0.1)
        member.statistics.add(STEPS, (), 1.0, 2.0, 3.0)
    in_step(*members)
    members[0].statistics.add(LENGTH, ("shared",), 1.0, 40.0)
    in_step(*members)
    for member in members:
        assert member.buckets() == {
            ("shared",): (4.0, 43.0),
            **{(f"of {number}", "ü\n|"): (1.0, 0.1) for number in range(3)},
        }
        assert member.buckets(STEPS) == {(): (3.0, 6.0, 9.0)}


def test_sums_come_back_to_the_last_bit(place: Place) -> None:
    numbers = (0.1 + 0.2, -1e-17, 12345678.900000001)
    writer, reader = Member(place.store()), Member(place.store())
    writer.statistics.add(STEPS, ("k",), *numbers)
    writer.sync()
    reader.sync()
    assert reader.statistics.buckets(STEPS) == {("k",): numbers}


def test_what_one_learned_is_there_for_the_next(place: Place) -> None:
    first = Member(place.store())
    first.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    first.sync()
    second = Member(place.store(), first.clock)
    second.sync()
    assert second.buckets() == {("k",): (1.0, 5.0)}
    second.statistics.add(LENGTH, ("k",), 1.0, 7.0)
    second.sync()
    third = Member(place.store(), first.clock)
    third.sync()
    assert third.buckets() == {("k",): (2.0, 12.0)}


def test_models_are_apart(place: Place) -> None:
    one, other = Member(place.store(), model="one"), Member(place.store(), model="one/more")
    one.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    in_step(one, other)
    assert other.buckets() == {}


def test_another_version_of_a_table_is_left_alone(place: Place) -> None:
    member = Member(place.store())
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    member.sync()
    wider = Table(LENGTH.name, 3, LENGTH.half_life_s, LENGTH.overflow)
    slower = Table(LENGTH.name, 2, 2 * LENGTH.half_life_s, LENGTH.overflow)
    for table in (wider, slower):
        other = Member(place.store(), member.clock, tables=(table,))
        other.statistics.add(table, ("k",), *[1.0] * table.width)
        in_step(other, member)
        assert other.buckets(table) == {("k",): (1.0,) * table.width}
    assert member.buckets() == {("k",): (1.0, 5.0)}


def test_a_batch_that_comes_twice_counts_once(place: Place) -> None:
    store = place.store()
    end_s = Clock()() + 1000.0
    push = Push("length.2.1800.1", end_s, "", 1, {("k",): (1.0, 2.0)})
    (first,) = store.push("m", "w", [push])
    assert store.push("m", "w", [push]) == [first]
    again = Push(push.page, end_s, first.generation, 2, {("k",): (1.0, 2.0)})
    assert store.push("m", "w", [again, again]) == [Receipt(first.generation, 2)] * 2
    assert store.push("m", "w", [push]) == [Receipt(first.generation, 2)]
    assert store.read("m", "w", [push.page, "nothing"]) == {
        push.page: Content(first.generation, 2, {("k",): (2.0, 4.0)})
    }


def test_a_push_to_a_page_that_was_begun_again_adds_nothing(place: Place) -> None:
    store = place.store()
    end_s = Clock()() + 1000.0
    (before,) = store.push("m", "w", [Push("p.2.1.1", end_s, "", 1, {("k",): (1.0, 2.0)})])
    place.wipe()
    late = Push("p.2.1.1", end_s, before.generation, 2, {("k",): (1.0, 2.0)})
    assert store.push("m", "w", [late]) == [Receipt("", 0)]
    (begun,) = store.push("m", "other", [Push("p.2.1.1", end_s, "", 1, {("k",): (5.0, 5.0)})])
    assert begun.generation != before.generation
    assert store.push("m", "w", [late]) == [Receipt(begun.generation, 0)]
    assert store.read("m", "w", ["p.2.1.1"])["p.2.1.1"].rows == {("k",): (5.0, 5.0)}


def test_what_a_wiped_store_lost_is_pushed_again(place: Place) -> None:
    clock = Clock()
    one, two = Member(place.store(), clock), Member(place.store(), clock)
    one.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    two.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    in_step(one, two)
    place.wipe()
    two.statistics.add(LENGTH, ("k",), 1.0, 7.0)
    in_step(two, one)
    late = Member(place.store(), clock)
    late.sync()
    assert one.buckets() == two.buckets() == late.buckets() == {("k",): (3.0, 18.0)}
    assert one.ledger.pages_lost == two.ledger.pages_lost == 1


def test_pages_whose_time_is_over_are_forgotten_everywhere(place: Place) -> None:
    clock = Clock()
    one, two = Member(place.store(), clock), Member(place.store(), clock)
    one.statistics.add(STEPS, ("k",), 1.0, 2.0, 3.0)
    in_step(one, two)
    assert two.buckets(STEPS)
    clock.now_s += STEPS.half_life_s * 7
    in_step(one, two)
    assert one.ledger._pages == {}
    assert two.statistics._others == {}


def test_a_new_page_makes_the_store_forget_old_ones(place: Place) -> None:
    store = place.store()
    store.push("m", "w", [Push("p.2.1.1", 1000.0, "", 1, {("k",): (1.0, 2.0)})])
    store.push("m", "w", [Push("p.2.1.9", Clock()() + 1000.0, "", 1, {("k",): (1.0, 2.0)})])
    assert set(store.stamps("m")) == {"p.2.1.9"}
    assert store.read("m", "w", ["p.2.1.1"]) == {}


def test_a_file_that_was_set_back_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    clock = Clock()
    one, two = Member(SqliteStore(path), clock), Member(SqliteStore(path), clock)
    one.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    in_step(one, two)
    for member in (one, two):
        member.store.close()
    backup = path.read_bytes()
    one.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    two.statistics.add(LENGTH, ("k",), 1.0, 7.0)
    in_step(one, two)
    for member in (one, two):
        member.store.close()
        member.ledger.read_again()
    path.write_bytes(backup)
    in_step(two, one)
    for member in (one, two):
        assert member.buckets() == {("k",): (3.0, 18.0)}
        member.store.close()


def test_a_redis_that_was_set_back_is_found_out(redis: RedisServer) -> None:
    from gateway.state.redis import RedisStore

    clock = Clock()
    one, two = (Member(RedisStore(redis.url, "test"), clock) for _ in range(2))
    one.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    in_step(one, two)
    redis.save()
    one.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    in_step(one, two)
    try:
        redis.kill()
        with pytest.raises(StateError) as caught:
            one.sync()
        assert caught.value.kind == "unreachable"
    finally:
        redis.start(with_saved=True)
    for member in (one, two):
        member.ledger.read_again()
    two.statistics.add(LENGTH, ("k",), 1.0, 7.0)
    in_step(two, one)
    for member in (one, two):
        assert member.buckets() == {("k",): (3.0, 18.0)}
        member.store.close()


class Unreliable(SqliteStore):
    """Does what it is asked to, and then may say that it failed."""

    answers_are_lost = False

    def push(self, model: str, writer: str, pushes: Sequence[Push]) -> list[Receipt]:
        receipts = super().push(model, writer, pushes)
        if self.answers_are_lost:
            raise StateError("timeout", "the answer is lost")
        return receipts

    def wipe(self, model: str) -> None:
        with self._transaction("IMMEDIATE") as connection:
            for table in ("pages", "cells", "batches"):
                connection.execute(f"DELETE FROM {table} WHERE model = ?", (model,))


@pytest.fixture(scope="module")
def unreliable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unreliable]:
    store = Unreliable(tmp_path_factory.mktemp("unreliable") / "state.sqlite")
    yield store
    store.close()


MEMBERS = st.integers(0, 2)
EVENTS = st.one_of(
    st.tuples(st.just("observe"), MEMBERS, st.sampled_from("abc"), st.floats(-1e6, 1e6)),
    st.tuples(st.just("stage"), MEMBERS),
    st.tuples(st.just("exchange"), MEMBERS),
    st.tuples(st.just("exchange, answer lost"), MEMBERS),
    st.tuples(st.just("settle"), MEMBERS),
    st.tuples(st.just("wipe")),
    st.tuples(st.just("time passes")),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, max_size=40))
def test_sums_are_those_of_all_observations_in_any_order(
    unreliable: Unreliable, events: list[tuple[object, ...]]
) -> None:
    clock = Clock()
    model = uuid4().hex  # examples run again, and must begin empty
    one_alone = Member(unreliable, clock)
    members = [Member(unreliable, clock, model) for _ in range(3)]
    for event in events:
        match event:
            case ("observe", int(at), str(key), float(value)):
                for member in (members[at], one_alone):
                    member.statistics.add(LENGTH, (key,), 1.0, value)
            case ("stage", int(at)):
                members[at].ledger.stage()
            case ("exchange", int(at)):
                members[at].ledger.exchange(unreliable)
            case ("exchange, answer lost", int(at)):
                unreliable.answers_are_lost = True
                try:
                    members[at].ledger.exchange(unreliable)
                except StateError:
                    pass
                finally:
                    unreliable.answers_are_lost = False
            case ("settle", int(at)):
                members[at].ledger.settle()
            case ("wipe",):
                unreliable.wipe(model)
            case ("time passes",):
                clock.now_s += LENGTH.epoch_s / 2
    in_step(*members)
    members.append(Member(unreliable, clock, model))  # one that knows only what is in the store
    members[-1].sync()
    expected = one_alone.statistics.buckets(LENGTH)
    for member in members:
        found = member.statistics.buckets(LENGTH)
        assert found.keys() == expected.keys()
        for key, sums in found.items():
            assert sums == pytest.approx(expected[key], rel=1e-6, abs=1e-3)


def add_and_sync(path: Path, rounds: int, now_s: float) -> None:
    member = Member(SqliteStore(path), Clock(now_s))
    for number in range(rounds):
        member.statistics.add(LENGTH, (f"key {number % 7}",), 1.0, 2.0)
        member.sync()
    member.store.close()


def test_two_processes_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    clock = Clock()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_and_sync, args=(path, 70, clock.now_s)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
        assert process.exitcode == 0
    late = Member(SqliteStore(path), clock)
    late.sync()
    late.store.close()
    assert late.buckets() == {(f"key {number}",): (20.0, 40.0) for number in range(7)}
