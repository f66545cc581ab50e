"""LangChain's `ChatOpenAI`."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

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


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return city


def model(name: str = MODEL, key: str = KEY, max_tokens: int = 100, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=name,
        base_url=f"{URL}/v1",
        api_key=SecretStr(key),
        max_completion_tokens=max_tokens,
        **more,
    )


def chat() -> None:
    check(model().invoke(HELLO).content)


def stream() -> None:
    chunks = list(model(stream_usage=True).stream(HELLO))
    check("".join(str(chunk.content) for chunk in chunks), chunks)
    check(any(chunk.usage_metadata for chunk in chunks), chunks)


def responses() -> None:
    check(model(use_responses_api=True).invoke(HELLO).text)
    check("".join(chunk.text for chunk in model(max_tokens=20, use_responses_api=True).stream(HELLO)))


def tools() -> None:
    (call,) = model().bind_tools([get_weather], tool_choice="any").invoke(WEATHER).tool_calls
    check("city" in call["args"], call)


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        answer = model().with_structured_output(City, method=method).invoke(WEATHER)
        check(isinstance(answer, City), answer)


def unknown_model() -> None:
    raises(openai.NotFoundError, lambda: model(UNKNOWN_MODEL).invoke(HELLO))


def wrong_key() -> None:
    raises(openai.AuthenticationError, lambda: model(key=WRONG_KEY).invoke(HELLO))


def retry() -> None:
    limited = model(key=LIMITED_KEY, max_tokens=60)
    retries_after_429(lambda: limited.invoke(HELLO))


run(
    "langchain-openai",
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
