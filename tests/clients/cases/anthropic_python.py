"""Anthropic's client for Python."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.clients.report import HELLO, KEY, MODEL, TOOL, UNKNOWN_MODEL, URL, WEATHER, check, run

SAY: Any = [{"role": "user", "content": HELLO}]
TOOL_OF_ANTHROPIC: Any = {**TOOL, "input_schema": TOOL["parameters"]}
TOOL_OF_ANTHROPIC.pop("parameters")


def client(key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=URL, api_key=key)


def ask(model: str = MODEL, key: str = KEY) -> str:
    message: Any = client(key).messages.create(model=model, max_tokens=60, messages=SAY)
    return str(message.content[0].text)


def models() -> None:
    listed = [model.id for model in client().models.list()]
    check(MODEL in listed, listed)
    check(client().models.retrieve(MODEL).id == MODEL)
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
        "tools": [TOOL_OF_ANTHROPIC],
        "tool_choice": {"type": "any"},
    }
    whole = client().messages.create(**asked)
    with client().messages.stream(**asked) as events:
        final = events.get_final_message()
    for message in (whole, final):
        block: Any = next(block for block in message.content if block.type == "tool_use")
        check("city" in block.input, block)


run(
    "anthropic",
    ask,
    (anthropic.NotFoundError, UNKNOWN_MODEL),
    (anthropic.AuthenticationError, ""),
    [models, stream, tools],
)
