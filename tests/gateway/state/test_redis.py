"""Failures of Redis: lost replies, no memory, no permission, keys of other programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.state.redis import RedisStore, without_credentials
from gateway.state.store import StateError
from tests.support.cutting_proxy import cutting_proxy
from tests.support.redis_server import RedisServer
from tests.support.state_member import LENGTH, Clock, Member, in_step


@pytest.fixture
def member(redis: RedisServer) -> Iterator[Member]:
    member = Member(RedisStore(redis.url, "test"))
    yield member
    member.store.close()


@pytest.mark.slow
def test_a_push_whose_reply_was_lost_counts_once(redis: RedisServer, member: Member) -> None:
    with cutting_proxy(redis.port, b"EVAL") as proxy:
        proxied = Member(RedisStore(f"redis://127.0.0.1:{proxy.port}/0", "test"), member.clock)
        proxied.statistics.add(LENGTH, ("k",), 1.0, 5.0)
        proxy.cuts = True
        for _ in range(2):
            with pytest.raises(StateError) as caught:
                proxied.sync()
            assert caught.value.kind == "unreachable"
        assert proxy.cut == 2
        member.sync()
        assert member.buckets() == {("k",): (1.0, 5.0)}, "the push arrived, only its reply was lost"
        proxied.statistics.add(LENGTH, ("k",), 1.0, 6.0)
        proxy.cuts = False
        in_step(proxied, member)
        proxied.store.close()
    assert member.buckets() == proxied.buckets() == {("k",): (2.0, 11.0)}


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


def test_an_evicted_page_is_pushed_again(redis: RedisServer, member: Member) -> None:
    other = Member(member.store, member.clock)
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    in_step(member, other)
    (page,) = redis.client.keys("test:page:*")
    redis.client.delete(page)
    other.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    in_step(other, member)
    assert member.buckets() == other.buckets() == {("k",): (2.0, 11.0)}


def test_pages_expire_with_their_epoch(redis: RedisServer, member: Member) -> None:
    member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    member.sync()
    (page,) = redis.client.keys("test:page:*")
    end_s = LENGTH.end_s(int(member.clock.now_s // LENGTH.epoch_s))
    assert redis.client.expiretime(page) == pytest.approx(end_s, abs=1.0)
    assert end_s > member.clock.now_s + 5 * LENGTH.half_life_s


def test_keys_of_another_program_are_reported(redis: RedisServer, member: Member) -> None:
    redis.client.set("test:pages:m", "a text")
    with pytest.raises(StateError) as caught:
        member.sync()
    assert caught.value.kind == "refused"
    redis.client.delete("test:pages:m")
    redis.client.hset("test:pages:m", f"length.2.1800.{int(Clock()() // 1800)}", "a stamp")
    redis.client.hset(f"test:page:m:length.2.1800.{int(Clock()() // 1800)}", "not json", "1")
    with pytest.raises(StateError) as caught:
        member.sync()
    assert caught.value.kind == "foreign"


def test_a_wrong_password_is_refused_and_not_shown(redis: RedisServer) -> None:
    store = RedisStore(f"redis://me:very-secret@127.0.0.1:{redis.port}/0", "test")
    with pytest.raises(StateError) as caught:
        store.versions()
    assert caught.value.kind == "refused"
    assert "very-secret" not in str(caught.value)
    store.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@redis.example:6380/2", "redis://redis.example:6380/2"),
        ("rediss://:secret@[fd00::1]", "rediss://[fd00::1]:6379"),
        ("redis://", "redis://localhost:6379"),
        ("unix://user:secret@/run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_credentials_are_removed_from_urls(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_a_unix_socket(redis: RedisServer) -> None:
    with pytest.raises(StateError) as caught:
        RedisStore(f"unix://{redis.folder}/none.sock", "test").versions()
    assert caught.value.kind == "unreachable"
    store = RedisStore(f"unix://{redis.socket}", "test")
    assert store.versions() == {}
    store.close()
