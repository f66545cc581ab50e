"""A real engine with a small KV cache that tells what it stores and evicts: what is expected there is what it finds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import Served
from tests.vllm.pair.conftest import BLOCKS
from tests.vllm.requests import ask

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 128  # the size of the CPU's
WORDS = 60
"""Of a prompt: 600 to 800 tokens of the tiny model's, so that some ten prompts fit into the blocks."""


def messages(number: int) -> list[dict[str, Any]]:
    text = " ".join(f"def merge_{number}_{word}(left, right):" for word in range(WORDS))
    return [{"role": "user", "content": text}]


def cached(served: Served, number: int) -> tuple[int, int]:
    """Return the tokens of a prompt, and how many of them its engine had cached."""
    completion = ask(served, "plain", messages(number), max_tokens=24)
    assert completion.usage is not None
    details = completion.usage.prompt_tokens_details
    return completion.usage.prompt_tokens, (details and details.cached_tokens) or 0


def expected(served: Served, number: int) -> str:
    """Return what is expected of a prompt."""
    candidates = served.explain(messages=messages(number))["candidates"]
    return str(next(each["note"] for each in candidates if each["backend"] == "plain"))


def test_what_the_engine_tells_is_what_it_does(served: Served) -> None:
    tokens, before = cached(served, 0)
    assert (tokens > 400, before) == (True, 0)
    assert cached(served, 0)[1] > 0.8 * tokens
    eventually_blocking(lambda: "of the prompt cached" in expected(served, 0))

    fits = BLOCKS * BLOCK_TOKENS // tokens
    for number in range(1, 3 * fits):
        assert cached(served, number)[1] < 0.5 * tokens
    eventually_blocking(lambda: "cached, by events" in expected(served, 3 * fits - 1))
    eventually_blocking(lambda: "cached" not in expected(served, 0))
    last: list[int] = []

    def are_the_last() -> bool:
        """Return whether the last prompts are expected: as many as fit, and one that is partly evicted, or just."""
        last[:] = [number for number in range(3 * fits) if "cached, by events" in expected(served, number)]
        return fits - 1 <= len(last) <= fits + 2 and last == [*range(last[0], 3 * fits)]

    eventually_blocking(are_the_last)  # what it tells is read some tenths of a second later
    found = {number: cached(served, number)[1] > 0.8 * tokens for number in (last[-1], last[3], 0, last[0] - 1)}
    assert found == {last[-1]: True, last[3]: True, 0: False, last[0] - 1: False}

    served.http.post(f"{served.backends()['plain']['url']}/reset_prefix_cache").raise_for_status()
    cached(served, 3 * fits)  # it tells with its next step
    eventually_blocking(lambda: "cached" not in expected(served, last[-1]))
    assert cached(served, last[-1])[1] == 0
    told = {"backend": "plain", "source": "events"}
    right = served.metric("gateway_prefix_tokens_total", outcome="found", **told)
    assert right > 0
    assert served.metric("gateway_prefix_tokens_total", outcome="missed", **told) < 0.25 * right
