"""The schedule of each replica of a pool, or the reason against one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from backends.calibration.batch_schedule import SCHEDULE_KEY, Floats, Range, ranges_of, why_unscheduled
from backends.calibration.calibration import Calibration, load_calibration
from backends.draft_schedule import draft_tokens
from backends.speculation import Method
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec
from lab.schedule.choose import goodput_of
from lab.schedule.drafts import Drafts, drafts_of, mean_context_tokens

LONGEST_K: Final = 8
"""Longest draft that is tried with a head that may draft further than it does now."""
_EXTENDABLE: Final = frozenset({Method.EAGLE, Method.EAGLE3})
"""Methods for which a k above the present one is tried: others have a depth of their own, or always draft the most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Acceptance and mean context of the requests of a replica."""

    drafts: Drafts
    context_tokens: float


@dataclass(frozen=True, slots=True)
class ScheduledReplica:
    """A replica, and the schedule that is best for it."""

    spec: ReplicaSpec
    reason: str  # why it has none; empty if it has one
    measured: Measured | None = None
    ranges: tuple[Range, ...] = ()  # best k by batch size; a single range where one k is best for all
    values: Mapping[str, Any] | None = None  # keys of its `speculative_config` to set
    goodput: Floats | None = None  # tokens per second of each batch size with each k, shape (batches, k + 1)

    @property
    def scheduled(self) -> ReplicaSpec:
        """The replica with its new values."""
        return self.spec if self.values is None else replace(self.spec, config={**self.spec.config, **self.values})

    @property
    def single_k(self) -> int:
        """The k that is best for all batch sizes, of which doublings count alike."""
        assert self.goodput is not None
        shares = self.goodput / self.goodput.max(axis=1, keepdims=True)
        weights = 1.0 / np.arange(1.0, len(shares) + 1)
        return max(1, int((weights @ shares).argmax()))

    @property
    def unscheduled(self) -> ReplicaSpec:
        """The replica with one k for all batch sizes."""
        if self.values is None:
            return self.spec
        config = {key: value for key, value in self.spec.config.items() if key != SCHEDULE_KEY}
        return replace(self.spec, config={**config, "num_speculative_tokens": self.single_k})

    def is_like(self, other: ScheduledReplica) -> bool:
        """Return whether another replica has the same method and the same outcome."""
        return (self.spec.method, self.reason, self.values) == (other.spec.method, other.reason, other.values)


def from_requests(requests: Sequence[ReplayRequest]) -> Callable[[ReplicaSpec], Measured]:
    """Return a function that takes the acceptance of a replica from the requests of a trace."""
    context_tokens = mean_context_tokens(requests)

    def measure(spec: ReplicaSpec) -> Measured:
        calibration = load_calibration(spec.calibration)
        k = draft_tokens(spec.method, spec.config)
        if spec.method in _EXTENDABLE and not spec.config.get("parallel_drafting"):
            k = max(k, min(LONGEST_K, _known_k(calibration, spec.method, requests)))
        config = {**spec.config, "num_speculative_tokens": k}
        return Measured(drafts_of(calibration, spec.method, config, requests), context_tokens)

    return measure


def schedule_replica(
    spec: ReplicaSpec, measure: Callable[[ReplicaSpec], Measured], longest_batch: int | None, tolerance: float
) -> ScheduledReplica:
    """Return the schedule of a replica."""
    if reason := why_unscheduled(spec.method):
        return ScheduledReplica(spec, reason)
    calibration = load_calibration(spec.calibration)
    measured = measure(spec)
    longest_batch = longest_batch or calibration.scheduler.max_num_seqs
    config = {**spec.config, "num_speculative_tokens": measured.drafts.k}
    table = goodput_of(calibration, spec.method, config, measured.drafts, measured.context_tokens, longest_batch)
    ranges = tuple(ranges_of(table, tolerance))
    most = max(k for _, _, k in ranges)
    if not most:
        return ScheduledReplica(spec, "no draft pays at any batch size: run it as a baseline", measured, ranges)
    if len(ranges) == 1 and SCHEDULE_KEY not in spec.config:
        if most == draft_tokens(spec.method, spec.config):
            return ScheduledReplica(spec, f"its k = {most} is best at every batch size", measured, ranges)
        values: dict[str, Any] = {"num_speculative_tokens": most}
    else:
        # The k of an MTP head must stay a multiple of its layers, which only its checkpoint knows.
        longest = draft_tokens(spec.method, spec.config) if spec.method is Method.MTP else most
        values = {"num_speculative_tokens": longest, SCHEDULE_KEY: [list(one) for one in ranges]}
    return ScheduledReplica(spec, "", measured, ranges, values, table)


def _known_k(calibration: Calibration, method: Method, requests: Sequence[ReplayRequest]) -> int:
    """Return how long the drafts are whose acceptance was recorded, or else calibrated."""
    recorded = [
        max(steps) - 1
        for number in range(0, len(requests), max(1, len(requests) // 100))
        if isinstance(steps := requests[number].acceptance.get(method.value), Sequence) and len(steps)
    ]
    return max(recorded) if recorded else len(calibration.acceptance(method, "chat").by_position)
