"""Clients of a model: what is kept of one goes by the id of its key, and who uses more than its share."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from gateway.routing.keys import ANONYMOUS, Client, Keyring, digest
from gateway.routing.model import Traffic
from tests.gateway.conftest import Start
from tests.gateway.reload.test_change import change


def test_an_id_is_that_of_the_key_and_tells_nothing_of_its_digest() -> None:
    one = Keyring([(digest("alpha"), Client("key-1")), (digest("beta"), Client("key-2"))])
    two = Keyring([(digest("beta"), Client("key-1")), (digest("gamma"), Client("key-2"))])
    assert len({each.id for each in one.clients + two.clients} | {ANONYMOUS.id}) == 4
    assert digest("alpha").hex()[:8] not in one.clients[0].id
    assert two.with_id(one.clients[0].id) is None
    assert two.with_id(one.clients[1].id) is two.clients[0]


@pytest.mark.slow
async def test_no_key_sees_what_another_has_used_after_any_order_of_reloads(gateway_of: Start) -> None:
    rng, used, kept = random.Random(0), Counter[str](), ["alpha", "beta"]
    settings: dict[str, Any] = {"policy": {"name": "learned"}, "queue": {"max_in_flight_per_backend": 4}}
    async with gateway_of(**settings, keys=keys(kept)) as running:
        for _ in range(30):
            if rng.random() < 0.4:
                later = rng.sample(["alpha", "beta", "gamma", "delta"], rng.choice([1, 2, 3]))
                await change(running, keys=keys(later))
                for gone in {*kept} - {*later}:
                    del used[gone]
                kept = later
            key = rng.choice(kept)
            (await running.chat(headers={"authorization": f"Bearer {key}"})).raise_for_status()
            used[key] += 1
            relay = running.gateway.relay
            clients = {each: relay.access.keyring.identify({b"x-api-key": each.encode()}) for each in kept}
            accounts = {each: relay.limits._accounts.get(client.id) for each, client in clients.items()}
            assert {each: account.sum_requests for each, account in accounts.items() if account} == used
            assert relay.limits._accounts.keys() == {clients[each].id for each in used}
        await running.until(lambda: not running.gateway.leaving)  # of keys that are gone
        page = (await running.client.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("gateway_key_tokens_total")]
        assert {line.split('"')[1] for line in lines} <= {client.name for client in clients.values()}


def keys(secrets: list[str]) -> list[dict[str, Any]]:
    """Return keys as the pool file names those without a name: by position."""
    return [{"name": f"key-{at}", "key": secret, "requests_per_minute": 9999} for at, secret in enumerate(secrets, 1)]


# Who uses more of a model than its share


def test_a_client_beyond_its_share_is_known_by_its_requests_in_flight() -> None:
    traffic, one, two, heavy = (
        Traffic(),
        Client("one", id="one"),
        Client("two", id="two"),
        Client("heavy", id="heavy", weight=2.0),
    )
    for _ in range(9):
        traffic.begin(one)
    assert traffic.overuse(one) == 1.0, "there is nobody else"
    traffic.begin(two)
    assert [traffic.overuse(one), traffic.overuse(two)] == pytest.approx([1.8, 1.0])
    assert traffic.overuse(heavy) == 1.0, "it has none"
    for _ in range(10):
        traffic.begin(heavy)
    assert traffic.overuse(heavy) == 1.0
    assert traffic.overuse(one) == pytest.approx(1.8)
    for client in (two, *[heavy] * 10):
        traffic.end(client)
    assert (traffic.overuse(one), traffic.in_flight) == (1.0, 9)
    many = [Client("", id=f"client {number}") for number in range(20)]
    for client in many:
        traffic.begin(client)
    assert traffic.overuse(one) == 5.0
