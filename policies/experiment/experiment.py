"""An experiment: arms that serve side by side, the requests that each gets, and what that has shown so far."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from random import Random
from statistics import fmean, stdev
from typing import Final, NamedTuple

from backends.backend import Candidate
from policies.decision import Outcome
from policies.experiment.blocks import FAR_LONGER, LEAST_REQUESTS, ArmSums, Blocks, kind_of, mix, work_of
from policies.experiment.curve import Fit, Row, fit
from policies.experiment.turns import Comparison, Turns
from policies.features.request import RequestFeatures
from policies.statistics import Statistics, Table

REST, USUAL = "(rest)", "(usual)"
"""What serves beside the arms, and the pool as it serves without an experiment."""


@dataclass(frozen=True)
class Plan:
    """What is compared, and how.

    Parameters
    ----------
    id
        What tells it from others; the order of its blocks follows from it.
    arms
        Names of what is compared, two or more.
    groups
        Names of the replicas of each group; empty if all replicas that there are make up one. A conversation stays in
        its group.
    rotates
        Whether each group serves as another arm in each block, as with settings that need no restart; else, each arm
        has a group.
    block_s
        Seconds with the same shares of the traffic.
    explore
        By how much more than in proportion to its replicas a group gets in some blocks; 0 for never.
    usual
        Whether in one block of each cycle the pool serves as it does otherwise, which shows what comparing costs.
    before
        The same with shorter blocks, by which it was compared while requests took less time. These count too.
    """

    id: str
    arms: tuple[str, ...]
    groups: tuple[frozenset[str], ...]
    rotates: bool = False
    block_s: float = 60.0
    explore: float = 0.25
    usual: bool = True
    before: Plan | None = None

    @property
    def ids(self) -> list[str]:
        """Its id, and those of the plans before."""
        return [self.id, *(self.before.ids if self.before is not None else ())]

    def of_block(self, number: int) -> tuple[Plan, int]:
        """Return the plan of a block and its number there; those of plans before have negative numbers."""
        plan = self
        while number < 0 and plan.before is not None:
            plan, number = plan.before, number + _BEFORE
        return plan, number

    @cached_property
    def salt(self) -> int:
        """A number that looks random, the same in all processes."""
        number = 0
        for each in self.id.encode():
            number = mix(number ^ each)
        return number

    @cached_property
    def _cycle(self) -> tuple[int | None, ...]:
        """The kinds of blocks: the group that gets more, -1 for none, and None for blocks as usual."""
        return (*[-1] * _EVEN, *range(self.count if self.explore else 0), *([None] if self.usual else []))

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.groups) or 1

    def shares(self, number: int) -> tuple[float, ...] | None:
        """Return the weights of each group's replicas in a block; None if all serve as usual."""
        plan, number = self.of_block(number)
        kind = plan._cycle[_shuffled(plan.salt, number, len(plan._cycle))]
        if kind is None:
            return None
        more = 1.0 + self.explore
        return tuple(1.0 if kind < 0 else more if group == kind else 1.0 / more for group in range(self.count))

    def arm_of(self, group: int, number: int) -> str:
        """Return the arm as which a group serves in a block."""
        if not self.rotates:
            return self.arms[group]
        arms = len(self.arms)
        return self.arms[(_shuffled(~self.salt, number, arms) + group) % arms]

    def group_of(self, backend: str) -> int:
        """Return the group of a replica; -1 for one in none."""
        if not self.groups:
            return 0
        return next((group for group, members in enumerate(self.groups) if backend in members), -1)


@lru_cache(maxsize=64)
def _shuffled(salt: int, number: int, count: int) -> int:
    """Return the place of a number in its cycle, of `count` numbers in an order that looks random."""
    cycle, place = divmod(number, count)
    return sorted(range(count), key=lambda each: mix(salt ^ (cycle * count + each)))[place]


class Sums(NamedTuple):
    """What one arm came to in a block, over all gateways."""

    seconds: float = 0.0  # that requests spent there
    work: float = 0.0  # units that they had done
    requests: float = 0.0
    arrived_work: float = 0.0
    weight: float = 0.0  # 1 for each process, and less as it ages
    chosen: float = 0.0  # requests that were sent to it
    replicas: float = 0.0  # that were up, summed over these
    ttft_s: float = 0.0  # summed over `streams`
    streams: float = 0.0
    decode_s: float = 0.0  # seconds after the first token, summed over `decoded` tokens
    decoded: float = 0.0
    output_tokens: float = 0.0
    failed: float = 0.0
    judged: float = 0.0  # requests with an objective
    missed: float = 0.0  # of these, those that were served too late

    def __add__(self, other: tuple[float, ...]) -> Sums:  # type: ignore[override]
        return Sums(*[a + b for a, b in zip(self, other, strict=True)])


class Given(NamedTuple):
    """What a request was given to."""

    candidates: Sequence[Candidate]
    arm: str = ""  # empty for the replicas beside the arms, and in blocks as usual
    chance: float = 1.0  # of being given to these


BLOCKS: Final = Table("blocks", len(Sums._fields), 4 * 86_400.0, lambda key: (*key[:2], REST, key[3]))
"""Sums by experiment, block, arm and process."""


class Experiment:
    """Gives requests to arms, and adds up what they take. One thread calls it."""

    def __init__(self, plan: Plan, statistics: Statistics, seed: int | None = None) -> None:
        self.plan = plan
        self._statistics = statistics
        self._rng = Random(seed)
        self._blocks = Blocks(plan.block_s, math.inf if plan.rotates else FAR_LONGER)
        self._names = [*plan.arms, REST, USUAL]
        self._process = f"{Random().getrandbits(64):x}"
        # Of conversations, by what they last ended with: their group, and how many have gone on with that.
        self._groups: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._sums: dict[tuple[int, str], Sums] = {}
        self._number = -1
        self._shares: tuple[float, ...] | None = None

    def go_on(self, plan: Plan) -> None:
        """Go on with longer blocks; conversations stay in their groups."""
        self.plan = plan
        self._blocks.block_s = plan.block_s
        self._blocks.start_over()
        self._sums.clear()
        self._number, self._shares = -1, None

    def give(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Given:
        """Give a request to the candidates of a group; to all of them in blocks as usual."""
        now_s = self._statistics.clock()
        number = self._turn(now_s)
        if self._shares is None:
            self._add(now_s, number, USUAL, len(candidates))
            return Given(candidates)
        members: list[list[Candidate]] = [[] for _ in range(self.plan.count + 1)]  # and, at last, the others
        for each in candidates:
            members[self.plan.group_of(each.name)].append(each)
        group, chance = self._conversation(request), 1.0
        if group is None or not members[group]:
            weights = [len(each) * share for each, share in zip(members, (*self._shares, 1.0), strict=True)]
            group = self._rng.choices(range(len(members)), weights)[0]
            chance = weights[group] / sum(weights)
        if request.prefix:
            _, branches = self._groups.get(request.prefix[-1], (0, 0))
            self._groups[request.prefix[-1]] = group, branches
            self._groups.move_to_end(request.prefix[-1])
            if len(self._groups) > _MOST_CONVERSATIONS:
                self._groups.popitem(last=False)
        arm = "" if group == self.plan.count else self.plan.arm_of(group, number)
        self._add(now_s, number, arm or REST, len(members[group]))
        return Given(members[group], arm, chance)

    def _conversation(self, request: RequestFeatures) -> int | None:
        """Return the group of the conversation that a prompt goes on with; None for the first of one.

        A prompt that comes again as it was is no conversation: else all requests of a client that repeats itself would
        be in one group. Nor is one that very many go on with, such as a system prompt that once came alone.
        """
        for each in reversed(request.prefix[:-1]):
            group, branches = self._groups.get(each, (0, _MOST_BRANCHES))
            if branches < _MOST_BRANCHES:
                self._groups[each] = group, branches + 1
                return group
        return None

    def _turn(self, now_s: float) -> int:
        """Return the number of the present block, which may begin now."""
        number = int(now_s // self.plan.block_s)
        if number != self._number:
            self._number, self._shares = number, self.plan.shares(number)
            self._blocks.begin(number, now_s)
            self.close(now_s)
        return number

    def _add(self, now_s: float, number: int, arm: str, replicas: int) -> None:
        if self._blocks.counts(now_s):
            self._note(number, arm, Sums(chosen=1.0, replicas=float(replicas)))

    def _note(self, number: int, arm: str, sums: Sums) -> None:
        self._sums[number, arm] = self._sums.get((number, arm), Sums()) + sums

    def observe(self, outcome: Outcome, *, is_late: bool | None = None) -> None:
        """Add a finished request that was given to an arm; `is_late` if it missed its objective, None without one."""
        now_s = self._statistics.clock()
        number = int((now_s - outcome.e2e_s) // self.plan.block_s)
        arm = self._arm(outcome.decision.backend, number)
        if outcome.status >= 500:
            self._note(number, arm, Sums(failed=1.0))
        elif outcome.output_tokens and outcome.e2e_s > 0.0:
            sizes = outcome.prompt_tokens.bit_length() // 2, outcome.output_tokens.bit_length() // 2
            kind = f"{kind_of(outcome.request)} {sizes[0]} {sizes[1]}"
            self._blocks.observe(now_s, outcome.e2e_s, work_of(outcome), kind, self._names.index(arm))
            self._note(number, arm, _times(outcome))
            if is_late is not None:
                self._note(number, arm, Sums(judged=1.0, missed=float(is_late)))
        self.close(now_s)

    def arm_now(self, backend: str) -> str | None:
        """Return the arm as which a replica serves now; None if it serves as usual."""
        group = self.plan.group_of(backend)
        return None if self._shares is None or group < 0 else self.plan.arm_of(group, self._number)

    def failed(self, backend: str, seconds: float) -> None:
        """Count a request that a replica has failed, so many seconds after it was sent."""
        now_s, block_s = self._statistics.clock(), self.plan.block_s
        # In the present block: the one in which it was sent may be closed.
        self._note(int(now_s // block_s), self._arm(backend, int((now_s - seconds) // block_s)), Sums(failed=1.0))

    def _arm(self, backend: str, number: int) -> str:
        """Return what a replica served as in a block."""
        if self.plan.shares(number) is None:
            return USUAL
        group = self.plan.group_of(backend)
        return REST if group < 0 else self.plan.arm_of(group, number)

    def close(self, now_s: float) -> None:
        """Add the blocks whose requests have ended to the statistics, which all gateways share."""
        for number, arms in self._blocks.closed(now_s):
            noted = {key: self._sums.pop(key) for key in [*self._sums] if key[0] <= number}
            if self._blocks.needed_s() is not None:
                continue
            for at, arm in enumerate(self._names):
                if at in arms or (number, arm) in noted:  # an arm all of whose requests fail has no times
                    found = arms.get(at) or ArmSums()
                    times = Sums(found.seconds, found.work, found.requests, found.arrived_work, 1.0)
                    sums = times + noted.get((number, arm), Sums())
                    self._statistics.add(BLOCKS, (self.plan.id, str(number), arm, self._process), *sums)

    @property
    def mean_s(self) -> float:
        """Mean seconds of the requests of late."""
        return self._blocks.mean_s

    def needed_block_s(self) -> float | None:
        """Return how long a block must be for the requests of late; None if it is long enough."""
        return self._blocks.needed_s()


def _times(outcome: Outcome) -> Sums:
    sums = Sums(output_tokens=float(outcome.output_tokens))
    if outcome.ttft_s is None or outcome.tpot_s is None:
        return sums
    later = max(0, outcome.output_tokens - 1)
    return sums._replace(ttft_s=outcome.ttft_s, streams=1.0, decode_s=outcome.tpot_s * later, decoded=float(later))


class Evidence:
    """What all gateways have seen in the blocks of an experiment."""

    def __init__(self, plan: Plan, statistics: Statistics) -> None:
        self.plan = plan
        before = {id_: -_BEFORE * at for at, id_ in enumerate(plan.ids)}
        blocks: dict[int, dict[str, Sums]] = {}
        for key, aged in sorted(statistics.buckets(BLOCKS).items()):
            sums = Sums(*aged)
            if key[0] in before and sums.weight > 0.0:
                id_, number, arm, _ = key
                arms = blocks.setdefault(int(number) + before[id_], {})
                arms[arm] = arms.get(arm, Sums()) + tuple(each / sums.weight for each in sums)
        self.blocks = dict(sorted(blocks.items()))

    def total(self, arm: str) -> Sums:
        """Return the sums of an arm over all blocks."""
        total = Sums()
        for arms in self.blocks.values():
            total += arms.get(arm, Sums())
        return total

    def needed_block_s(self) -> float | None:
        """Return how long a block must be for enough requests of each arm; None if it has them, or too few are over."""
        arms = [
            [each[arm].requests for at, each in self.blocks.items() if at >= 0 and arm in each and each[arm].chosen]
            for arm in self.plan.arms
        ]
        is_known = min(map(len, arms)) >= _LEAST_KNOWN
        is_short = is_known and min(sum(each) / len(each) for each in arms) < 2.0 * LEAST_REQUESTS
        return _LONGER * self.plan.block_s if is_short else None

    def paces(self, arm: str, least_requests: float) -> list[float]:
        """Return the seconds per unit of work of an arm in each of its blocks with so many requests."""
        return [row.seconds_per_work for row in self._rows(arm, 0, least_requests)]

    def times_the_work(self, first: str, second: str) -> float:
        """Return how many times as much work arrives at a replica of one arm as of another; 1 if that may be chance.

        Requests are given at random, so it is none of the arms' own: some client may act by the arm it was given to.
        """
        ones, others = ({row.number: row.work_per_s for row in self._rows(arm, 0)} for arm in (first, second))
        even = [number for number in ones.keys() & others.keys() if set(self.plan.shares(number) or ()) == {1.0}]
        logs = [math.log(ones[number] / others[number]) for number in even]
        if len(logs) < _LEAST_EVEN or self.plan.rotates:
            return 1.0
        mean, error = fmean(logs), stdev(logs) / math.sqrt(len(logs))
        return math.exp(mean) if abs(mean) > max(_UNEVEN, _ERRORS * error) else 1.0

    def fit(self, first: str, second: str) -> Fit | None:
        """Return what the blocks show of one arm against another; None while they are too few."""
        return fit([*self._rows(first, 0), *self._rows(second, 1)])

    def _rows(self, arm: str, at: int, least_requests: float = LEAST_REQUESTS) -> Iterator[Row]:
        """Yield the blocks in which an arm has served enough, by as many replicas throughout as at first."""
        for number, arms in self.blocks.items():
            sums = arms.get(arm)
            if sums is None or sums.requests < least_requests or sums.arrived_work <= 0.0 or not sums.chosen:
                continue
            replica_s = Blocks(self.plan.of_block(number)[0].block_s).window_s * sums.replicas / sums.chosen
            yield Row(number, at, sums.seconds / sums.work, sums.arrived_work / replica_s)

    def cost(self, confidence: float) -> Comparison:
        """Return what requests take while it compares, over what they take as usual."""
        turns = Turns()
        for number, arms in sorted(self.blocks.items()):
            is_usual = self.plan.shares(number) is None
            total = sum((sums for arm, sums in arms.items() if (arm == USUAL) is is_usual), Sums())
            if total.requests >= LEAST_REQUESTS and total.arrived_work > 0.0:
                turns.add(number, total.seconds / total.work, total.arrived_work, control=is_usual)
        return turns.comparison(confidence)


def best_first(evidence: Evidence) -> list[str]:
    """Return the arms in the order of what they take, as far as that is known."""
    order = [*evidence.plan.arms]
    for _ in order:
        for at, (one, other) in enumerate(pairwise(order)):
            found = evidence.fit(one, other)
            if found is not None and found.overall(0.5).ratio > 1.0:
                order[at], order[at + 1] = other, one
    return order


_EVEN: Final = 3
"""Blocks of a cycle with shares in proportion to the replicas."""
_BEFORE: Final = 1 << 40
"""More than the number of any block."""
_LEAST_KNOWN: Final = 4
_LONGER: Final = 4.0
"""Blocks after which it is known how many requests one has, and how much longer it is made if they are too few."""
_LEAST_EVEN: Final = 4
_UNEVEN: Final = math.log(1.2)
_ERRORS: Final = 5.0
"""Even blocks, logarithm of the ratio, and standard errors of it from which on the work of two arms is not alike."""
_MOST_CONVERSATIONS: Final = 100_000
_MOST_BRANCHES: Final = 8
