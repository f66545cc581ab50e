"""LiteLLM as a library, with its provider `openai`."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients.report import HELLO, KEY, MODEL, TOOL, URL, WEATHER, City, check, run

TOOLS = [{"type": "function", "function": TOOL}]


def call(text: str = HELLO, model: str = MODEL, key: str = KEY, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    asked = {"api_base": f"{URL}/v1", "api_key": key, "max_tokens": 60, **more}
    return litellm.completion(model=f"openai/{model}", messages=messages, **asked)


def ask(**options: str) -> object:
    return call(**options).choices[0].message.content


def stream() -> None:
    chunks = list(call(stream=True, stream_options={"include_usage": True}))
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
    (called,) = call(WEATHER, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    check("city" in json.loads(called.function.arguments), called)


def structured() -> None:
    content = call(WEATHER, response_format=City).choices[0].message.content
    check(City.model_validate_json(content), content)


run(
    "litellm",
    ask,
    (litellm.NotFoundError, ""),
    (litellm.AuthenticationError, ""),
    [stream, completions, responses, tools, structured],
)
