"""State and reports through Redis with TLS, and the URLs of servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.peers.live_redis import LiveRedis
from gateway.state.redis import RedisStore
from gateway.state.redis_client import without_credentials
from gateway.state.store import StateError
from tests.support.redis_tls import tls_redis
from tests.support.state_member import LENGTH, Member, in_step

EXPECTED = "expected redis://host:port/database, rediss://"


def learn_and_report(url: str) -> None:
    """Check that two gateways share statistics and reports."""
    one, two = Member(RedisStore(url, "test")), Member(RedisStore(url, "test"))
    one.statistics.add(LENGTH, ("k",), 1.0, 5.0)
    two.statistics.add(LENGTH, ("k",), 1.0, 6.0)
    in_step(one, two)
    assert one.buckets() == two.buckets() == {("k",): (2.0, 11.0)}
    here, there = LiveRedis(url, "test", "here"), LiveRedis(url, "test", "there")
    assert here.exchange(b"first", []) == []
    assert there.exchange(b"other", []) == [b"first"]
    assert there.exchange(b"", []) == [], "unchanged"
    assert here.exchange(b"second", []) == [b"other"]
    assert there.exchange(b"", []) == [b"second"]
    here.leave()
    assert LiveRedis(url, "test", "late").exchange(b"", []) == [b"other"]
    assert LiveRedis(url, "test", "later").exchange(b"", ["there"]) == []
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


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://a:secret", EXPECTED),
        ("redis://a:secret", EXPECTED),
        ("redis://a/secret", EXPECTED),
        ("redis+sentinel://a:26379,b:26379/main", "Sentinel and Cluster are not supported"),
        ("redis+cluster://a:7000", "Sentinel and Cluster are not supported"),
        ("redis://a?secret=1", "an option after `\\?` is not one of redis-py's connections"),
        ("rediss://a?ssl_cert_reqs=perhaps", "an option after `\\?` is not valid"),
    ],
)
def test_urls_with_errors(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        without_credentials(url)
    assert "secret" not in str(caught.value)


def test_the_files_of_a_url_need_not_exist_to_check_the_pool(tmp_path: Path) -> None:
    assert without_credentials(f"rediss://a?ssl_ca_certs={tmp_path}/none.pem") == "rediss://a:6379"
