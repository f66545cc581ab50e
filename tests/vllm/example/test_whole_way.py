"""The official client, the gateway, and the example pool of four real vLLM engines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, AsyncStream

from gateway.config.load import load_pool
from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import START_S, Served
from tests.vllm.requests import MESSAGES, check_acceptance, check_stream, check_whole_answer, to

pytestmark = pytest.mark.vllm

METHODS = {"plain": "baseline", "lookup": "ngram", "head": "eagle", "draft": "draft_model"}
SPECULATING = [name for name in METHODS if name != "plain"]
ABORT_S = 5.0  # time for a busy machine; the work itself takes longer
BEGIN_S = 60.0  # on a machine with other work to do


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backend", METHODS)
def test_a_chat_answer_comes_whole(served: Served, backend: str, temperature: float) -> None:
    check_whole_answer(served, backend, temperature)


@pytest.mark.parametrize("backend", METHODS)
def test_a_chat_answer_comes_as_a_stream(served: Served, backend: str) -> None:
    check_stream(served, backend)


def test_init_writes_a_pool_of_what_the_engines_say_and_a_probe_agrees(served: Served, tmp_path: Path) -> None:
    urls = [each["url"] for each in served.backends().values()]
    gateway, path = str(Path(sys.executable).with_name("gateway")), str(tmp_path / "pool.yaml")
    for words in (["init", *urls], ["check", "--probe"]):
        asked = [gateway, *words, "--config", path]
        ran = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(each.url or "" for each in load_pool(Path(path)).models["tiny"].backends.values()) == sorted(urls)


@pytest.mark.parametrize("backend", SPECULATING)
def test_acceptance_is_counted_and_learned(served: Served, backend: str) -> None:
    check_acceptance(served, backend)


def test_a_baseline_reports_no_acceptance(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=16, extra_headers=to("plain")
    )
    assert (answer.model_extra or {})["metrics"].get("speculative_decoding") is None


def test_completions_stream_and_are_routed_by_the_policy(served: Served) -> None:
    with served.openai.completions.with_streaming_response.create(
        model="tiny", prompt="def heappush(heap, item):\n", temperature=0, max_tokens=32, stream=True
    ) as raw:
        assert raw.headers["x-gateway-policy"] == "learned"
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
    await until(lambda: running(served, engine) == 0, BEGIN_S)
    ended = served.metric("vllm:request_success_total", engine, finished_reason="length")
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        asking = asyncio.create_task(ask_much(client, backend, stream=stream))
        await until(lambda: running(served, engine) > 0 or asking.done(), BEGIN_S)
        assert not asking.done(), asking.result()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await until(lambda: running(served, engine) == 0, ABORT_S)
    assert served.metric("vllm:request_success_total", engine, finished_reason="length") == ended
    assert served.backends()[backend]["in_flight"] == 0


def running(served: Served, engine: str) -> float:
    return served.metric("vllm:num_requests_running", engine)


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a condition that asks servers, beside the event loop."""
    await asyncio.to_thread(eventually_blocking, condition, timeout_s)


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
    victim = "head"
    before = served.backends()[victim]
    answered_by: list[str] = []
    states: set[str] = set()

    def is_back() -> bool:
        state = served.backends()[victim]["state"]
        states.add(state)
        assert not any(task.done() for task in asking)
        return bool(state == "up" and "down" in states)

    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def keep_asking() -> None:
            while True:
                answered_by.append((await ask_little(client)).headers["x-gateway-backend"])

        stream = asyncio.create_task(ask_much(client, victim, stream=True))
        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        await until(lambda: running(served, before["url"]) > 1 and len(answered_by) > 0, BEGIN_S)
        os.kill(before["pid"], signal.SIGKILL)

        with pytest.raises(openai.APIError):  # an error event, not a cut
            await stream
        count = len(answered_by)
        await until(lambda: len(answered_by) >= count + 10, BEGIN_S)
        assert victim not in answered_by[count + 3 :]
        await until(is_back, START_S)
        now = served.backends()[victim]
        assert now["pid"] != before["pid"]
        assert now["restarts"] > before["restarts"]  # once more each time that its port was not free yet
        assert (await ask_little(client, victim)).headers["x-gateway-backend"] == victim
        for task in asking:
            assert not task.done()  # not one request failed
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def ask_little(client: AsyncOpenAI, backend: str = "") -> Any:
    return await client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_tokens=32,
        extra_headers=to(backend) if backend else {},
        extra_body={"ignore_eos": True},
    )


def test_nothing_is_left_when_the_gateway_is_stopped(served: Served) -> None:
    assert len(served.processes()) > len(METHODS)
    assert served.stop() == 0
    assert served.processes() == {}
