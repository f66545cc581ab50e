"""Replicas from DNS, asked of a real DNS server."""

from __future__ import annotations

import pytest

from gateway.discovery import resolver
from gateway.discovery.resolver import DnsSource
from gateway.discovery.source import SourceError
from tests.gateway.discovery.followed import Followed, following
from tests.support.dns_server import DnsServer
from tests.support.waiting import eventually

NAME = "vllm.example."


def urls_of(followed: Followed) -> list[list[str]]:
    return [[each.url for each in report.values()] for report in followed.reports]


@pytest.mark.slow
async def test_each_address_is_a_replica_and_one_of_both_families_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_SHORTEST_S", 0.05)
    async with DnsServer() as server:
        server.records = {(NAME, "A"): ["10.0.0.7", "10.0.0.3"], (NAME, "AAAA"): ["fd00::7"]}
        async with following(DnsSource(NAME, 8000, server.resolver())) as it:
            await eventually(lambda: it.reports)
            assert urls_of(it)[0] == ["http://10.0.0.3:8000", "http://10.0.0.7:8000"]
            server.records = {(NAME, "AAAA"): ["fd00::7"]}
            await eventually(lambda: urls_of(it)[-1] == ["http://[fd00::7]:8000"])
            server.records = {("localhost.", "A"): ["127.0.0.1"], ("localhost.", "AAAA"): ["::1"]}
        async with following(DnsSource("localhost", 8000, server.resolver())) as it:
            await eventually(lambda: it.reports)
            assert urls_of(it) == [["http://127.0.0.1:8000"]]


async def test_srv_targets_of_the_first_priority_are_replicas() -> None:
    async with DnsServer() as server:
        name = "_http._tcp.vllm.example."
        server.records = {(name, "SRV"): ["10 1 8001 b.example.", "10 9 8000 a.example.", "20 0 8000 spare.example."]}
        async with following(DnsSource(name, None, server.resolver())) as it:
            await eventually(lambda: it.reports)
            assert urls_of(it) == [["http://a.example:8000", "http://b.example:8001"]]


@pytest.mark.parametrize("port", [8000, None])
async def test_a_name_that_does_not_exist_has_no_replicas_and_a_failing_server_is_an_error(port: int | None) -> None:
    async with DnsServer() as server:
        async with following(DnsSource(NAME, port, server.resolver())) as it:
            await eventually(lambda: it.reports)
            assert urls_of(it) == [[]]
        server.fails = True
        with pytest.raises(SourceError, match=r"vllm\.example"):
            await DnsSource(NAME, port, server.resolver()).follow(lambda _: None)


async def test_a_ttl_is_respected_within_bounds() -> None:
    async with DnsServer() as server:
        server.records = {(NAME, "A"): ["10.0.0.3"]}  # with a TTL of a second
        async with following(DnsSource(NAME, 8000, server.resolver())) as it:
            await eventually(lambda: it.reports)
            assert server.asked == 1, "the next time after the shortest time"
