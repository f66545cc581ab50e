"""Policies side by side on the same requests: ratios of mean times with intervals, over all requests and over parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.evaluate.bootstrap import Interval, block_length, block_sums, interval
from lab.replay.simulate import Replayed

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

METRICS = ("e2e_s", "ttft_s", "tpot_s")
_PREFERRED = ("least_loaded", "round_robin", "random")
_MOST_KINDS = 8
_FEW = 30
_LENGTHS = (0, 512, 2048, 8192, 32768)
_OUTPUTS = (0, 64, 256, 1024)
_TEMPERATURES = ((0.0, "0"), (0.5, "above 0 to 0.5"), (1.0, "above 0.5 to 1"), (np.inf, "above 1"))


@dataclass(frozen=True, slots=True)
class Traits:
    """What the requests of a trace were like; each has an entry for every request of the trace."""

    workload: Sequence[str]
    temperature: Floats
    prompt_tokens: Numbers


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the requests: by what they were chosen, and which of the reference's requests are in it."""

    by: str
    name: str
    inside: Truths


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
        One of `METRICS`.
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
    """Return parts of the requests by kind, temperature, lengths and load; none by a trait that all requests share."""
    found: list[Part] = []
    for candidates in (
        _by_workload(np.asarray(traits.workload, object)[reference.number]),
        _by_temperature(traits.temperature[reference.number]),
        _by_length("prompt tokens", traits.prompt_tokens[reference.number], _LENGTHS),
        _by_length("answer tokens", reference.output_tokens, _OUTPUTS),
        _by_load(in_flight(reference, reference.arrived_s)),
    ):
        some = [part for part in candidates if part.inside.sum() >= _FEW]
        if len(some) > 1:
            found += some
    return found


def in_flight(played: Replayed, at_s: Floats) -> Numbers:
    """Return how many requests were in flight at each time, shape (times,)."""
    begun = np.searchsorted(np.sort(played.arrived_s), at_s, side="right")
    ended = np.searchsorted(np.sort(played.arrived_s + played.e2e_s), at_s, side="right")
    return begun - ended


def _by_workload(workload: npt.NDArray[np.object_]) -> Iterator[Part]:
    names, counts = np.unique(workload.astype(str), return_counts=True)
    for index in np.argsort(-counts)[:_MOST_KINDS]:
        yield Part("workload", str(names[index]) or "not named", workload == names[index])


def _by_temperature(temperature: Floats) -> Iterator[Part]:
    low = -np.inf
    for high, name in _TEMPERATURES:
        yield Part("temperature", name, (temperature > low) & (temperature <= high))
        low = high


def _by_length(by: str, tokens: Numbers, bounds: Sequence[int]) -> Iterator[Part]:
    for low, high in zip(bounds, [*bounds[1:], None], strict=True):
        name = f"more than {low:,}" if high is None else f"{low + 1:,} to {high:,}" if low else f"up to {high:,}"
        yield Part(
            by, name, (tokens > low) & (tokens <= (np.inf if high is None else high)) | ((tokens == 0) & (low == 0))
        )


def _by_load(load: Numbers) -> Iterator[Part]:
    low, high = np.quantile(load, (1 / 3, 2 / 3)) if len(load) else (0.0, 0.0)
    yield Part("in flight on arrival", f"up to {low:.0f}", load <= low)
    yield Part("in flight on arrival", f"{low + 1:.0f} to {high:.0f}", (load > low) & (load <= high))
    yield Part("in flight on arrival", f"more than {high:.0f}", load > high)


def ratios(played: Mapping[str, Replayed], reference: str, seed: int) -> dict[str, dict[str, Interval | None]]:
    """Return `ratio` of every other policy by metric, and by policy."""
    return {
        metric: {name: ratio(one, played[reference], metric, seed) for name, one in played.items() if name != reference}
        for metric in METRICS
    }
