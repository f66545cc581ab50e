"""Parameters of one simulated engine: limits, memory and step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.calibration.calibration import Calibration, Drafting, StepTime
from backends.drafting.script import BLOCK_TOKENS
from backends.speculation import Method

_MODELLESS = frozenset({Method.BASELINE, Method.NGRAM, Method.SUFFIX})
_BLOCKS = frozenset({Method.DSPARK, Method.DFLASH})
"""Methods that draft all k tokens together, in vLLM whatever the schedule says."""


@dataclass(frozen=True, slots=True)
class EngineParameters:
    """Settings of an engine.

    Parameters
    ----------
    step, drafting
        Time of a step; see `StepTime` and `Drafting`.
    k
        Maximum tokens drafted per step; 0 for a baseline.
    k_by_batch
        `k_by_batch[b]` is the k for a batch of b requests; the last entry holds for larger ones. Empty for always `k`.
    max_num_seqs, max_num_batched_tokens, max_model_len
        vLLM's limits of the same names.
    kv_blocks
        Blocks of 16 tokens in the KV cache.
    prefix_caching
        Whether requests share the blocks of common prefixes.
    least_passes
        Passes of the drafter in a step for which the schedule drafts fewer tokens: a draft model runs once even for
        none, to keep its cache, and a drafter of blocks always drafts k.
    adaptive
        Whether each step verifies only the draft tokens that are worth their time, as with vLLM's
        `enable_adaptive_verification`.

    Examples
    --------
    >>> from backends.calibration.calibration import load_calibration
    >>> calibration = load_calibration("llama-3.1-8b-h100")
    >>> parameters = EngineParameters.of(calibration, Method.NGRAM, {"num_speculative_tokens": 5})
    >>> parameters.k
    5
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
    least_passes: int = 0
    adaptive: bool = False

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.kv_blocks) < 1 or self.k < 0:
            raise ValueError("the limits of an engine must be positive")

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
        """Return the parameters of a method from a calibration; limits that are None are the calibration's.

        Raises
        ------
        ValueError
            If the calibration does not have the method, the schedule of k is invalid, or the method has no confidence
            to adapt to.
        """
        config = speculative_config or {}
        adaptive = bool(config.get("enable_adaptive_verification"))
        if adaptive and method in _MODELLESS:
            raise ValueError(f"enable_adaptive_verification needs a method with a draft model, not {method!s}")
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
            least_passes=k if method in _BLOCKS else int(method not in _MODELLESS),
            adaptive=adaptive,
        )


def draft_tokens(method: Method, speculative_config: Mapping[str, Any]) -> int:
    """Return k: `num_speculative_tokens`, by default the tree depth of suffix decoding; 0 for a baseline.

    Raises
    ------
    ValueError
        If a method that needs `num_speculative_tokens` has none.

    Examples
    --------
    >>> draft_tokens(Method.SUFFIX, {})
    24
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
    """Return k by batch size from vLLM's `num_speculative_tokens_per_batch_size`; a gap has the k before it.

    Raises
    ------
    ValueError
        If it is not a list of [first, last, k] that starts at 1 and does not overlap.

    Examples
    --------
    >>> k_by_batch([[1, 2, 5], [4, 5, 2]], k=3)
    (3, 3, 3, 3, 2, 2)
    """
    table = [k]
    if any(len(entry) != 3 for entry in schedule):
        raise ValueError(f"batch-size schedule: expected entries [first, last, k], not {schedule!r}")
    for first, last, tokens in sorted((first, last, tokens) for first, last, tokens in schedule):
        if first < len(table) or last < first or tokens < 0:
            raise ValueError(
                f"batch-size schedule: [{first}, {last}, {tokens}] overlaps the entry before it or is reversed"
            )
        if len(table) == 1 and first != 1:
            raise ValueError("batch-size schedule: the first entry must start at batch size 1")
        table += [table[-1]] * (first - len(table)) + [min(k, tokens)] * (last - first + 1)
    return tuple(table)
