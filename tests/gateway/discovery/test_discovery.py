"""Following sources, and a gateway whose replicas come from DNS."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.pool_file import PoolFile
from gateway.config.settings import DiscoverSettings, PoolSettings
from gateway.discovery import discovery
from gateway.discovery.discovery import Discovery
from gateway.discovery.source import MOST_REPLICAS, Replica, Report, SourceError, replica_at
from gateway.service.replicas import plan
from tests.support.command import ADMIN_KEY, Command, gateway_command, until
from tests.support.dns_server import DnsServer
from tests.support.event_loop import event_loop_in_thread
from tests.support.pool_file import CHAT
from tests.support.upstream import Upstream, upstreams_in_thread
from tests.support.waiting import eventually

ONE, TWO = replica_at("10.0.0.1", 8000), replica_at("10.0.0.2", 8000)


class Scripted:
    """A source that reports what it is told to; an error ends it."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[list[Replica] | SourceError] = asyncio.Queue()

    async def follow(self, report: Report) -> None:
        while True:
            step = await self.steps.get()
            if isinstance(step, SourceError):
                raise step
            report(step)


def settings_of(**discover: dict[str, Any]) -> PoolSettings:
    sources = {name: {"method": "baseline", "dns": "x:80"} | each for name, each in discover.items()}
    model = {"policy": {"name": "round_robin"}, "default_temperature": 1.0, "discover": sources}
    return PoolFile.model_validate({"models": {"m": model}})


class Following:
    def __init__(self) -> None:
        self.source = Scripted()
        self.changes = 0
        self.answers: list[tuple[str, str, str, int]] = []
        self.made: list[DiscoverSettings] = []
        self.discovery = Discovery(self._changed, lambda *answer: self.answers.append(answer), self._make)

    def _changed(self) -> None:
        self.changes += 1

    def _make(self, settings: DiscoverSettings) -> Scripted:
        self.made.append(settings)
        return self.source

    async def step(self, step: list[Replica] | SourceError) -> None:
        count = len(self.answers)
        self.source.steps.put_nowait(step)
        await eventually(lambda: len(self.answers) > count)


@pytest.fixture
async def following(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Following]:
    monkeypatch.setattr(discovery, "_PAUSE_S", 0.01)
    it = Following()
    yield it
    it.discovery.keep(None)


async def test_what_was_found_last_is_kept_when_a_source_says_nothing(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = settings_of(fleet={})
    following.source.steps.put_nowait([ONE, TWO])
    await following.discovery.start(settings)
    key = ("m", "fleet")
    assert following.discovery.found(settings) == {key: (ONE, TWO)}
    for _ in range(3):
        await following.step([])
        await following.step([])
        await following.step(SourceError("no route"))
        await following.step(SourceError("no route"))
    assert following.discovery.found(settings) == {key: (ONE, TWO)}
    assert following.changes == 1
    assert caplog.text.count("has no replicas") == caplog.text.count("no route") == 3, "once each time that it begins"
    await following.step([TWO])
    assert following.discovery.found(settings) == {key: (TWO,)}
    assert following.changes == 2
    outcomes = [outcome for _, _, outcome, _ in following.answers]
    assert (outcomes.count("found"), outcomes.count("nothing"), outcomes.count("failed")) == (2, 6, 6)


async def test_the_number_of_replicas_is_bounded(following: Following) -> None:
    many = [replica_at(f"10.0.{number // 250}.{number % 250}", 8000) for number in range(MOST_REPLICAS + 5)]
    following.source.steps.put_nowait(many)
    await following.discovery.start(settings_of(fleet={}))
    assert following.answers == [("m", "fleet", "found", MOST_REPLICAS)]


@pytest.mark.slow
async def test_a_source_is_followed_on_unless_it_looks_elsewhere(following: Following, tmp_path: Path) -> None:
    heavier, moved = (settings_of(fleet=fleet) for fleet in ({"weight": 2.0}, {"dns": "y:80"}))
    following.source.steps.put_nowait([ONE])
    await following.discovery.start(settings_of(fleet={}))
    await following.discovery.start(heavier)
    following.discovery.keep(heavier)
    assert len(following.made) == 1
    (backend,) = plan(heavier, tmp_path, None, following.discovery.found(heavier)).backends
    assert (backend.name, backend.url, backend.weight) == ("fleet/10.0.0.1:8000", "http://10.0.0.1:8000", 2.0)
    following.source.steps.put_nowait([TWO])
    await following.discovery.start(moved)
    assert len(following.made) == 2
    following.discovery.keep(moved)
    await eventually(lambda: len([task for task in asyncio.all_tasks() if "discover" in task.get_name()]) == 1)


async def test_a_source_that_looks_elsewhere_takes_no_replica_away_before_it_has_found_others(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    first, moved = settings_of(fleet={}), settings_of(fleet={"dns": "mistyped:80"})
    following.source.steps.put_nowait([ONE, TWO])
    await following.discovery.start(first)
    following.source = Scripted()
    following.source.steps.put_nowait(SourceError("no such name"))
    await following.discovery.start(moved)
    following.discovery.keep(moved)
    assert following.discovery.found(moved) == {("m", "fleet"): (ONE, TWO)}
    assert "no such name; the 2 replicas found before are kept" in caplog.text
    await following.step([TWO])
    assert following.discovery.found(moved) == {("m", "fleet"): (TWO,)}


async def test_a_source_that_fails_while_it_is_ended_is_ended(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()

    async def fail_when_cancelled(_: Report) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise SourceError("the API server is away")

    monkeypatch.setattr(following.source, "follow", fail_when_cancelled)
    starting = asyncio.create_task(following.discovery.start(settings_of(fleet={})))
    await began.wait()
    (source,) = following.discovery._followed.values()
    following.discovery.keep(None)
    await asyncio.wait_for(asyncio.wait([source.task]), 5.0)
    starting.cancel()


def test_a_replica_that_is_listed_or_found_twice_is_there_once(tmp_path: Path) -> None:
    settings = settings_of(one={}, two={"dns": "y:80"})
    listed = PoolFile.model_validate({"models": {"n": {"backends": {"b": {"method": "baseline", "url": TWO.url}}}}})
    settings = settings.model_copy(update={"models": {**settings.models, **listed.models}})
    planned = plan(settings, tmp_path, None, {("m", "one"): [ONE, TWO], ("m", "two"): [ONE]})
    assert [(each.model, each.name) for each in planned.backends] == [("m", "one/10.0.0.1:8000"), ("n", "b")]


def test_a_replica_that_cannot_be_used_keeps_no_other_out(tmp_path: Path) -> None:
    odd = [Replica("odd", "http://:x"), Replica("odder", "gopher://10.0.0.9:1")]
    (planned,) = plan(settings_of(one={}), tmp_path, None, {("m", "one"): [*odd, ONE]}).backends
    assert planned.url == ONE.url


POOL = """
server: {{drain_s: 3}}
health: {{interval_s: 0.2}}
models:
  m:
    policy: {{name: round_robin}}
    default_temperature: 1
    discover:
      fleet: {{method: baseline, srv: _http._tcp.vllm.example.}}
admin: {{key: "{admin}"}}
state: none
"""
CUSTOMIZE = """
import dns.resolver
import gateway.discovery.resolver as resolver

def read(self, f):
    self.nameservers, self.port = ["127.0.0.1"], {port}

dns.resolver.BaseResolver.read_resolv_conf = read
resolver._SHORTEST_S = 0.2
"""


@pytest.fixture
def network() -> Iterator[tuple[DnsServer, dict[str, Upstream]]]:
    """A DNS server and upstreams on an event loop of their own."""
    with event_loop_in_thread() as run, upstreams_in_thread("ab", "m") as upstreams:
        server = run(DnsServer().__aenter__())
        try:
            yield server, {each.name: each for each in upstreams}
        finally:
            run(server.__aexit__())


def served_by(command: Command) -> set[str]:
    answers = [command.post("/v1/chat/completions", CHAT) for _ in range(8)]
    return {
        answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else str(answer.status_code)
        for answer in answers
    }


@pytest.mark.slow
def test_replicas_of_a_gateway_come_and_go_with_their_records(
    network: tuple[DnsServer, dict[str, Upstream]], tmp_path: Path
) -> None:
    server, upstreams = network
    ports = {name: upstream.url.rpartition(":")[2] for name, upstream in upstreams.items()}

    def publish(names: str) -> None:
        records = [f"0 0 {ports[name]} 127.0.0.1." for name in names]
        server.records = {("_http._tcp.vllm.example.", "SRV"): records}

    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE.format(port=server.port))
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.format(admin=ADMIN_KEY))
    publish("a")
    python_path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with gateway_command(path, tmp_path, "--workers", "2", env={"PYTHONPATH": python_path}) as command:
        until(lambda: served_by(command) == {"from a"})
        publish("ab")
        until(lambda: served_by(command) == {"from a", "from b"})
        publish("b")
        until(lambda: served_by(command) == {"from b"})
        server.fails = True
        until(lambda: "replicas found before are kept" in command.printed())
        until(lambda: 'gateway_discovered_backends{model="m",source="fleet"} 1.0' in command.get("/metrics").text)
        page = command.get("/metrics").text
        assert 'gateway_discoveries_total{model="m",outcome="failed",source="fleet"}' in page
        assert f"fleet/127.0.0.1:{ports['a']}" not in page
        assert served_by(command) == {"from b"}
