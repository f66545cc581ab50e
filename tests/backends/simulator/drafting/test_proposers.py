"""Drafts of proposers, replayed on finished texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.calibration.load import load_calibration
from backends.drafting.ngram import UNLIMITED, ngram_replay
from backends.drafting.script import Script, Steps, block_hashes, plain_steps
from backends.simulator.drafting.proposers import Proposer
from backends.speculation import Method
from policies.learned.shadow_drafting import steps_of

H100 = load_calibration("llama-3.1-8b-h100")
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def plain_lookup(context: Sequence[int], k: int, min_n: int, max_n: int, max_model_len: int = UNLIMITED) -> list[int]:
    """Draft by vLLM's rule, implemented in the simplest way."""
    k = min(k, max_model_len - len(context))
    for n in range(min(max_n, len(context)), min_n - 1, -1):
        for start in range(len(context) - n):
            if context[start : start + n] == context[len(context) - n :]:
                return list(context[start + n : start + n + max(k, 0)])
    return []


def plain_replay(prompt: list[int], output: list[int], k: int, min_n: int, max_n: int, max_model_len: int) -> Steps:
    emitted, drafted = plain_steps(len(output))
    for position in range(1, len(output)):
        draft = plain_lookup(prompt + output[:position], k, min_n, max_n, max_model_len)
        accepted = 0
        while accepted < len(draft) and output[position + accepted : position + accepted + 1] == [draft[accepted]]:
            accepted += 1
        emitted[position] = min(accepted + 1, len(output) - position)
        drafted[position] = len(draft)
    return emitted, drafted


@pytest.mark.slow
@given(TOKENS, TOKENS, st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.integers(20, 90))
@settings(max_examples=300, deadline=None)
def test_ngram_replay_equals_the_simple_implementation(
    prompt: list[int], output: list[int], k: int, min_n: int, wider: int, max_model_len: int
) -> None:
    emitted, drafted = ngram_replay(prompt, output, k, min_n, min_n + wider, max_model_len)
    expected = plain_replay(prompt, output, k, min_n, min_n + wider, max_model_len)
    assert emitted.tolist() == expected[0].tolist()
    assert drafted.tolist() == expected[1].tolist()


def scripts_of(method: Method, config: dict[str, object], kind: str, temperature: float, requests: int) -> list[Script]:
    proposer = Proposer(method, config, H100, seed=7)
    return [proposer.script([1], list(range(400)), temperature, kind) for _ in range(requests)]


def tokens_per_step(script: Script) -> float:
    return (script.output_tokens - 1) / (steps_of(script.emitted) - 1)


@pytest.mark.parametrize(
    ("kind", "k", "measured"),
    # SpecDecode-Bench, EAGLE-3, Llama-3.1-8B: tokens per step of the requests that the calibration was not fitted on
    [
        ("chat", 1, 1.640),
        ("chat", 3, 2.235),
        ("chat", 5, 2.468),
        ("code", 1, 1.762),
        ("code", 3, 2.694),
        ("code", 5, 3.158),
        ("math", 3, 2.408),
        ("summarization", 3, 2.321),
    ],
)
def test_eagle3_emits_the_measured_tokens_per_step(kind: str, k: int, measured: float) -> None:
    scripts = scripts_of(Method.EAGLE3, {"num_speculative_tokens": k}, kind, 0.0, 300)
    steps = sum((script.output_tokens - 1) / tokens_per_step(script) for script in scripts)
    assert sum(script.output_tokens - 1 for script in scripts) / steps == pytest.approx(measured, rel=0.06)


def test_acceptance_falls_with_temperature() -> None:
    def mean(temperature: float) -> float:
        scripts = scripts_of(Method.EAGLE3, {"num_speculative_tokens": 3}, "chat", temperature, 50)
        return float(np.mean([*map(tokens_per_step, scripts)]))

    means = [mean(temperature) for temperature in (0.0, 0.4, 0.8, 1.0)]
    assert means == sorted(means, reverse=True)
    assert means[0] - means[-1] > 0.4


def test_baseline_and_ngram_scripts() -> None:
    plain = Proposer(Method.BASELINE, None, H100).script([1, 2], [3, 4, 5], 1.0, "chat")
    assert plain.emitted.tolist() == [1, 1, 1]
    assert plain.drafted.tolist() == [0, 0, 0]
    config = {"num_speculative_tokens": 3, "prompt_lookup_max": 2}
    text = [1, 2, 3, 4, 5, 6]
    ngram = Proposer(Method.NGRAM, config, H100).script(text, text, 0.0, "chat")
    assert ngram.emitted.tolist() == [1, 1, 4, 3, 2, 1]
    limited = Proposer(Method.NGRAM, config, H100, max_model_len=9).script(text, text, 0.0, "chat")
    assert limited.drafted.tolist() == [0, 0, 1, 0, 0, 0]


def test_suffix_proposers_remember_earlier_requests() -> None:
    proposer = Proposer(Method.SUFFIX, {}, H100)
    answer = list(range(100, 160))
    first = proposer.script([1, 2, 3], answer, 0.0, "chat")
    second = proposer.script([7, 8, 9], answer, 0.0, "chat")
    assert first.emitted.max() == 1
    assert tokens_per_step(second) > 3


def test_block_hashes_depend_on_all_preceding_tokens() -> None:
    first, other = list(range(32)), [99, *range(1, 32)]
    assert block_hashes(first)[0] != block_hashes(other)[0]
    assert block_hashes(first)[1] != block_hashes(other)[1]
    assert block_hashes(first[:31]) == block_hashes(first)[:1]
    assert block_hashes([]) == ()


def test_invalid_scripts_and_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry for each"):
        Script(1, 3, *plain_steps(2))
    with pytest.raises(ValueError, match="at least one"):
        Script(0, 1, *plain_steps(1))
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        Proposer(Method.EAGLE, {}, H100)
