"""One run, read at all places: the same number for the same thing, whoever says it."""

from __future__ import annotations

import re

import pytest

from backends.health import Ejected, State
from tests.gateway.conftest import MODEL, start_gateway
from tests.support.waiting import eventually_async

METHODS = {"plain": "baseline", "lookup": "ngram", "head": "eagle3"}
TOKENS_PER_STEP = {"plain": 1.0, "lookup": 1.25, "head": 2.0}
DRAFTS, PER_DRAFT = {"plain": 0.0, "lookup": 0.125, "head": 1.0}, {"lookup": 5, "head": 3}
"""Of each step: the share that drafts, and the tokens that it then drafts."""


def page(name: str, steps: int) -> bytes:
    """Return what an engine counts after so many steps: its `/metrics`."""
    tokens = steps * TOKENS_PER_STEP[name]
    lines = ["num_requests_running 0", "num_requests_waiting 0", f"generation_tokens_total {tokens}"]
    lines += ["time_to_first_token_seconds_count 0", f"inter_token_latency_seconds_count {steps}"]
    if name != "plain":
        drafts = steps * DRAFTS[name]
        lines += [f"spec_decode_num_drafts_total {drafts}", f"spec_decode_num_accepted_tokens_total {tokens - steps}"]
        lines += [f"spec_decode_num_draft_tokens_total {drafts * PER_DRAFT[name]}"]
        lines += [
            f'spec_decode_num_accepted_tokens_per_pos_total{{position="{at}"}} 0' for at in range(PER_DRAFT[name])
        ]
    return "".join(f"vllm:{line}\n" for line in lines).encode()


@pytest.mark.slow
async def test_all_places_say_the_same() -> None:
    async with start_gateway(METHODS) as running:
        steps = 0

        async def series(name: str) -> dict[str, float]:
            """Return the values of a series by backend."""
            return {each: await running.counted(f"gateway_backend_{name}", backend=each) for each in METHODS}

        async def is_known() -> bool:
            nonlocal steps
            steps += 8000
            for name, upstream in running.upstreams.items():
                upstream.metrics = page(name, steps)
            return await series("tokens_per_step") == pytest.approx(TOKENS_PER_STEP, rel=0.01)

        await eventually_async(is_known)
        running.gateway.pool.report(running.backend("plain"), Ejected(0.1, "for a moment"))
        await running.until(lambda: running.backend("plain").health.state is State.RECOVERING)
        on_page, pool = await running.on_page(), (await running.admin("pool"))["models"][MODEL]["backends"]
        status = (await running.command("status")).stdout
        for name, per_step in TOKENS_PER_STEP.items():
            acceptance = on_page[name]["acceptance"], pool[name]["engine"]["acceptance"]
            assert [each["tokens_per_step"] for each in acceptance] == pytest.approx([per_step] * 2, rel=0.01), name
            assert re.search(rf"^{name} .* {per_step:.2f} ", status, re.MULTILINE), status
        rates = {name: (TOKENS_PER_STEP[name] - 1.0) / DRAFTS[name] / PER_DRAFT[name] for name in PER_DRAFT}
        accepted = await series("acceptance_ratio")
        assert {name: accepted[name] for name in rates} == pytest.approx(rates, rel=0.01)
        assert await series("up") == dict.fromkeys(METHODS, 1.0), "one that recovers gets requests"
        assert {each["up"] for each in on_page.values()} == {True}
        assert "3 of 3 replicas up" in status
