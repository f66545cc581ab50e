"""Instructor around OpenAI's client."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException

from tests.clients.report import KEY, MODEL, UNKNOWN_MODEL, URL, WEATHER, City, check, run


def ask(model: str = MODEL, key: str = KEY, mode: instructor.Mode = instructor.Mode.TOOLS) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=key), mode=mode)
    messages: Any = [{"role": "user", "content": WEATHER}]
    return client.chat.completions.create(model=model, messages=messages, response_model=City, max_tokens=100)


def tools() -> None:
    check(isinstance(ask(), City))


def structured() -> None:
    check(isinstance(ask(mode=instructor.Mode.JSON_SCHEMA), City))


def stream() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY))
    messages: Any = [{"role": "user", "content": WEATHER}]
    *_, last = client.chat.completions.create_partial(
        model=MODEL, messages=messages, response_model=City, max_tokens=100
    )
    check(last.city, last)


run(
    "instructor",
    ask,
    (InstructorRetryException, UNKNOWN_MODEL),
    (InstructorRetryException, "401"),
    [stream, tools, structured],
    has_chat=False,
)
