"""A planted best k is found within one token, at every batch size that is tried."""

from __future__ import annotations

import pytest

from benchmarks.schedule import CASES, measure

NAMES = ("8B, GH200 (knee), eagle3, fading", "70B, 2x H200, draft_model, low", "mixture of experts, eagle3, good")


@pytest.mark.parametrize("name", NAMES)
def test_the_planted_best_k_is_found_within_one_token(name: str) -> None:
    [case] = [one for one in CASES if one.name == name]
    result = measure(case, requests=150, seed=3, batches=(1, 12, 96))["trace"]
    assert result.best[0] > result.best[-1]
    assert result.furthest <= 1, result
    assert max(result.lost) < 0.02
