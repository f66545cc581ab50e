"""The official client, the gateway, and four real vLLM engines that speculate in different ways."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionMessageParam

from tests.vllm.conftest import Served

pytestmark = pytest.mark.vllm

METHODS = {"plain": "baseline", "lookup": "ngram", "tree": "suffix", "head": "eagle"}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Write merge of Python's heapq."}]
ABORT_S = 5.0  # time for a busy machine; the work itself takes longer
START_S = 30.0  # on a machine with other work to do
BACK_S = 180.0


def to(backend: str) -> dict[str, str]:
    return {"x-gateway-backend": backend}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backend", METHODS)
def test_a_chat_answer_comes_whole(served: Served, backend: str, temperature: float) -> None:
    raw = served.openai.chat.completions.with_raw_response.create(
        model="tiny",
        messages=MESSAGES,
        temperature=temperature,
        max_tokens=64,
        logprobs=True,
        extra_headers=to(backend),
        extra_body={"ignore_eos": True, "seed": 7},
    )
    answer = raw.parse()
    assert raw.headers["x-gateway-backend"] == backend
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 64
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    # Tokens drawn from the model's own distribution, whatever was drafted: noise would lie near log(1/2048) = -7.6.
    assert sum(token.logprob for token in choice.logprobs.content) / 64 > -5.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backend", METHODS)
def test_a_chat_answer_comes_as_a_stream(served: Served, backend: str, temperature: float) -> None:
    with served.openai.chat.completions.with_streaming_response.create(
        model="tiny",
        messages=MESSAGES,
        temperature=temperature,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=to(backend),
        extra_body={"ignore_eos": True},
    ) as raw:
        assert raw.headers["x-gateway-backend"] == backend
        assert raw.headers["content-type"].startswith("text/event-stream")
        chunks = list(raw.parse())
    contents = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(contents)
    assert len(contents) >= 2  # in pieces; few, where suffix decoding has seen the answer before
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 64


@pytest.mark.parametrize("backend", METHODS)
def test_acceptance_is_real_and_counted(served: Served, backend: str) -> None:
    labels = {"model": "tiny", "backend": backend}
    counted_before = served.metric("gateway_accepted_tokens_total", **labels)
    answer = served.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_tokens=300,
        extra_headers=to(backend),
        extra_body={"ignore_eos": True},
    )
    extra: dict[str, Any] = answer.model_extra or {}
    speculation = extra["metrics"].get("speculative_decoding")
    if backend == "plain":
        assert speculation is None
        return
    assert speculation is not None
    assert speculation["num_accepted_draft_tokens"] > 0
    assert speculation["mean_acceptance_length"] > 1.0
    counted = served.metric("gateway_accepted_tokens_total", **labels) - counted_before
    assert counted == speculation["num_accepted_draft_tokens"]


def test_completions_stream_and_are_routed_by_the_policy(served: Served) -> None:
    with served.openai.completions.with_streaming_response.create(
        model="tiny", prompt="def heappush(heap, item):\n", temperature=0, max_tokens=32, stream=True
    ) as raw:
        assert raw.headers["x-gateway-policy"] == "thresholds"
        assert raw.headers["x-gateway-backend"] in METHODS
        assert raw.headers["x-gateway-reason"]
        assert "".join(chunk.choices[0].text for chunk in raw.parse() if chunk.choices)


def test_two_choices_are_two_answers(served: Served) -> None:
    answer = served.openai.chat.completions.create(model="tiny", messages=MESSAGES, n=2, max_tokens=48, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


@pytest.mark.parametrize("parameters", [{"logit_bias": {"5": -100}}, {"extra_body": {"min_p": 0.1}}])
def test_what_only_a_baseline_serves_goes_there(served: Served, parameters: dict[str, Any]) -> None:
    raw = served.openai.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=8, **parameters
    )
    assert raw.headers["x-gateway-backend"] == "plain"
    assert raw.parse().choices


def test_the_engines_own_errors_pass(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        served.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5000)
    with pytest.raises(openai.NotFoundError, match="tiny"):
        served.openai.chat.completions.create(model="huge", messages=MESSAGES)


def test_the_model_is_listed_and_text_is_tokenized(served: Served) -> None:
    assert "tiny" in [model.id for model in served.openai.models.list()]
    tokens = served.http.post(f"{served.url}/tokenize", json={"model": "tiny", "prompt": "def heappush"}).json()
    text = served.http.post(f"{served.url}/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]}).json()
    assert text["prompt"] == "def heappush"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("backend", METHODS)
async def test_a_client_that_leaves_ends_the_engines_work(served: Served, backend: str, stream: bool) -> None:
    engine = served.backends()[backend]["url"]
    await until_true(lambda: running(served, engine) == 0, 10)
    ended = served.metric("vllm:request_success_total", engine, finished_reason="length")
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        asking = asyncio.create_task(ask_much(client, backend, stream=stream))
        await until_true(lambda: running(served, engine) > 0 or asking.done(), START_S)
        assert not asking.done(), asking.result()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await until_true(lambda: running(served, engine) == 0, ABORT_S)
    assert served.metric("vllm:request_success_total", engine, finished_reason="length") == ended
    assert served.backends()[backend]["in_flight"] == 0


def running(served: Served, engine: str) -> float:
    return served.metric("vllm:num_requests_running", engine)


async def until_true(condition: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


async def ask_much(client: AsyncOpenAI, backend: str, *, stream: bool) -> int:
    """Ask for ten seconds of work, at a temperature at which little is accepted; return the chunks that came."""
    answer = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=1,
        max_tokens=1900,
        n=8,
        stream=stream,
        extra_headers=to(backend),
        extra_body={"ignore_eos": True},
    )
    return len([chunk async for chunk in answer]) if isinstance(answer, AsyncStream) else 1


async def test_the_others_carry_on_when_an_engine_dies_and_it_comes_back(served: Served) -> None:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        victim = (await ask_little(client)).headers["x-gateway-backend"]  # the one that the policy likes for this
        before = served.backends()[victim]
        answered_by: list[str] = []
        states: set[str] = set()

        async def keep_asking() -> None:
            while True:
                answered_by.append((await ask_little(client)).headers["x-gateway-backend"])
                await asyncio.sleep(0.1)

        begun = asyncio.create_task(ask_much(client, victim, stream=True))
        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        await until_true(lambda: running(served, before["url"]) > 1 and victim in answered_by, 20)
        os.kill(before["pid"], signal.SIGKILL)

        with pytest.raises(openai.APIError):  # an error event, not a cut
            await begun
        count = len(answered_by)
        while len(answered_by) < count + 10:
            await asyncio.sleep(0.05)
        assert victim not in answered_by[count + 3 :]
        async with asyncio.timeout(BACK_S):
            while (now := served.backends()[victim])["state"] != "up":
                states.add(now["state"])
                assert not [task for task in asking if task.done()]
                await asyncio.sleep(0.2)
        assert now["pid"] != before["pid"]
        assert now["restarts"] == before["restarts"] + 1
        assert "down" in states
        count = len(answered_by)
        await until_true(lambda: victim in answered_by[count:], 10)
        for task in asking:
            assert not task.done()  # not one request failed
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def ask_little(client: AsyncOpenAI) -> Any:
    return await client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=32, extra_body={"ignore_eos": True}
    )


def test_nothing_is_left_when_the_gateway_is_stopped(served: Served) -> None:
    assert len(served.processes()) > len(METHODS)
    assert served.stop() == 0
    assert served.processes() == {}
