"""What the labels of a pod say."""

from __future__ import annotations

import pytest

from backends.draft_schedule import draft_tokens
from backends.drafter_limit import Beyond
from backends.speculation import Method, serve_config
from gateway.discovery.inference_pool import RANGE, LabelError, Pod, settings_of
from tests.support.kubernetes_api import pod

SCHEDULE = '{"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": [[1, 16, 5], [17, 256, 0]]}'
PLAIN = {"method": Method.BASELINE, "speculative_config": None}


@pytest.mark.parametrize(
    ("said", "method", "k"),
    [
        ({"method": "baseline"}, Method.BASELINE, 0),
        ({"method": "eagle3", "num-speculative-tokens": "3"}, Method.EAGLE3, 3),
        ({"method": "ngram", "speculative-config": SCHEDULE}, Method.NGRAM, 5),
    ],
)
def test_labels_name_the_method_and_what_it_drafts(said: dict[str, str], method: Method, k: int) -> None:
    settings = settings_of(said, {})
    assert settings.method is method
    assert draft_tokens(method, serve_config(method, settings.speculative_config)) == k
    assert settings_of({**said, "weight": "1.5"}, {}).weight == 1.5
    if method is not Method.BASELINE:
        assert settings_of({**said, "draft-depth": "true"}, {}).draft_depth
    if method is Method.EAGLE3:
        limit = settings_of({**said, "drafter-limit": "2048", "beyond-drafter-limit": "none"}, {}).drafter_limit
        assert (limit.tokens, limit.beyond) == (2048, Beyond.NONE)


LABEL = "speculation.gateway"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, f"it has no label {LABEL}/method; set it to one of baseline, ngram, suffix"),
        ({"method": "eagle-3"}, f"{LABEL}/method: unknown 'eagle-3'; did you mean 'eagle3'?"),
        ({"method": "eagle3"}, f"{LABEL}/num-speculative-tokens: required by eagle3; set the number of tokens"),
        ({"method": "eagle3", "num-speculative-tokens": "few"}, f"{LABEL}/num-speculative-tokens: expected a whole"),
        (
            {"method": "ngram", "speculative-config": "[" * 100_000},
            f"{LABEL}/speculative-config: expected a JSON object",
        ),
        (
            {"method": "ngram", "num-speculative-tokens": "3", "speculative-config": SCHEDULE},
            f"{LABEL}/num-speculative-tokens: differs from num_speculative_tokens in {LABEL}/speculative-config",
        ),
        (
            {"method": "eagle3", "num-speculative-tokens": "3", "drafter-limit": "9", "beyond-drafter-limit": "bach"},
            f"{LABEL}/beyond-drafter-limit: unknown 'bach'; did you mean 'batch'?",
        ),
        ({"method": "suffix", "drafter-limit": "9"}, f"{LABEL}/drafter-limit: suffix has no draft model"),
        ({"method": "baseline", "draft-depth": "true"}, f"{LABEL}/draft-depth: a baseline drafts nothing; remove it"),
        ({"metod": "ngram"}, f"{LABEL}/metod: no such label; did you mean 'method'?"),
    ],
)
def test_a_wrong_label_is_named_with_what_would_be_right(said: dict[str, str], message: str) -> None:
    with pytest.raises(LabelError) as raised:
        settings_of(said, {})
    assert message in str(raised.value)


def test_only_a_pod_that_says_nothing_gets_what_the_source_says() -> None:
    assert settings_of({}, PLAIN).method is Method.BASELINE
    assert settings_of({"weight": "2"}, PLAIN).weight == 2
    assert settings_of({"method": "suffix"}, PLAIN).method is Method.SUFFIX
    with pytest.raises(LabelError, match=r"no label speculation.gateway/method"):
        settings_of({"num-speculative-tokens": "3"}, PLAIN)


def test_a_pod_takes_requests_if_it_is_ready_and_stays() -> None:
    said = {"method": "ngram", "speculative-config": SCHEDULE}
    assert Pod.of(pod("a", "10.0.0.1", said), {}) == Pod("10.0.0.1", settings_of(said, {}))
    assert Pod.of(pod("a", "10.0.0.1", {}), PLAIN) == Pod("10.0.0.1", settings_of({}, PLAIN))
    for each in (
        pod("b", "10.0.0.2", {}, ready="False"),
        pod("c", "10.0.0.3", {}, ready="Unknown"),
        pod("d", "10.0.0.4", {}, ending=True),
        pod("e", None, {}),
        {"metadata": {"name": "f"}, "status": {"podIP": "10.0.0.6"}},
    ):
        assert Pod.of(each, PLAIN) is None


def test_the_range_of_contexts_is_that_of_llm_d() -> None:
    found = pod("a", "10.0.0.1", {"method": "suffix"})
    found["metadata"]["labels"][RANGE] = "4096-32768"
    kept = Pod.of(found, {})
    assert kept.own.context_range == "4096-32768"
    for wrong in ("4096", "a-b", "-1-5", "", "0-2048,8192-16384", "0-" + "9" * 60):
        found["metadata"]["labels"][RANGE] = wrong
        left_out = Pod.of(found, {})
        assert (left_out.own, left_out.problem) == (None, f"{RANGE}: expected tokens, such as 0-4096")
