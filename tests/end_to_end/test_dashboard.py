"""The dashboard of the default pool under load: what it shows of each backend."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from backends.calibration.load import load_calibration
from tests.end_to_end.conftest import MODEL
from tests.support.command import Command
from tests.support.waiting import eventually, eventually_async

CALIBRATION = "llama-3.1-8b-h100"


async def _load(client: openai.AsyncOpenAI, requests: int) -> None:
    """Send requests of two workloads, some at a time."""
    places = asyncio.Semaphore(8)

    async def send(number: int) -> None:
        workload, temperature = (("chat", 0.7), ("code", 0.0))[number % 2]
        async with places:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Write {workload}, for the {number}th time."}],
                temperature=temperature,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-gateway-workload": workload},
            )
            async for _ in stream:
                pass

    await asyncio.gather(*(send(number) for number in range(requests)))


async def _watch(gateway: Command, seen: list[Any]) -> None:
    """Ask as the page does, until the last snapshot shows everything that the load left behind."""
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30.0) as client:

        async def ask(what: str) -> Any:
            seen.append((await client.get(f"/admin/dashboard/{what}", headers=gateway.admin)).json())
            return seen[-1]

        async def is_shown() -> bool:
            return _is_complete((await ask("snapshot"))["models"][0])

        await ask("history")
        await eventually_async(is_shown)


def _is_complete(model: dict[str, Any]) -> bool:
    workloads = {group["workload"] for group in (model["belief"] or {"groups": []})["groups"]}
    accepts = any(backend["share"] and backend["acceptance"] for backend in model["backends"])
    return {"chat", "code"} <= workloads and accepts and len(model["decisions"]) >= 3


@pytest.mark.slow
async def test_it_shows_the_pool_as_the_engines_and_the_gateway_counted_it(
    gateway: Command, async_client: openai.AsyncOpenAI
) -> None:
    seen: list[Any] = []
    async with async_client, asyncio.timeout(60.0):
        watching = asyncio.create_task(_watch(gateway, seen))
        await eventually(lambda: seen)
        await _load(async_client, 60)
        await watching
    history, snapshot = seen[0], seen[-1]
    model = snapshot["models"][0]
    backends = {backend["name"]: backend for backend in model["backends"]}
    assert list(backends) == ["plain", "lookup", "tree", "head", "draft"]
    assert (model["policy"], model["decides"], model["simulated"]) == ("learned", "learned", True)

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
