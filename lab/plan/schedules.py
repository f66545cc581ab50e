"""Kinds of replicas whose k depends on the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backends.calibration.batch_schedule import SCHEDULED
from backends.calibration.calibration import Calibration
from lab.plan.mixes import Kind
from lab.replay.request import ReplayRequest
from lab.schedule.choose import best_schedule
from lab.schedule.drafts import drafts_of, mean_context_tokens


def with_schedules(kinds: Sequence[Kind], calibration: Calibration, requests: Sequence[ReplayRequest]) -> list[Kind]:
    """Return kinds and, for each method that may gain by it, one more whose k follows the batch size.

    Its schedule is the best one for these requests with drafts of up to the largest k of the method.
    """
    result = list(kinds)
    context_tokens = mean_context_tokens(requests)
    for method in dict.fromkeys(kind.method for kind in kinds if kind.method in SCHEDULED):
        longest = max((kind for kind in kinds if kind.method is method), key=lambda kind: kind.k)
        drafts = drafts_of(calibration, method, longest.config, requests)
        batch = calibration.scheduler.max_num_seqs
        schedule = best_schedule(calibration, method, longest.config, drafts, context_tokens, batch)
        if schedule:
            result.append(replace(longest, k=max(k for *_, k in schedule), schedule=tuple(schedule)))
    return result
