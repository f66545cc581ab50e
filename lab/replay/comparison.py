"""Policies side by side on the same requests: ratios of mean times with intervals, over all requests and over parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.evaluate.bootstrap import Interval, block_length, block_sums, interval
from lab.replay.parts import Floats, Part, Truths, by_length, by_load, by_temperature, by_workload, distinguishing
from lab.replay.simulate import Replayed
from lab.report.distributions import METRICS

Numbers = npt.NDArray[np.int64]

_PREFERRED = ("least_loaded", "round_robin", "random")


@dataclass(frozen=True, slots=True)
class Traits:
    """What the requests of a trace were like; each has an entry for every request of the trace."""

    workload: Sequence[str]
    temperature: Floats
    prompt_tokens: Numbers


def reference_of(policies: Sequence[str]) -> str:
    """Return the policy that others are compared with: the simplest one among them, else the first.

    Examples
    --------
    >>> reference_of(["learned", "least_loaded"]), reference_of(["learned", "static"])
    ('least_loaded', 'learned')
    """
    return next((name for name in _PREFERRED if name in policies), policies[0])


def ratio(one: Replayed, other: Replayed, metric: str, seed: int, inside: Truths | None = None) -> Interval | None:
    """Return the mean of a time under one policy over that under another, on the requests that both have served.

    Requests are compared in pairs: what they have in common, such as their length, does not widen the interval. It
    comes from resampling blocks of consecutive requests (`lab.evaluate.bootstrap`), and says what other traffic like
    this would give; how much the draws of the simulation matter, other seeds of the replay say.

    Parameters
    ----------
    metric
        `e2e_s`, `ttft_s` or `tpot_s`.
    seed
        Seed of the resampling.
    inside
        Which requests of `other` to use; None for all.

    Returns
    -------
    Interval or None
        None if the requests are too few for an interval.
    """
    numbers = other.number if inside is None else other.number[inside]
    _, mine, theirs = np.intersect1d(one.number, numbers, assume_unique=True, return_indices=True)
    up, down = getattr(one, metric)[mine], getattr(other, metric)
    down = (down if inside is None else down[inside])[theirs]
    known = ~(np.isnan(up) | np.isnan(down))
    up, down = up[known], down[known]
    length = block_length(len(up)) if len(up) else 1
    try:
        return interval([block_sums(up, length)], [block_sums(down, length)], seed) if len(up) else None
    except ValueError:  # too few blocks
        return None


def parts(reference: Replayed, traits: Traits) -> list[Part]:
    """Return parts of the reference's requests by kind, temperature, lengths and load on arrival."""
    number = reference.number
    return distinguishing(
        [
            by_workload([traits.workload[index] for index in number.tolist()]),
            by_temperature(traits.temperature[number]),
            by_length("prompt tokens", traits.prompt_tokens[number]),
            by_length("answer tokens", reference.output_tokens),
            by_load("in flight on arrival", in_flight(reference, reference.arrived_s)),
        ]
    )


def in_flight(played: Replayed, at_s: Floats) -> Numbers:
    """Return how many requests were in flight at each time, shape (times,)."""
    begun = np.searchsorted(np.sort(played.arrived_s), at_s, side="right")
    ended = np.searchsorted(np.sort(played.arrived_s + played.e2e_s), at_s, side="right")
    return begun - ended


def ratios(played: Mapping[str, Replayed], reference: str, seed: int) -> dict[str, dict[str, Interval | None]]:
    """Return `ratio` of every other policy by metric, and by policy."""
    return {
        metric: {name: ratio(one, played[reference], metric, seed) for name, one in played.items() if name != reference}
        for metric in METRICS
    }
