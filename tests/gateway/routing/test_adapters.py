"""LoRA adapters: a request goes where its adapter is loaded, as keys allow; loading is seen while it runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from policies.learned.policy import Learned
from tests.gateway.conftest import MODEL, Running, Start
from tests.support.upstream import Wire, answer

THREE = {"a": "baseline", "b": "ngram", "c": "eagle3"}


async def served_by(running: Running, model: str) -> set[str]:
    return {(await running.chat(model=model)).headers["x-gateway-backend"] for _ in range(6)}


async def models(running: Running, **headers: str) -> dict[str, Any]:
    listed = (await running.client.get("/v1/models", headers=headers)).json()["data"]
    return {card["id"]: card["parent"] for card in listed}


async def load(running: Running, **adapters: list[str]) -> None:
    for name, loaded in adapters.items():
        running.upstreams[name].adapters = loaded
    for name, loaded in adapters.items():
        await running.until(lambda name=name, loaded=loaded: running.backend(name).engine.said.adapters == {*loaded})


@pytest.mark.slow
async def test_a_request_goes_where_its_adapter_is_loaded(gateway_of: Start) -> None:
    async with gateway_of(THREE) as running:
        response = await running.chat(model="sql")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        await load(running, b=["sql"], c=["sql", "chat"])
        assert await models(running) == {MODEL: None, "chat": MODEL, "sql": MODEL}
        card = (await running.client.get("/v1/models/sql")).json()
        assert (card["id"], card["root"]) == ("sql", MODEL)
        assert await served_by(running, "sql") == {"b", "c"}
        assert {seen.json["model"] for seen in running.upstreams["b"].seen} == {"sql"}, "the engine gets it as it came"
        assert (await running.chat(model="chat")).headers["x-gateway-backend"] == "c"
        await load(running, c=["chat"])
        assert await served_by(running, "sql") == {"b"}
        assert await served_by(running, MODEL) == {*THREE}
        await running.upstreams["b"].die()
        await running.until(lambda: not running.gateway.pool.up(MODEL) or len(running.gateway.pool.up(MODEL)) == 2)
        assert (await running.chat(model="sql")).status_code == 503, "it is known, and its only replica is down"


@pytest.mark.slow
async def test_a_key_is_bound_to_adapters_or_to_models_with_theirs(gateway_of: Start) -> None:
    keys = [
        {"name": "one", "key": "sk-1", "adapters": ["sql"]},
        {"name": "base", "key": "sk-2", "models": [MODEL]},
        {"name": "both", "key": "sk-3", "models": [MODEL], "adapters": ["chat"]},
    ]
    expected = {"sk-1": {"sql"}, "sk-2": {MODEL, "sql", "chat"}, "sk-3": {MODEL, "chat"}}
    async with gateway_of(THREE, keys=keys) as running:
        await load(running, a=["sql", "chat"])
        for key, allowed in expected.items():
            bearer = {"authorization": f"Bearer {key}"}
            assert {*await models(running, **bearer)} == allowed
            for name in (MODEL, "sql", "chat", "none"):
                status = (await running.chat(model=name, headers=bearer)).status_code
                assert status == (200 if name in allowed else 404), (key, name)
        refused = await running.chat(headers={"authorization": "Bearer sk-1"})
        assert refused.json()["error"]["message"].endswith("for this key; /v1/models lists what this key may use.")


@pytest.mark.slow
async def test_a_configured_name_is_not_taken_by_an_adapter(gateway_of: Start) -> None:
    async with gateway_of(THREE) as running:
        await load(running, a=[MODEL + "-x", MODEL])
        assert await served_by(running, MODEL) == {*THREE}
        assert await models(running) == {MODEL: None, MODEL + "-x": MODEL}


@pytest.mark.slow
async def test_a_list_without_end_harms_nobody(gateway_of: Start) -> None:
    async with gateway_of(THREE) as running:
        names = ["x" * 300, *[f"adapter-{number}" for number in range(3000)]]
        running.upstreams["a"].adapters = names
        await running.until(lambda: bool(running.backend("a").engine.said.adapters))
        assert len(running.backend("a").engine.said.adapters) <= 1000
        assert names[0] not in running.backend("a").engine.said.adapters
        card = json.dumps({"data": [{"id": MODEL}, *[{"id": "y" * 1000, "parent": MODEL}] * 3000]}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(card)
        running.upstreams["b"].models = head + card
        for _ in range(6):
            assert (await running.chat(model=MODEL)).status_code == 200


@pytest.mark.slow
async def test_acceptance_is_learned_by_adapter(gateway_of: Start) -> None:
    """The drafter stays as it is: under the adapter, hardly a draft is accepted."""

    async def behave(wire: Wire) -> None:
        is_adapted, drafts = wire.seen.json["model"] == "sql", wire.upstream.name == "c"
        accepted = (0 if is_adapted else 38) if drafts else 0
        speculative = {"num_draft_tokens": 60, "num_accepted_draft_tokens": accepted, "num_spec_steps": 20}
        made = answer(wire.upstream.name, 60) | {"metrics": {"speculative_decoding": speculative} if drafts else {}}
        await wire.json(made)

    async with gateway_of(
        {"a": "baseline", "c": "eagle3"}, {"name": "learned", "seed": 0}, behaviour=behave
    ) as running:
        await load(running, a=["sql"], c=["sql"])
        learned = running.gateway.models[MODEL].policy
        assert isinstance(learned, Learned)

        async def per_step(model: str) -> float:
            note = (await running.notes(model=model))["c"]
            return float(note.partition(" per step")[0].rpartition(" ")[2])

        for _ in range(30):
            await asyncio.gather(*[running.chat(model=name) for name in ("sql", MODEL) for _ in range(4)])
            if await per_step(MODEL) > 1.5 * await per_step("sql"):
                break
        assert await per_step(MODEL) > 1.5 * await per_step("sql")
