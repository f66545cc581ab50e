"""OpenAI's client for Python."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.clients.report import HELLO, KEY, MODEL, TOOL, UNKNOWN_MODEL, URL, WEATHER, City, check, raises, run

SAY: Any = [{"role": "user", "content": HELLO}]
ASK: Any = [{"role": "user", "content": WEATHER}]
TOOLS: Any = [{"type": "function", "function": TOOL}]


def client(key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=key)


def ask(model: str = MODEL, key: str = KEY) -> str | None:
    return client(key).chat.completions.create(model=model, messages=SAY, max_tokens=60).choices[0].message.content


def models() -> None:
    listed = [model.id for model in client().models.list()]
    check(MODEL in listed, listed)
    check(client().models.retrieve(MODEL).id == MODEL)


def stream() -> None:
    events = client().chat.completions.create(
        model=MODEL, messages=SAY, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(events)
    check("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks)
    check(chunks[-1].usage is not None, chunks[-1])


def completions() -> None:
    check(client().completions.create(model=MODEL, prompt="def f(", max_tokens=8).choices[0].text)
    pieces = client().completions.create(model=MODEL, prompt="def f(", max_tokens=8, stream=True)
    check("".join(piece.choices[0].text for piece in pieces if piece.choices))


def responses() -> None:
    check(client().responses.create(model=MODEL, input=HELLO, max_output_tokens=20).output_text)
    with client().responses.stream(model=MODEL, input=HELLO, max_output_tokens=20) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    check("".join(deltas) == final.output_text, final)
    asked: Any = {"model": MODEL, "input": HELLO, "previous_response_id": "resp_unknown"}
    raises(openai.NotFoundError, "", lambda: client().responses.create(**asked))


def cut_short() -> None:
    response = client().responses.create(model=MODEL, input=HELLO, max_output_tokens=20)
    check((response.status, bool(response.output_text)) == ("incomplete", True), response)


def tools() -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 100}
    (call,) = client().chat.completions.create(**asked).choices[0].message.tool_calls
    check("city" in json.loads(call.function.arguments), call)
    with client().chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls or ()
    check("city" in json.loads(streamed.function.arguments), streamed)


def structured() -> None:
    answer = client().chat.completions.parse(model=MODEL, messages=ASK, response_format=City, max_tokens=100)
    check(answer.choices[0].message.parsed, answer)


run(
    "openai",
    ask,
    (openai.NotFoundError, UNKNOWN_MODEL),
    (openai.AuthenticationError, ""),
    [models, stream, completions, responses, cut_short, tools, structured],
)
