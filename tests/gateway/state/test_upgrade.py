"""What earlier versions stored is read, and what later ones stored is left alone.

The files of `tests/data/state` were written by the code of these versions, with a clock that says 2100: two gateways,
five answers learned, in the tables of their learner, version 2 of the rules pinned.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from pathlib import Path

import pytest

from gateway.admin.policy_versions import Pin, settings_of
from gateway.state import sqlite
from gateway.state.documents import Documents
from gateway.state.redis import RedisStore
from gateway.state.sqlite import SqliteStore
from gateway.state.store import Store
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.learned.table import LENGTH
from policies.statistics import Table
from tests.support.redis_server import RedisServer
from tests.support.state_member import Clock, Member

EARLIER = Path(__file__).parents[2] / "data" / "state"
SCHEMAS = sorted(path.stem for path in EARLIER.glob("*.sql"))
WRITTEN_S = 4102444805.0
FORMER = tuple(
    Table(name, width, half_life_s, lambda key: key)
    for name, width, half_life_s in (("acceptance", 3, 7200.0), ("length", 3, 7200.0), ("steps", 16, 900.0))
)
"""The tables of the learner that wrote the files."""


async def _no_store(_: object) -> None:
    raise AssertionError


def written(schema: str, path: Path) -> SqliteStore:
    connection = sqlite3.connect(path)
    connection.executescript((EARLIER / f"{schema}.sql").read_text())
    connection.close()
    return SqliteStore(path)


def stored(schema: str, redis: RedisServer) -> RedisStore:
    for key, value in json.loads((EARLIER / f"{schema}.json").read_text()).items():
        if isinstance(value, dict):
            redis.client.hset(key, mapping=value)
        elif isinstance(value, list):
            redis.client.rpush(key, *value)
        else:
            redis.client.set(key, value)
    return RedisStore(redis.url, "gateway")


@pytest.fixture(params=itertools.product(SCHEMAS, ["sqlite", "redis"]), ids="-".join)
def store(request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer) -> Store:
    """A store that an earlier version has written."""
    schema, kind = request.param
    return written(schema, tmp_path / "state.sqlite") if kind == "sqlite" else stored(schema, redis)


def learned(member: Member) -> dict[str, float]:
    """Return the number of observations by table."""
    tables = member.statistics.tables.values()
    return {table.name: sum(sums[0] for sums in member.statistics.buckets(table).values()) for table in tables}


def member_of(store: Store, tables: tuple[Table, ...] = FORMER) -> Member:
    """Return a member that knows what the store has."""
    member = Member(store, Clock(WRITTEN_S), "llama", tables)
    member.sync()
    return member


def pin_in(store: Store) -> Pin:
    documents = Documents(_no_store)
    documents.settle(documents.refresh(store, store.stamps()))
    assert [each.version for each in documents.history("llama/rules")] == [1, 2]
    document = documents.get("llama/pin")
    return Pin.model_validate_json(document.text)


def test_what_earlier_versions_stored_survives(store: Store) -> None:
    for _ in range(2):  # as it begins, and after a restart
        assert learned(member_of(store)) == {"acceptance": 5.0, "length": 5.0, "steps": 5.0}
        pin = pin_in(store)
        assert pin.version == 2
        assert [rule.name for rule in settings_of(pin.rules).rules] == ["code", "rest"]
        store.close()


def test_what_a_former_learner_has_learned_begins_anew_beside_its_pins(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    tables = tuple(Learned(LearnedSettings()).statistics.tables.values())
    member = member_of(store, tables)
    member.sync()
    (said,) = caplog.messages
    assert "acceptance.3.1800, length.3.1800, steps.16.225 is not read; this one has" in said
    assert not any(learned(member).values())
    assert pin_in(store).version == 2
    member.statistics.add(LENGTH, ("", "0/0", "code/2", "", ""), 1.0, 0.5, 1.0, 0.5)
    member.sync()
    assert learned(member_of(store, tables))["log_length"] == 1.0, "what is learned from now on stays"
    store.close()


@pytest.mark.parametrize("had_copy", [True, False])
def test_a_file_of_a_later_version_is_left_alone(
    had_copy: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, own = tmp_path / "state.sqlite", tmp_path / "state.sqlite.format-2"
    if had_copy:
        written("pins-with-history", own).close()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE later (x)")
    connection.execute(f"PRAGMA application_id = {sqlite._APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    before = path.read_bytes()
    store = SqliteStore(path)
    member = member_of(store)
    member.sync()
    assert learned(member)["length"] == (5.0 if had_copy else 0.0)
    (message,) = caplog.messages
    assert "written by a later version of the gateway (format 3)" in message
    assert message.endswith("the one from the last time" if had_copy else "a new file")
    assert store.location == str(own)
    store.close()
    assert path.read_bytes() == before
