"""Replays vLLM's n-gram proposer on a finished text: tokens that each possible step drafts and accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.drafting.script import Steps, plain_steps

UNLIMITED = 1 << 30


def lookup_bounds(speculative_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the minimum and maximum n of prompt lookup: a missing bound equals the other; both default to 5.

    This is vLLM's rule (`vllm/config/speculative.py`).

    Examples
    --------
    >>> lookup_bounds({"prompt_lookup_max": 4}), lookup_bounds({})
    ((4, 4), (5, 5))
    """
    low = speculative_config.get("prompt_lookup_min")
    high = speculative_config.get("prompt_lookup_max")
    if low is None and high is None:
        return 5, 5
    if low is None:
        return int(high), int(high)  # type: ignore[arg-type]
    return int(low), int(low if high is None else high)


def ngram_replay(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    k: int,
    min_n: int,
    max_n: int,
    max_model_len: int = UNLIMITED,
) -> Steps:
    """Replay prompt lookup with vLLM's algorithm (`vllm/v1/spec_decode/ngram_proposer.py`).

    A step looks up the last n tokens of prompt and output, with the largest n in [min_n, max_n] that matches earlier
    text. It drafts up to k tokens that followed the leftmost match.

    Examples
    --------
    >>> emitted, drafted = ngram_replay([1, 2, 3, 4], [1, 2, 3, 4], k=2, min_n=2, max_n=2)
    >>> emitted.tolist(), drafted.tolist()
    ([1, 1, 2, 1], [0, 0, 2, 2])
    """
    if k < 1 or not 1 <= min_n <= max_n:
        raise ValueError(f"n-gram lookup needs k >= 1 and 1 <= min <= max, not k={k}, min={min_n}, max={max_n}")
    output_tokens = len(output_ids)
    emitted, drafted = plain_steps(output_tokens)
    if output_tokens < 2:
        return emitted, drafted
    text = np.concatenate([np.asarray(prompt_ids, np.int64), np.asarray(output_ids, np.int64)])
    ends = np.arange(len(prompt_ids) + 1, len(text))  # tokens before output position 1, 2, ...
    starts = _continuations(text, ends, min_n, max_n)

    length = np.where(starts < ends, np.clip(np.minimum(ends - starts, max_model_len - ends), 0, k), 0)
    accepted = np.zeros(len(ends), np.int64)
    matching = np.ones(len(ends), bool)
    for position in range(min(k, int(length.max()))):
        matching &= (position < length) & (ends + position < len(text))
        source = np.minimum(starts + position, len(text) - 1)
        target = np.minimum(ends + position, len(text) - 1)
        matching &= text[source] == text[target]
        accepted += matching
    emitted[1:] = np.minimum(accepted + 1, len(text) - ends)
    drafted[1:] = length
    return emitted, drafted


def _continuations(
    text: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], min_n: int, max_n: int
) -> npt.NDArray[np.int64]:
    """Return, for each end e, the start of the continuation of the matched n-gram; e itself if none matches."""
    follows = ends.copy()
    grams = np.unique(text, return_inverse=True)[1].astype(np.int64)  # id of the n-gram that starts at each position
    tokens, vocabulary = grams, int(grams.max()) + 1
    for n in range(1, min(max_n, len(text)) + 1):
        if n > 1:
            joined = grams[:-1] * vocabulary + tokens[n - 1 :]
            grams = np.unique(joined, return_inverse=True)[1].astype(np.int64)
        if n < min_n:
            continue
        leftmost = np.full(int(grams.max()) + 1, len(text), np.int64)
        np.minimum.at(leftmost, grams, np.arange(len(grams)))
        starts = ends - n
        known = starts >= 0
        first = leftmost[grams[starts[known]]]
        follows[known] = np.where(first < starts[known], first + n, follows[known])
    return follows
