"""`backends/drafting/_suffix.c` gives exactly the results of the Python implementation."""

from __future__ import annotations

from random import Random
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.drafting.script import Steps, plain_steps
from backends.drafting.suffix_trees import SuffixTrees
from tests.backends.drafting.test_suffix import texts

pytestmark = pytest.mark.slow

DEFAULTS = (24, 1.0, 0.1, 10_000, 24, 1 << 30)
SETTINGS = st.tuples(
    st.sampled_from([1, 2, 3, 5, 24]),
    st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    st.sampled_from([0.0, 0.1, 0.35, 1.0]),
    st.sampled_from([0, 1, 3, 10_000]),
    st.sampled_from([1, 3, 24]),
    st.sampled_from([0, 30, 1 << 30]),
)


def replay(trees: Any, prompt: list[int], answer: list[int], learn: bool = True) -> Steps:
    steps = plain_steps(len(answer))
    trees.replay(np.array(prompt + answer, np.int32), len(prompt), learn, *steps)
    return steps


def check(ours: Any, theirs: Any, prompt: list[int], answer: list[int], learn: bool = True) -> None:
    for found, expected in zip(replay(ours, prompt, answer, learn), replay(theirs, prompt, answer, learn), strict=True):
        assert found.tolist() == expected.tolist()


@pytest.mark.slow
@given(SETTINGS, st.randoms(use_true_random=False), st.sampled_from([1, 2, 4, 50]), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_structured_texts_are_drafted_alike(
    suffix: ModuleType, chosen: tuple[Any, ...], random: Random, vocabulary: int, requests: int
) -> None:
    ours, theirs = suffix.SuffixTrees(*chosen), SuffixTrees(*chosen)
    for prompt, answer in texts(random.randrange(1 << 32), requests, vocabulary):
        check(ours, theirs, prompt, answer, learn=random.random() < 0.8)


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@pytest.mark.slow
@given(SETTINGS, st.lists(st.tuples(TOKENS, TOKENS, st.booleans()), max_size=8))
@settings(max_examples=300, deadline=None)
def test_arbitrary_texts_are_drafted_alike(
    suffix: ModuleType, chosen: tuple[Any, ...], requests: list[tuple[list[int], list[int], bool]]
) -> None:
    ours, theirs = suffix.SuffixTrees(*chosen), SuffixTrees(*chosen)
    for prompt, answer, learn in requests:
        check(ours, theirs, prompt, answer, learn)


def test_memory_of_removed_answers_is_reused(suffix: ModuleType) -> None:
    trees = suffix.SuffixTrees(24, 1.0, 0.1, 5, 24, 1 << 30)
    sizes = []
    for prompt, answer in texts(5, 600, 50):
        replay(trees, prompt, answer)
        sizes.append(trees.held_bytes)
    assert sizes[-1] == sizes[300]


@pytest.mark.parametrize(
    ("text", "prompt", "steps", "drafted"),
    [([1, 2, -1], 1, 2, 2), ([1, 2, 3], 1, 3, 2), ([1, 2, 3], 1, 2, 1), ([1, 2], 3, 1, 1), ([1, 2], -1, 3, 3)],
)
def test_invalid_texts_and_arrays_are_refused(
    suffix: ModuleType, text: list[int], prompt: int, steps: int, drafted: int
) -> None:
    arrays = np.ones(steps, np.int32), np.ones(drafted, np.int32)
    with pytest.raises(ValueError, match="expected token ids"):
        suffix.SuffixTrees(*DEFAULTS).replay(np.array(text, np.int32), prompt, True, *arrays)


def test_invalid_settings_are_refused(suffix: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected a depth"):
        suffix.SuffixTrees(0, *DEFAULTS[1:])
    with pytest.raises(TypeError):
        suffix.SuffixTrees(*DEFAULTS, depth=1)


def test_too_deep_trees_are_refused_without_a_crash(suffix: ModuleType) -> None:
    with pytest.raises(MemoryError):
        suffix.SuffixTrees(2**31 - 1, *DEFAULTS[1:])


def test_threads_cannot_use_the_same_trees_at_once(suffix: ModuleType) -> None:
    trees = suffix.SuffixTrees(*DEFAULTS)
    refused = []

    def run() -> None:
        try:
            replay(trees, [1], [n * n % 97 for n in range(300_000)])
        except RuntimeError as error:
            refused.append(str(error))

    threads = [Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(refused) <= {"another thread replays a text on these trees"}
    replay(trees, [1], [2, 3])
