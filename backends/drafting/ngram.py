"""vLLM's n-gram proposer, replayed on a finished text: what every step would have drafted, and what was accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.drafting.script import Steps, plain_steps

UNLIMITED = 1 << 30


def lookup_bounds(speculative_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the n-gram lookup's minimum and maximum; with one bound given the other equals it, with none both are 5.

    This is vLLM's rule (`vllm/config/speculative.py`).
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
    """Replay prompt lookup as vLLM does it (`vllm/v1/spec_decode/ngram_proposer.py`).

    A step takes the last n tokens of prompt and output so far, with the largest n in [min_n, max_n] for which they
    occur earlier, finds their leftmost occurrence and drafts the k tokens (or as many as there are) that followed.

    Parameters
    ----------
    prompt_ids, output_ids
        Token ids; the output has at least one.
    k
        Tokens drafted at most, at least 1.
    min_n, max_n
        Bounds of the lookup, `prompt_lookup_min` and `prompt_lookup_max`.
    max_model_len
        No draft reaches beyond this many tokens of prompt and output.

    Returns
    -------
    emitted, drafted
        int32, shape (len(output_ids),); see `Script`.

    Raises
    ------
    ValueError
        If k < 1 or not 1 <= min_n <= max_n.
    """
    if k < 1 or not 1 <= min_n <= max_n:
        raise ValueError(f"n-gram lookup needs k >= 1 and 1 <= min <= max, not k={k}, min={min_n}, max={max_n}")
    output_tokens = len(output_ids)
    emitted, drafted = plain_steps(output_tokens)
    if output_tokens < 2:
        return emitted, drafted
    text = np.concatenate([np.asarray(prompt_ids, np.int64), np.asarray(output_ids, np.int64)])
    ends = np.arange(len(prompt_ids) + 1, len(text))  # tokens known when the step at output position 1, 2, ... begins
    follows = _continuations(text, ends, min_n, max_n)

    found = follows < ends
    length = np.where(found, np.clip(np.minimum(ends - follows, max_model_len - ends), 0, k), 0)
    accepted = np.zeros(len(ends), np.int64)
    still = np.ones(len(ends), bool)
    for position in range(min(k, int(length.max()))):
        still &= (position < length) & (ends + position < len(text))
        source = np.minimum(follows + position, len(text) - 1)
        target = np.minimum(ends + position, len(text) - 1)
        still &= text[source] == text[target]
        accepted += still
    emitted[1:] = np.minimum(accepted + 1, len(text) - ends)
    drafted[1:] = length
    return emitted, drafted


def _continuations(
    text: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], min_n: int, max_n: int
) -> npt.NDArray[np.int64]:
    """For each end e, return where the continuation of the matched n-gram begins; e itself where nothing matches."""
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
