"""Requests that every method must serve, whole and streamed, with its acceptance counted and learned."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import Served


def _asking_for(name: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": f"Write {name} of Python's heapq."}]


MESSAGES = _asking_for("merge")
_FUNCTIONS = ("heappush", "heappop", "heapify", "heapreplace", "merge", "nlargest", "nsmallest", "heappushpop")
_TOKENS = 60
_CLOSE = 0.15
_LEARNED_S = 30.0


def to(backend: str) -> dict[str, str]:
    """Return the headers that send a request to a backend."""
    return {"x-gateway-backend": backend}


def ask(served: Served, backend: str, messages: Any = MESSAGES, workload: str = "", **fields: Any) -> ChatCompletion:
    """Return a greedy answer of a replica that goes on to its limit of tokens; `fields` are more of the body."""
    headers = to(backend) | ({"x-gateway-workload": workload} if workload else {})
    body = {"ignore_eos": True, "temperature": 0, **fields}
    return served.openai.chat.completions.create(
        model="tiny", messages=messages, extra_headers=headers, extra_body=body
    )


def drafts(answer: ChatCompletion) -> dict[str, Any]:
    """Return what an engine says of its drafts for an answer; nothing if it does not speculate."""
    said: dict[str, Any] | None = (answer.model_extra or {})["metrics"].get("speculative_decoding")
    return said or {}


def accepted(answer: ChatCompletion) -> int:
    """Return how many drafted tokens an answer has."""
    return int(drafts(answer).get("num_accepted_draft_tokens", 0))


def check_method(served: Served, backend: str) -> None:
    """Check answers of a replica, whole and streamed, and that what its engine accepts is counted and learned."""
    for temperature in (0.0, 1.0):
        _check_whole_answer(served, backend, temperature)
    _check_stream(served, backend)
    if served.backends()[backend]["method"] == "baseline":
        assert not drafts(ask(served, backend, max_tokens=16))
    else:
        _check_acceptance(served, backend)


def _check_whole_answer(served: Served, backend: str, temperature: float) -> None:
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


def _check_stream(served: Served, backend: str) -> None:
    """Check a chat answer that comes as a stream."""
    with served.openai.chat.completions.with_streaming_response.create(
        model="tiny",
        messages=MESSAGES,
        temperature=1,
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


def _check_acceptance(served: Served, backend: str) -> None:
    """Check that a speculating engine's acceptance is counted by the gateway and learned by its policy."""
    labels = {"model": "tiny", "backend": backend}
    accepted_before = served.metric("gateway_accepted_tokens_total", **labels)
    conversations = [_asking_for(name) for name in _FUNCTIONS]  # unlike ones: suffix decoding remembers answers
    workload = f"functions-{backend}"  # apart from what other tests have asked
    found = sum(accepted(ask(served, backend, each, workload, max_tokens=_TOKENS)) for each in conversations)
    assert found > 0
    assert served.metric("gateway_accepted_tokens_total", **labels) - accepted_before == found

    generated = len(conversations) * _TOKENS
    measured = generated / (generated - found)
    initial = served.initial[backend]

    def has_learned() -> bool:
        predictions = [
            served.predictions(workload, messages=messages, temperature=0, max_tokens=_TOKENS)[backend]
            for messages in conversations
        ]
        predicted = fmean(prediction.tokens_per_step for prediction in predictions)
        error, initial_error = abs(predicted - measured), abs(initial.tokens_per_step - measured)
        return predictions[0].step_ms != initial.step_ms and (error < initial_error or error < _CLOSE * measured)

    eventually_blocking(has_learned, _LEARNED_S, f"{measured:.2f} tokens per step are learned, from {initial}")
    assert served.metric("gateway_policy_errors_total", model="tiny") == 0
