"""Pydantic AI with its `OpenAIChatModel`."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.report import HELLO, KEY, MODEL, URL, WEATHER, City, check, run


def agent(model: str = MODEL, key: str = KEY, kind: Any = OpenAIChatModel, **more: Any) -> Agent[None, Any]:
    chosen = kind(model, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=key))
    return Agent(chosen, model_settings={"max_tokens": 60}, **more)


async def streamed(asked: Agent[None, Any]) -> str:
    async with asked.run_stream(HELLO) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


def ask(**options: str) -> object:
    return agent(**options).run_sync(HELLO).output


def stream() -> None:
    check(asyncio.run(streamed(agent())))


def responses() -> None:
    check(agent(kind=OpenAIResponsesModel).run_sync(HELLO).output)
    check(asyncio.run(streamed(agent(kind=OpenAIResponsesModel))))


def tools() -> None:
    called = []
    asked = agent()

    @asked.tool_plain
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        called.append(city)
        return "12 degrees"

    check(asked.run_sync(WEATHER).output)
    check(called)


def structured() -> None:
    answer = agent(output_type=City).run_sync(WEATHER).output
    check(isinstance(answer, City), answer)


run("pydantic-ai-slim", ask, (ModelHTTPError, "404"), (ModelHTTPError, "401"), [stream, responses, tools, structured])
