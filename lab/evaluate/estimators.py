"""Off-policy estimates of a policy's outcomes on logged traffic, from the propensities of the log's policy.

The weight of a logged request is the probability of the logged choice under the evaluated policy over its propensity.
There are three estimates of a mean:

- IPS, inverse propensity score (Horvitz and Thompson, JASA 47(260), 1952): the mean of weight times outcome;
- SNIPS, self-normalized IPS (Swaminathan and Joachims, NeurIPS 2015): IPS over the mean weight; lower variance, and a
  bias that vanishes as the log grows;
- DR, doubly robust (Dudik et al., "Doubly Robust Policy Evaluation and Optimization", Statistical Science 29(4), 2014):
  the prediction of a model of the outcomes, corrected by the weighted errors of that model.

All of them ignore that requests slow each other: they estimate the outcome of sending one request elsewhere with all
others unchanged. Replay a policy that would shift the load.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lab.evaluate.bootstrap import block_length, block_sums, interval, weighted_quantile
from lab.evaluate.log import FAILED, METRICS, RESCUED, RETRIED, Log
from lab.evaluate.outcome_model import expected_outcomes, has_enough_outcomes
from lab.report.distributions import SHARES
from lab.statistics import Interval

Floats = npt.NDArray[np.float64]

MIN_EFFECTIVE_SAMPLE_SIZE = 100
"""Effective sample size below which an evaluation is refused: the coverage of intervals is unknown there."""

MAX_IMPOSSIBLE_SHARE = 0.01
"""Share of a policy's choices that the log's policy could never make, above which an evaluation is refused."""

_MAX_WEIGHT_DEVIATION = 0.05  # of the mean weight from 1, unless within...
_MAX_WEIGHT_ERRORS = 4.0  # ...this number of standard errors
_MIN_TAIL = 20.0  # effective requests beyond a quantile
_MORE_LOAD = 1.5
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean under the policy in seconds, and its ratio to the mean of the log, with 95% intervals."""

    mean: Interval
    to_log: Interval


@dataclass(frozen=True, slots=True)
class MetricEvaluation:
    """The evaluation of one metric.

    Parameters
    ----------
    logged
        Mean in the log, in seconds.
    estimates
        Estimates of the mean by `ips`, `snips` and `dr`; without `dr` if there are too few outcomes for a model.
    quantiles
        Self-normalized quantiles by probability, without those that have too few requests beyond them.
    distribution
        Points (seconds, percentage at or below) of the self-normalized distribution, for a chart.
    """

    logged: float
    estimates: Mapping[str, Estimate]
    quantiles: Mapping[float, Interval]
    distribution: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a policy on a log.

    Parameters
    ----------
    requests
        Number of requests used.
    effective_sample_size
        Number of requests logged under the policy itself that would be as informative, (sum w)^2 / sum w^2 (Kish 1965).
    mean_weight
        Mean weight; about 1 if the propensities are right and the log covers the policy's choices.
    largest_weight
        Largest share of the total weight that one request has.
    impossible
        Share of the policy's choices that the log's policy would never make.
    shares, logged_shares
        Shares of the requests by backend, under the policy and in the log.
    refusal
        Why the policy cannot be evaluated on this log, and what would help; empty if it can. A refused evaluation has
        no metrics.
    notes
        Caveats.
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
    """Evaluate every policy of a log, in order.

    Parameters
    ----------
    metrics
        Some of `METRICS`; those with too few values in the log are left out.
    seed
        Seed of the resampling.
    """
    checked = {}
    for policy, propensities in log.propensities.items():
        weights = weights_of(log, policy)
        checked[policy] = _overlap(log, policy, propensities, weights), weights
    usable = [metric for metric in metrics if (log.outcomes[metric] > 0).sum() >= MIN_EFFECTIVE_SAMPLE_SIZE]
    models = _models(log, usable) if any(not result.refusal for result, _ in checked.values()) else {}
    return [
        result
        if result.refusal
        else replace(result, metrics={metric: _metric(log, policy, metric, weights, models, seed) for metric in usable})
        for policy, (result, weights) in checked.items()
    ]


def weights_of(log: Log, policy: str) -> Floats:
    """Return the weight of each request under a policy, shape (requests,)."""
    weights: Floats = log.propensities[policy][np.arange(log.requests), log.chosen] / log.propensity
    return weights


def effective_size(weights: Floats) -> float:
    """Return the effective sample size (`Evaluation`); 0 without weights above 0.

    Examples
    --------
    >>> effective_size(np.array([1.0, 1.0, 0.0]))
    2.0
    """
    total = float(weights.sum())
    return total**2 / float(weights @ weights) if total else 0.0


def _models(log: Log, metrics: Sequence[str]) -> dict[str, Floats]:
    """Return the expected outcomes of metrics that have enough outcomes for a model; fitted in parallel."""
    fitted = [metric for metric in metrics if has_enough_outcomes(log.outcomes[metric])]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        expected = pool.map(lambda metric: expected_outcomes(log, log.outcomes[metric]), fitted)
        return dict(zip(fitted, expected, strict=True))


def _overlap(log: Log, policy: str, propensities: Floats, weights: Floats) -> Evaluation:
    """Check how far the choices of the log and of the policy overlap."""
    total = float(weights.sum())
    impossible = float(log.impossible[policy].mean())
    shares = dict(zip(log.backends, (float(share) for share in propensities.mean(axis=0)), strict=True))
    counts = np.bincount(log.chosen, minlength=len(log.backends)) / log.requests
    logged_shares = dict(zip(log.backends, map(float, counts), strict=True))
    size = effective_size(weights)
    mean = total / log.requests
    deviations = block_sums(weights - mean, block_length(log.requests))
    error = float(np.sqrt(deviations @ deviations)) / log.requests
    result = Evaluation(
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
    if impossible > MAX_IMPOSSIBLE_SHARE:
        refusal = (
            f"the log's policy would never make {impossible:.0%} of its choices, so their outcomes are unknown; most "
            f"of the difference is at {_where(shares, logged_shares)}. Log with a policy that tries every backend now "
            "and then (`random`, or `learned` with exploration), or replay it"
        )
    elif size < MIN_EFFECTIVE_SAMPLE_SIZE:
        needed = f"{log.requests * MIN_EFFECTIVE_SAMPLE_SIZE / size:,.0f}" if size else "many more"
        refusal = (
            f"the effective sample size of the {log.requests:,} requests is {size:.0f}; at least "
            f"{MIN_EFFECTIVE_SAMPLE_SIZE} is needed. Log about {needed} such requests, or explore more: the log seldom "
            f"chose as this policy does; most of the difference is at {_where(shares, logged_shares)}"
        )
    elif abs(mean - 1 + impossible) > max(_MAX_WEIGHT_DEVIATION, _MAX_WEIGHT_ERRORS * error):
        refusal = (
            f"the mean weight is {mean:.2f} instead of 1: the propensities in the log are wrong, or its policy would "
            "never make some of these choices. Record all candidates with their propensities"
        )
    return replace(result, refusal=refusal) if refusal else result


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

    possible = 1 - log.impossible[policy][known]
    estimates = {"ips": estimate(weight * outcome, possible), "snips": estimate(weight * outcome, weight)}
    if (model := models.get(metric)) is not None:
        predictions, chosen = model[known], log.chosen[known]
        corrected = (log.propensities[policy][known] * predictions).sum(axis=1)
        corrected += weight * (outcome - predictions[np.arange(len(outcome)), chosen])
        if corrected.sum() > 0:
            estimates["dr"] = estimate(corrected, np.ones(len(outcome)))
    size = effective_size(weight)
    quantiles = {
        probability: weighted_quantile(outcome, weight, probability, length)
        for probability in QUANTILES
        if size * (1 - probability) >= _MIN_TAIL
    }
    return MetricEvaluation(float(outcome.mean()), estimates, quantiles, _distribution(outcome, weight, size))


def _distribution(outcome: Floats, weight: Floats, size: float) -> list[tuple[float, float]]:
    """Return the self-normalized distribution, without the ends that have too few requests beyond them."""
    order = np.argsort(outcome, kind="stable")
    shares = np.cumsum(weight[order]) / weight.sum()
    drawn = [percent for percent in SHARES if size * min(percent, 100 - percent) / 100 >= _MIN_TAIL]
    at = np.minimum(np.searchsorted(shares, np.array(drawn) / 100), len(order) - 1)
    return list(zip(outcome[order[at]].tolist(), drawn, strict=True))


def _notes(
    log: Log, policy: str, impossible: float, shares: Mapping[str, float], logged_shares: Mapping[str, float]
) -> tuple[str, ...]:
    notes = []
    if impossible:
        notes.append(f"{impossible:.2%} of its choices cannot occur in the log; they are assumed to be like the others")
    failed = sum(log.left_out.get(reason, 0) for reason in (FAILED, RETRIED, RESCUED))
    if failed:
        notes.append(f"{failed:,} requests that failed, were retried or were rescued are left out")
    grown = [name for name, share in shares.items() if share > 0.05 and share > _MORE_LOAD * logged_shares[name]]
    loads = log.in_flight[np.arange(log.requests), log.chosen]
    if grown and not np.isnan(loads).all() and float(np.nanmean(loads)) >= 1:
        changes = ", ".join(f"`{name}` {shares[name]:.0%} instead of {logged_shares[name]:.0%}" for name in grown)
        notes.append(
            f"it would shift the load ({changes}), and backends had {float(np.nanmean(loads)):.1f} requests in flight "
            "on average: the resulting slowdown is not included; replay it"
        )
    if log.missing_features[policy]:
        notes.append(
            f"the log lacks {', '.join(log.missing_features[policy])}, on which the policy depends: defaults were "
            "used, so its choices may differ"
        )
    if np.isnan(log.in_flight).all():
        notes.append("the log lacks the load of the backends: the policy was evaluated as if all were idle")
    return tuple(notes)


def _where(shares: Mapping[str, float], logged_shares: Mapping[str, float]) -> str:
    name = max(shares, key=lambda backend: shares[backend] - logged_shares[backend])
    return f"`{name}` ({shares[name]:.0%} of its choices, {logged_shares[name]:.0%} of the log's)"
