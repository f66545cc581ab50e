"""OpenAI's Agents SDK, on chat completions and on the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from tests.clients.report import HELLO, KEY, MODEL, URL, WEATHER, City, check, run

set_tracing_disabled(disabled=True)


WHOLE = 1500
"""Tokens that are enough for an answer of a simulated replica to end by itself."""


def agent(kind: Any, model: str = MODEL, key: str = KEY, max_tokens: int = 60, **more: Any) -> Agent[None]:
    chosen = kind(model=model, openai_client=openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=key))
    return Agent(name="assistant", model=chosen, model_settings=ModelSettings(max_tokens=max_tokens), **more)


async def streamed(asked: Agent[None]) -> str:
    result = Runner.run_streamed(asked, HELLO)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    check("".join(pieces) == result.final_output, result.final_output)
    return "".join(pieces)


def called(kind: Any) -> list[str]:
    cities: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return "12 degrees"

    check(Runner.run_sync(agent(kind, max_tokens=WHOLE, tools=[get_weather]), WEATHER).final_output)
    return cities


def ask(**options: str) -> object:
    return asyncio.run(Runner.run(agent(OpenAIChatCompletionsModel, **options), HELLO)).final_output


def stream() -> None:
    check(asyncio.run(streamed(agent(OpenAIChatCompletionsModel))))


def responses() -> None:
    check(asyncio.run(streamed(agent(OpenAIResponsesModel))))


def cut_short() -> None:
    check(Runner.run_sync(agent(OpenAIResponsesModel), HELLO).final_output)


def tools() -> None:
    check(called(OpenAIChatCompletionsModel))
    check(called(OpenAIResponsesModel))


def structured() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        answer = Runner.run_sync(agent(kind, output_type=City), WEATHER).final_output
        check(isinstance(answer, City), answer)


run(
    "openai-agents",
    ask,
    (openai.NotFoundError, ""),
    (openai.AuthenticationError, ""),
    [stream, responses, cut_short, tools, structured],
)
