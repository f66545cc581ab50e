"""State and reports through Redis with TLS, Sentinel and Cluster: real servers, which fail over and move keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.state.live import LiveExchange
from gateway.state.redis import RedisStore
from gateway.state.redis_client import redis_address
from gateway.state.store import StateError
from tests.support.redis_topologies import cluster_redis, sentinel_redis, tls_redis
from tests.support.state_member import LENGTH, Member, in_step
from tests.support.waiting import eventually_blocking

EXPECTED = "expected redis://host:port/database, rediss://"


def works(attempt: Callable[[], object]) -> bool:
    with contextlib.suppress(StateError):
        attempt()
        return True
    return False


def learn_and_report(url: str) -> None:
    """Check that two gateways share statistics and reports."""
    one, two = Member(RedisStore(url, "test")), Member(RedisStore(url, "test"))
    one.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    two.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    in_step(one, two)
    assert one.buckets() == two.buckets() == {("k",): (2.0, 11.0)}
    here, there = LiveExchange(url, "test", "here"), LiveExchange(url, "test", "there")
    assert here.exchange(b"first", []) == []
    assert there.exchange(b"other", []) == [b"first"]
    assert there.exchange(b"", []) == [], "unchanged"
    assert here.exchange(b"second", []) == [b"other"]
    assert there.exchange(b"", []) == [b"second"]
    here.leave()
    assert LiveExchange(url, "test", "late").exchange(b"", []) == [b"other"]
    assert LiveExchange(url, "test", "later").exchange(b"", ["there"]) == []
    one.store.close()
    two.store.close()


@pytest.mark.slow
def test_tls_with_a_certificate_of_its_own() -> None:
    with tls_redis("pa55word") as (address, certificate):
        learn_and_report(f"rediss://:pa55word@{address}/0?ssl_ca_certs={certificate}")
        for url, kind in (
            (f"rediss://:pa55word@{address}/0", "unreachable"),  # a certificate that nobody has signed
            (f"rediss://:wrong@{address}/0?ssl_ca_certs={certificate}", "refused"),
            (f"rediss://:pa55word@{address}/0?ssl_ca_certs={certificate}.none", "unreachable"),
        ):
            with pytest.raises(StateError) as caught:
                RedisStore(url, "test").stamps()
            assert caught.value.kind == kind
            assert "pa55word" not in str(caught.value)


@pytest.mark.slow
def test_sentinels_name_the_new_master() -> None:
    with sentinel_redis() as sentinels:
        learn_and_report(sentinels.url)
        member = Member(RedisStore(sentinels.url, "test"))
        live = LiveExchange(sentinels.url, "test", "w")
        member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
        member.sync()
        live.exchange(b"report", [])
        eventually_blocking(lambda: sentinels.replica.client.hget("test:live", "w") == b"report", what="replicated")
        sentinels.master.kill()
        with pytest.raises(StateError) as caught:
            member.sync()
        assert caught.value.kind == "unreachable"
        eventually_blocking(lambda: works(member.sync), what="the store is found at the new master")
        eventually_blocking(lambda: works(lambda: live.exchange(b"again", [])))
        assert sentinels.replica.client.hget("test:live", "w") == b"again"
        late = Member(member.store, member.clock)
        late.sync()
        assert late.buckets() == {("k",): (3.0, 16.0)}
        member.store.close()


@pytest.mark.slow
def test_all_keys_of_a_pool_have_one_slot_of_a_cluster_and_may_move() -> None:
    with cluster_redis() as cluster:
        learn_and_report(cluster.url)
        member = Member(RedisStore(cluster.url, "test"))
        live = LiveExchange(cluster.url, "test", "w")
        live.exchange(b"report", [])
        keys = cluster.keys()
        assert {key.partition(b":")[0] for key in keys} == {b"{test}"}
        holder = cluster.holder_of("{test}:index")
        other = next(server for server in cluster.servers if server is not holder)
        cluster.move("{test}:index", holder, other)
        member.statistics.add(LENGTH, ("k",), 1.0, 5.0)
        eventually_blocking(lambda: works(member.sync))
        eventually_blocking(lambda: works(lambda: live.exchange(b"again", [])))
        assert cluster.holder_of("{test}:live") is other
        assert sorted(cluster.keys()) == sorted({*keys, *other.client.keys("*")}), "nothing is left behind"
        late = Member(member.store, member.clock)
        late.sync()
        assert late.buckets() == {("k",): (3.0, 16.0)}
        member.store.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis+sentinel://user:secret@a:1,[fd00::1]/main/3", "redis+sentinel://a:1,[fd00::1]:26379/main/3"),
        ("rediss+sentinel://a/main?sentinel_password=secret", "rediss+sentinel://a:26379/main"),
        ("redis+cluster://:secret@a,b:7001", "redis+cluster://a:6379,b:7001"),
        ("rediss+cluster://a?ssl_ca_certs=/ca.pem", "rediss+cluster://a:6379"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert redis_address(url).location == shown


def test_options_of_sentinels_and_of_their_master() -> None:
    address = redis_address("rediss+sentinel://me:secret@a,b/main/3?sentinel_password=other&ssl_ca_certs=/ca.pem")
    assert address.hosts == (("a", 26379), ("b", 26379))
    tls = {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert address.options == {"username": "me", "password": "secret", "db": 3, **tls}
    assert address.sentinel_options == {"password": "other", **tls}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://a:secret", EXPECTED),
        ("redis://a:secret", EXPECTED),
        ("redis://a/secret", EXPECTED),
        ("redis+ring://a", EXPECTED),
        ("unix+cluster://a", EXPECTED),
        ("redis+sentinel://a:26379,b:26379", "needs the name of the master"),
        ("redis+sentinel://a:26379/main/secret", EXPECTED),
        ("redis+cluster://a:secret", "expected host:port,host:port"),
        ("redis+cluster://a,", "expected host:port,host:port"),
        ("redis+cluster://a/3", "no other database than 0"),
        ("redis://a?secret=1", "an option after `\\?` is not one of redis-py's connections"),
        ("rediss://a?ssl_cert_reqs=perhaps", "an option after `\\?` is not valid"),
    ],
)
def test_urls_with_errors(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        redis_address(url)
    assert "secret" not in str(caught.value)


def test_a_prefix_with_a_hash_tag_is_kept() -> None:
    from gateway.state.redis_client import RedisConnection

    assert RedisConnection("redis+cluster://a", "east-{pool}").prefix == "east-{pool}"
    assert RedisConnection("redis+cluster://a", "pool").prefix == "{pool}"
    assert RedisConnection("redis://a", "pool").prefix == "pool"


def test_the_files_of_a_url_need_not_exist_to_check_the_pool(tmp_path: Path) -> None:
    assert redis_address(f"rediss://a?ssl_ca_certs={tmp_path}/none.pem").options["ssl_ca_certs"].endswith("none.pem")
