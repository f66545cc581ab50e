"""Scripts: how many tokens each possible step of a request emits and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 16
"""Tokens per block of the KV cache, vLLM's default."""

Steps = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""`(emitted, drafted)`, both of shape (output_tokens,)."""


@dataclass(frozen=True, slots=True)
class Script:
    """The script of one request for the simulated engine.

    Speculation does not change the text, only how many tokens a step emits. A known text thus determines the result of
    every possible step.

    Examples
    --------
    >>> script = Script(100, 3, *plain_steps(3))
    >>> script.emitted.tolist(), script.drafted.tolist()
    ([1, 1, 1], [0, 0, 0])
    """

    # prompt_tokens, output_tokens: both at least 1.
    prompt_tokens: int
    output_tokens: int
    # Shape (output_tokens,). `emitted[i]` is the number of tokens that a step at output position i emits: accepted + 1,
    # at least 1 and at most `output_tokens - i`. The prefill emits position 0.
    emitted: npt.NDArray[np.int32]
    # Shape (output_tokens,). `drafted[i]` is the number of draft tokens that this step verifies; 0 without a draft.
    drafted: npt.NDArray[np.int32]
    # `block_hashes(prompt + output)`, or of the prompt only; empty for a request that shares no prefix.
    prefix_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if self.emitted.shape != (self.output_tokens,) or self.drafted.shape != (self.output_tokens,):
            raise ValueError("emitted and drafted need one entry for each output token")


def plain_steps(output_tokens: int) -> Steps:
    """Return the steps of a request without speculation: one token each."""
    return np.ones(output_tokens, np.int32), np.zeros(output_tokens, np.int32)


def block_hashes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return a chained hash for each full block of `token_ids`; it identifies the block and all tokens before it.

    Examples
    --------
    >>> len(block_hashes(range(40)))
    2
    """
    chained = 0
    hashes = []
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chained = hash((chained, *token_ids[start : start + BLOCK_TOKENS]))
        hashes.append(chained)
    return tuple(hashes)
