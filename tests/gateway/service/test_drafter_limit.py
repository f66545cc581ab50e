"""The limit of a drafter where users meet it: settings, `gateway check`, metrics, explanations, page and advice."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backends.backend import Backend
from backends.drafter_limit import Beyond, DrafterLimit
from backends.engine import Said
from backends.health import State
from backends.probe import Probe
from backends.simulator.server.settings import ReplicaSettings
from backends.speculation import Method
from gateway.cli.app import app
from gateway.config.load import load_pool
from gateway.service.replicas import configured, plan
from lab.past.pool import simulated_pool
from lab.simulation.table import request_table
from tests.gateway.conftest import ADMIN, MODEL, start_gateway
from tests.support.upstream import Upstream, Wire, answer

LIMIT = DrafterLimit(2048)
LATEST = DrafterLimit(2048, Beyond.WORSE)  # as of the latest vLLM
SHORT = DrafterLimit(1024)  # the engines of these tests say that they serve 2,048 tokens
HEAD = "  num_speculative_tokens: 3"
METHODS = {"plain": "baseline", "head": "eagle3"}


def pool_file(folder: Path, *lines: str, method: str = "eagle3") -> Path:
    """Write a pool file with one replica, of which some lines are given."""
    path = folder / "pool.yaml"
    own = "\n        ".join((f"method: {method}", "url: http://127.0.0.1:9", *lines))
    path.write_text(f"models:\n  m:\n    policy: {{name: random}}\n    backends:\n      a:\n        {own}\n")
    return path


@pytest.mark.parametrize(
    ("lines", "limit"),
    [
        (("drafter_limit: 2048",), LATEST),
        (("drafter_limit: {tokens: 4096, beyond: none}",), DrafterLimit(4096, Beyond.NONE)),
        (("drafter_limit: ${UNSET:-}",), DrafterLimit(1024, Beyond.WORSE)),  # null: what the draft says
        ((), DrafterLimit(1024, Beyond.WORSE)),
        (("  max_model_len: 512",), DrafterLimit(512, Beyond.WORSE)),
        (("  max_model_len: 512", "drafter_limit: 300"), DrafterLimit(300, Beyond.WORSE)),
    ],
)
def test_what_the_file_says_comes_before_what_the_draft_says(
    lines: tuple[str, ...], limit: DrafterLimit, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    path = pool_file(tmp_path, "speculative_config:", f"  model: {tmp_path}", HEAD, *lines)
    (backend,) = configured(load_pool(path))
    assert backend.drafter_limit == limit


def test_an_engine_with_a_shorter_context_makes_it_no_limit() -> None:
    backend = Backend("a", "m", Method.EAGLE3, "http://h", 3, drafter_limit=LIMIT)
    shown = []
    for tokens in (0, 2049, 2048, 1024, 8192):  # as its probes say, after one another
        backend.set_engine(Said(context_tokens=tokens))
        shown.append(backend.drafter_limit)
    assert shown == [LIMIT, LIMIT, None, None, LIMIT]


@pytest.mark.parametrize(
    ("version", "beyond"), [("0.19.0", Beyond.BATCH), ("0.32.0+cu129", Beyond.WORSE), ("0.19.0" * 999, Beyond.WORSE)]
)
async def test_what_happens_beyond_is_what_the_version_of_the_engine_does(version: str, beyond: Beyond) -> None:
    """The latest, where it tells more than is read; and as the file says, where it is not asked."""
    async with Upstream("a", "m", version=version) as upstream:
        for asks, expected in ((True, beyond), (False, Beyond.BATCH)):
            backend = Backend("a", "m", Method.EAGLE3, upstream.url, 3, drafter_limit=SHORT, asks_version=asks)
            probe = Probe(backend, 5.0)
            result = await probe.run(admit=True)
            await probe.close()
            assert result.said is not None
            backend.set_engine(result.said)
            assert backend.drafter_limit == DrafterLimit(SHORT.tokens, expected)


def test_a_simulated_replica_has_the_limit_of_its_calibration_or_of_the_file(tmp_path: Path) -> None:
    lines = ("simulate: {calibration: llama-3.1-8b-h100}", "speculative_config:", HEAD)
    own = DrafterLimit(300)
    for more, limit in (
        ((), DrafterLimit(2048, Beyond.WORSE)),
        (("drafter_limit: {tokens: 300, beyond: batch}",), own),
    ):
        path = pool_file(tmp_path, *lines, *more)
        path.write_text(path.read_text().replace("        url: http://127.0.0.1:9\n", ""))
        settings = load_pool(path)
        (backend,) = plan(settings, tmp_path).backends
        (engine,) = json.loads((tmp_path / "simulator.json").read_text())["replicas"]
        with request_table(iter(()), 0.0) as table:
            (replayed,) = simulated_pool(settings.models["m"], table).replicas
        assert backend.drafter_limit == limit
        assert ReplicaSettings.model_validate(engine).engine_parameters().drafter_limit == limit
        assert replayed.drafter_limit == (own if more else None)  # None: that of the calibration


@pytest.mark.slow
def test_check_says_the_limits_and_of_which_none_is_known(tmp_path: Path) -> None:
    line = ["check", "--config", str(pool_file(tmp_path, "speculative_config:", HEAD, "drafter_limit: 2048"))]
    printed = CliRunner().invoke(app, line).output
    assert f"m/a: its drafter serves 2,048 tokens; beyond, {LATEST.consequence}." in printed
    pool_file(tmp_path, "speculative_config:", HEAD)
    printed = CliRunner().invoke(app, line).output
    assert "m/a: how long a context its drafter serves is not known: set drafter_limit" in printed
    draft_model = ("speculative_config: {num_speculative_tokens: 3, model: org/draft}", "drafter_limit: 2048")
    pool_file(tmp_path, *draft_model, method="draft_model")
    printed = CliRunner().invoke(app, line).output
    assert "m/a: from vLLM 0.33 on its engine takes contexts of at most 2,048 tokens." in printed
    pool_file(tmp_path, method="suffix")
    assert "drafter" not in CliRunner().invoke(app, line).output


async def long_ones(wire: Wire) -> None:
    """Report 30 tokens of answer to as many tokens of prompt as the request has letters, divided by ten."""
    usage = {"prompt_tokens": len(wire.seen.json["messages"][0]["content"]) // 10, "completion_tokens": 30}
    await wire.json(answer(wire.upstream.name) | {"usage": usage})


@pytest.mark.slow
async def test_requests_beyond_a_limit_are_counted_explained_and_advised_on() -> None:
    async with start_gateway(METHODS, {"name": "learned"}, behaviour=long_ones, limits={"head": SHORT}) as running:
        for number in range(200):  # a quarter of them ends beyond the limit
            headers = {"x-gateway-backend": ("plain", "head")[number % 2]}
            (await running.chat("x" * (10_190 if number % 8 in {0, 1} else 9_000), headers=headers)).raise_for_status()
        beyond = {"backend": "head", "beyond": "batch"}
        assert await running.counted("gateway_requests_beyond_drafter_limit_total") == 25
        assert await running.counted("gateway_requests_beyond_drafter_limit_total", **beyond) == 25
        assert await running.counted("gateway_context_tokens_bucket", backend="plain", le="1024.0") == 75

        (advised,) = (await running.admin("advice"))["models"][MODEL]["findings"]
        assert advised["backend"] == "head"
        assert advised["title"] == "25% of the model's requests exceed the drafter's 1,024 tokens"
        assert advised["evidence"] == f"50 of 200 requests, of which 25 were sent here: {SHORT.consequence}"
        assert advised["title"] in (await running.command("advise")).stdout

        for words, most, said in ((1400, 9, "is beyond"), (500, 4000, "may grow beyond")):
            notes = await running.notes("word " * words, max_tokens=most)
            assert (said in notes["head"], "beyond" in notes["plain"]) == (True, False)
        assert "beyond" not in (await running.notes("word " * 500, max_tokens=9))["head"]
        shown, on_page = json.loads(json.dumps(asdict(SHORT))), await running.on_page()
        assert {name: each["drafter_limit"] for name, each in on_page.items()} == {"plain": None, "head": shown}


def with_images(number: int, **fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png", **fields}}
    return {"model": MODEL, "messages": [{"role": "user", "content": ["What is it?", *[part] * number]}]}


async def images(wire: Wire) -> None:
    """Report 600 tokens for each image, or 80 for one in low detail; and a response whose conversation has 1,500."""
    if wire.seen.target == "/v1/responses":
        usage = {"input_tokens": 1400, "output_tokens": 100}
        await wire.json({"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": usage})
        return
    body = wire.seen.body
    tokens = 12 + body.count(b"a.png") * (80 if b'"low"' in body else 600)
    await wire.json(answer(wire.upstream.name) | {"usage": {"prompt_tokens": tokens, "completion_tokens": 30}})


@pytest.mark.slow
async def test_images_end_no_engine_while_another_can_serve_them() -> None:
    async with start_gateway(METHODS, behaviour=images, limits={"head": DrafterLimit(1024, Beyond.CRASH)}) as running:

        async def sent(body: dict[str, Any]) -> str:
            response = await running.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            return response.headers["x-gateway-backend"]

        async def explained(body: dict[str, Any]) -> tuple[Any, str]:
            document = await running.explain(**body)
            return document["features"], {each["backend"]: each["note"] for each in document["candidates"]}["head"]

        three = with_images(3)
        assert (await explained(three))[0]["unseen"]["unknown"] == ["image"]
        assert [await sent(three) for _ in range(20)] == ["plain"] * 20
        features, note = await explained(three)
        assert (features["prompt_tokens"], features["unseen"]["unknown"]) == (pytest.approx(1812, abs=20), [])
        assert "the request is beyond its drafter's 1,024 tokens" in note
        low = with_images(2, detail="low")
        assert await sent(low) == "plain"
        assert {await sent(low) for _ in range(4)} == {"plain", "head"}, "these are known to be short"

        await running.upstreams["plain"].die()
        await running.until(lambda: running.backend("plain").health.state is State.DOWN)
        assert await sent(with_images(1, detail="high")) == "head", "nobody else can take it, and it may be short"
        assert (await running.client.post("/v1/chat/completions", json=three)).status_code == 503


async def test_a_stored_conversation_is_as_long_as_its_engine_has_told() -> None:
    async with start_gateway(METHODS, behaviour=images) as running:

        async def features(**fields: Any) -> Any:
            body = {"model": MODEL, "input": "hi", **fields}
            explained = await running.client.post("/admin/explain?path=/v1/responses", headers=ADMIN, json=body)
            return explained.json()["features"]

        first = {"model": MODEL, "input": "hi", "conversation": "conv_1"}
        assert (await features(conversation="conv_1"))["unseen"]["unknown"] == ["conversation"]
        for _ in range(5):
            (await running.client.post("/v1/responses", json=first)).raise_for_status()
        for stored in ({"conversation": {"id": "conv_1"}}, {"previous_response_id": "resp_1"}):
            found = await features(**stored)
            assert (found["prompt_tokens"], found["unseen"]) == (pytest.approx(1506, abs=5), None)
        assert (await features(previous_response_id="resp_2"))["unseen"]["unknown"] == ["conversation"]


async def test_forms_and_pairs_are_as_long_as_they_are() -> None:
    async def behave(wire: Wire) -> None:
        await wire.json({"text": "word", "results": [], "usage": {"type": "duration", "seconds": 60}})

    limits = {"head": DrafterLimit(1024, Beyond.CRASH)}
    async with start_gateway(METHODS, behaviour=behave, limits=limits) as running:
        for _ in range(4):
            form: dict[str, Any] = {"file": ("a.mp3", b"x" * 40_000), "model": (None, MODEL)}
            headers = {"x-gateway-model": MODEL}
            heard = await running.client.post("/v1/audio/transcriptions", files=form, headers=headers)
            pairs = {"model": MODEL, "query": "why", "documents": ["word " * 200] * 10}
            ranked = await running.client.post("/v1/rerank", json=pairs)
            short = await running.client.post("/v1/rerank", json={**pairs, "documents": ["word"]})
            found = [each.headers["x-gateway-backend"] for each in (heard, ranked)]
            assert (found, short.status_code) == (["plain", "plain"], 200)
        (seen,) = running.gateway.models[MODEL].parts._of[""].values()
        assert seen.mean == 3000, "60 seconds"


async def usage_alone(wire: Wire) -> None:
    """Report tokens, and neither times nor acceptance."""
    await wire.json(answer(wire.upstream.name) | {"usage": {"prompt_tokens": 30, "completion_tokens": 30}})


async def test_requests_for_several_answers_have_no_context() -> None:
    """Also with a policy that does not learn, which then needs no features."""
    async with start_gateway(METHODS, {"name": "round_robin"}, behaviour=usage_alone) as running:
        for prompt in ("one", ["one", "two"]):
            body = {"model": MODEL, "prompt": prompt}
            (await running.client.post("/v1/completions", json=body)).raise_for_status()
        assert await running.counted("gateway_e2e_seconds_count") == 2
        assert await running.counted("gateway_context_tokens_count") == 1
