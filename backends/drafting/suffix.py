"""Suffix decoding, replayed on a finished text: a tree for each request and one across requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from backends.drafting.script import Steps, plain_steps
from backends.drafting.suffix_tree import SuffixTree, replay


class SuffixCache:
    """What vLLM's suffix proposer remembers: the answers of earlier requests, in one tree.

    Follows `arctic_inference.suffix_decoding.SuffixDecodingCache`, which vLLM calls (arXiv 2411.04975).

    Parameters
    ----------
    max_tree_depth
        Longest run of tokens that is matched and drafted together.
    max_spec_factor
        Drafted tokens for each token of the match.
    min_token_prob
        A draft ends where its estimated probability falls below this.
    max_cached_requests
        Answers remembered; the oldest is forgotten first.
    num_speculative_tokens
        Tokens drafted at most; None for `max_tree_depth`.
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
                "suffix decoding needs a depth of 1 or more, a factor and a cache of 0 or more, and a probability"
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
        """Take the settings from vLLM's `--speculative-config`."""
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
        """Memory for what is remembered, with the room it has for more."""
        return self._tree.held_bytes

    def replay(self, prompt_ids: Sequence[int], output_ids: Sequence[int], learn: bool = True) -> Steps:
        """Return what every step of a request would emit and draft, and remember its answer.

        Parameters
        ----------
        prompt_ids, output_ids
            Token ids, at least one each.
        learn
            False leaves the cache as it was.

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
