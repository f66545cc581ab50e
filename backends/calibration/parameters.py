"""What one simulated engine is set to: its limits, its memory, and the time a step takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.calibration.calibration import Calibration, Drafting, StepTime
from backends.drafting.script import BLOCK_TOKENS
from backends.speculation import Method


@dataclass(frozen=True, slots=True)
class EngineParameters:
    """Settings of an engine.

    Parameters
    ----------
    step, drafting
        The cost of a step; see `StepTime` and `Drafting`.
    k
        Tokens drafted a step at most; 0 for a baseline.
    k_by_batch
        `k_by_batch[b]` is the k for a batch of b requests, the last entry that of any larger one; empty: always `k`.
    kv_blocks
        Blocks of 16 tokens in the KV cache.
    """

    step: StepTime
    drafting: Drafting
    k: int = 0
    k_by_batch: tuple[int, ...] = ()
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    kv_blocks: int = 16_384
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.kv_blocks) < 1 or self.k < 0:
            raise ValueError("an engine's limits are positive")

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        method: Method,
        speculative_config: Mapping[str, Any] | None = None,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
    ) -> EngineParameters:
        """Take the parameters of a method from a calibration, and the limits from it where they are not given.

        Raises
        ------
        ValueError
            If the calibration knows nothing of the method, or the schedule of k is wrong.
        """
        config = speculative_config or {}
        k = draft_tokens(method, config)
        drafting = calibration.method(method).drafting
        if config.get("parallel_drafting"):
            drafting = drafting.model_copy(update={"parallel": True})
        limits = calibration.scheduler
        schedule = config.get("num_speculative_tokens_per_batch_size")
        return cls(
            step=calibration.step,
            drafting=drafting,
            k=k,
            k_by_batch=k_by_batch(schedule, k) if schedule else (),
            max_num_seqs=max_num_seqs or limits.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or limits.max_num_batched_tokens,
            max_model_len=max_model_len or limits.max_model_len,
            kv_blocks=max(1, calibration.kv_tokens(method) // BLOCK_TOKENS),
            prefix_caching=prefix_caching,
        )

    def verify_s(self, tokens: int, context_tokens: int) -> float:
        """Return the target's time for `tokens` in the batch, whose requests have `context_tokens` behind them."""
        step = self.step
        below = min(tokens, step.knee_tokens)
        return (
            step.base_s
            + step.per_token_below_knee_s * below
            + step.per_token_above_knee_s * (tokens - below)
            + step.per_context_token_s * context_tokens
        )

    def draft_s(self, k: int, requests: int, context_tokens: int, verify_s: float) -> float:
        """Return the time that drafting k tokens for each of `requests` adds to a step."""
        if k == 0 or requests == 0:
            return 0.0
        drafting = self.drafting
        passes = 1 if drafting.parallel else k
        return (
            drafting.base_s
            + drafting.verify_share * verify_s
            + passes
            * (drafting.per_pass_s + drafting.per_request_s * requests + drafting.per_context_token_s * context_tokens)
        )


def draft_tokens(method: Method, speculative_config: Mapping[str, Any]) -> int:
    """Return k: `num_speculative_tokens`, for suffix the depth of its trees where it is not given, 0 for a baseline.

    Raises
    ------
    ValueError
        If a method that needs it has none.
    """
    if method is Method.BASELINE:
        return 0
    k = speculative_config.get("num_speculative_tokens")
    if k is None and method is Method.SUFFIX:
        k = speculative_config.get("suffix_decoding_max_tree_depth", 24)
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"{method!s} needs num_speculative_tokens of at least 1, not {k!r}")
    return k


def k_by_batch(schedule: Sequence[Sequence[int]], k: int) -> tuple[int, ...]:
    """Expand vLLM's `num_speculative_tokens_per_batch_size` into k by batch size, gaps taking the k before them.

    Raises
    ------
    ValueError
        If it is not a list of [first, last, k] that begins at 1, rises and does not overlap.
    """
    table = [k]
    if any(len(entry) != 3 for entry in schedule):
        raise ValueError(f"a batch-size schedule has entries [first, last, k], not {schedule!r}")
    for first, last, tokens in sorted((first, last, tokens) for first, last, tokens in schedule):
        if first < len(table) or last < first or tokens < 0:
            raise ValueError(
                f"batch-size schedule: [{first}, {last}, {tokens}] overlaps the one before it or runs backwards"
            )
        if len(table) == 1 and first != 1:
            raise ValueError("a batch-size schedule begins at batch size 1")
        table += [table[-1]] * (first - len(table)) + [min(k, tokens)] * (last - first + 1)
    return tuple(table)
