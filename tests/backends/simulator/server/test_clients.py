"""The official clients of OpenAI and Anthropic understand the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

MODEL = "llama-3.1-8b"
WEATHER = "What is the weather in Oslo, in celsius?"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
CALLED = {"city": "Oslo", "unit": "celsius"}
HELLO: Any = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
def client(simulator: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{simulator.urls['lookup']}/v1", api_key="none", max_retries=0, timeout=20) as each:
        yield each


@pytest.fixture
def claude(simulator: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=simulator.urls["lookup"], api_key="none", max_retries=0, timeout=20) as each:
        yield each


def test_chat(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=40)
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
)
def test_tools(client: openai.OpenAI, choice: Any, reason: str) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": WEATHER}], "tools": TOOLS}
    whole = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
    with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    for given in (whole, streamed):
        assert given.finish_reason == reason
        assert given.message.tool_calls is not None
        [call] = given.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == CALLED


def test_the_answer_to_a_tool_result_is_text(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": WEATHER}], tools=TOOLS)
    called: Any = first.choices[0].message
    messages: Any = [
        {"role": "user", "content": WEATHER},
        called.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "12 degrees"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    assert second.message.content
    assert not second.message.tool_calls


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {"name": "weather", "schema": PARAMETERS}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": WEATHER}],
        response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[typeddict-item]
    )
    assert json.loads(answer.choices[0].message.content or "") == CALLED


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="import os\n", max_tokens=30, temperature=0)
    stream = client.completions.create(model=MODEL, prompt="import os\n", max_tokens=30, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Valid aliases"):
        client.chat.completions.create(model="nope", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="hi")


def test_responses(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Hello there", "instructions": "Be kind", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=30)
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 30
    ended = client.responses.create(**asked)
    assert ended.status == "completed"
    assert ended.output_text.startswith(whole.output_text)
    kinds = []
    with client.responses.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_response()
    assert final.output_text == ended.output_text
    assert kinds[:4] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    ]
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}


def test_a_stream_of_responses_that_is_cut_short_ends_as_completed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Hello there", "temperature": 0, "max_output_tokens": 30}
    events = list(client.responses.create(**asked, stream=True))
    last: Any = events[-1]
    assert last.type == "response.completed"
    assert (last.response.status, last.response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == client.responses.create(**asked).output_text


def test_responses_are_not_stored(client: openai.OpenAI) -> None:
    stored = client.responses.create(model=MODEL, input="Hello there", max_output_tokens=3, store=True)
    missing = f"Response with id '{stored.id}' not found"
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match=missing) as caught:
            client.responses.create(model=MODEL, input="And?", previous_response_id=stored.id, stream=stream)
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", "response_id")
    with pytest.raises(openai.NotFoundError, match=missing):
        client.responses.retrieve(stored.id)
    with pytest.raises(openai.NotFoundError, match=missing):
        client.responses.cancel(stored.id)
    with pytest.raises(openai.BadRequestError, match="background mode"):
        client.responses.create(model=MODEL, input="Hello there", background=True)


def test_responses_call_tools(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **FUNCTION, "strict": False}]
    whole: Any = client.responses.create(model=MODEL, input=WEATHER, tools=tools)
    with client.responses.stream(model=MODEL, input=WEATHER, tools=tools, tool_choice="required") as stream:
        for _ in stream:
            pass
        final: Any = stream.get_final_response()
    for response in (whole, final):
        assert response.output[0].type == "function_call"
        assert json.loads(response.output[0].arguments) == CALLED


def test_messages(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "system": "Be kind", "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked, max_tokens=30)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 30
    assert whole.content[0].type == "text"
    with claude.messages.stream(**asked, max_tokens=30) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 30
    assert claude.messages.create(**asked, max_tokens=1500).stop_reason == "end_turn"
    stopped = claude.messages.create(**asked, max_tokens=30, stop_sequences=[text[10:13]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[10:13])
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="Be kind")
    assert counted.input_tokens == whole.usage.input_tokens


def test_messages_call_tools(claude: anthropic.Anthropic) -> None:
    tools: Any = [{"name": "get_weather", "description": "Weather of a city", "input_schema": PARAMETERS}]
    asked: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": WEATHER}], "tools": tools}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        block: Any = message.content[0]
        assert (block.type, block.name, block.input) == ("tool_use", "get_weather", CALLED)


def test_messages_refuse(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(model="nope", max_tokens=5, messages=HELLO)


async def test_many_concurrent_requests(simulator: Any) -> None:
    import asyncio

    url = f"{simulator.urls['eagle3']}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:

        async def count_tokens(index: int) -> int:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": f"Tell me of {index}"}], max_tokens=40, stream=True
            )
            return len([chunk async for chunk in stream])

        counts = await asyncio.gather(*(count_tokens(index) for index in range(40)))
    assert all(count > 3 for count in counts)
