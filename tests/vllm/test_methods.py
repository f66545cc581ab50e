"""Methods that the example pool does not have: suffix, EAGLE-3, MTP, a custom class and a batch-size schedule."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllm.conftest import EAGER, Served
from tests.vllm.requests import MESSAGES, ask, check_method, drafts

pytestmark = pytest.mark.vllm

POOL = "tests/vllm/pool.methods.yaml"
ENV = EAGER
METHODS = {"tree": "suffix", "head3": "eagle3", "mtp": "mtp", "own": "custom_class", "scheduled": "eagle"}


def test_every_method_started(served: Served) -> None:
    assert {name: backend["method"] for name, backend in served.backends().items()} == METHODS


@pytest.mark.parametrize("backend", METHODS)
def test_chat_answers_come_whole_and_as_streams_and_are_learned_from(served: Served, backend: str) -> None:
    check_method(served, backend)


def test_a_schedule_drafts_less_in_a_larger_batch(served: Served) -> None:
    def drafted_per_step(_: int) -> float:
        said = drafts(ask(served, "scheduled", max_tokens=120))
        return float(said["num_draft_tokens"] / said["num_spec_steps"])

    alone = drafted_per_step(0)
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(drafted_per_step, range(4)))
    assert alone == pytest.approx(4.0, abs=0.2)
    assert min(together) < 3.0


def test_a_request_without_a_temperature_takes_the_engines_own(served: Served) -> None:
    answer = served.http.post(
        f"{served.url}/v1/responses", json={"model": "tiny", "input": "Hi", "max_output_tokens": 1, "store": False}
    ).json()
    assert answer["temperature"] == 0.25
    assert served.explain(messages=MESSAGES)["features"]["temperature"] == 0.25
