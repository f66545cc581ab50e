"""The official clients of OpenAI and Anthropic against the default pool."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import openai
import pytest

from tests.end_to_end.conftest import MODEL
from tests.support.command import ROOT, Command, until

SAY = [{"role": "user", "content": "Tell me about sequence types."}]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", ["openai_python", "anthropic_python"])
def test_the_cases_of_official_clients(gateway: Command, script: str) -> None:
    environ = {"CLIENTS_URL": gateway.url, "CLIENTS_MODEL": MODEL, "CLIENTS_KEY": "none", "CLIENTS_LIMITED_KEY": "none"}
    done = subprocess.run(
        [sys.executable, "-P", ROOT / f"tests/clients/cases/{script}.py"],
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    cases = {each["case"]: each["error"] for each in map(json.loads, done.stdout.splitlines()[1:])}
    of_keys = {"wrong key", "retry after 429"}  # which this pool has none of
    assert {"chat", "unknown model", "stream", "tools", "models"} <= cases.keys()
    assert {name: error for name, error in cases.items() if error and name not in of_keys} == {}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=SAY, max_tokens=40)
    completion = answer.parse()
    assert completion.choices[0].message.content
    assert completion.usage is not None
    assert 1 <= completion.usage.completion_tokens <= 40
    assert answer.headers["x-gateway-backend"] in {"plain", "lookup", "tree", "head", "draft"}
    assert answer.headers["x-gateway-policy"] == "learned"
    assert answer.headers["x-gateway-reason"]
    assert answer.headers["x-gateway-simulated"] == "true"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"llama-3\.1-8b"):
        client.chat.completions.create(model="nope", messages=SAY)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=SAY, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x " * 140_000}])
    with pytest.raises(openai.BadRequestError, match="plain"):
        client.chat.completions.create(model=MODEL, messages=SAY, extra_headers={"x-gateway-backend": "nope"})


async def test_a_cancelled_request_is_cancelled_at_the_engine(
    gateway: Command, async_client: openai.AsyncOpenAI
) -> None:
    def running() -> int:
        backends = gateway.get("/admin/pool", headers=gateway.admin).json()["models"][MODEL]["backends"]
        return int(backends["plain"]["in_flight"])

    for stream in (True, False):
        request = asyncio.ensure_future(
            async_client.chat.completions.create(
                model=MODEL,
                messages=SAY,
                max_tokens=4000,
                stream=stream,
                extra_headers={"x-gateway-backend": "plain"},
                extra_body={"ignore_eos": True},
            )
        )
        await asyncio.to_thread(until, lambda: running() == 1)
        if stream:
            answer = await request
            await anext(answer.__aiter__())  # type: ignore[union-attr]
            await answer.close()  # type: ignore[union-attr]
        else:
            request.cancel()
        await asyncio.to_thread(until, lambda: running() == 0, 2.0)

    def engine_is_idle() -> bool:
        backends = gateway.get("/admin/pool", headers=gateway.admin).json()["models"][MODEL]["backends"]
        return bool(backends["plain"]["engine"]["running"] == 0)

    await asyncio.to_thread(until, engine_is_idle, 5.0)
    await async_client.close()
