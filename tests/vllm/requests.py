"""Requests that every method must serve, whole and streamed, with its acceptance counted and learned."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from openai.types.chat import ChatCompletionMessageParam

from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import Served

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Write merge of Python's heapq."}]
_FUNCTIONS = ("heappush", "heappop", "heapify", "heapreplace", "merge", "nlargest", "nsmallest", "heappushpop")
_TOKENS = 60
_CLOSE = 0.15
_LEARNED_S = 30.0


def to(backend: str) -> dict[str, str]:
    """Return the headers that send a request to a backend."""
    return {"x-gateway-backend": backend}


def check_whole_answer(served: Served, backend: str, temperature: float) -> None:
    """Check a chat answer that comes in one piece."""
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
    # Tokens of the model's own distribution, whatever was drafted: noise would be near log(1/2048) = -7.6.
    assert sum(token.logprob for token in choice.logprobs.content) / 64 > -5.0


def check_stream(served: Served, backend: str, temperature: float) -> None:
    """Check a chat answer that comes as a stream."""
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
    assert len(contents) >= 2  # few pieces, where suffix decoding has seen the answer before
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 64


def check_acceptance(served: Served, backend: str) -> None:
    """Check that a speculating engine's acceptance is counted by the gateway and learned by its policy."""
    labels = {"model": "tiny", "backend": backend}
    accepted_before = served.metric("gateway_accepted_tokens_total", **labels)
    predicted_before = prediction(served, backend)
    reported: list[dict[str, Any]] = []
    for name in _FUNCTIONS:
        answer = served.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"Write {name} of Python's heapq."}],
            temperature=0,
            max_tokens=_TOKENS,
            extra_headers=to(backend),
            extra_body={"ignore_eos": True},
        )
        reported.append((answer.model_extra or {})["metrics"]["speculative_decoding"])
    accepted: int = sum(each["num_accepted_draft_tokens"] for each in reported)
    assert accepted > 0
    assert served.metric("gateway_accepted_tokens_total", **labels) - accepted_before == accepted

    measured = len(_FUNCTIONS) * _TOKENS / (len(_FUNCTIONS) * _TOKENS - accepted)

    def has_learned() -> bool:
        now = prediction(served, backend)
        is_nearer = abs(now.tokens_per_step - measured) < abs(predicted_before.tokens_per_step - measured)
        return now.step_ms != predicted_before.step_ms and (
            is_nearer or abs(now.tokens_per_step - measured) < _CLOSE * measured
        )

    eventually_blocking(has_learned, _LEARNED_S, f"from {predicted_before}, {measured:.2f} tokens per step are learned")
    assert served.metric("gateway_policy_errors_total", model="tiny") == 0


class Prediction(NamedTuple):
    """What the policy predicts for a backend."""

    tokens_per_step: float
    step_ms: float


def prediction(served: Served, backend: str) -> Prediction:
    """Return the policy's prediction for the requests of `check_acceptance`."""
    explained = served.explain(messages=MESSAGES, temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    [note] = [candidate["note"] for candidate in explained["candidates"] if candidate["backend"] == backend]
    found = re.search(r"([\d.]+) per step of ([\d.]+) ms", note)
    assert found is not None, note
    return Prediction(float(found.group(1)), float(found.group(2)))
