"""Instructor around OpenAI's client."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel

from tests.clients.report import (
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


def unknown_model() -> None:
    raises(InstructorRetryException, lambda: ask(UNKNOWN_MODEL), lambda error: UNKNOWN_MODEL in str(error))


def wrong_key() -> None:
    raises(InstructorRetryException, lambda: ask(key=WRONG_KEY), lambda error: "401" in str(error))


def retry() -> None:
    retries_after_429(lambda: ask(key=LIMITED_KEY))


run(
    "instructor",
    {
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "unknown model": unknown_model,
        "wrong key": wrong_key,
        "retry after 429": retry,
    },
)
