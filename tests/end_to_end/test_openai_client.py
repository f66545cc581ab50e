"""The official clients of OpenAI and Anthropic against the default pool."""

from __future__ import annotations

import asyncio
import json
import time

import anthropic
import httpx
import openai
import pytest

from tests.end_to_end.conftest import MODEL
from tests.support.command import Command, until

SAY = [{"role": "user", "content": "Tell me about sequence types."}]
CODE = '''def insort_right(a, x, lo=0, hi=None, *, key=None):
    """Insert item x in list a, and keep it sorted assuming a is sorted."""
    if key is None:
        lo = bisect_right(a, x, lo, hi)
    else:
        lo = bisect_right(a, key(x), lo, hi, key=key)
    a.insert(lo, x)
'''
pytestmark = pytest.mark.slow

REPEAT = [{"role": "user", "content": f"Repeat this code exactly:\n```python\n{CODE}```"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=SAY, max_tokens=40)
    completion = answer.parse()
    assert completion.choices[0].message.content
    assert completion.usage is not None
    assert 1 <= completion.usage.completion_tokens <= 40
    assert answer.headers["x-gateway-backend"] in {"plain", "lookup", "tree", "head", "draft"}
    assert answer.headers["x-gateway-policy"] == "learned"
    assert answer.headers["x-gateway-reason"]
    assert answer.headers["x-gateway-simulated"] == "true"


def test_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=SAY, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason in {"stop", "length"}


def test_every_replica_gives_the_same_greedy_answer(client: openai.OpenAI) -> None:
    texts = {
        client.chat.completions.create(
            model=MODEL, messages=REPEAT, max_tokens=60, temperature=0, extra_headers={"x-gateway-backend": name}
        )
        .choices[0]
        .message.content
        for name in ("plain", "lookup", "tree", "head", "draft")
    }
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [0, 1])
def test_completions(client: openai.OpenAI, temperature: float) -> None:
    completion = client.completions.create(model=MODEL, prompt="def f(x):", max_tokens=20, temperature=temperature)
    assert completion.choices[0].text
    streamed = client.completions.create(
        model=MODEL, prompt="def f(x):", max_tokens=20, temperature=temperature, seed=7, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)


def test_several_answers(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=10, n=2, temperature=1)
    assert [choice.index for choice in completion.choices] == [0, 1]


def test_tools(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=SAY,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=200,  # type: ignore[list-item]
    )
    calls = completion.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "get_weather"
    assert isinstance(json.loads(calls[0].function.arguments)["city"], str)


def test_tools_in_a_stream(client: openai.OpenAI) -> None:
    arguments = ""
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=SAY,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=200,
        stream=True,  # type: ignore[list-item]
    ):
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            assert call.function is not None
            arguments += call.function.arguments or ""
    assert "city" in json.loads(arguments)


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    completion = client.chat.completions.create(
        model=MODEL,
        messages=SAY,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    person = json.loads(completion.choices[0].message.content or "")
    assert isinstance(person["name"], str)
    assert isinstance(person["age"], int)


def test_responses(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Tell me about sequence types.", max_output_tokens=30)
    assert response.output_text
    assert response.usage is not None
    events = list(client.responses.create(model=MODEL, input="Hello", max_output_tokens=30, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert any(event.type == "response.output_text.delta" for event in events)


def test_anthropic_messages(gateway: Command) -> None:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none-needed", max_retries=0) as client:
        message = client.messages.create(model=MODEL, max_tokens=30, messages=[{"role": "user", "content": "Hello"}])
        assert message.content[0].type == "text"
        with client.messages.stream(
            model=MODEL, max_tokens=30, messages=[{"role": "user", "content": "Hello"}]
        ) as stream:
            assert "".join(stream.text_stream)
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(model="nope", max_tokens=3, messages=[{"role": "user", "content": "Hello"}])
        assert "llama-3.1-8b" in str(caught.value)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_tokenize_and_detokenize(gateway: Command) -> None:
    tokens = gateway.post("/tokenize", {"model": MODEL, "prompt": "def f(x): return x"}).json()["tokens"]
    assert gateway.post("/detokenize", {"model": MODEL, "tokens": tokens}).json()["prompt"] == "def f(x): return x"


def test_other_paths_of_vllm_pass_through(gateway: Command) -> None:
    assert "simulated" in gateway.get("/version").json()["version"]
    assert gateway.get("/nothing/here").json()["error"]["code"] == "path_closed"
    assert (
        gateway.post("/v1/embeddings", {"model": MODEL, "input": "hi"}).status_code == 404
    )  # the model only generates


def test_preflight_requests_take_no_replica_out(gateway: Command) -> None:
    up = gateway.get("/readyz").json()["up"]
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    for _ in range(10):
        url = f"{gateway.url}/v1/chat/completions"
        assert httpx.options(url, headers=headers, trust_env=False).status_code == 200
    assert gateway.get("/readyz").json()["up"] == up


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"llama-3\.1-8b"):
        client.chat.completions.create(model="nope", messages=SAY)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=SAY, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x " * 140_000}])
    with pytest.raises(openai.BadRequestError, match="plain"):
        client.chat.completions.create(model=MODEL, messages=SAY, extra_headers={"x-gateway-backend": "nope"})


def test_baseline_only_parameters(client: openai.OpenAI) -> None:
    for _ in range(3):
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=SAY, max_tokens=5, logit_bias={"5": 1}, extra_body={"min_p": 0.1}
        )
        assert answer.headers["x-gateway-backend"] == "plain"


async def test_a_cancelled_request_is_cancelled_at_the_engine(
    gateway: Command, async_client: openai.AsyncOpenAI
) -> None:
    def running() -> int:
        backends = gateway.get("/admin/pool", headers=gateway.admin).json()["models"][MODEL]["backends"]
        return int(backends["plain"]["in_flight"])

    for stream in (True, False):
        request = asyncio.ensure_future(
            async_client.chat.completions.create(
                model=MODEL,
                messages=SAY,
                max_tokens=4000,
                stream=stream,
                extra_headers={"x-gateway-backend": "plain"},
                extra_body={"ignore_eos": True},
            )
        )
        await asyncio.to_thread(until, lambda: running() == 1)
        if stream:
            answer = await request
            await anext(answer.__aiter__())  # type: ignore[union-attr]
            await answer.close()  # type: ignore[union-attr]
        else:
            request.cancel()
        await asyncio.to_thread(until, lambda: running() == 0, 2.0)

    def engine_is_idle() -> bool:
        backends = gateway.get("/admin/pool", headers=gateway.admin).json()["models"][MODEL]["backends"]
        return bool(backends["plain"]["engine"]["running"] == 0)

    await asyncio.to_thread(until, engine_is_idle, 5.0)
    await async_client.close()


def test_ngram_drafting_is_faster_on_a_repetitive_prompt(client: openai.OpenAI) -> None:
    def seconds(name: str) -> float:
        durations_s = []
        for _ in range(3):
            before_s = time.perf_counter()
            client.chat.completions.create(
                model=MODEL, messages=REPEAT, max_tokens=90, temperature=0, extra_headers={"x-gateway-backend": name}
            )
            durations_s.append(time.perf_counter() - before_s)
        return min(durations_s)

    assert seconds("lookup") < 0.75 * seconds(
        "plain"
    )  # step times are simulated, so the ratio does not depend on the machine


def test_concurrent_streams(gateway: Command) -> None:
    async def all_answers() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0, timeout=60.0) as client:

            async def answer(number: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=SAY, max_tokens=30, temperature=number % 2, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

            return await asyncio.gather(*(answer(number) for number in range(60)))

    texts = asyncio.run(all_answers())
    assert all(texts)


def test_admin_and_metrics_show_the_pool(gateway: Command) -> None:
    pool = gateway.get("/admin/pool", headers=gateway.admin).json()["models"][MODEL]
    assert list(pool["backends"]) == ["plain", "lookup", "tree", "head", "draft"]
    for backend in pool["backends"].values():
        assert backend["state"] == "up"
        assert backend["simulated"] is True
        assert backend["pid"]
    body = {"model": MODEL, "messages": REPEAT, "temperature": 0}
    explained = gateway.post("/admin/explain", body, headers=gateway.admin)
    assert explained.json()["choice"]["policy"] == "learned"
    assert "simulated" in gateway.printed()
