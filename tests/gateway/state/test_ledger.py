"""Exchange of statistics through a store: nothing is lost and nothing counts twice, whatever fails."""

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
from tests.gateway.state.conftest import Stores
from tests.support.redis_server import RedisServer
from tests.support.state_member import LENGTH, STEPS, Clock, Member, in_step


def test_three_members_share_all_observations(stores: Stores) -> None:
    clock = Clock()
    members = [Member(stores.open(), clock) for _ in range(3)]
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


def test_sums_are_restored_exactly(stores: Stores) -> None:
    numbers = (0.1 + 0.2, -1e-17, 12345678.900000001)
    writer, reader = Member(stores.open()), Member(stores.open())
    writer.statistics.add(STEPS, ("k",), *numbers)
    writer.sync()
    reader.sync()
    assert reader.statistics.buckets(STEPS) == {("k",): numbers}


def test_statistics_of_earlier_members_are_read_by_later_ones(stores: Stores) -> None:
    first = Member(stores.open())
    first.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    first.sync()
    second = Member(stores.open(), first.clock)
    second.sync()
    assert second.buckets() == {("k",): (1.0, 5.0)}
    second.statistics.add(LENGTH, ("k",), 1.0, 7.0)
    second.sync()
    third = Member(stores.open(), first.clock)
    third.sync()
    assert third.buckets() == {("k",): (2.0, 12.0)}


def test_models_are_separate(stores: Stores) -> None:
    one, other = Member(stores.open(), model="one"), Member(stores.open(), model="one/more")
    one.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    in_step(one, other)
    assert other.buckets() == {}


def test_tables_of_other_versions_are_separate(stores: Stores) -> None:
    member = Member(stores.open())
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    member.sync()
    wider = Table(LENGTH.name, 3, LENGTH.half_life_s, LENGTH.overflow)
    slower = Table(LENGTH.name, 2, 2 * LENGTH.half_life_s, LENGTH.overflow)
    for table in (wider, slower):
        other = Member(stores.open(), member.clock, tables=(table,))
        other.statistics.add(table, ("k",), *[1.0] * table.width)
        in_step(other, member)
        assert other.buckets(table) == {("k",): (1.0,) * table.width}
    assert member.buckets() == {("k",): (1.0, 5.0)}


def test_a_repeated_batch_counts_once(stores: Stores) -> None:
    store = stores.open()
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


def test_a_push_to_an_older_generation_adds_nothing(stores: Stores) -> None:
    store = stores.open()
    end_s = Clock()() + 1000.0
    (before,) = store.push("m", "w", [Push("p.2.1.1", end_s, "", 1, {("k",): (1.0, 2.0)})])
    stores.wipe()
    late = Push("p.2.1.1", end_s, before.generation, 2, {("k",): (1.0, 2.0)})
    assert store.push("m", "w", [late]) == [Receipt("", 0)]
    (recreated,) = store.push("m", "other", [Push("p.2.1.1", end_s, "", 1, {("k",): (5.0, 5.0)})])
    assert recreated.generation != before.generation
    assert store.push("m", "w", [late]) == [Receipt(recreated.generation, 0)]
    assert store.read("m", "w", ["p.2.1.1"])["p.2.1.1"].rows == {("k",): (5.0, 5.0)}


def test_a_wiped_store_gets_all_sums_back(stores: Stores) -> None:
    clock = Clock()
    one, two = Member(stores.open(), clock), Member(stores.open(), clock)
    one.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    two.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    in_step(one, two)
    stores.wipe()
    two.statistics.add(LENGTH, ("k",), 1.0, 7.0)
    in_step(two, one)
    late = Member(stores.open(), clock)
    late.sync()
    assert one.buckets() == two.buckets() == late.buckets() == {("k",): (3.0, 18.0)}
    assert one.ledger.pages_lost == two.ledger.pages_lost == 1


def test_expired_pages_are_removed_everywhere(stores: Stores) -> None:
    clock = Clock()
    one, two = Member(stores.open(), clock), Member(stores.open(), clock)
    one.statistics.add(STEPS, ("k",), 1.0, 2.0, 3.0)
    in_step(one, two)
    assert two.buckets(STEPS)
    clock.now_s += STEPS.half_life_s * 7
    in_step(one, two)
    assert one.ledger._pages == {}
    assert two.statistics._others == {}


def test_a_new_page_removes_expired_pages_from_the_store(stores: Stores) -> None:
    store = stores.open()
    store.push("m", "w", [Push("p.2.1.1", 1000.0, "", 1, {("k",): (1.0, 2.0)})])
    store.push("m", "w", [Push("p.2.1.9", Clock()() + 1000.0, "", 1, {("k",): (1.0, 2.0)})])
    assert set(store.stamps("m")) == {"p.2.1.9"}
    assert store.read("m", "w", ["p.2.1.1"]) == {}


def test_a_file_reset_to_an_older_state_is_detected(tmp_path: Path) -> None:
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


def test_a_redis_reset_to_an_older_state_is_detected(redis: RedisServer) -> None:
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
    """A store that can fail after a push has succeeded."""

    loses_replies = False

    def push(self, model: str, writer: str, pushes: Sequence[Push]) -> list[Receipt]:
        receipts = super().push(model, writer, pushes)
        if self.loses_replies:
            raise StateError("timeout", "the reply is lost")
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
    st.tuples(st.just("exchange, reply lost"), MEMBERS),
    st.tuples(st.just("settle"), MEMBERS),
    st.tuples(st.just("wipe")),
    st.tuples(st.just("time passes")),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, max_size=40))
def test_sums_equal_those_of_all_observations_after_any_events(
    unreliable: Unreliable, events: list[tuple[object, ...]]
) -> None:
    clock = Clock()
    model = uuid4().hex  # every example needs an empty store
    reference = Member(unreliable, clock)
    members = [Member(unreliable, clock, model) for _ in range(3)]
    for event in events:
        match event:
            case ("observe", int(index), str(key), float(value)):
                for member in (members[index], reference):
                    member.statistics.add(LENGTH, (key,), 1.0, value)
            case ("stage", int(index)):
                members[index].ledger.stage()
            case ("exchange", int(index)):
                members[index].ledger.exchange(unreliable)
            case ("exchange, reply lost", int(index)):
                unreliable.loses_replies = True
                try:
                    members[index].ledger.exchange(unreliable)
                except StateError:
                    pass
                finally:
                    unreliable.loses_replies = False
            case ("settle", int(index)):
                members[index].ledger.settle()
            case ("wipe",):
                unreliable.wipe(model)
            case ("time passes",):
                clock.now_s += LENGTH.epoch_s / 2
    in_step(*members)
    members.append(Member(unreliable, clock, model))  # reads only what is in the store
    members[-1].sync()
    expected = reference.statistics.buckets(LENGTH)
    for member in members:
        buckets = member.statistics.buckets(LENGTH)
        assert buckets.keys() == expected.keys()
        for key, sums in buckets.items():
            assert sums == pytest.approx(expected[key], rel=1e-6, abs=1e-3)


def add_and_sync(path: Path, rounds: int, now_s: float) -> None:
    member = Member(SqliteStore(path), Clock(now_s))
    for number in range(rounds):
        member.statistics.add(LENGTH, (f"key {number % 7}",), 1.0, 2.0)
        member.sync()
    member.store.close()


@pytest.mark.slow
def test_two_processes_that_push_concurrently_lose_nothing(tmp_path: Path) -> None:
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
