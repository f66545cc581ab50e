"""Real vLLM is asked for the usage of streams, and its clients see nothing of that."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import pytest

from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import Served
from tests.vllm.example.conftest import BACKENDS

STREAMS, TOKENS = 3, 300
"""Long streams: the engine counts what the last step accepts beyond their end, about two tokens each."""
FEW = 24
_CHANGES = re.compile(rb'"id":"[^"]*"|"created":\d+|"(?:content|text)":"(?:[^"\\]|\\.)*"')

pytestmark = pytest.mark.vllm


def stream(served: Served, backend: str, path: str = "/v1/chat/completions", number: int = 0, **fields: Any) -> bytes:
    """Return the events of a stream whose client does not ask for usage."""
    text = f"Write function {number} of Python's heapq."
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    body = {"model": "tiny", "stream": True, "max_tokens": FEW, "ignore_eos": True, "temperature": 0}
    answer = served.http.post(served.url + path, json=body | prompt | fields, headers={"x-gateway-backend": backend})
    answer.raise_for_status()
    return answer.content


def shape(events: bytes) -> list[bytes]:
    """Return the events of a stream without what differs between two, and runs of equal ones as one."""
    return [event for event, _ in groupby(_CHANGES.sub(b"", events).split(b"\n\n"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_usage_is_exact_and_hidden(served: Served, backend: str) -> None:
    unasked = stream(served, backend)  # the first one: as the engine answers by itself
    engine = served.backends()[backend]["url"]

    def counters() -> tuple[float, float]:
        steps = [
            served.metric(f"vllm:{name}_seconds_count", engine)
            for name in ("time_to_first_token", "inter_token_latency")
        ]
        return served.metric("vllm:generation_tokens_total", engine), sum(steps)

    def believed(name: str) -> float:
        return served.metric(f"gateway_{name}_total", backend=backend)

    tokens, steps = counters()
    before = {name: believed(name) for name in ("output_tokens", "steps", "step_tokens")}
    with ThreadPoolExecutor(STREAMS) as threads:
        asking = threads.map(lambda number: stream(served, backend, number=number, max_tokens=TOKENS), range(STREAMS))
        for asked in asking:
            assert shape(asked) == shape(unasked)
    eventually_blocking(lambda: counters()[0] - tokens == STREAMS * TOKENS)
    assert believed("output_tokens") - before["output_tokens"] == STREAMS * TOKENS
    given = STREAMS * TOKENS / (counters()[1] - steps)
    learned = (believed("step_tokens") - before["step_tokens"]) / (believed("steps") - before["steps"])
    assert learned == pytest.approx(given, rel=0.03)


def test_options_that_do_not_ask(served: Served) -> None:
    plain = shape(stream(served, "plain"))
    for options in (None, {}, {"include_usage": False, "continuous_usage_stats": True}):
        assert shape(stream(served, "plain", stream_options=options)) == plain


def test_several_choices_and_completions(served: Served) -> None:
    before = served.metric("gateway_output_tokens_total", backend="plain")
    chat = stream(served, "plain", n=2, temperature=1)
    completion = stream(served, "plain", "/v1/completions")
    assert served.metric("gateway_output_tokens_total", backend="plain") - before == 3 * FEW
    for events, choices in ((chat, 2), (completion, 1)):
        documents = [json.loads(line[6:]) for line in events.split(b"\n\n") if line.startswith(b"data: {")]
        ends = [each for each in documents if each["choices"][0]["finish_reason"]]
        assert len(ends) == choices
        assert all("system_fingerprint" in each for each in ends)
        assert not any("usage" in each for each in documents)
