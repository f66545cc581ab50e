"""A real engine that drafts as deep as each request asks, with the scheduler of deploy/vllm_draft_depth."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import family
from tests.support.paths import ROOT
from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import EAGER, Served
from tests.vllm.requests import MESSAGES, ask, drafts

pytestmark = pytest.mark.vllm

POOL = "tests/vllm/pool.depth.yaml"
ENV = EAGER | {"PYTHONPATH": os.pathsep.join([EAGER["PYTHONPATH"], str(ROOT / "deploy/vllm_draft_depth")])}
PREDICTS = False  # the policy is one that does not
CONFIGURED = 3
DEPTHS = (None, 0, 1, 2)
TOKENS = 400
START_S = 30.0
UNKNOWN = (-1, 1.5, "2", [2])


def ask_depth(served: Served, depth: object, tokens: int = 60) -> tuple[str, dict[str, Any]]:
    """Return the answer to a request of a depth, and what its engine says of its drafts."""
    xargs: dict[str, Any] = {} if depth is None else {"vllm_xargs": {"draft_tokens": depth}}
    answer = ask(served, "head", max_tokens=tokens, **xargs)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens
    text = answer.choices[0].message.content
    assert text
    return text, drafts(answer)


def test_the_gateway_starts_its_engine_with_the_scheduler(served: Served) -> None:
    assert served.backends()["head"]["draft_depth"]
    started = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(served.command.process.pid)]
    assert any(b"--scheduler-cls\0vllm_draft_depth.Scheduler" in line for line in started)


def test_each_request_of_a_batch_is_drafted_as_deep_as_it_asks(served: Served) -> None:
    url = served.backends()["head"]["url"]

    def drafted() -> float:
        return served.metric("vllm:spec_decode_num_draft_tokens_total", url)

    before = drafted()
    with ThreadPoolExecutor(len(DEPTHS)) as threads:
        asked = [threads.submit(ask_depth, served, depth, TOKENS) for depth in DEPTHS]
        eventually_blocking(lambda: served.metric("vllm:num_requests_running", url) > 1, START_S)
        answers = dict(zip(DEPTHS, [each.result() for each in asked], strict=True))
    found = {depth: said for depth, (_, said) in answers.items()}

    assert len({text for text, _ in answers.values()}) == 1
    assert found[0]["num_draft_tokens"] == found[0]["num_accepted_draft_tokens"] == 0
    for depth, most in ((1, 1), (2, 2), (None, CONFIGURED)):
        steps, tokens = found[depth]["num_spec_steps"], found[depth]["num_draft_tokens"]
        assert most * 0.8 * steps < tokens <= most * steps
        assert found[depth]["num_accepted_draft_tokens"] > 0
    assert found[1]["num_draft_tokens"] < found[2]["num_draft_tokens"]
    eventually_blocking(lambda: drafted() - before == sum(said["num_draft_tokens"] for said in found.values()), START_S)


def test_positions_beyond_the_depth_are_never_accepted(served: Served) -> None:
    url = served.backends()["head"]["url"]

    def accepted(position: int) -> float:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        return served.metric(name, url, position=str(position))

    before = [accepted(position) for position in range(2)]
    ask_depth(served, 1)
    eventually_blocking(lambda: accepted(0) > before[0], START_S)
    assert accepted(1) == before[1]


def test_a_depth_that_is_none_is_served_in_full(served: Served) -> None:
    in_full = ask_depth(served, None)
    for depth in UNKNOWN:
        assert ask_depth(served, depth) == in_full


def test_a_depth_that_no_engine_can_read_is_refused_and_the_engine_lives(served: Served) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    for xargs in ({"draft_tokens": 10**30}, {"draft_tokens": {"k": 1}}, {"draft_tokens": None}, [3]):
        answer = served.http.post(f"{served.url}/v1/chat/completions", json={**body, "vllm_xargs": xargs})
        assert answer.status_code == 400
    ask_depth(served, 2)
