"""How many tokens a replica drafts per step: k, which may depend on the batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from backends.speculation import SCHEDULE_KEY, Method


@dataclass(frozen=True, slots=True)
class DraftSchedule:
    """How many tokens an engine drafts per step.

    Examples
    --------
    >>> schedule = DraftSchedule(3, by_batch=(3, 3, 1))
    >>> schedule.at(1), schedule.at(2), schedule.at(50), DraftSchedule(3).at(50)
    (3, 1, 1, 3)
    """

    k: int  # tokens drafted per step at most; 0 for a baseline
    # `by_batch[b]` is the k for a batch of b requests; the last entry holds for larger ones. Empty: always `k`.
    by_batch: tuple[int, ...] = ()
    # Whether the engine itself verifies fewer in large batches (vLLM's `enable_adaptive_verification`).
    adaptive: bool = False

    def at(self, batch: int) -> int:
        """Return the k for a batch of this size."""
        return self.by_batch[min(batch, len(self.by_batch) - 1)] if self.by_batch else self.k


class Speculation(NamedTuple):
    """How an engine speculates.

    Examples
    --------
    >>> str(Speculation(Method.EAGLE3, DraftSchedule(3))), str(Speculation(Method.BASELINE, DraftSchedule(0)))
    ('eagle3 with k 3', 'baseline')
    """

    method: Method
    schedule: DraftSchedule

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.method} with k {self.schedule.k}" if self.schedule.k else self.method.value


def draft_schedule(method: Method, config: Mapping[str, Any] | None) -> DraftSchedule:
    """Return how many tokens an engine with a speculative config drafts.

    Examples
    --------
    >>> config = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 64, 1]]}
    >>> draft_schedule(Method.EAGLE3, config).at(64)
    1
    >>> draft_schedule(Method.BASELINE, None)
    DraftSchedule(k=0, by_batch=(), adaptive=False)
    """
    config = config or {}
    k = draft_tokens(method, config)
    if k == 0:
        return DraftSchedule(0)
    ranges = config.get(SCHEDULE_KEY)
    adaptive = bool(config.get("enable_adaptive_verification"))
    return DraftSchedule(k, k_by_batch(ranges, k) if ranges else (), adaptive)


def effective_k(method: Method, k: int) -> int:
    """Return the maximum tokens drafted per step: `k`, or the method's default if `k` is 0 (not set).

    Examples
    --------
    >>> effective_k(Method.EAGLE3, 5), effective_k(Method.SUFFIX, 0), effective_k(Method.BASELINE, 0)
    (5, 24, 0)
    """
    return 0 if method is Method.BASELINE else k or _DEFAULT_K.get(method, 3)


def draft_tokens(method: Method, speculative_config: Mapping[str, Any]) -> int:
    """Return k: `num_speculative_tokens`, by default the tree depth of suffix decoding; 0 for a baseline.

    Examples
    --------
    >>> draft_tokens(Method.SUFFIX, {})
    24
    """
    if method is Method.BASELINE:
        return 0
    k = speculative_config.get("num_speculative_tokens")
    if k is None and method is Method.SUFFIX:
        k = speculative_config.get("suffix_decoding_max_tree_depth", _DEFAULT_K[method])
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"{method!s} needs num_speculative_tokens of at least 1, not {k!r}")
    return k


def k_by_batch(schedule: Sequence[Sequence[int]], k: int) -> tuple[int, ...]:
    """Return k by batch size from vLLM's `num_speculative_tokens_per_batch_size`; a gap takes the k before it.

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


_DEFAULT_K: Final = {Method.SUFFIX: 24}
