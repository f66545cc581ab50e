"""LiteLLM as a library, with many requests at once."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # it looks for a tokenizer of the model, for 23 s in each request if there is no network
)
import litellm

from tests.clients.load import OUTPUT_TOKENS, REQUESTS, STREAMS, Figures, Run
from tests.clients.report import HELLO, KEY, MODEL, URL, report


async def ask(limit: asyncio.Semaphore, number: int) -> tuple[float, float, int]:
    """Return the times to the first token and to the end in seconds, and the output tokens."""
    async with limit:
        begun_s = time.perf_counter()
        first_s, tokens = 0.0, 0
        answer = await litellm.acompletion(
            model=f"hosted_vllm/{MODEL}",
            api_base=f"{URL}/v1",
            api_key=KEY,
            messages=[{"role": "user", "content": f"{HELLO} {number}"}],
            max_tokens=OUTPUT_TOKENS,
            extra_body={"ignore_eos": True},
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in answer:
            if chunk.choices and chunk.choices[0].delta.content:
                first_s = first_s or time.perf_counter() - begun_s
            if getattr(chunk, "usage", None):
                tokens = chunk.usage.completion_tokens
        return first_s, time.perf_counter() - begun_s, tokens


async def ask_all() -> list[tuple[float, float, int] | BaseException]:
    limit = asyncio.Semaphore(STREAMS)
    return await asyncio.gather(*(ask(limit, number) for number in range(REQUESTS)), return_exceptions=True)


def measure(_: Path) -> Figures:
    litellm.completion(  # its first call loads what it needs
        model=f"hosted_vllm/{MODEL}",
        api_base=f"{URL}/v1",
        api_key=KEY,
        messages=[{"role": "user", "content": HELLO}],
        max_tokens=OUTPUT_TOKENS,
        extra_body={"ignore_eos": True},
    )
    answers = asyncio.run(ask_all())
    done = [answer for answer in answers if not isinstance(answer, BaseException)]
    return Figures(
        requests=len(done),
        failed=len(answers) - len(done),
        output_tokens=sum(tokens for _, _, tokens in done),
        ttft_ms=1000 * sum(first_s for first_s, _, _ in done) / len(done),
        tpot_ms=1000 * sum((end_s - first_s) / (tokens - 1) for first_s, end_s, tokens in done) / len(done),
    )


report("litellm", Run(measure, unreported=1).cases)
