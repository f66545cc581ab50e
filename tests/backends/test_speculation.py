"""Validation of `--speculative-config`: what vLLM accepts passes, and what it refuses at start is refused before."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from backends.draft_schedule import draft_tokens
from backends.speculation import Method, SpeculativeConfig, method_issues, release_notes, serve_config
from backends.validation import issues_of


def issues_by_key(config: dict[str, Any]) -> dict[str, str]:
    """Return the message and hint of each issue of `config`, by key."""
    with pytest.raises(ValidationError) as caught:
        SpeculativeConfig.model_validate(config)
    issues = issues_of(caught.value, SpeculativeConfig)
    return {".".join(map(str, issue.path)): f"{issue.message}; {issue.hint}" for issue in issues}


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (Method.NGRAM, {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        (Method.NGRAM, {"method": "ngram_gpu", "num_speculative_tokens": 5, "prompt_lookup_max": 4}),
        (Method.SUFFIX, {}),
        (Method.SUFFIX, {"suffix_decoding_max_tree_depth": 16, "suffix_decoding_min_token_prob": 0.2}),
        (Method.DRAFT_MODEL, {"model": "a/pard", "num_speculative_tokens": 8, "parallel_drafting": True}),
        (Method.MTP, {"method": "deepseek_mtp", "num_speculative_tokens": 1}),
        (Method.EAGLE, {"model": "m", "num_speculative_tokens": 5, "a_key_of_next_year": [1, {"x": None}]}),
        (Method.NGRAM, {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 4, 2]]}),
        (Method.EAGLE, {"model": "m", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.8, 0.6, 0.6]}),
    ],
)
def test_a_valid_configuration_is_passed_to_vllm_unchanged(method: Method, config: dict[str, Any]) -> None:
    checked = SpeculativeConfig.model_validate(config)

    assert method_issues(method, config, served=True) == []
    assert serve_config(method, checked) == {"method": method.value, **config}


@pytest.mark.parametrize(
    ("config", "key", "issue"),
    [
        ({"num_spec_tokens": 3}, "num_spec_tokens", "unknown key; did you mean 'num_speculative_tokens'?"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "not a key of vLLM; did you mean 'draft_tensor_paral"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens", "must be greater than or equal to 1; "),
        ({"parallel_drafting": "perhaps"}, "parallel_drafting", "expected true or false; "),
        (
            {"suffix_decoding_min_token_prob": 1.5},
            "suffix_decoding_min_token_prob",
            "must be less than or equal to 1; ",
        ),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min", "greater than prompt_lookup_max, 4; "),
    ],
)
def test_an_invalid_configuration_is_refused_with_a_hint(config: dict[str, Any], key: str, issue: str) -> None:
    ((found, said),) = issues_by_key(config).items()
    assert (found, said.startswith(issue)) == (key, True)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([], {"": "needs at least 1"}),
        ([[2, 4, 1]], {".0": "the first range starts at 2; start it at 1"}),
        ([[1, 4, 3], [4, 8, 1]], {".1": "overlaps the previous range, which ends at 4; start it at 5"}),
        ([[1, 4, 3], [8, 5, 1]], {".1": "the range is reversed, 8 to 5; [5, 8, tokens]"}),
        ([[1, 4, -1]], {".0.2": "must be greater than or equal to 0"}),
        ([[1, 4]], {".0.2": "missing"}),
    ],
)
def test_an_invalid_schedule_by_batch_size_is_refused(schedule: list[list[int]], expected: dict[str, str]) -> None:
    key = "num_speculative_tokens_per_batch_size"
    issues = issues_by_key({"num_speculative_tokens": 5, key: schedule})
    assert issues.keys() == {key + below for below in expected}
    for below, message in expected.items():
        assert issues[key + below].startswith(message)


def keys_of(method: Method, config: dict[str, Any] | None, *, served: bool) -> set[str]:
    return {".".join(map(str, issue.path)) for issue in method_issues(method, config, served=served)}


@pytest.mark.parametrize("method", sorted(set(Method) - {Method.BASELINE, Method.SUFFIX}))
def test_methods_that_draft_need_num_speculative_tokens(method: Method) -> None:
    assert "num_speculative_tokens" in keys_of(method, None, served=False)
    assert keys_of(method, {"num_speculative_tokens": 2}, served=False) == set()


@pytest.mark.parametrize("method", sorted(set(Method) - {Method.BASELINE}))
def test_the_draft_is_needed_only_for_engines_that_the_gateway_starts(method: Method) -> None:
    needs = method not in {Method.NGRAM, Method.SUFFIX, Method.MTP, Method.DSPARK}
    assert keys_of(method, {"num_speculative_tokens": 2}, served=True) == ({"model"} if needs else set())
    assert keys_of(method, {"num_speculative_tokens": 2, "model": None}, served=True) == ({"model"} if needs else set())
    assert keys_of(method, {"num_speculative_tokens": 2, "model": "m.C"}, served=True) == set()


def test_the_configured_method_must_be_that_of_the_backend() -> None:
    assert keys_of(Method.EAGLE, {"method": "eagle3", "num_speculative_tokens": 2}, served=False) == {"method"}
    assert keys_of(Method.SUFFIX, {"method": "ngram_gpu"}, served=False) == {"method"}
    assert keys_of(Method.SUFFIX, {"method": "suffix"}, served=False) == set()


def test_a_baseline_has_no_configuration() -> None:
    assert method_issues(Method.BASELINE, None, served=True) == []
    assert keys_of(Method.BASELINE, {}, served=True) == {""}
    assert serve_config(Method.BASELINE, None) == {}


def test_a_schedule_is_refused_where_the_engine_would_die_of_it() -> None:
    config = {
        "num_speculative_tokens": 3,
        "model": "m",
        "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]],
    }
    refused = {
        method for method in Method if "num_speculative_tokens_per_batch_size" in keys_of(method, config, served=True)
    }
    assert refused == {Method.SUFFIX, Method.MEDUSA}
    assert keys_of(Method.SUFFIX, config, served=False) == set()  # of another version, perhaps


def test_keys_of_other_vllm_versions_are_allowed_only_for_running_replicas() -> None:
    config = {"disable_by_batch_size": 16, "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert SpeculativeConfig.model_validate(config).model_extra == {"disable_by_batch_size": 16}
    assert keys_of(Method.NGRAM, config, served=False) == set()
    assert keys_of(Method.NGRAM, config, served=True) == {"disable_by_batch_size"}


@pytest.mark.parametrize(
    ("method", "config", "tokens"),
    [
        (Method.BASELINE, None, 0),
        (Method.NGRAM, {"num_speculative_tokens": 5}, 5),
        (Method.SUFFIX, None, 24),
        (Method.SUFFIX, {"suffix_decoding_max_tree_depth": 10}, 10),
        (Method.SUFFIX, {"suffix_decoding_max_tree_depth": 10, "num_speculative_tokens": 6}, 6),
    ],
)
def test_the_tokens_drafted_per_step(method: Method, config: dict[str, Any] | None, tokens: int) -> None:
    assert (
        draft_tokens(method, serve_config(method, SpeculativeConfig.model_validate(config) if config else None))
        == tokens
    )


@pytest.mark.parametrize(
    ("method", "config", "version", "note"),
    [
        (Method.MEDUSA, {}, "", "removes medusa"),
        (Method.MLP_SPECULATOR, {}, "0.33.1", "no more since 0.33"),
        (Method.EAGLE3, {"enable_adaptive_verification": True}, "0.29.0", "begins with 0.30"),
        (Method.EAGLE3, {"enable_adaptive_verification": True}, "0.30.0", "PROFILE_CONTEXT_LEN"),
        (Method.EAGLE3, {}, "0.33.0", None),
    ],
)
def test_notes_name_what_a_release_does_otherwise(
    method: Method, config: dict[str, Any], version: str, note: str | None
) -> None:
    notes = list(release_notes(method, config, version))
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
