"""The verdict of an experiment: whether it can end, and its result in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, variance
from typing import Final

from policies.experiment.blocks import FAR_LONGER, LEAST_REQUESTS
from policies.experiment.curve import Crossing, Point
from policies.experiment.evidence import Evidence, Sums, best_first
from policies.experiment.interval import margin_at_any_time


class Stage(StrEnum):
    """The stage of an experiment."""

    RUNNING = "running"
    DECIDED = "decided"  # one arm is better at the observed load
    ALIKE = "alike"  # the arms differ by less than matters
    HARM = "harm"  # requests of one arm fail, miss their objective, or take far longer
    OVER = "over"  # its time is over, without a certain result
    STOPPED = "stopped"  # by an operator


@dataclass(frozen=True, slots=True)
class Finding:
    """How the best arm compares with another one."""

    better: str
    other: str
    at_mean: Point  # ratios of the better to the other
    curve: list[Point]
    crossing: Crossing | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of an experiment."""

    stage: Stage
    sentence: str
    findings: tuple[Finding, ...]
    blocks: int
    harmed: str = ""  # the arm that harms its requests


def verdict_of(evidence: Evidence, until: float, *, is_over: bool = False) -> Verdict:
    """Return the verdict of an experiment, and whether it can end.

    Parameters
    ----------
    until
        Relative difference that does not matter.
    is_over
        Whether it ends anyway.
    """
    order, blocks = best_first(evidence), len(evidence.blocks)
    best, others = order[0], order[1:]
    if (harmed := _harmed(evidence)) is not None:
        arm, sentence = harmed
        return Verdict(Stage.HARM, sentence, _findings(evidence, best, others), blocks, arm)
    findings = _findings(evidence, best, others)
    if len(findings) < len(others):
        waits = f"Nothing is known: each arm needs a few blocks of time with {LEAST_REQUESTS:.0f} requests or more."
        waits += f" Of conversations, {evidence.stays} blocks count as one." if evidence.stays > 1 else ""
        return Verdict(Stage.OVER if is_over else Stage.RUNNING, waits, findings, blocks)
    nearest = max(findings, key=lambda finding: finding.at_mean.high)
    stage = Stage.OVER if is_over else Stage.RUNNING
    for other in others:
        if (times := evidence.times_the_work(best, other)) != 1.0:
            return Verdict(stage, _UNEVEN.format(best, times, other), findings, blocks)
    if nearest.at_mean.high < 1.0:
        stage = Stage.DECIDED
    elif all(each.at_mean.high < 1.0 + until and each.at_mean.low > 1.0 / (1.0 + until) for each in findings):
        stage = Stage.ALIKE
    return Verdict(stage, _sentence(nearest, stage, until), findings, blocks)


def _findings(evidence: Evidence, best: str, others: list[str]) -> tuple[Finding, ...]:
    # Together as certain as one comparison alone: the best arm must be better than each other one.
    confidence = 1.0 - (1.0 - CERTAIN) / max(1, len(others))
    fits = [(other, evidence.fit(best, other)) for other in others]
    return tuple(
        Finding(best, other, found.overall(confidence), found.curve(confidence), found.crossing(SHOWN))
        for other, found in fits
        if found is not None
    )


def _sentence(finding: Finding, stage: Stage, until: float) -> str:
    point = finding.at_mean
    load = f"at {point.in_flight:.1f} requests in flight per replica"
    if stage is Stage.ALIKE:
        return f"{finding.better} and {finding.other} differ by less than {100.0 * until:g}% {load}{_by_load(finding)}."
    if point.high > _UNKNOWN:
        return f"{finding.better} seems better than {finding.other} {load}; by how much is not known."
    faster, least, most = 1.0 - point.ratio, 1.0 - point.high, 1.0 - point.low
    interval = f"{CERTAIN:.0%}: {least:.1%} to {most:.1%}"
    sentence = f"{finding.better} takes {faster:.1%} less time than {finding.other} {load} ({interval})"
    if stage is Stage.OVER:
        return f"It seems that {sentence}, which is not certain: that takes more time (--for) or more requests."
    if stage is not Stage.DECIDED:
        return f"It seems that {sentence}, which is not certain yet."
    return f"{sentence}{_by_load(finding)}."


def _by_load(finding: Finding) -> str:
    """Return at which loads the result differs from the mean; empty if none is known."""
    crossing = finding.crossing
    if crossing is None:
        loses = [f"; but {finding.better} takes longer at {at.in_flight:.1f}" for at in finding.curve if at.low > 1.0]
        return "".join(loses[:1])
    below = finding.better if crossing.better_below == 0 else finding.other
    interval = f"{SHOWN:.0%}: {crossing.low:.1f} to {crossing.high:.1f}"
    return f"; {below} pays up to {crossing.in_flight:.1f} in flight per replica ({interval})"


def _harmed(evidence: Evidence) -> tuple[str, str] | None:
    """Return the arm that harms its requests so much that nobody should wait for certainty, and how."""
    totals = {arm: evidence.total(arm) for arm in evidence.plan.arms}
    # Arms that take turns are not compared by times: a burst of traffic may fall into the turns of one.
    is_beside = evidence.plan.count >= len(totals)
    for arm, sums in totals.items():
        others = sum((each for name, each in totals.items() if name != arm), Sums())
        share, rest = _failed(sums), _failed(others)
        blocks = sum(1 for arms in evidence.blocks.values() if arm in arms and arms[arm].failed)
        least = _TIMES_AS_OFTEN * max(rest, _FEW_FAILED, 1.0 / max(1.0, others.chosen))
        if sums.failed >= _LEAST_FAILED and blocks >= _LAST_PACES and share > least:
            return arm, f"{share:.1%} of the requests of {arm} failed, {rest:.1%} of the others."
        if is_beside and _misses_more(evidence.misses(arm)):
            late, others_late = sums.missed / sums.judged, others.missed / others.judged
            return arm, f"{late:.0%} of the requests of {arm} missed their objective, {others_late:.0%} of the others."
    paces = {arm: evidence.paces(arm, _LEAST_OF_PACE) for arm in totals} if is_beside else {}
    known = {arm: each[-_LAST_PACES:] for arm, each in paces.items() if len(each) >= _LAST_PACES}
    for arm, own in known.items():
        other = min(known, key=lambda each: max(known[each]))
        times = min(own) / max(known[other])
        if times > FAR_LONGER:
            longer = f"more than {times:.1f} times as long as those of {other}"
            return arm, f"Requests of {arm} take {longer}, in each of the last blocks."
    return None


def _failed(sums: Sums) -> float:
    return sums.failed / max(1.0, sums.chosen, sums.failed)


def _misses_more(shares: list[float]) -> bool:
    if len(shares) < _LAST_PACES:
        return False
    error = max(variance(shares) / len(shares), _LEAST_VARIANCE)
    return fmean(shares) > max(_MISSES_MORE, margin_at_any_time(error, CERTAIN, len(shares) - 1.0))


CERTAIN: Final = 0.99
"""Confidence at which one arm is declared better."""
SHOWN: Final = 0.95
"""Confidence of the interval of a crossing."""
_UNEVEN: Final = (
    "Nothing can be said: requests of {} bring {:.1f} times the work of those of {}, though they are given at random. "
    "A client acts by where it is sent, or replicas of one arm refuse some requests."
)
_UNKNOWN: Final = 1.5
"""An interval that reaches this ratio does not show the better arm."""
_LEAST_FAILED: Final = 10.0
_TIMES_AS_OFTEN: Final = 5.0
_FEW_FAILED: Final = 0.002
"""Least assumed share of failures of others: so an arm counts as harmed from 1%."""
_MISSES_MORE: Final = 0.1
"""Difference of shares of missed objectives that counts as harm."""
_LEAST_VARIANCE: Final = 1e-8
_LAST_PACES: Final = 3
"""Blocks of each arm in which failures or a large difference must persist to end it: once may be chance."""
_LEAST_OF_PACE: Final = 20.0
"""Fewest requests of an arm in each of these: with fewer, a few long ones look like harm by chance."""
