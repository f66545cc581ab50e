"""The evidence of all gateways from the blocks of an experiment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import fmean, stdev
from typing import Final, NamedTuple

from policies.experiment.blocks import LEAST_REQUESTS, STAYS, window_s
from policies.experiment.curve import Fit, Row, fit
from policies.experiment.plan import BEFORE, Plan
from policies.experiment.turns import Comparison, Turns
from policies.statistics import Statistics, Table

REST, USUAL = "(rest)", "(usual)"
"""Names in the table for replicas outside of the arms, and for the pool in blocks as usual."""


class Sums(NamedTuple):
    """Sums of one arm in a block, over all gateways."""

    seconds: float = 0.0  # that requests spent there
    work: float = 0.0  # units done for them
    requests: float = 0.0
    arrived_work: float = 0.0
    weight: float = 0.0  # 1 for each process, decaying with age
    chosen: float = 0.0  # requests sent to it
    replicas: float = 0.0  # that were up, summed over these requests
    ttft_s: float = 0.0  # summed over `streams`
    streams: float = 0.0
    decode_s: float = 0.0  # seconds after the first token, summed over `decoded` tokens
    decoded: float = 0.0
    output_tokens: float = 0.0
    failed: float = 0.0
    judged: float = 0.0  # requests with an objective
    missed: float = 0.0  # of these, those served too late
    stayed: float = 0.0  # requests sent to it because their conversation was, in an earlier block

    def __add__(self, other: tuple[float, ...]) -> Sums:  # type: ignore[override]
        return Sums(*[a + b for a, b in zip(self, other, strict=True)])


BLOCKS: Final = Table("blocks", len(Sums._fields), 4 * 86_400.0, lambda key: (*key[:2], REST, key[3]))
"""Sums by experiment, block, arm and process."""


class Evidence:
    """The evidence of all gateways from the blocks of an experiment."""

    def __init__(self, plan: Plan, statistics: Statistics) -> None:
        self.plan = plan
        before = {id_: -BEFORE * at for at, id_ in enumerate(plan.ids)}
        blocks: dict[int, dict[str, Sums]] = {}
        for key, aged in sorted(statistics.buckets(BLOCKS).items()):
            sums = Sums(*aged)
            if key[0] in before and sums.weight > 0.0:
                id_, number, arm, _ = key
                arms = blocks.setdefault(int(number) + before[id_], {})
                arms[arm] = arms.get(arm, Sums()) + tuple(each / sums.weight for each in sums)
        self.blocks = dict(sorted(blocks.items()))
        totals = [self.total(arm) for arm in plan.arms]
        # Blocks that share conversations are correlated.
        has_conversations = sum(each.stayed for each in totals) > _FEW_STAYED * sum(each.chosen for each in totals)
        self.stays = STAYS if has_conversations else 1

    def total(self, arm: str) -> Sums:
        """Return the sums of an arm over all blocks."""
        total = Sums()
        for arms in self.blocks.values():
            total += arms.get(arm, Sums())
        return total

    def needed_block_s(self) -> float | None:
        """Return how long a block must be for enough requests of each arm; None if it is, or too few have ended."""
        arms = [
            [each[arm].requests for at, each in self.blocks.items() if at >= 0 and arm in each and each[arm].chosen]
            for arm in self.plan.arms
        ]
        is_known = min(map(len, arms)) >= _LEAST_KNOWN
        is_short = is_known and min(sum(each) / len(each) for each in arms) < 2.0 * LEAST_REQUESTS
        return _LONGER * self.plan.block_s if is_short else None

    def paces(self, arm: str, least_requests: float) -> list[float]:
        """Return an arm's seconds per unit of work, by block with at least `least_requests` requests."""
        return self._by_cluster((row.number, row.seconds_per_work) for row in self._rows(arm, 0, least_requests))

    def misses(self, arm: str) -> list[float]:
        """Return, by block, the share of an arm's requests that miss their objective, minus that of other arms."""
        shares = []
        for number, arms in self.blocks.items():
            own = arms.get(arm, Sums())
            others = sum((arms.get(name, Sums()) for name in self.plan.arms if name != arm), Sums())
            if min(own.judged, others.judged) >= LEAST_REQUESTS:
                shares.append((number, own.missed / own.judged - others.missed / others.judged))
        return self._by_cluster(shares)

    def _by_cluster(self, values: Iterable[tuple[int, float]]) -> list[float]:
        """Return the means of blocks' values within each cluster of correlated blocks."""
        found: dict[int, list[float]] = {}
        for number, value in values:
            found.setdefault(number // self.stays, []).append(value)
        return [*map(fmean, found.values())]

    def times_the_work(self, first: str, second: str) -> float:
        """Return the ratio of work arriving at a replica of one arm to another's; 1 if that may be chance.

        Requests are assigned at random, so a difference is not the arms' doing: some client may react to its arm.
        """
        pairs: list[tuple[int, float, float]] = []
        for number, arms in self.blocks.items():
            sums = [arms.get(arm, Sums()) for arm in (first, second)]
            chosen = [each.chosen for each in sums]
            is_even = set(self.plan.shares(number) or ()) == {1.0}
            is_away = any(not each.chosen and arm in arms for arm, each in zip((first, second), sums, strict=True))
            if is_even and (min(chosen) > 0.0 or (max(chosen) < _SURELY and not is_away)):
                one, other = map(_work_of_replica, sums)
                pairs.append((number, one, other))
        # Differences, not ratios: with few requests, a ratio is uneven by chance alone.
        differences = self._by_cluster((number, one - other) for number, one, other in pairs)
        ones, others = (sum([pair[at] for pair in pairs]) for at in (1, 2))
        if len(differences) < _LEAST_EVEN or min(ones, others) <= 0.0 or self.plan.rotates:
            return 1.0
        error = stdev(differences) / math.sqrt(len(differences))
        is_chance = abs(fmean(differences)) <= _ERRORS * error or abs(math.log(ones / others)) <= _UNEVEN
        return 1.0 if is_chance else ones / others

    def fit(self, first: str, second: str) -> Fit | None:
        """Fit the blocks of one arm against another; return None while they are too few."""
        return fit([*self._rows(first, 0), *self._rows(second, 1)], self.stays)

    def _rows(self, arm: str, at: int, least_requests: float = LEAST_REQUESTS) -> Iterator[Row]:
        """Yield the blocks in which an arm served enough, as if by its mean number of replicas throughout."""
        for number, arms in self.blocks.items():
            sums = arms.get(arm)
            if sums is None or sums.requests < least_requests or sums.arrived_work <= 0.0 or not sums.chosen:
                continue
            replica_s = window_s(self.plan.of_block(number)[0].block_s) * sums.replicas / sums.chosen
            yield Row(number, at, sums.seconds / sums.work, sums.arrived_work / replica_s)

    def cost(self, confidence: float) -> Comparison:
        """Return the ratio of request times during the experiment to those as usual."""
        turns = Turns(forgets=False)
        for number, arms in sorted(self.blocks.items()):
            is_usual = self.plan.shares(number) is None
            total = sum((sums for arm, sums in arms.items() if (arm == USUAL) is is_usual), Sums())
            if total.requests >= LEAST_REQUESTS and total.arrived_work > 0.0:
                turns.add(number, total.seconds / total.work, total.arrived_work, control=is_usual)
        return turns.comparison(confidence)


def _work_of_replica(sums: Sums) -> float:
    return sums.arrived_work * sums.chosen / sums.replicas if sums.chosen else 0.0


def best_first(evidence: Evidence) -> list[str]:
    """Return the arms, fastest first, as far as known."""
    order = [*evidence.plan.arms]
    for _ in order:
        for at in range(len(order) - 1):
            one, other = order[at : at + 2]
            found = evidence.fit(one, other)
            if found is not None and found.overall(0.5).ratio > 1.0:
                order[at : at + 2] = other, one
    return order


_FEW_STAYED: Final = 0.05
"""Share of requests that continue conversations of earlier blocks from which blocks count as correlated."""
_LEAST_KNOWN: Final = 4
_LONGER: Final = 4.0
"""Blocks after which their requests are known, and the factor by which they are lengthened if those are too few."""
_LEAST_EVEN: Final = 4
_UNEVEN: Final = math.log(1.2)
_ERRORS: Final = 5.0
"""Fewest even blocks, log ratio, and standard errors of the difference from which two arms get different work."""
_SURELY: Final = 20.0
"""Requests of the other arm in a block in which an arm that is up would have got at least one."""
