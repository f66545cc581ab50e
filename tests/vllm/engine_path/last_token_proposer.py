"""A proposer for vLLM's `custom_class` method: drafts what followed the last token the last time it was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class LastTokenProposer:
    """Bigram lookup in the request's own tokens.

    Parameters
    ----------
    vllm_config
        vLLM's configuration; the number of tokens to draft is read from it.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._k: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len: int = vllm_config.model_config.max_model_len

    def load_model(self, *_: Any, **__: Any) -> None:
        """Load nothing: there is no draft model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return up to k drafted tokens for each request of the batch.

        Parameters
        ----------
        sampled_token_ids
            Tokens that the last step gave each request; empty for one that is still in its prefill.
        num_tokens_no_spec
            Shape (requests,): tokens of prompt and answer so far.
        token_ids_cpu
            Shape (requests, max_model_len): those tokens.
        """
        drafts: list[list[int]] = []
        for index, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[index])
            if not sampled or length >= self._max_model_len:
                drafts.append([])
                continue
            tokens = token_ids_cpu[index, :length]
            (seen,) = np.nonzero(tokens[:-1] == tokens[-1])
            start = int(seen[-1]) + 1 if len(seen) else length
            end = min(start + self._k, length, start + self._max_model_len - length)
            drafts.append([int(token) for token in tokens[start:end]])
        return drafts
