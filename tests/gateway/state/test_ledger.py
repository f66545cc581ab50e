"""Exchange of statistics through a store: nothing is lost and nothing counts twice, whatever fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from uuid import uuid4

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.state.ledger import page_of
from gateway.state.sqlite import SqliteStore
from gateway.state.store import Entry, StateError
from policies.statistics import Table
from tests.gateway.state.conftest import Stores
from tests.support.state_member import LENGTH, STEPS, Clock, Member, in_step


def test_three_members_share_all_observations(stores: Stores) -> None:
    clock = Clock()
    members = [Member(stores.open(), clock) for _ in range(3)]
    for number, member in enumerate(members):
        member.statistics.add(LENGTH, ("shared",), 1.0, float(number))
        member.statistics.add(LENGTH, (f"of {number}", "ü\n|"), 1.0, 0.1)
        member.statistics.add(STEPS, (), 1.0, 2.0, 3.0)
    numbers = (0.1 + 0.2, -1e-17, 12345678.900000001)
    members[0].statistics.add(STEPS, ("exact",), *numbers)
    in_step(*members)
    assert members[2].statistics.buckets(STEPS)["exact",] == numbers
    members[0].statistics.add(LENGTH, ("shared",), 1.0, 40.0)
    in_step(*members)
    for member in members:
        assert member.buckets() == {
            ("shared",): (4.0, 43.0),
            **{(f"of {number}", "ü\n|"): (1.0, 0.1) for number in range(3)},
        }
        assert member.buckets(STEPS)[()] == (3.0, 6.0, 9.0)


FOREIGN = {
    "sums": [[["k"], [1.0, 1e300]]], "a truth": [[["k"], [True, 1.0]]], "a key": [[[["k"]], [1.0, 1.0]]],
    "no rows": 7, "no JSON": b"{",
}  # fmt: skip


@pytest.mark.parametrize("place", ["page", "head"])
@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_cannot_be_read_is_set_aside_and_all_else_is_read(
    stores: Stores, place: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    members = [Member(stores.open(), clock) for _ in range(3)]
    broken, good, reader = members
    for member in (broken, good):
        member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
        member.sync()
    head = broken.ledger._head
    name = head if place == "head" else page_of(head, next(iter(broken.ledger._pages)))
    data = value if isinstance(value, bytes) else orjson.dumps(value)
    entry = broken.store.read([name])[name]
    broken.store.commit({}, {name: Entry(entry.stamp and "other", data, entry.end_s)})
    for _ in range(2):
        reader.sync()
    assert reader.buckets() == {("k",): (1.0, 5.0)}
    assert f"{name} was not written by the gateway" in caplog.text


def test_models_and_tables_of_other_versions_are_separate(stores: Stores) -> None:
    member, of_another = Member(stores.open()), Member(stores.open(), model="m/more")
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    in_step(member, of_another)
    assert of_another.buckets() == {}
    wider = Table(LENGTH.name, 3, LENGTH.half_life_s, LENGTH.overflow)
    slower = Table(LENGTH.name, 2, 2 * LENGTH.half_life_s, LENGTH.overflow)
    for table in (wider, slower):
        other = Member(stores.open(), member.clock, tables=(table,))
        other.statistics.add(table, ("k",), *[1.0] * table.width)
        in_step(other, member)
        assert other.buckets(table) == {("k",): (1.0,) * table.width}
    assert member.buckets() == {("k",): (1.0, 5.0)}


def test_a_commit_needs_the_expected_stamps(stores: Stores) -> None:
    store, other = stores.open(), stores.open()
    entries = {"listed": Entry("one", b"1 2\n", Clock()() + 1000.0), "unlisted": Entry("", b"\xff")}
    assert store.commit({"listed": ""}, entries)
    assert other.stamps() == {"listed": "one"}
    assert {name: entry.value for name, entry in other.read(["listed", "unlisted", "none"]).items()} == {
        "listed": b"1 2\n",
        "unlisted": b"\xff",
    }
    for expected in ({"listed": ""}, {"listed": "two"}, {"listed": "one", "none": "one"}):
        assert not other.commit(expected, {"listed": Entry("three", b""), "unlisted": None})
    assert store.stamps() == {"listed": "one"}
    assert store.read(["unlisted"])
    assert other.commit({"listed": "one", "none": ""}, {"listed": None, "unlisted": None})
    assert store.stamps() == store.read(["listed", "unlisted"]) == {}


def test_expired_pages_are_forgotten(stores: Stores) -> None:
    clock = Clock()
    one, two = Member(stores.open(), clock), Member(stores.open(), clock)
    one.statistics.add(STEPS, ("k",), 1.0, 2.0, 3.0)
    in_step(one, two)
    assert two.buckets(STEPS)
    clock.now_s += STEPS.half_life_s * 7
    in_step(one, two)
    assert one.ledger._pages == {}
    assert one.ledger._known == two.ledger._known == set()
    assert two.statistics._others == {}


def test_expired_entries_are_removed_from_the_store(stores: Stores) -> None:
    store = stores.open()
    store.commit({"old": ""}, {"old": Entry("stamp", b"", 1000.0)})
    store.commit({"new": ""}, {"new": Entry("stamp", b"", Clock()() + 1000.0)})
    assert set(store.stamps()) == {"new"}
    assert not store.read(["old"])


class Unreliable(SqliteStore):
    """A store that can fail after a commit has succeeded."""

    loses_replies = False

    def commit(self, expected: Mapping[str, str], changes: Mapping[str, Entry | None]) -> bool:
        committed = super().commit(expected, changes)
        if self.loses_replies:
            raise StateError("timeout", "the reply is lost")
        return committed

    def wipe(self) -> None:
        with self._transaction("IMMEDIATE") as connection:
            connection.execute("DELETE FROM entries")


@pytest.fixture(scope="module")
def unreliable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unreliable]:
    with contextlib.closing(Unreliable(tmp_path_factory.mktemp("unreliable") / "state.sqlite")) as store:
        yield store


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
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
                members[index].exchange()
            case ("exchange, reply lost", int(index)):
                unreliable.loses_replies = True
                with contextlib.suppress(StateError):
                    members[index].exchange()
                unreliable.loses_replies = False
            case ("settle", int(index)):
                members[index].ledger.settle()
            case ("wipe",):
                unreliable.wipe()
            case ("time passes",):
                clock.now_s += LENGTH.epoch_s / 2
    in_step(*members)
    members.append(Member(unreliable, clock, model))  # reads only what is in the store
    members[-1].sync()
    expected = reference.statistics.buckets(LENGTH)
    for member in members:
        buckets = member.statistics.buckets(LENGTH)
        assert buckets.keys() == expected.keys()
        for length, sums in buckets.items():
            assert sums == pytest.approx(expected[length], rel=1e-6, abs=1e-3)
