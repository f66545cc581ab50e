"""LiteLLM as a library, with its provider `openai`."""

from __future__ import annotations

import json
from typing import Any

import litellm
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

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


class City(BaseModel):
    """A city."""

    city: str


def ask(text: str = HELLO, model: str = MODEL, key: str = KEY, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    asked = {"api_base": f"{URL}/v1", "api_key": key, "max_tokens": 60, **more}
    return litellm.completion(model=f"openai/{model}", messages=messages, **asked)


def chat() -> None:
    check(ask().choices[0].message.content)


def stream() -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    check("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks)


def completions() -> None:
    asked: Any = {"api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 8}
    check(litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="def f(", **asked).choices[0].text)


def responses() -> None:
    asked: Any = {"api_base": f"{URL}/v1", "api_key": KEY, "max_output_tokens": 20, "input": HELLO}
    check(litellm.responses(model=f"openai/{MODEL}", **asked).output)
    kinds = [event.type for event in litellm.responses(model=f"openai/{MODEL}", stream=True, **asked)]
    check(kinds[-1] == "response.completed", kinds)


def tools() -> None:
    (call,) = ask(WEATHER, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    check("city" in json.loads(call.function.arguments), call)


def structured() -> None:
    content = ask(WEATHER, response_format=City).choices[0].message.content
    check(City.model_validate_json(content), content)


def unknown_model() -> None:
    raises(litellm.NotFoundError, lambda: ask(model=UNKNOWN_MODEL))


def wrong_key() -> None:
    raises(litellm.AuthenticationError, lambda: ask(key=WRONG_KEY))


def retry() -> None:
    retries_after_429(lambda: ask(key=LIMITED_KEY))


run(
    "litellm",
    {
        "chat": chat,
        "stream": stream,
        "completions": completions,
        "responses": responses,
        "tools": tools,
        "structured": structured,
        "unknown model": unknown_model,
        "wrong key": wrong_key,
        "retry after 429": retry,
    },
)
