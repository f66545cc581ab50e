"""The dashboard of the default pool under load: what it shows of each backend, of the policy and of its decisions."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import orjson
import pytest

from backends.calibration.load import load_calibration
from tests.end_to_end.conftest import MODEL
from tests.support.command import Command
from tests.support.waiting import eventually, eventually_async

SECRET = "xylophone quark"
CALIBRATION = "llama-3.1-8b-h100"


async def _load(client: openai.AsyncOpenAI, requests: int) -> None:
    """Send requests of two workloads, some at a time."""
    places = asyncio.Semaphore(8)

    async def send(number: int) -> None:
        workload, temperature = (("chat", 0.7), ("code", 0.0))[number % 2]
        async with places:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[
                    {"role": "system", "content": f"You write {workload}. {SECRET}"},
                    {"role": "user", "content": f"{SECRET} {number}"},
                ],
                temperature=temperature,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-gateway-workload": workload},
            )
            async for _ in stream:
                pass

    await asyncio.gather(*(send(number) for number in range(requests)))


async def _watch(gateway: Command, seen: list[Any], raw: list[bytes]) -> None:
    """Ask as the page does, until the last snapshot shows everything that the load left behind."""
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30.0) as client:

        async def ask(what: str) -> Any:
            answer = await client.get(f"/admin/dashboard/{what}", headers=gateway.admin)
            raw.append(answer.content)
            seen.append(orjson.loads(answer.content))
            return seen[-1]

        async def is_shown() -> bool:
            return _is_complete((await ask("snapshot"))["models"][0])

        await ask("history")
        await eventually_async(is_shown)


def _is_complete(model: dict[str, Any]) -> bool:
    workloads = {group["workload"] for group in (model["belief"] or {"groups": []})["groups"]}
    decisions = model["decisions"]
    return (
        {"chat", "code"} <= workloads
        and any(backend["share"] and backend["acceptance"] for backend in model["backends"])
        and len(decisions) >= 3
        and all(decision["ended"] for decision in decisions)
    )


@pytest.mark.slow
async def test_it_shows_the_pool_the_policy_and_its_decisions_under_load(
    gateway: Command, async_client: openai.AsyncOpenAI
) -> None:
    seen: list[Any] = []
    raw: list[bytes] = []
    async with async_client, asyncio.timeout(60.0):
        watching = asyncio.create_task(_watch(gateway, seen, raw))
        await eventually(lambda: seen)
        await _load(async_client, 60)
        await watching
    history, snapshot = seen[0], seen[-1]
    model = snapshot["models"][0]
    backends = {backend["name"]: backend for backend in model["backends"]}
    assert list(backends) == ["plain", "lookup", "tree", "head", "draft"]
    assert (model["policy"], model["decides"], model["simulated"]) == ("learned", "learned", True)

    # The pool, as the engines and the gateway counted it
    assert {name: backend["method"] for name, backend in backends.items()} == {
        "plain": "baseline", "lookup": "ngram", "tree": "suffix", "head": "eagle3", "draft": "draft_model",
    }  # fmt: skip
    assert {backend["state"] for backend in backends.values()} == {"up"}
    assert sum(backend["share"] for backend in backends.values()) == pytest.approx(1.0)
    busiest = max(backends.values(), key=lambda backend: backend["share"])
    assert busiest["requests_per_s"] > 0
    assert busiest["output_tokens_per_s"] > busiest["requests_per_s"]
    for times in (busiest["ttft"], busiest["tpot"]):
        assert 0 < times["p50_s"] <= times["p95_s"] <= times["p99_s"] < 10
        assert times["count"] > 0
    base_s = load_calibration(CALIBRATION).step.base_s
    assert base_s / 2 < busiest["fitted_step_s"] < 10 * base_s
    assert all(backend["acceptance"] for backend in backends.values() if backend["share"])
    for backend in (each for each in backends.values() if each["acceptance"]):
        accepted = backend["acceptance"]
        positions = accepted["by_position"]
        assert len(positions) <= backend["k"]
        assert positions == sorted(positions, reverse=True), "a token is accepted only after those before it"
        assert 1.0 <= accepted["tokens_per_step"] <= 1.0 + sum(positions) + 1e-9, "steps without a draft count"
    assert all(len(backend["point"]) == len(history["series"]) for backend in backends.values())

    # What the policy believes
    groups = {group["workload"]: group for group in model["belief"]["groups"]}
    assert model["belief"]["baseline"] == "plain"
    for workload, temperature in (("chat", "0.5-0.9"), ("code", "0-0.05")):
        group = groups[workload]
        assert (group["temperature"], len(group["template"])) == (temperature, 8)
        of = {each["backend"]: each for each in group["backends"]}
        assert of["plain"]["speedup"] == pytest.approx(1.0)
        assert of["plain"]["tokens_per_step"] == pytest.approx(1.0)
        assert all(each["speedup"] > 0.2 and each["tokens_per_step"] >= 1.0 for each in of.values())
        assert group["requests"] >= 20

    # The decisions
    for decision in model["decisions"]:
        scores = {each["backend"]: each["score"] for each in decision["candidates"]}
        assert list(scores) == list(backends)
        assert all(score > 0 for score in scores.values())
        if decision["reason"] == "least_delay":
            assert scores[decision["backend"]] == min(scores.values())
        assert sum(each["propensity"] for each in decision["candidates"]) == pytest.approx(1.0, abs=1e-3)
        assert decision["predicted_s"] > 0
        assert decision["request"]["workload"] in {"chat", "code", ""}
    ok = [decision for decision in model["decisions"] if decision["ended"]["outcome"] == "ok"]
    assert ok
    assert all(decision["ended"]["e2e_s"] > 0 for decision in ok)
    numbers = [decision["number"] for decision in model["decisions"]]
    assert numbers == sorted(numbers)

    # Nothing that nobody is to see
    sent = b"\n".join(raw)
    for word in (*SECRET.encode().split(), gateway.admin["authorization"].partition(" ")[2].encode(), b"127.0.0.1"):
        assert word not in sent
