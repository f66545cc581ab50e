"""Compares policies on the same requests: ratios of mean times with intervals, over all requests and parts of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import numpy.typing as npt

from lab.report.distributions import METRICS
from lab.simulation.simulate import Replayed
from lab.simulation.table import Traits
from lab.statistics import Floats, Interval, of_replications, of_units

Compared = Mapping[tuple[str, str], Interval | None]
"""Mean time of the first over the second's, on requests that both served."""


Numbers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]
_PREFERRED = ("least_loaded", "round_robin", "random")
_FEW = 30
"""Requests that a part needs."""
_MOST_WORKLOADS = 8
_PARTS = 8  # of a run
Key = tuple[str, ...]
"""A time and a policy, a part (`Part.key`) and a policy, or `e2e_s` and a pair of policies."""


def winner(mean_s: Mapping[str, float], compared: Compared, failed: Mapping[str, str]) -> str:
    """Return who took the least time to finish, if that is shown against every other one.

    Parameters
    ----------
    mean_s
        Mean time to finish in seconds, by name; NaN for one that served nothing.
    compared
        Ratios of all pairs with their 95% intervals. An interval without ends shows nothing.
    failed
        By name of those that failed requests, words such as `failed 3 of 20 requests`; they cannot win.

    Examples
    --------
    >>> winner({"a": 1.0, "b": 1.25}, {("a", "b"): Interval(0.8, 0.7, 0.9)}, {})
    'a won: its mean time to finish is 20.0% (95%: 10.0% to 30.0%) shorter than that of b.'
    >>> winner({"a": 1.0, "b": 1.25}, {("a", "b"): Interval(0.8, 0.6, 1.1)}, {})
    'Nobody won: the mean time to finish of a is 20.0% (95%: -10.0% to 40.0%) shorter than that of b, maybe by chance.'
    """
    without = "".join(f" {name} {what} and cannot win." for name, what in failed.items())
    ranked = sorted(mean_s.keys() - failed.keys(), key=lambda name: (mean_s[name], name))
    if not ranked:
        return f"Nobody won.{without}"
    best, *others = ranked
    if not others:
        return f"{best} won: it alone failed no request.{without}" if failed else f"{best} is alone: nobody to compare."
    ratios = {name: compared.get((best, name)) for name in others}
    for name, ratio in ratios.items():
        if ratio is None or not ratio.is_known:
            shorter = "" if ratio is None else f": {1 - ratio.value:.1%} shorter in the mean"
            why = "there is no interval that tells it from chance"
            return f"Nobody is shown to win: {best} finishes before {name}{shorter}, but {why}.{without}"
        if ratio.low == ratio.high == 1:
            return f"Nobody won: {best} and {name} take the same time to finish.{without}"
        if ratio.high >= 1:
            said = f"the mean time to finish of {best} is {_shorter(ratio)} shorter than that of {name}"
            return f"Nobody won: {said}, maybe by chance.{without}"
    second = others[0]
    gain = ratios[second]
    assert gain is not None
    next_one = f"{second}, the next" if others[1:] else second
    return f"{best} won: its mean time to finish is {_shorter(gain)} shorter than that of {next_one}.{without}"


def _shorter(ratio: Interval) -> str:
    saved = ratio.saved()
    return f"{saved.value:.1%} (95%: {saved.low:.1%} to {saved.high:.1%})"


def reference_of(policies: Sequence[str]) -> str:
    """Return the policy to compare others with: the simplest one among them, else the first.

    Examples
    --------
    >>> reference_of(["learned", "least_loaded"]), reference_of(["learned", "static"])
    ('least_loaded', 'learned')
    """
    return next((name for name in _PREFERRED if name in policies), policies[0])


def _both(one: Replayed, other: Replayed, metric: str, inside: Truths | None = None) -> tuple[Floats, Floats]:
    """Return a time under each of two policies, for requests that both served and that are `inside` the other's."""
    _, mine, theirs = np.intersect1d(one.number, other.number, assume_unique=True, return_indices=True)
    up, down = getattr(one, metric)[mine], getattr(other, metric)[theirs]
    known = ~(np.isnan(up) | np.isnan(down))
    known &= True if inside is None else inside[theirs]
    return up[known], down[known]


def ratio(one: Replayed, other: Replayed, metric: str, inside: Truths | None = None) -> float | None:
    """Return the ratio of a mean time under one policy to that under another, on the requests that both served."""
    up, down = _both(one, other, metric, inside)
    total = float(down.sum())
    return float(up.sum()) / total if total > 0 else None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the requests: the trait that selects them, its name, and which are in it."""

    by: str
    name: str
    inside: Truths
    key: tuple[str, ...]  # the same for this part of other traffic


def ratios(played: Mapping[str, Replayed], reference: str, traits: Traits) -> dict[Key, float]:
    """Return `ratio` of every policy but the reference, by time; for the time to finish, also by part and by pair."""
    others = [name for name in played if name != reference]
    found = {(metric, name): ratio(played[name], played[reference], metric) for metric in METRICS for name in others}
    by_part = {
        (*part.key, name): ratio(played[name], played[reference], "e2e_s", part.inside)
        for part in parts(played[reference], traits)
        for name in others
    }
    mean_s = {reference: 1.0} | {name: value for name in others if (value := found["e2e_s", name])}
    pairs = {("e2e_s", one, other): mean_s[one] / mean_s[other] for one, other in permutations(mean_s, 2)}
    return {key: value for key, value in (found | by_part | pairs).items() if value}


def intervals(ratios_: Mapping[Key, float], replications: Sequence[Mapping[Key, float]]) -> dict[Key, Interval]:
    """Return the ratios with intervals from replications; without ends where too few replications have the ratio."""
    return {
        key: of_replications(value, [one[key] for one in replications if key in one]) for key, value in ratios_.items()
    }


def of_runs(played: Mapping[str, Replayed], traits: Traits) -> dict[Key, Interval]:
    """Return the ratios of runs on engines, with intervals from parts of the runs."""
    if len(played) < 2:
        return {}
    reference = reference_of(list(played))
    found: dict[Key, Interval | None] = {**intervals(ratios(played, reference, traits), ())}
    found |= {(time, name): of_parts(one, played[reference], time) for time in METRICS for name, one in played.items()}
    found |= {("e2e_s", a, b): of_parts(played[a], played[b], "e2e_s") for a, b in permutations(played, 2)}
    return {key: value for key, value in found.items() if value is not None}


def of_parts(one: Replayed, other: Replayed, metric: str) -> Interval | None:
    """Return the ratio of a mean time in one run on engines to that in another, on the requests that both served.

    Requests share batches, so the interval's units are up to eight consecutive parts of the runs, each at least as long
    as the longest request. Runs too short for two parts have no interval.
    """
    up, down = _both(one, other, metric)
    if not (up.sum() > 0 and down.sum() > 0):
        return None
    parts = max(1, min(_PARTS, _longest_fit(one), _longest_fit(other)))
    part_of = np.arange(len(up)) * parts // len(up)
    starts = np.flatnonzero(np.diff(part_of, prepend=-1))
    return of_units(np.add.reduceat(up, starts), np.add.reduceat(down, starts))


def _longest_fit(result: Replayed) -> int:
    """Return how often the longest request fits into a run."""
    span_s = (result.arrived_s + result.e2e_s).max() - result.arrived_s.min()
    return int(span_s / result.e2e_s.max())


def verdict(played: Mapping[str, Replayed], compared: Mapping[Key, Interval | None], errors: int = 0) -> str:
    """Return who won; only errors beyond `errors`, which none could avoid, count as failures."""
    failed = {
        name: f"failed {one.errors:,} of {one.errors + len(one.e2e_s):,} requests"
        for name, one in played.items()
        if one.errors > errors or not len(one.e2e_s)
    }
    mean_s = {name: float(one.e2e_s.mean()) if len(one.e2e_s) else math.nan for name, one in played.items()}
    return winner(mean_s, {(a, b): compared.get(("e2e_s", a, b)) for a, b in permutations(played, 2)}, failed)


def parts(reference: Replayed, traits: Traits) -> list[Part]:
    """Return parts of the reference's requests by kind, temperature, lengths and load on arrival.

    Traits that all requests share make no parts, nor do a few requests.
    """
    number = reference.number
    load = in_flight(reference, reference.arrived_s)
    thirds = np.quantile(load, (1 / 3, 2 / 3)).round().tolist() if len(load) else ()
    candidates = [
        _by_workload(np.array([traits.workload[index] for index in number.tolist()], dtype=np.str_)),
        _ranges("temperature", traits.temperature[number], (0.0, 0.5, 1.0)),
        _ranges("prompt tokens", traits.prompt_tokens[number], (512, 2048, 8192, 32768)),
        _ranges("answer tokens", reference.output_tokens, (64, 256, 1024)),
        _ranges("in flight on arrival", load, thirds),
    ]
    found: list[Part] = []
    for candidate in candidates:
        some = [part for part in candidate if part.inside.sum() >= _FEW]
        found += some if len(some) > 1 else []
    return found


def _by_workload(each: npt.NDArray[np.str_]) -> list[Part]:
    """Return the most frequent workloads."""
    names, counts = np.unique(each, return_counts=True)
    most = sorted(zip(names.tolist(), counts.tolist(), strict=True), key=lambda one: (-one[1], one[0]))
    return [
        Part("workload", name or "not named", each == name, ("workload", name)) for name, _ in most[:_MOST_WORKLOADS]
    ]


def _ranges(by: str, values: Floats | Numbers, bounds: Sequence[float]) -> list[Part]:
    """Return the ranges up to each bound and beyond the last; NaN falls in none."""
    ranges = []
    for index, (low, high) in enumerate(zip((-np.inf, *bounds), (*bounds, np.inf), strict=True)):
        name = f"up to {high:,g}" if index == 0 else f"above {low:,g}"
        name += f" to {high:,g}" if low > -np.inf and high < np.inf else ""
        ranges.append(Part(by, name, (values > low) & (values <= high), (by, str(index))))
    return ranges


def in_flight(played: Replayed, at_s: Floats) -> Numbers:
    """Return how many requests were in flight at each time, shape (times,)."""
    begun = np.searchsorted(np.sort(played.arrived_s), at_s, side="right")
    ended = np.searchsorted(np.sort(played.arrived_s + played.e2e_s), at_s, side="right")
    return begun - ended
