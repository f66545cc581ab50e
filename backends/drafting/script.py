"""What the engine needs to know of one request: how many tokens each of its steps will emit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 16
"""Tokens to a block of the KV cache, vLLM's default."""

Steps = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""`(emitted, drafted)`, both of shape (output_tokens,)."""


@dataclass(frozen=True, slots=True)
class Script:
    """One request, as the engine plays it.

    Speculation does not change the text, only how many tokens a step emits; so with the text known, every step
    that could be taken is known as well.

    Parameters
    ----------
    prompt_tokens, output_tokens
        Lengths; both at least 1.
    emitted
        Shape (output_tokens,). `emitted[i]`: tokens that a step starting at output position i emits, the accepted
        ones and one more, at least 1 and at most `output_tokens - i`. Position 0 comes from the prefill.
    drafted
        Shape (output_tokens,). `drafted[i]`: draft tokens verified by that step; 0 where the proposer found none.
    prefix_blocks
        Chained hashes of the full 16-token blocks of prompt and output, `block_hashes(prompt + output)`. Those of
        the prompt alone will do; none at all mean that the request shares nothing with others.
    """

    prompt_tokens: int
    output_tokens: int
    emitted: npt.NDArray[np.int32]
    drafted: npt.NDArray[np.int32]
    prefix_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if self.emitted.shape != (self.output_tokens,) or self.drafted.shape != (self.output_tokens,):
            raise ValueError("emitted and drafted have one entry for each output token")


def plain_steps(output_tokens: int) -> Steps:
    """Return the steps of a request that is not speculated on: one token each."""
    return np.ones(output_tokens, np.int32), np.zeros(output_tokens, np.int32)


def block_hashes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return a hash for each full block of `token_ids`, which stands for the block and all that precedes it."""
    chained = 0
    hashes = []
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chained = hash((chained, *token_ids[start : start + BLOCK_TOKENS]))
        hashes.append(chained)
    return tuple(hashes)
