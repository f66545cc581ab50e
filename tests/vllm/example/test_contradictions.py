"""Real engines whose methods are exchanged in the pool file: what the file says is not believed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import Served, pool_before, serve
from tests.vllm.requests import to

pytestmark = pytest.mark.vllm

TRUE = ("plain", "lookup", "head")
EACH = 20
"""Answers of each, of which is learned."""
SAID: dict[str, dict[str, Any]] = {
    "plain": {"method": "eagle3", "speculative_config": {"model": "x", "num_speculative_tokens": 3}},
    "lookup": {"method": "baseline"},
    "head": {"method": "ngram", "speculative_config": {"num_speculative_tokens": 9, "prompt_lookup_max": 4}},
}
FOUND = {
    "plain": "the pool file says eagle3 with k 3, but its engine does not speculate",
    "lookup": "the pool file says baseline, but its engine speculates, with k 5",
    "head": "the pool file says ngram with k 9, but its engine drafts with k 3",
}


@pytest.fixture(scope="module")
def swapped(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a gateway whose pool file says of each engine what is not so."""
    urls = {name: backend["url"] for name, backend in served.backends().items()}
    backends = {name: {"url": urls[name], **said} for name, said in SAID.items()}
    folder = tmp_path_factory.mktemp("swapped")
    with serve(folder, str(pool_before(folder, backends, "learned"))) as gateway:
        yield gateway


def test_a_pool_file_that_is_right_is_not_contradicted(served: Served) -> None:
    found = {name: (one["method"], one["contradictions"], one["observed"]) for name, one in served.backends().items()}
    assert found == {
        "plain": ("baseline", {}, {"method": "baseline", "num_speculative_tokens": 0}),
        "lookup": ("ngram", {}, {"method": "ngram", "num_speculative_tokens": 5}),
        "head": ("eagle", {}, {"method": "eagle", "num_speculative_tokens": 3}),
        "draft": ("draft_model", {}, {"method": "draft_model", "num_speculative_tokens": 4}),
    }


def test_each_is_known_at_the_start(swapped: Served) -> None:
    log = swapped.command.printed()
    assert [log.count(f"tiny/{name}: {text}") for name, text in FOUND.items()] == [1, 1, 1]
    kinds = {name: list(one["contradictions"]) for name, one in swapped.backends().items()}
    assert kinds == {"plain": ["no_speculation"], "lookup": ["speculation"], "head": ["k"]}
    for name, (kind,) in kinds.items():
        eventually_blocking(lambda: swapped.metric("gateway_backend_contradiction", backend=name, kind=kind) == 1)  # noqa: B023
    answer = swapped.http.get(f"{swapped.url}/admin/advice", headers=swapped.command.admin)
    findings = {each["backend"]: each["title"] for each in answer.json()["models"]["tiny"]["findings"]}
    assert findings == FOUND
    expected = swapped.predictions(messages=[{"role": "user", "content": "Hi"}], temperature=0)
    assert expected["plain"].tokens_per_step == 1.0
    assert expected["lookup"].tokens_per_step > 1.0


def test_what_is_learned_of_each_is_what_its_engine_counts(swapped: Served) -> None:
    def ask(number: int) -> None:
        answer = swapped.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"Write function number {number // 3} of Python's heapq."}],
            temperature=0,
            max_tokens=64,
            extra_headers=to(TRUE[number % 3]),
            extra_body={"ignore_eos": True},
            stream=True,
        )
        for _ in answer:
            pass

    def counted(name: str) -> tuple[float, float]:
        engine = swapped.backends()[name]["engine"]
        return float(engine["generation_tokens"]), float(engine["first_steps"] + engine["later_steps"])

    before = {name: counted(name) for name in TRUE}
    for number in range(3):  # the first answer of each shows its habits, and counts as one of others
        ask(number)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(ask, range(3, 3 * EACH)))
    tokens = {name: before[name][0] + 64 * EACH for name in TRUE}
    eventually_blocking(lambda: all(counted(name)[0] >= tokens[name] for name in TRUE))
    true = {}
    for name in TRUE:
        after = counted(name)
        true[name] = (after[0] - before[name][0]) / (after[1] - before[name][1])

    def believed() -> dict[str, float]:
        found = swapped.predictions(
            messages=[{"role": "user", "content": "Write function number 1 of Python's heapq."}]
        )
        return {name: found[name].tokens_per_step for name in TRUE}

    eventually_blocking(lambda: all(abs(believed()[name] / true[name] - 1) < 0.15 for name in TRUE), 40.0)
    assert true["plain"] == 1.0
    assert min(true["head"], true["lookup"]) > 1.1
