"""A real engine that dies under load, and comes back with a head of random weights: that is noticed, and avoided."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.support.command import alive, family
from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import START_S, Served
from tests.vllm.requests import MESSAGES, accepted, to

pytestmark = pytest.mark.vllm

VICTIM, STEADY = "head", "draft"
TOKENS = 48
FOUND_WITHIN = 15
"""Answers of the broken replica within which it is found; at least 6 are needed."""
BEFORE, AFTER = 48, 24
"""Requests before it breaks, of which 40 are needed, and after it was found."""


RANDOMISE = """
import torch
from safetensors.torch import load_file, save_file
torch.manual_seed(0)
save_file({name: 0.1 * torch.randn_like(one) for name, one in load_file(given).items()}, given, {"format": "pt"})
"""


def ask(served: Served, number: int, backend: str | None = None, temperature: float = 0.0) -> tuple[str, float]:
    """Return the backend of an answer, and its tokens per step."""
    text = f"Write function number {number} of Python's heapq."
    raw = served.openai.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "system", "content": "You write Python."}, {"role": "user", "content": text}],
        temperature=temperature,
        max_tokens=TOKENS,
        extra_headers=to(backend) if backend else {},
        extra_body={"ignore_eos": True},
    )
    return raw.headers["x-gateway-backend"], TOKENS / (TOKENS - accepted(raw.parse()))


def ask_each(served: Served, numbers: Iterable[int], backend: str | None = None, temperature: float = 0.0) -> list[Any]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda number: ask(served, number, backend, temperature), numbers))


def kill_under_streams(served: Served) -> None:
    """Kill the victim: its eight streams end with an error, others carry on, and it comes back."""
    before = served.backends()[VICTIM]

    def stream() -> None:
        more: Any = {"max_tokens": 1900, "n": 8, "temperature": 1, "extra_body": {"ignore_eos": True}}
        for _ in served.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, extra_headers=to(VICTIM), **more
        ):
            pass

    with ThreadPoolExecutor(1) as thread:
        streaming = thread.submit(stream)
        eventually_blocking(lambda: served.metric("vllm:num_requests_running", before["url"]) > 1)
        os.kill(before["pid"], signal.SIGKILL)
        assert VICTIM not in {backend for backend, _ in ask_each(served, range(12))}
        with pytest.raises(openai.APIError):  # an error event, not a cut
            streaming.result()
    eventually_blocking(lambda: served.backends()[VICTIM]["state"] == "down")
    ask_each(served, range(12), STEADY, 1.0)  # changed traffic, while the victim starts
    eventually_blocking(lambda: served.backends()[VICTIM]["state"] in {"up", "recovering"}, START_S)
    now = served.backends()[VICTIM]
    assert now["pid"] != before["pid"]
    assert now["restarts"] > before["restarts"]  # once more each time that its port was not free yet


def test_a_head_that_a_restart_has_broken_is_avoided(
    served: Served, weights: Path, in_vllm: Callable[..., Any]
) -> None:
    before = ask_each(served, range(BEFORE), VICTIM)
    in_vllm(RANDOMISE, str(weights))
    kill_under_streams(served)
    broken: list[float] = []
    while not served.backends()[VICTIM]["drafter_silent"]:
        assert len(broken) < FOUND_WITHIN, broken
        broken += [per_step for _, per_step in ask_each(served, range(2), VICTIM)]
    silence = served.backends()[VICTIM]["drafter_silent"]
    assert silence["cause"] == "since_restart"
    line = f"{VICTIM} does otherwise than it did: its drafter is silent since restart"
    assert served.command.printed().count(line) == 1
    candidates = served.explain(messages=MESSAGES, temperature=0)["candidates"]
    notes = {each["backend"]: each["note"] for each in candidates}
    assert "silent since restart" in notes[VICTIM]
    assert "silent" not in notes[STEADY]

    after = ask_each(served, range(AFTER))
    ask_each(served, range(12), STEADY, 1.0)
    share = sum(backend == VICTIM for backend, _ in after) / AFTER
    per_step = [np.mean(each) for each in ([per_step for _, per_step in before], broken)]
    print(f"\ntokens per step: {per_step[0]:.2f} before, {per_step[1]:.2f} of the broken head; {share:.0%}; {silence}")
    assert share <= 0.25
    assert served.backends()[STEADY]["drafter_silent"] is None

    def gauge(backend: str, cause: str) -> float:
        return served.metric("gateway_backend_drafter_silent", backend=backend, cause=cause)

    eventually_blocking(lambda: gauge(VICTIM, "since_restart") == 1)
    assert gauge(VICTIM, "unknown") == gauge(STEADY, "since_restart") == gauge(STEADY, "unknown") == 0


def test_nothing_is_left_when_the_gateway_is_stopped(served: Served) -> None:
    processes = family(served.command.process.pid)
    assert len(processes) > len(served.backends())
    assert served.command.end() == 0
    assert not alive(processes)
