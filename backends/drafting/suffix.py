"""Replay of suffix decoding on finished texts, with a tree per request and one for earlier answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backends.drafting.script import Steps, plain_steps

try:
    from backends.drafting._suffix import SuffixTrees  # exists in a compiled build
except ImportError:
    from backends.drafting.suffix_trees import SuffixTrees


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

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_requests: int = 10_000,
        num_speculative_tokens: int | None = None,
        max_model_len: int = 1 << 30,
    ) -> None:
        if max_tree_depth < 1 or max_spec_factor < 0 or not 0 <= min_token_prob <= 1 or max_cached_requests < 0:
            raise ValueError(
                "suffix decoding needs a depth of at least 1, a factor and a cache size of at least 0, "
                "and a probability between 0 and 1"
            )
        self._trees = SuffixTrees(
            max_tree_depth,
            max_spec_factor,
            min_token_prob,
            max_cached_requests,
            num_speculative_tokens or max_tree_depth,
            max_model_len,
        )

    @classmethod
    def of(cls, speculative_config: Mapping[str, Any], max_model_len: int = 1 << 30) -> SuffixCache:
        """Return a cache with the settings of vLLM's `--speculative-config`."""
        config = speculative_config
        return cls(
            max_tree_depth=config.get("suffix_decoding_max_tree_depth", 24),
            max_spec_factor=config.get("suffix_decoding_max_spec_factor", 1.0),
            min_token_prob=config.get("suffix_decoding_min_token_prob", 0.1),
            max_cached_requests=config.get("suffix_decoding_max_cached_requests", 10_000),
            num_speculative_tokens=config.get("num_speculative_tokens"),
            max_model_len=max_model_len,
        )

    def replay(self, prompt_ids: Sequence[int], output_ids: Sequence[int], learn: bool = True) -> Steps:
        """Return the tokens that each possible step of a request emits and drafts, and add its answer to the cache."""
        emitted, drafted = plain_steps(len(output_ids))
        text = np.array([*prompt_ids, *output_ids], np.int32)
        if text.min() < 0:
            raise ValueError("token ids are at least 0")
        self._trees.replay(text, len(prompt_ids), learn, emitted, drafted)
        return emitted, drafted
