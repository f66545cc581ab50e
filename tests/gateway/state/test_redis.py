"""Redis: its URLs, TLS, and its failures: no memory, no permission, keys of other programs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gateway.peers.live_redis import LiveRedis
from gateway.state.redis import RedisStore
from gateway.state.redis_client import RedisConnection, without_credentials
from gateway.state.store import Entry, StateError
from tests.support.redis_server import RedisServer
from tests.support.redis_tls import tls_redis
from tests.support.state_member import LENGTH, Member, in_step


@pytest.fixture
def member(redis: RedisServer) -> Iterator[Member]:
    member = Member(RedisStore(redis.url, "test"))
    yield member
    member.store.close()


def test_sums_refused_for_lack_of_memory_are_pushed_later(redis: RedisServer, member: Member) -> None:
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    redis.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StateError) as caught:
            member.sync()
        assert caught.value.kind == "full"
    finally:
        redis.client.config_set("maxmemory", 0)
    in_step(member)
    late = Member(member.store, member.clock)
    late.sync()
    assert late.buckets() == {("k",): (1.0, 5.0)}
    end_s = LENGTH.end_s(int(member.clock.now_s // LENGTH.epoch_s))
    for key in redis.client.keys("test:[pw]*"):
        assert end_s <= redis.client.expiretime(key) <= end_s + 3600.0, "keys expire with their epoch"


@pytest.mark.parametrize("evicted", ["page/*", "writer/*", "index"])
def test_evicted_keys_are_written_again(redis: RedisServer, member: Member, evicted: str) -> None:
    other = Member(member.store, member.clock)
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    in_step(member, other)
    redis.client.delete(*redis.client.keys(f"test:{evicted}"))
    other.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    late = Member(member.store, member.clock)
    in_step(other, late, member)
    assert member.buckets() == other.buckets() == late.buckets() == {("k",): (2.0, 11.0)}


def test_a_clock_that_is_wrong_is_told_once(
    member: Member, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = time.time()
    for behind_s in (0.0, 86400.0, 86400.0):
        monkeypatch.setattr(time, "time", lambda behind_s=behind_s: now_s - behind_s)
        member.store.stamps()
    (line,) = caplog.messages
    assert "s behind that of redis://" in line


def test_a_gateway_whose_clock_is_ahead_drops_nothing_of_others(
    redis: RedisServer, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    member.store.commit({}, {"late": Entry("old", b"", now_s - 9.0), "page": Entry("own", b"", now_s + 3600.0)})
    monkeypatch.setattr(time, "time", lambda: now_s + 86400.0)
    assert member.store.stamps() == {"page": "own"}
    assert redis.client.hkeys("test:index") == [b"page"]


def test_keys_of_another_program_are_reported(redis: RedisServer, member: Member) -> None:
    redis.client.set("test:index", "a text")
    with pytest.raises(StateError) as caught:
        member.sync()
    assert caught.value.kind == "refused"


def test_an_entry_of_another_program_is_set_aside(
    redis: RedisServer, member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    member.store.commit({"document/d": ""}, {"document/d": Entry("own", b"[]")})
    for index, head in (("a stamp and more", "{}"), ("stamp 0.0", "stamp not json"), (b"\xff 0.0", b"\xff 7")):
        redis.client.hset("test:index", "writer/w/m", index)
        redis.client.set("test:writer/w/m", head)
        member.sync()
        assert member.store.stamps()["document/d"] == "own"
    assert "writer/w/m" in caplog.text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@redis.example:6380/2", "redis://redis.example:6380/2"),
        ("rediss://:secret@[fd00::1]", "rediss://[fd00::1]:6379"),
        ("redis://", "redis://localhost:6379"),
        ("unix://user:secret@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("rediss://a?ssl_ca_certs=/no/such/file.pem", "rediss://a:6379"),  # which need not exist to check the pool
    ],
)
def test_credentials_are_removed_from_urls(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://a:secret", "expected redis://host:port/database, rediss://"),
        ("redis://a/secret", "expected redis://host:port/database, rediss://"),
        ("redis+sentinel://a:26379,b:26379/main", "Sentinel and Cluster are not supported"),
        ("redis://a?secret=1", "an option after `\\?` is not one of redis-py's connections"),
        ("rediss://a?ssl_cert_reqs=perhaps", "an option after `\\?` is not valid"),
    ],
)
def test_urls_with_errors(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        without_credentials(url)
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_tls_with_a_certificate_of_its_own() -> None:
    with tls_redis("pa55word") as (address, certificate):
        url = f"rediss://:pa55word@{address}/0?ssl_ca_certs={certificate}"
        store = RedisStore(url, "test")
        assert store.commit({}, {"a": Entry("stamp", b"1")})
        assert store.stamps() == {"a": "stamp"}
        store.close()
        here, there = LiveRedis(url, "test", "here"), LiveRedis(url, "test", "there")
        assert here.exchange(b"first", []) == []
        assert there.exchange(b"other", []) == [b"first"]
        assert there.exchange(b"", []) == [], "unchanged"
        assert here.exchange(b"second", []) == [b"other"]
        assert there.exchange(b"", []) == [b"second"]
        here.leave()
        assert LiveRedis(url, "test", "late").exchange(b"", []) == [b"other"]
        assert LiveRedis(url, "test", "later").exchange(b"", ["there"]) == []
        for wrong, kind in (
            (f"rediss://:pa55word@{address}/0", "unreachable"),  # a certificate that nobody has signed
            (url.replace("pa55word", "wrong"), "refused"),
            (f"{url}.none", "unreachable"),
        ):
            with pytest.raises(StateError) as caught:
                RedisStore(wrong, "test").stamps()
            assert caught.value.kind == kind
            assert "pa55word" not in str(caught.value)


def test_a_unix_socket(redis: RedisServer) -> None:
    with pytest.raises(StateError) as caught:
        RedisStore(f"unix://{redis.folder}/none.sock", "test").stamps()
    assert caught.value.kind == "unreachable"
    store = RedisStore(f"unix://{redis.socket}", "test")
    assert store.stamps() == {}
    store.close()


def test_a_server_that_takes_no_writes_any_more_is_connected_to_anew(redis: RedisServer) -> None:
    """As after a failover: its address is by now that of another one."""
    connection = RedisConnection(redis.url)
    with connection.translate_errors():
        before = connection.client.client_id()
        connection.client.replicaof("127.0.0.1", 1)
    with pytest.raises(StateError, match="read only replica"), connection.translate_errors():
        connection.client.set("a", "b")
    with connection.translate_errors():
        connection.client.replicaof("NO", "ONE")
        assert connection.client.client_id() != before
    connection.client.close()
