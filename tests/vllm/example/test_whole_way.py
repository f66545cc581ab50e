"""The official client, the gateway, and the example pool of four real vLLM engines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI, AsyncStream

from gateway.config.load import load_pool
from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import Served
from tests.vllm.example.conftest import BACKENDS
from tests.vllm.requests import MESSAGES, check_method, to

pytestmark = pytest.mark.vllm

ABORT_S = 5.0  # time for a busy machine; the work itself takes longer
BEGIN_S = 60.0  # on a machine with other work to do


@pytest.mark.parametrize("backend", BACKENDS)
def test_chat_answers_come_whole_and_as_streams_and_are_learned_from(served: Served, backend: str) -> None:
    check_method(served, backend)


def test_init_writes_a_pool_of_what_the_engines_say_and_a_probe_agrees(served: Served, tmp_path: Path) -> None:
    urls = [each["url"] for each in served.backends().values()]
    gateway, path = str(Path(sys.executable).with_name("gateway")), str(tmp_path / "pool.yaml")
    for words in (["init", *urls], ["check", "--probe"]):
        asked = [gateway, *words, "--config", path]
        ran = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(each.url or "" for each in load_pool(Path(path)).models["tiny"].backends.values()) == sorted(urls)


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


@pytest.mark.parametrize(("backend", "stream"), [("plain", True), ("lookup", False), ("head", True), ("draft", False)])
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


async def ask_much(client: AsyncOpenAI, backend: str, *, stream: bool) -> None:
    """Ask for ten seconds of work, at a temperature at which little is accepted."""
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
    if isinstance(answer, AsyncStream):
        async for _ in answer:
            pass
