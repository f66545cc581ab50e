"""The real vLLM agrees with what we say of its `--speculative-config`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from backends.speculation import PASSED_ON, Method, SpeculativeConfig, method_issues

INTERNAL = {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}
NOT_TO_BE_USED = {"tensor_parallel_size"}

pytestmark = pytest.mark.vllm

K = {"num_speculative_tokens": 3}
CONFIGS: list[dict[str, Any]] = [
    {"method": "ngram", **K},
    {"method": "ngram", **K, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    {"method": "ngram", **K, "prompt_lookup_min": 5, "prompt_lookup_max": 4},
    {"method": "ngram", **K, "prompt_lookup_max": 0},
    {"method": "ngram"},
    {"method": "ngram", "num_speculative_tokens": 0},
    {"method": "ngram", **K, "tensor_parallel_size": 2},
    {"method": "ngram", **K, "prompt_lookup_mx": 4},
    {"method": "ngram", **K, "disable_by_batch_size": 16},
    {"method": "ngram", **K, "use_heterogeneous_vocab": True},
    {"method": "ngram", **K, "use_heterogeneous_vocab": False},
    {"method": "ngram", **K, "enable_adaptive_verification": True},
    {"method": "ngram", **K, "rejection_sample_method": "block"},
    {"method": "ngram", **K, "rejection_sample_method": "other"},
    {"method": "ngram", **K, "rejection_sample_method": "synthetic"},
    {"method": "ngram", **K, "synthetic_acceptance_length": 2.0},
    *(
        {"method": "ngram", **K, "rejection_sample_method": "synthetic", **how}
        for how in (
            {"synthetic_acceptance_rates": [0.8, 0.6, 0.6]},
            {"synthetic_acceptance_rates": [0.8, 0.6]},
            {"synthetic_acceptance_rates": [0.6, 0.8, 0.8]},
            {"synthetic_acceptance_rates": [1.2, 0.8, 0.8]},
            {"synthetic_acceptance_length": 4.0},
            {"synthetic_acceptance_length": 4.5},
        )
    ),
    {"method": "suffix"},
    {"method": "suffix", "suffix_decoding_max_tree_depth": 0},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    {"method": "suffix", "suffix_decoding_max_cached_requests": -1},
    {"method": "suffix", "suffix_decoding_max_spec_factor": -0.1},
    {"method": "suffix", "suffix_decoding_min_token_prob": 1.1},
    {"method": "custom_class", **K},
    {"method": "custom_class", **K, "model": "package.Proposer"},
    {"method": "eagle", **K},
    {"method": "draft_model", **K},
    {"method": "medusa", **K},
]

ASK = """
import typing
from vllm.config import speculative

def takes(config):
    try:
        speculative.SpeculativeConfig(**config)
    except ValueError as error:
        return str(error)
    return ""

def words(literal):
    return [word for part in typing.get_args(literal) for word in (words(part) or [part])]

answer = {
    "keys": list(speculative.SpeculativeConfig.__dataclass_fields__),
    "methods": words(speculative.SpeculativeMethod),
    "refusals": [takes(config) for config in given],
}
"""


@pytest.fixture(scope="module")
def vllm(in_vllm: Callable[..., Any]) -> dict[str, Any]:
    answer: dict[str, Any] = in_vllm(ASK, CONFIGS)
    return answer


def test_we_know_its_keys(vllm: dict[str, Any]) -> None:
    assert set(SpeculativeConfig.model_fields) | PASSED_ON == set(vllm["keys"]) - INTERNAL - NOT_TO_BE_USED


def test_we_know_its_methods(vllm: dict[str, Any]) -> None:
    ours = set(Method) - {Method.BASELINE}
    others = {word for word in vllm["methods"] if not word.endswith("_mtp")} - ours
    assert others == {"ngram_gpu", "extract_hidden_states"}
    assert ours <= set(vllm["methods"])


@pytest.mark.parametrize("place", range(len(CONFIGS)), ids=lambda place: json.dumps(CONFIGS[place]))
def test_we_refuse_what_it_refuses(vllm: dict[str, Any], place: int) -> None:
    config, refusal = CONFIGS[place], vllm["refusals"][place]
    faults = [str(fault) for fault in method_issues(Method(config["method"]), config, served=True)]
    try:
        SpeculativeConfig.model_validate(config)
    except ValidationError as error:
        faults.append(str(error))
    is_left_to_it = not faults and not PASSED_ON.isdisjoint(config)
    assert bool(faults) == bool(refusal) or is_left_to_it, (faults, refusal)
