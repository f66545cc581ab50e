"""Keys, limits, admin, metrics and models over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from tests.gateway.conftest import ADMIN, MODEL, Start, bearer
from tests.support.upstream import END, Wire, answer, delta, usage

KEYS = [
    {"name": "free", "key": "sk-free"},
    {"name": "hashed", "sha256": hashlib.sha256(b"sk-hashed").hexdigest(), "may_override": True},
    {"name": "one", "key": "sk-one", "max_in_flight": 1},
]


@pytest.mark.slow
async def test_requests_need_a_key_if_keys_are_set_and_one_that_may_to_name_a_backend(gateway_of: Start) -> None:
    async with gateway_of(keys=KEYS) as running:
        for headers in ({}, bearer("sk-wrong"), {"authorization": "Bearer"}, {"authorization": "Basic sk-free"}):
            response = await running.chat(headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        for path in ("/v1/models", "/version"):
            assert (await running.client.get(path)).status_code == 401
        for headers in (bearer("sk-free"), {"x-api-key": "sk-free"}, bearer("sk-hashed")):
            assert (await running.chat(headers=headers)).status_code == 200
        assert not [request for request in running.upstreams["a"].seen if request.header("authorization")]
        other = {"x-gateway-backend": "b"}
        assert (await running.chat(headers=bearer("sk-free") | other)).status_code == 403
        assert (await running.chat(headers=bearer("sk-hashed") | other)).headers["x-gateway-backend"] == "b"


async def test_backends_get_their_own_key(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        await running.chat(headers=bearer("for-the-engine"))
        passed_on = running.upstreams["a"].seen[-1].header("authorization")
        assert passed_on == "Bearer for-the-engine", "the gateway has no keys of its own"
        running.backend("a").api_key = "own"
        await running.chat(headers=bearer("for-the-engine"))
        keys = [value for name, value in running.upstreams["a"].seen[-1].headers if name.lower() == "authorization"]
        assert keys == ["Bearer own"]


@pytest.mark.parametrize(("key", "most", "status"), [("sk-one", None, 429), ("sk-free", 1, 503)])
async def test_limits_on_requests_in_flight(gateway_of: Start, key: str, most: int | None, status: int) -> None:
    release = asyncio.Event()

    async def held(wire: Wire) -> None:
        await release.wait()
        await wire.json(answer(wire.upstream.name))

    server = {"max_in_flight": most, "drain_s": 1}
    async with gateway_of({"a": "baseline"}, keys=KEYS, server=server, behaviour=held) as running:
        first = asyncio.create_task(running.chat(headers=bearer(key)))
        await running.until(lambda: len(running.upstreams["a"].seen) == 1)
        refused = await running.chat(headers=bearer(key))
        assert refused.status_code == status
        assert most is None or refused.headers["retry-after"] == "1"
        release.set()
        assert (await first).status_code == 200
        assert (await running.chat(headers=bearer(key))).status_code == 200


async def test_models_are_those_of_the_pool_and_one_need_not_be_named(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        assert (await running.client.post("/v1/chat/completions", json={"messages": []})).status_code == 200
        listed = (await running.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == [MODEL]
        assert listed["data"][0]["max_model_len"] == 2048  # as reported by the engine
        assert (await running.client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        assert (await running.client.get("/v1/models/nope")).status_code == 404


async def test_explain_sends_nothing_and_does_not_advance_the_policy(gateway_of: Start) -> None:
    async with gateway_of() as running:
        answers = [await running.explain(temperature=0.3) for _ in range(3)]
        explained = answers[0]
        assert {each["choice"]["backend"] for each in answers} == {explained["choice"]["backend"]}
        assert explained["features"]["temperature"] == 0.3
        assert [candidate["backend"] for candidate in explained["candidates"]] == ["a", "b"]
        assert all(candidate["eligible"] for candidate in explained["candidates"])
        assert [upstream.seen for upstream in running.upstreams.values()] == [[], []]
        assert (await running.chat(temperature=0.3)).headers["x-gateway-backend"] == explained["choice"]["backend"]
        restricted = await running.explain(min_p=0.1)
        assert [candidate["eligible"] for candidate in restricted["candidates"]] == [True, False]
        assert "min_p" in restricted["candidates"][1]["note"]


async def test_metrics_of_a_request(gateway_of: Start) -> None:
    async def measured(wire: Wire) -> None:
        drafted = b'"speculative_decoding":{"num_draft_tokens":9,"num_accepted_draft_tokens":4}'
        last = usage(11, 8).replace(b"{", b'{"metrics":{"queue_time_ms":3.0,' + drafted + b"},", 1)
        texts = ("", "one two", "three four", "five")
        await wire.stream(*(delta(text) for text in texts), last, END, pause_s=0.02)

    async with gateway_of({"b": "ngram"}) as running:
        running.upstreams["b"].behaviour = measured
        assert (await running.chat(stream=True, temperature=0.6)).status_code == 200
        await running.until(lambda: running.backend("b").in_flight == 0)
        warm, engine = {"temperature": "0.5-0.7"}, {"temperature": "0.5-0.7", "source": "engine"}
        for name, expected, labels in (
            ("requests_total", 1, {"outcome": "ok"}),
            ("prompt_tokens_total", 11, {}),
            ("output_tokens_total", 8, {}),
            ("drafted_tokens_total", 9, warm),
            ("accepted_tokens_total", 4, warm),
            ("steps_total", 4, engine),
            ("step_tokens_total", 8, engine),
            ("ttft_seconds_count", 1, {}),
            ("tpot_seconds_count", 1, {}),
            ("e2e_seconds_count", 1, {}),
            ("backend_up", 1, {}),
            ("in_flight", 0, {}),
        ):
            found = await running.counted(f"gateway_{name}", backend="b", method="ngram", model="m", **labels)
            assert found == expected, name
        ttft_s, e2e_s = [await running.counted(f"gateway_{name}_seconds_sum") for name in ("ttft", "e2e")]
        assert 0 < ttft_s < 0.02 + ttft_s < e2e_s
        assert await running.counted("gateway_itl_seconds_count") >= 3
        assert await running.counted("gateway_overhead_seconds_count") == 1


async def test_requests_add_no_new_labels(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        await running.chat()
        before = len((await running.client.get("/metrics")).text.splitlines())
        for number in range(30):
            await running.chat(f"{number}", user=f"u{number}", headers={"x-request-id": f"r{number}"})
            await running.client.get(f"/path/{number}")
            await running.client.post("/v1/chat/completions", json={"model": f"m{number}", "messages": []})
        after = len((await running.client.get("/metrics")).text.splitlines())
        assert after <= before + 2  # one new series: refused requests


async def test_what_fastapi_refuses_has_the_shape_of_openai(
    gateway_of: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_of(batches={"folder": str(tmp_path)}) as running:

        def fails() -> dict[str, object]:
            raise RuntimeError("secret")

        monkeypatch.setattr(running.gateway, "launched", fails)
        for method, path, status, param in (
            ("PATCH", "/v1/files", 405, None),
            ("GET", "/v1/batches/a/b/c", 404, None),
            ("GET", "/admin/none", 404, None),
            ("POST", "/v1/models", 405, None),
            ("GET", "/admin/policy/rules?version=first", 422, "version"),
            ("POST", "/admin/drain", 422, None),
            ("GET", "/admin/pool", 500, None),
        ):
            answered = await running.client.request(method, path, headers=ADMIN)
            assert answered.status_code == status, path
            assert answered.headers["content-type"] == "application/json"
            error = answered.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["param"], "secret" in error["message"]) == (param, False)
            assert (answered.headers.get("allow") is not None) is (status == 405), path
        headers = {**ADMIN, "content-type": "application/x-www-form-urlencoded"}  # as curl -d has it
        answered = await running.client.post("/admin/drain", content='{"backend": "a"}', headers=headers)
        assert "'Content-Type: application/json'" in answered.json()["error"]["message"]
        headers["content-type"] = "application/json"
        answered = await running.client.post("/admin/drain", content='{"backend": a}', headers=headers)
        assert answered.json()["error"]["message"].startswith("body: no JSON, from character ")


async def test_a_base_url_without_v1_or_with_two_is_told_the_path_that_was_meant(gateway_of: Start) -> None:
    async with gateway_of() as running:
        for path, meant in (
            ("/chat/completions", " Did you mean /v1/chat/completions?"),
            ("/v1/v1/chat/completions", " Did you mean /v1/chat/completions?"),
            ("/v1/sleep", ""),
        ):
            answer = await running.client.post(path, json={})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"].endswith(f"so it is not relayed.{meant}")
