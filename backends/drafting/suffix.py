"""Replay of suffix decoding on finished texts, with a tree per request and one for earlier answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from backends.drafting.script import Steps, plain_steps
from backends.drafting.suffix_tree import SuffixTree, replay


class SuffixCache:
    """The cache of vLLM's suffix proposer: a tree of the answers of earlier requests.

    Follows `arctic_inference.suffix_decoding.SuffixDecodingCache`, which vLLM calls (arXiv 2411.04975).

    Parameters
    ----------
    max_tree_depth
        Maximum tokens of a match and its draft together.
    max_spec_factor
        Maximum drafted tokens per token of the match.
    min_token_prob
        Probability below which a draft ends.
    max_cached_requests
        Maximum number of answers; the oldest is removed first.
    num_speculative_tokens
        Maximum tokens drafted per step; None for `max_tree_depth`.
    max_model_len
        Maximum tokens of prompt, output and draft.

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
        self.max_tree_depth = max_tree_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self.max_cached_requests = max_cached_requests
        self.num_speculative_tokens = num_speculative_tokens or max_tree_depth
        self.max_model_len = max_model_len
        self._tree = SuffixTree(max_tree_depth)
        self._cached: deque[int] = deque()  # lengths of the answers in the tree, oldest first

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

    @property
    def held_bytes(self) -> int:
        """Allocated memory in bytes."""
        return self._tree.held_bytes

    def replay(self, prompt_ids: Sequence[int], output_ids: Sequence[int], learn: bool = True) -> Steps:
        """Return the tokens that each possible step of a request emits and drafts, and add its answer to the cache.

        Parameters
        ----------
        prompt_ids, output_ids
            Token ids, at least one each.
        learn
            False to leave the cache unchanged.

        Returns
        -------
        emitted, drafted
            int32, shape (len(output_ids),); see `Script`.
        """
        remember = self.max_cached_requests > 0
        if remember and learn:
            while len(self._cached) >= self.max_cached_requests:
                self._tree.forget_oldest(self._cached.popleft())
        self._tree.begin()
        emitted, drafted = plain_steps(len(output_ids))
        replay(
            SuffixTree(self.max_tree_depth, len(prompt_ids) + len(output_ids)),
            self._tree,
            [*prompt_ids, *output_ids],
            len(prompt_ids),
            num_speculative_tokens=self.num_speculative_tokens,
            max_model_len=self.max_model_len,
            factor=self.max_spec_factor,
            min_prob=self.min_token_prob,
            remember=remember,
            emitted=emitted,
            drafted=drafted,
        )
        if remember and learn:
            self._cached.append(len(output_ids))
        elif remember:
            self._tree.forget_newest()
        return emitted, drafted
