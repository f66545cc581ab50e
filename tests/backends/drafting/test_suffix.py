"""Suffix decoding: drafts against arctic-inference."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from backends.drafting import suffix
from backends.drafting.suffix import SuffixCache
from backends.drafting.suffix_trees import SuffixTrees

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the interpreted rules; tests/extensions/test_suffix.py compares those in C with them."""
    monkeypatch.setattr(suffix, "SuffixTrees", SuffixTrees)


def texts(seed: int, requests: int, vocabulary: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts and answers that repeat parts of themselves, the same on every machine."""
    state = seed

    def draw(below: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % below

    for _ in range(requests):
        prompt = [draw(vocabulary) for _ in range(1 + draw(50))]
        answer: list[int] = []
        while len(answer) < 100:
            if draw(3) == 0:
                answer.append(draw(vocabulary))
            else:
                source = prompt + answer
                start = draw(len(source))
                answer += source[start : start + 1 + draw(12)]
        yield prompt, answer


@pytest.mark.parametrize(
    ("seed", "requests", "vocabulary", "cached", "emitted", "drafted", "checksum"),
    # Recorded from arctic-inference 0.1.1, SuffixDecodingCache(24, cached), speculating at every position of `texts`
    # with max_spec_tokens=24, max_spec_factor=1.0 and min_token_prob=0.1.
    [
        (1, 30, 4, 10_000, 8549, 19722, 2309382737),
        (2, 30, 50, 10_000, 8505, 14223, 158309170),
        (3, 40, 8, 5, 10729, 20387, 3157593407),
        (4, 20, 8, 0, 5388, 9527, 2591912655),
    ],
)
def test_replay_equals_recorded_drafts_of_arctic_inference(
    seed: int, requests: int, vocabulary: int, cached: int, emitted: int, drafted: int, checksum: int
) -> None:
    cache = SuffixCache({"suffix_decoding_max_cached_requests": cached})
    replays = [cache.replay(prompt, answer) for prompt, answer in texts(seed, requests, vocabulary)]
    both = np.concatenate([*(steps[0] for steps in replays), *(steps[1] for steps in replays)])
    assert sum(int(steps[0].sum()) for steps in replays) == emitted
    assert sum(int(steps[1].sum()) for steps in replays) == drafted
    assert zlib.crc32(both.astype("<i4").tobytes()) == checksum


def test_factor_depth_and_tokens_limit_the_draft() -> None:
    run = list(range(10, 40))
    assert SuffixCache({"suffix_decoding_max_spec_factor": 2.0}).replay(run, run)[1][3] == 6
    assert SuffixCache({"suffix_decoding_max_spec_factor": 0.0}).replay(run, run)[1].max() == 0
    assert SuffixCache({"suffix_decoding_max_tree_depth": 8}).replay(run, run)[1].max() == 4
    assert SuffixCache({"num_speculative_tokens": 3}).replay(run, run)[1].max() == 3
    near_the_end = SuffixCache(max_model_len=60).replay(run, run)[1]
    assert near_the_end[-6:].tolist() == [5, 4, 3, 2, 1, 0]


def test_replay_without_learning_leaves_the_cache_unchanged() -> None:
    cache = SuffixCache()
    known, other = list(range(100, 130)), list(range(300, 330))
    cache.replay([1], known)
    cache.replay([1], other, learn=False)
    assert cache.replay([1], other)[0].max() == 1


def test_invalid_settings_are_refused() -> None:
    for wrong in ({"max_tree_depth": 0}, {"min_token_prob": 1.5}, {"max_cached_requests": -1}, {"max_spec_factor": -1}):
        with pytest.raises(ValueError, match="suffix decoding needs"):
            SuffixCache({f"suffix_decoding_{name}": value for name, value in wrong.items()})
