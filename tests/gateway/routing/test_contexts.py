"""Replicas of one model that take contexts of unlike length: whom a request goes to."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from backends.health import Health, State
from policies.features.request import TYPICAL_TOKENS
from tests.gateway.conftest import MODEL, start_gateway

SHORT, LONG = 1024, 32_768
LONG_PROMPT = "word " * 3000


@pytest.mark.parametrize(
    ("text", "body", "goes_to"),
    [
        ("Hi", {}, "ab"),
        ("Hi", {"max_tokens": 900}, "ab"),
        ("Hi", {"max_tokens": SHORT + 1}, "b"),
        (LONG_PROMPT, {}, "b"),
        ("word " * 4 * (SHORT - TYPICAL_TOKENS), {"max_tokens": 1}, "b"),
        ("word " * 200_000, {}, "b"),
    ],
    ids=["short", "short limit", "long limit", "long", "just too long", "too long for all"],
)
async def test_a_request_goes_where_it_is_taken(text: str, body: dict[str, Any], goes_to: str) -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}) as running:
        running.upstreams["a"].max_model_len, running.upstreams["b"].max_model_len = SHORT, LONG
        await running.until(lambda: {each.engine.said.context_tokens for each in running.gateway.pool} == {SHORT, LONG})
        answers = [await running.chat(text, **body) for _ in range(8)]
        counts = Counter(answer.headers["x-gateway-backend"] for answer in answers)
        assert "".join(sorted(counts)) == goes_to


async def test_it_goes_elsewhere_while_none_that_takes_it_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with start_gateway({"a": "baseline", "b": "ngram"}) as running:
        with caplog.at_level(logging.WARNING):
            running.upstreams["a"].max_model_len, running.upstreams["b"].max_model_len = SHORT, LONG
            await running.until(lambda: MODEL in running.gateway.pool.unlike_contexts)
        assert caplog.text.count("its engines take contexts of 1,024 to") == 1
        running.backend("b").health = Health(State.EJECTED)
        assert (await running.chat(LONG_PROMPT)).headers["x-gateway-backend"] == "a"
        running.upstreams["a"].max_model_len = LONG
        await running.until(lambda: MODEL not in running.gateway.pool.unlike_contexts)
