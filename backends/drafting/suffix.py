"""Replays suffix decoding on finished texts, with one tree per request and one for earlier answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from backends.drafting.script import Steps, plain_steps

try:
    from backends.drafting._suffix import SuffixTrees  # exists only in a compiled build
except ImportError:
    from backends.drafting.suffix_trees import SuffixTrees

_USUAL: Final = (
    ("max_tree_depth", 24),
    ("max_spec_factor", 1.0),
    ("min_token_prob", 0.1),
    ("max_cached_requests", 10_000),
)
"""vLLM's defaults."""


class SuffixCache:
    """The cache of vLLM's suffix proposer: a tree of the answers of earlier requests.

    Follows `arctic_inference.suffix_decoding.SuffixDecodingCache`, which vLLM calls (arXiv 2411.04975).

    Examples
    --------
    >>> cache = SuffixCache()
    >>> emitted, _ = cache.replay([1], [10, 11, 12, 13, 14, 15])
    >>> emitted.tolist()
    [1, 1, 1, 1, 1, 1]
    >>> emitted, _ = cache.replay([2], [10, 11, 12, 13, 14, 15])
    >>> emitted.tolist()
    [1, 2, 3, 3, 2, 1]
    """

    def __init__(self, speculative_config: Mapping[str, Any] | None = None, max_model_len: int = 1 << 30) -> None:
        config = speculative_config or {}  # in the format of vLLM's `--speculative-config`
        depth, factor, probability, cached = (config.get(f"suffix_decoding_{name}", known) for name, known in _USUAL)
        if depth < 1 or factor < 0 or not 0 <= probability <= 1 or cached < 0:
            raise ValueError(
                "suffix decoding needs a depth of at least 1, a factor and a cache size of at least 0, "
                "and a probability between 0 and 1"
            )
        k = config.get("num_speculative_tokens") or depth
        self._trees = SuffixTrees(depth, factor, probability, cached, k, max_model_len)

    def replay(self, prompt_ids: Sequence[int], output_ids: Sequence[int], learn: bool = True) -> Steps:
        """Return the tokens that each possible step of a request emits and drafts, and add its answer to the cache."""
        emitted, drafted = plain_steps(len(output_ids))
        text = np.array([*prompt_ids, *output_ids], np.int32)
        if text.min() < 0:
            raise ValueError("token ids are at least 0")
        self._trees.replay(text, len(prompt_ids), learn, emitted, drafted)
        return emitted, drafted
