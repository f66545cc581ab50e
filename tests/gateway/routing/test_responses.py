"""Stored responses: a chain goes to its replica, also through another gateway; one that is lost is said to be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from backends.health import State
from gateway.routing import lookups
from gateway.routing.sticky import Home
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, Start, bearer, start_gateway
from tests.support.upstream import Behaviour, Wire

THREE = {"a": "baseline", "b": "ngram", "c": "baseline"}
PATH = "/v1/responses"
OTHER = "secret"


def storing() -> Behaviour:
    """Return the behaviour of engines that store their responses, as vLLM does."""
    stored: dict[str, str] = {}
    numbers: Iterator[int] = count(1)

    async def behave(wire: Wire) -> None:
        seen, name = wire.seen, wire.upstream.name
        wanted = (
            seen.target.removeprefix(f"{PATH}/").partition("?")[0]
            if seen.method == "GET"
            else seen.json.get("previous_response_id")
        )
        if wanted and stored.get(wanted) != name:
            error = {"message": f"{name} has no {wanted}", "type": "invalid_request_error", "code": 404}
            await wire.json({"error": error}, 404)
            return
        made = wanted if seen.method == "GET" else f"resp_{name}{next(numbers)}"
        stored[made] = name
        await wire.json({"id": made, "object": "response", "status": "completed", "output": [], "model": name})

    return behave


async def ask(running: Running, previous: str | None = None) -> httpx.Response:
    chained = {} if previous is None else {"previous_response_id": previous}
    return await running.client.post(PATH, json={"model": MODEL, "input": "hi", **chained})


async def test_a_gateway_that_has_just_begun_finds_the_replica_of_a_response() -> None:
    """It asks the engines, once for each response that it has not seen itself."""
    behave = storing()
    async with start_gateway(THREE, behaviour=behave) as before:
        made = [(await ask(before)).json()["id"] for _ in range(6)]
    async with start_gateway(THREE, behaviour=behave) as running:
        for first in made:
            second = await ask(running, first)
            assert (second.status_code, second.json()["model"]) == (200, first[5])
            assert second.headers["x-gateway-reason"] == "stored_response"
            asked = sum(len(each.seen) for each in running.upstreams.values())
            third = await ask(running, second.json()["id"])
            assert third.json()["model"] == first[5]
            assert sum(len(each.seen) for each in running.upstreams.values()) == asked + 1
            read = await running.client.get(f"{PATH}/{first}?model={MODEL}")
            assert read.json()["id"] == first
        continued = {"model": MODEL, "input": "hi", "previous_response_id": first}
        explain = f"/admin/explain?path={PATH}"
        explained = (await running.client.post(explain, json=continued, headers=bearer(ADMIN_KEY))).json()
        notes = {each["backend"]: each["note"] for each in explained["candidates"]}
        assert explained["choice"]["backend"] == first[5]
        assert [name for name in THREE if notes[name] != "the stored response is on another replica"] == [first[5]]


async def test_of_several_models_a_response_is_read_without_naming_its_own(gateway_of: Start) -> None:
    """OpenAI's clients name no model when they read a response. Backends of two models may have the same name."""
    keys: list[dict[str, Any]] = [{"name": "all", "key": "sk-all"}, {"name": "one", "key": "sk-one", "models": [MODEL]}]
    for key in keys:
        key["max_in_flight"] = 1  # no request may leave its place taken
    model = {"policy": {"name": "random"}, "default_temperature": 1.0}
    models = {
        name: model | {"backends": {"a": {"method": "baseline", "url": f"http://{name}:1"}}} for name in (MODEL, OTHER)
    }
    async with gateway_of({"a": "baseline"}, behaviour=storing(), keys=keys, models=models) as running:
        client, every, one = running.client, bearer("sk-all"), bearer("sk-one")
        made = (await client.post(PATH, json={"model": MODEL, "input": "hi"}, headers=every)).json()["id"]
        for headers in (every, one):
            assert (await client.get(f"{PATH}/{made}", headers=headers)).json()["id"] == made
        running.gateway.relay.router.locations.remember("resp_2", Home(OTHER, "a"))
        assert f"No backend of {OTHER}" in (await client.get(f"{PATH}/resp_2", headers=every)).text
        for hidden in ("resp_2", "resp_unknown"):
            refused = await client.get(f"{PATH}/{hidden}", headers=one)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_not_found")
            assert OTHER not in refused.text
        await client.options(f"{PATH}/resp_unknown")
        assert running.upstreams["a"].seen[-1].method == "OPTIONS", "without a key, engines are not asked"
        running.gateway.relay.router.locations.forget(Home(MODEL, "a"))  # as after a restart
        assert (await client.get(f"{PATH}/{made}", headers=every)).json()["id"] == made


async def test_a_response_that_no_engine_holds_is_said_to_be_lost(gateway_of: Start) -> None:
    async with gateway_of(THREE, behaviour=storing()) as running:
        continued, read = await ask(running, "resp_x1"), await running.client.get(f"{PATH}/resp_x1")
        for response, param in ((continued, "previous_response_id"), (read, "response_id")):
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (404, "response_not_found", param)
            assert error["message"] == "Response with id 'resp_x1' not found."
        assert {seen.method for each in running.upstreams.values() for seen in each.seen} <= {"GET"}
        assert sum(each.in_flight for each in running.gateway.pool) == 0
        assert (await ask(running)).status_code == 200


@pytest.mark.slow
async def test_the_client_hears_with_which_replica_its_response_was_lost(gateway_of: Start) -> None:
    async with gateway_of(THREE, behaviour=storing()) as running:
        first = (await ask(running)).json()
        home = first["model"]
        await running.upstreams[home].die()
        await running.until(lambda: running.backend(home).health.state is State.DOWN)
        response = await ask(running, first["id"])
        assert response.status_code == 404
        assert response.json()["error"]["message"].endswith(f"not found; it was lost with its replica {home}.")


async def test_where_an_engine_does_not_tell_another_one_is_asked_to_answer(gateway_of: Start) -> None:
    async def behave(wire: Wire) -> None:
        await wire.json(
            {"id": "resp_1", "model": wire.upstream.name, "output": []}, 401 if wire.seen.method == "GET" else 200
        )

    async with gateway_of(THREE, behaviour=behave) as running:
        assert (await ask(running, "resp_unseen")).status_code == 200


async def test_what_is_no_id_is_the_engine_s_to_refuse(gateway_of: Start) -> None:
    async with gateway_of(THREE, behaviour=storing()) as running:
        for previous in ("resp_../../admin", "resp_" + "x" * 200, "other"):
            response = await ask(running, previous)
            assert response.status_code == 404
            assert "has no" in response.json()["error"]["message"]
        assert [seen.method for each in running.upstreams.values() for seen in each.seen] == ["POST"] * 3


async def test_one_key_has_engines_asked_only_so_often(gateway_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "PER_MINUTE", 8)
    at_once, most = 0, 0

    async def slow(wire: Wire) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        await wire.json({"error": {}}, 404)

    keys = [{"name": "greedy", "key": "sk-1"}, {"name": "other", "key": "sk-2"}]
    async with gateway_of(THREE, behaviour=slow, keys=keys) as running:
        running.gateway.relay.lookups = lookups.Lookups(lambda: 1000.0)  # all in one minute

        async def get(number: int, key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await running.client.get(f"{PATH}/resp_x{number}?model={MODEL}", headers=headers)

        answers = await asyncio.gather(*(get(number, "sk-1") for number in range(40)))
        assert Counter(each.status_code for each in answers) == {404: 8, 429: 32}
        refused = next(each for each in answers if each.status_code == 429)
        assert refused.json()["error"]["code"] == "too_many_unknown_responses"
        assert 0 < int(refused.headers["retry-after"]) <= 60
        assert sum(len(each.seen) for each in running.upstreams.values()) == 8 * len(THREE)
        assert most <= lookups.AT_ONCE * len(THREE)
        assert (await get(1, "sk-2")).status_code == 404
        assert sum(each.in_flight for each in running.gateway.pool) == 0
