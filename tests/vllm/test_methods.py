"""Methods that the example pool does not have: suffix, EAGLE-3, MTP, a custom class and a batch-size schedule."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllm.conftest import EAGER, Served
from tests.vllm.requests import MESSAGES, ask, check_acceptance, check_stream, check_whole_answer, drafts

pytestmark = pytest.mark.vllm

POOL = "tests/vllm/pool.methods.yaml"
ENV = EAGER
METHODS = {"tree": "suffix", "head3": "eagle3", "mtp": "mtp", "own": "custom_class", "scheduled": "eagle"}


def test_every_method_started(served: Served) -> None:
    assert {name: backend["method"] for name, backend in served.backends().items()} == METHODS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backend", METHODS)
def test_a_chat_answer_comes_whole(served: Served, backend: str, temperature: float) -> None:
    check_whole_answer(served, backend, temperature)


@pytest.mark.parametrize("backend", METHODS)
def test_a_chat_answer_comes_as_a_stream(served: Served, backend: str) -> None:
    check_stream(served, backend)


@pytest.mark.parametrize("backend", METHODS)
def test_acceptance_is_counted_and_learned(served: Served, backend: str) -> None:
    check_acceptance(served, backend)


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
