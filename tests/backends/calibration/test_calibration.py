"""The calibrations of the package, and simulated engines with them."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from backends.calibration.calibration import (
    Kind,
    calibration_names,
    load_calibration,
)
from backends.simulator.drafting.acceptance import model_based_replay
from backends.simulator.drafting.proposers import Proposer
from backends.simulator.engine.fleet import Fleet, Replica
from backends.speculation import Method
from benchmarks.virtual_time import run_closed_loop

H100 = "llama-3.1-8b-h100"


def document() -> dict[str, object]:
    dumped: dict[str, object] = yaml.safe_load(load_calibration(H100).model_dump_json())
    return dumped


@pytest.mark.parametrize("name", calibration_names())
def test_all_calibrations_load_and_have_all_methods(name: str) -> None:
    calibration = load_calibration(name)
    assert calibration.name == name
    assert set(calibration.methods) == set(Method)
    for method in Method:
        assert calibration.kv_tokens(method) >= calibration.scheduler.max_model_len // 8
        if method not in (Method.BASELINE, Method.NGRAM, Method.SUFFIX):
            for kind in Kind:
                progress = calibration.acceptance(method, kind).progress
                if progress is not None:
                    assert len(progress.output_tokens) == len(progress.logit_shifts)
                    assert list(progress.output_tokens) == sorted(set(progress.output_tokens))
    factors = calibration.temperature
    assert len(factors.temperatures) == len(factors.factors)
    assert list(factors.temperatures) == sorted(set(factors.temperatures))


def test_the_weights_of_a_draft_reduce_the_kv_cache() -> None:
    calibration = load_calibration(H100)
    assert calibration.kv_tokens(Method.DRAFT_MODEL) < calibration.kv_tokens(Method.EAGLE)
    assert calibration.kv_tokens(Method.EAGLE) < calibration.kv_tokens(Method.BASELINE)
    crowded = calibration.model_copy(update={"memory": calibration.memory.model_copy(update={"weights_gib": 100.0})})
    with pytest.raises(ValueError, match="no memory is left"):
        crowded.kv_tokens(Method.BASELINE)


def chat_tokens_per_s(method: Method, config: dict[str, int], concurrency: int) -> float:
    """Return the throughput of a closed loop of 128-token prompts with 300-token answers."""
    calibration = load_calibration(H100)
    proposer = Proposer(method, config, calibration, seed=1)
    rng = np.random.default_rng(5)
    scripts = [
        proposer.script(rng.integers(0, 1 << 17, 128).tolist(), rng.integers(0, 1 << 17, 300).tolist(), 0.0, "chat")
        for _ in range(concurrency * 2 + 30)
    ]
    fleet = Fleet([Replica("a", calibration, method, config)])
    return run_closed_loop(fleet, scripts, concurrency).tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize(("concurrency", "published"), [(1, 1.73), (128, 1.21)])
def test_the_speedup_of_eagle_is_the_published_one(concurrency: int, published: float) -> None:
    """SD-Illusion, arXiv 2601.11580: EAGLE on Llama-3.1-8B, H100, at batch 1 and 128."""
    eagle = chat_tokens_per_s(Method.EAGLE, {"num_speculative_tokens": 3}, concurrency)
    plain = chat_tokens_per_s(Method.BASELINE, {}, concurrency)
    assert eagle / plain == pytest.approx(published, rel=0.12)


def test_acceptance_grows_with_the_length_of_the_answer() -> None:
    calibration = load_calibration(H100)
    progress = calibration.acceptance(Method.EAGLE3, Kind.CHAT).progress
    assert progress is not None
    rng = np.random.default_rng(2)
    answers = [model_based_replay(rng, calibration, Method.EAGLE3, 3, 0.0, "chat", 900)[0] for _ in range(200)]
    emitted = np.mean(answers, axis=0)
    assert emitted[1:50].mean() < emitted[100:400].mean() - 0.15 < emitted[700:890].mean() - 0.25
    assert calibration.acceptance(Method.EAGLE3, Kind.CODE).progress is None
