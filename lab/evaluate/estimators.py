"""What a policy would have given on logged traffic, told from the probabilities with which the log's policy chose.

A request that the policy would have sent where it went counts by how much more probable that was with the policy than
with the log (its weight). Three estimates of a mean are made of that:

- IPS, inverse propensity score (Horvitz and Thompson, JASA 47(260), 1952): the mean of weight times outcome;
- SNIPS, self-normalised (Swaminathan and Joachims, NeurIPS 2015): the same over the mean weight; steadier, with a bias
  that vanishes as the log grows;
- DR, doubly robust (Dudik et al., "Doubly Robust Policy Evaluation and Optimization", Statistical Science 29(4), 2014):
  what a model of the outcomes expects, corrected by the weighted errors of that model.

None of them knows that requests slow each other: each tells what would come of a request that went elsewhere with all
others as they were. A policy that would move the load is to be replayed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lab.evaluate.bootstrap import Interval, block_length, block_sums, interval, weighted_quantile
from lab.evaluate.log import METRICS, Log
from lab.evaluate.outcome_model import enough, expected

Floats = npt.NDArray[np.float64]

FEWEST_EFFECTIVE = 100
"""Effective sample size below which nothing is told: how well intervals hold is not known there."""

MOST_IMPOSSIBLE = 0.01
"""Share of a policy's choices that the log's could never have made, above which nothing is told."""

_WEIGHTS_OFF = 0.05  # how far the mean weight may be from one...
_ERRORS_OFF = 4.0  # ...and how many standard errors
_TAIL = 20.0  # effective requests beyond a quantile
_MORE_LOAD = 1.5
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean under the policy, in seconds, and over the mean of the log, each with its 95% interval."""

    mean: Interval
    to_log: Interval


@dataclass(frozen=True, slots=True)
class MetricEvaluation:
    """One metric.

    Parameters
    ----------
    logged
        Its mean in the log, in seconds.
    estimates
        By `ips`, `snips`, `dr`; the last is missing where no model could be made.
    quantiles
        By probability: the self-normalised quantile; missing where too few requests lie beyond it.
    """

    logged: float
    estimates: Mapping[str, Estimate]
    quantiles: Mapping[float, Interval]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a log tells of a policy.

    Parameters
    ----------
    requests
        That were used.
    effective_sample_size
        As many requests logged under the policy itself would tell as much: (sum w)^2 / sum w^2 (Kish, 1965).
    mean_weight
        About 1 if the propensities are right and the policy chooses nothing that the log could not have.
    largest_weight
        Share of all weight that one request has.
    impossible
        Share of the policy's choices that the log's policy would never have made.
    shares, logged_shares
        Of the requests, by backend: the policy's and the log's.
    refusal
        Why the log cannot tell, and what would help; empty if it can. A refused evaluation has no metrics.
    notes
        What to keep in mind.
    """

    policy: str
    requests: int
    effective_sample_size: float
    mean_weight: float
    largest_weight: float
    impossible: float
    shares: Mapping[str, float]
    logged_shares: Mapping[str, float]
    refusal: str = ""
    notes: tuple[str, ...] = ()
    metrics: Mapping[str, MetricEvaluation] = field(default_factory=dict)


def evaluate(log: Log, metrics: Sequence[str] = METRICS, seed: int = 0) -> list[Evaluation]:
    """Evaluate every policy that was asked when the log was read, in that order.

    Parameters
    ----------
    metrics
        Of `METRICS`; one of which the log has too few is left out.
    seed
        Of the resampling.
    """
    found = {}
    for policy, propensities in log.propensities.items():
        weights = propensities[np.arange(log.requests), log.chosen] / log.propensity
        found[policy] = _overlap(log, policy, propensities, weights), weights
    usable = [metric for metric in metrics if (log.outcomes[metric] > 0).sum() >= FEWEST_EFFECTIVE]
    models = _models(log, usable) if any(not one.refusal for one, _ in found.values()) else {}
    return [
        one
        if one.refusal
        else replace(one, metrics={metric: _metric(log, policy, metric, weights, models, seed) for metric in usable})
        for policy, (one, weights) in found.items()
    ]


def _models(log: Log, metrics: Sequence[str]) -> dict[str, Floats]:
    """Return what is expected of each request, by metric, as far as there are outcomes enough; fitted side by side."""
    told = [metric for metric in metrics if enough(log.outcomes[metric])]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(told, pool.map(lambda metric: expected(log, log.outcomes[metric]), told), strict=True))


def _overlap(log: Log, policy: str, propensities: Floats, weights: Floats) -> Evaluation:
    """Look at how far the log's choices and the policy's overlap."""
    total = float(weights.sum())
    impossible = float(log.impossible[policy].mean())
    shares = dict(zip(log.backends, (float(share) for share in propensities.mean(axis=0)), strict=True))
    counts = np.bincount(log.chosen, minlength=len(log.backends)) / log.requests
    logged_shares = dict(zip(log.backends, map(float, counts), strict=True))
    size = total**2 / float(weights @ weights) if total else 0.0
    mean = total / log.requests
    deviations = block_sums(weights - mean, block_length(log.requests))
    error = float(np.sqrt(deviations @ deviations)) / log.requests
    found = Evaluation(
        policy=policy,
        requests=log.requests,
        effective_sample_size=size,
        mean_weight=mean,
        largest_weight=float(weights.max()) / total if total else 0.0,
        impossible=impossible,
        shares=shares,
        logged_shares=logged_shares,
        notes=_notes(log, policy, impossible, shares, logged_shares),
    )
    refusal = ""
    if impossible > MOST_IMPOSSIBLE:
        refusal = (
            f"{impossible:.0%} of its choices are ones that the log's policy would never have made: nothing is known "
            f"of what comes of them; most of the difference is at {_where(shares, logged_shares)}. Log with a policy "
            "that tries every backend now and then: `random`, or `learned` with exploration. Or replay it"
        )
    elif size < FEWEST_EFFECTIVE:
        needed = f"{log.requests * FEWEST_EFFECTIVE / size:,.0f}" if size else "many more"
        refusal = (
            f"the {log.requests:,} requests tell as much as {size:.0f} logged under the policy itself; "
            f"{FEWEST_EFFECTIVE} at least are needed. Log about {needed} requests as these were, or explore more: the "
            f"log seldom chose as this policy does; most of the difference is at {_where(shares, logged_shares)}"
        )
    elif abs(mean - 1 + impossible) > max(_WEIGHTS_OFF, _ERRORS_OFF * error):
        refusal = (
            f"the weights average {mean:.2f} where they would average 1: the propensities in the log are not those by "
            "which it was made, or its policy would never have made some of these choices. Record all candidates with "
            "their propensities"
        )
    return replace(found, refusal=refusal) if refusal else found


def _metric(
    log: Log, policy: str, metric: str, weights: Floats, models: Mapping[str, Floats], seed: int
) -> MetricEvaluation:
    known = log.outcomes[metric] > 0
    outcome, weight = log.outcomes[metric][known], weights[known]
    length = block_length(len(outcome))
    logged, ones = block_sums(outcome, length), block_sums(np.ones(len(outcome)), length)

    def estimate(numerator: Floats, denominator: Floats) -> Estimate:
        up, down = block_sums(numerator, length), block_sums(denominator, length)
        return Estimate(interval([up], [down], seed), interval([up, ones], [down, logged], seed))

    every = np.ones(len(outcome))
    seen = 1 - log.impossible[policy][known]
    estimates = {"ips": estimate(weight * outcome, seen), "snips": estimate(weight * outcome, weight)}
    if (model := models.get(metric)) is not None:
        answers, chosen = model[known], log.chosen[known]
        corrected = (log.propensities[policy][known] * answers).sum(axis=1)
        corrected += weight * (outcome - answers[np.arange(len(outcome)), chosen])
        if corrected.sum() > 0:
            estimates["dr"] = estimate(corrected, every)
    size = float(weight.sum() ** 2 / (weight @ weight))
    quantiles = {
        probability: weighted_quantile(outcome, weight, probability, length)
        for probability in QUANTILES
        if size * (1 - probability) >= _TAIL
    }
    return MetricEvaluation(float(outcome.mean()), estimates, quantiles)


def _notes(
    log: Log, policy: str, impossible: float, shares: Mapping[str, float], logged_shares: Mapping[str, float]
) -> tuple[str, ...]:
    notes = []
    if impossible:
        notes.append(
            f"{impossible:.2%} of its choices could not be seen in the log and count as if they were like the rest"
        )
    failed = log.left_out.get("failed", 0) + log.left_out.get("were sent again after a failure", 0)
    if failed:
        notes.append(f"{failed:,} requests failed or were sent again, and are left out: this is of those that did not")
    grown = [name for name, share in shares.items() if share > 0.05 and share > _MORE_LOAD * logged_shares[name]]
    loads = log.in_flight[np.arange(log.requests), log.chosen]
    if grown and not np.isnan(loads).all() and float(np.nanmean(loads)) >= 1:
        told = ", ".join(f"`{name}` {shares[name]:.0%} for {logged_shares[name]:.0%}" for name in grown)
        notes.append(
            f"it would move the load ({told}), with {float(np.nanmean(loads)):.1f} requests there already on average: "
            "how requests slow each other then is not in these figures; replay it"
        )
    if log.untold[policy]:
        notes.append(
            f"the log does not tell {', '.join(log.untold[policy])}, by which it decides: it was asked as if there was "
            "none, and may choose otherwise where it is told"
        )
    if np.isnan(log.in_flight).all():
        notes.append("the log does not tell how busy the backends were: the policy was asked as if all were idle")
    return tuple(notes)


def _where(shares: Mapping[str, float], logged_shares: Mapping[str, float]) -> str:
    name = max(shares, key=lambda backend: shares[backend] - logged_shares[backend])
    return f"`{name}` ({shares[name]:.0%} of its choices, {logged_shares[name]:.0%} of the log's)"
