"""Pydantic AI with its `OpenAIChatModel`."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.report import (
    HELLO,
    KEY,
    LIMITED_KEY,
    MODEL,
    UNKNOWN_MODEL,
    URL,
    WEATHER,
    WRONG_KEY,
    check,
    raises,
    retries_after_429,
    run,
)


class City(BaseModel):
    """A city."""

    city: str


def agent(name: str = MODEL, key: str = KEY, kind: Any = OpenAIChatModel, **more: Any) -> Agent[None, Any]:
    model = kind(name, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=key))
    return Agent(model, model_settings={"max_tokens": 60}, **more)


async def streamed(asked: Agent[None, Any]) -> str:
    async with asked.run_stream(HELLO) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


def chat() -> None:
    check(agent().run_sync(HELLO).output)


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


def unknown_model() -> None:
    raises(ModelHTTPError, lambda: agent(UNKNOWN_MODEL).run_sync(HELLO), lambda error: "404" in str(error))


def wrong_key() -> None:
    raises(ModelHTTPError, lambda: agent(key=WRONG_KEY).run_sync(HELLO), lambda error: "401" in str(error))


def retry() -> None:
    retries_after_429(lambda: agent(key=LIMITED_KEY).run_sync(HELLO))


run(
    "pydantic-ai-slim",
    {
        "chat": chat,
        "stream": stream,
        "responses": responses,
        "tools": tools,
        "structured": structured,
        "unknown model": unknown_model,
        "wrong key": wrong_key,
        "retry after 429": retry,
    },
)
