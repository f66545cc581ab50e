"""LangChain's `ChatOpenAI`."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.clients.report import HELLO, KEY, MODEL, UNKNOWN_MODEL, URL, WEATHER, City, check, run


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return city


def llm(model: str = MODEL, key: str = KEY, max_tokens: int = 100, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=model,
        base_url=f"{URL}/v1",
        api_key=SecretStr(key),
        max_completion_tokens=max_tokens,
        **more,
    )


def ask(**options: Any) -> object:
    return llm(**options).invoke(HELLO).content


def stream() -> None:
    chunks = list(llm(stream_usage=True).stream(HELLO))
    check("".join(str(chunk.content) for chunk in chunks), chunks)
    check(any(chunk.usage_metadata for chunk in chunks), chunks)


def responses() -> None:
    check(llm(use_responses_api=True).invoke(HELLO).text)
    check("".join(chunk.text for chunk in llm(max_tokens=20, use_responses_api=True).stream(HELLO)))


def tools() -> None:
    (call,) = llm().bind_tools([get_weather], tool_choice="any").invoke(WEATHER).tool_calls
    check("city" in call["args"], call)


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        answer = llm().with_structured_output(City, method=method).invoke(WEATHER)
        check(isinstance(answer, City), answer)


run(
    "langchain-openai",
    ask,
    (openai.NotFoundError, UNKNOWN_MODEL),
    (openai.AuthenticationError, ""),
    [stream, responses, tools, structured],
)
