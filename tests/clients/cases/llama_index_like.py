"""LlamaIndex's `OpenAILike`."""

from __future__ import annotations

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

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

SAY = [ChatMessage(role="user", content=HELLO)]


class City(BaseModel):
    """A city."""

    city: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return city


def model(name: str = MODEL, key: str = KEY) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=f"{URL}/v1",
        api_key=key,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=60,
        context_window=8192,
    )


def chat() -> None:
    check(model().chat(SAY).message.content)


def stream() -> None:
    check("".join(piece.delta or "" for piece in model().stream_chat(SAY)))


def completions() -> None:
    plain = model().model_copy(update={"is_chat_model": False})
    check(plain.complete("def f(").text)
    check("".join(piece.delta or "" for piece in plain.stream_complete("def f(")))


def tools() -> None:
    answer = model().chat_with_tools([FunctionTool.from_defaults(get_weather)], WEATHER, tool_required=True)
    (call,) = model().get_tool_calls_from_response(answer)
    check("city" in call.tool_kwargs, call)


def structured() -> None:
    answer = model().as_structured_llm(City).chat([ChatMessage(role="user", content=WEATHER)])
    check(isinstance(answer.raw, City), answer)


def unknown_model() -> None:
    raises(openai.NotFoundError, lambda: model(UNKNOWN_MODEL).chat(SAY))


def wrong_key() -> None:
    raises(openai.AuthenticationError, lambda: model(key=WRONG_KEY).chat(SAY))


def retry() -> None:
    limited = model(key=LIMITED_KEY)
    retries_after_429(lambda: limited.chat(SAY))


run(
    "llama-index-llms-openai-like",
    {
        "chat": chat,
        "stream": stream,
        "completions": completions,
        "tools": tools,
        "structured": structured,
        "unknown model": unknown_model,
        "wrong key": wrong_key,
        "retry after 429": retry,
    },
)
