"""Anthropic's client for Python."""

from __future__ import annotations

from typing import Any

import anthropic

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

SAY: Any = [{"role": "user", "content": HELLO}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def client(key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=URL, api_key=key)


def models() -> None:
    listed = [model.id for model in client().models.list()]
    check(MODEL in listed, listed)
    check(client().models.retrieve(MODEL).id == MODEL)


def chat() -> None:
    message: Any = client().messages.create(model=MODEL, max_tokens=20, messages=SAY)
    check(message.content[0].text, message)
    check(client().messages.count_tokens(model=MODEL, messages=SAY).input_tokens > 0)


def stream() -> None:
    with client().messages.stream(model=MODEL, max_tokens=20, messages=SAY) as events:
        text = "".join(events.text_stream)
        final: Any = events.get_final_message()
    check(text, final)
    check(final.stop_reason == "max_tokens", final)


def tools() -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": WEATHER}],
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    }
    whole = client().messages.create(**asked)
    with client().messages.stream(**asked) as events:
        final = events.get_final_message()
    for message in (whole, final):
        block: Any = next(block for block in message.content if block.type == "tool_use")
        check("city" in block.input, block)


def unknown_model() -> None:
    raises(
        anthropic.NotFoundError,
        lambda: client().messages.create(model=UNKNOWN_MODEL, max_tokens=5, messages=SAY),
        lambda error: UNKNOWN_MODEL in str(error),
    )


def wrong_key() -> None:
    raises(
        anthropic.AuthenticationError,
        lambda: client(WRONG_KEY).messages.create(model=MODEL, max_tokens=5, messages=SAY),
    )


def retry() -> None:
    limited = client(LIMITED_KEY)
    retries_after_429(lambda: limited.messages.create(model=MODEL, max_tokens=60, messages=SAY))


run(
    "anthropic",
    {
        "models": models,
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "unknown model": unknown_model,
        "wrong key": wrong_key,
        "retry after 429": retry,
    },
)
