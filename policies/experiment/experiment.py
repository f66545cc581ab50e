"""An experiment: assigns requests to arms, and collects their outcomes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from backends.backend import Candidate
from policies.decision import Outcome
from policies.experiment.blocks import FAR_LONGER, STAYS, ArmSums, Blocks, kind_of, work_of
from policies.experiment.evidence import BLOCKS, REST, USUAL, Sums
from policies.experiment.plan import Plan
from policies.features.request import RequestFeatures
from policies.statistics import Statistics


class Given(NamedTuple):
    """The assignment of a request."""

    candidates: Sequence[Candidate]
    arm: str = ""  # empty for replicas outside of the arms, and in blocks as usual
    chance: float = 1.0  # of this assignment


class Experiment:
    """Assigns requests to arms, and adds up their times. Used by one thread."""

    def __init__(self, plan: Plan, statistics: Statistics, seed: int | None = None) -> None:
        self.plan = plan
        self._statistics = statistics
        self._rng = Random(seed)
        self._blocks = Blocks(plan.block_s, math.inf if plan.rotates else FAR_LONGER)
        self._names = [*plan.arms, REST, USUAL]
        self._process = f"{Random().getrandbits(64):x}"
        # Conversations, by the last prefix: their group, its first block, and how many requests continue it.
        self._groups: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        self._sums: dict[tuple[int, str], Sums] = {}
        self._number = -1
        self._shares: tuple[float, ...] | None = None

    def go_on(self, plan: Plan) -> None:
        """Continue with longer blocks."""
        self.plan = plan
        self._groups.clear()
        self._blocks.block_s = plan.block_s
        self._blocks.start_over()
        self._sums.clear()
        self._number, self._shares = -1, None

    def give(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Given:
        """Assign a request to one group of the candidates; in blocks as usual, to all of them."""
        now_s = self._statistics.clock()
        number = self._turn(now_s)
        if self._shares is None:
            self._add(now_s, number, USUAL, len(candidates), stayed=False)
            return Given(candidates)
        members: list[list[Candidate]] = [[] for _ in range(self.plan.count + 1)]  # the others come last
        for each in candidates:
            members[self.plan.group_of(each.name)].append(each)
        for at, own in enumerate(members[:-1]):
            if not own and self._blocks.counts(now_s):  # an arm that is away, which is not one that got nothing
                self._note(number, self.plan.arm_of(at, number), Sums())
        group, since = self._conversation(request)
        chance = 1.0
        if since // STAYS != number // STAYS or not members[group]:
            weights = [len(each) * share for each, share in zip(members, (*self._shares, 1.0), strict=True)]
            group, since = self._rng.choices(range(len(members)), weights)[0], number
            chance = weights[group] / sum(weights)
        if request.prefix:
            _, _, branches = self._groups.get(request.prefix[-1], (0, 0, 0))
            self._groups[request.prefix[-1]] = group, since, branches
            self._groups.move_to_end(request.prefix[-1])
            if len(self._groups) > _MOST_CONVERSATIONS:
                self._groups.popitem(last=False)
        arm = "" if group == self.plan.count else self.plan.arm_of(group, number)
        self._add(now_s, number, arm or REST, len(members[group]), stayed=since != number and not self.plan.rotates)
        return Given(members[group], arm, chance)

    def _conversation(self, request: RequestFeatures) -> tuple[int, int]:
        """Return the group of the conversation that a prompt continues, and its first block; -1 for a new one.

        An identical prompt does not continue one: else all requests of a client that repeats itself would be in one
        group. Nor does a prefix that very many continue, such as a system prompt that was once sent without more.
        """
        for each in reversed(request.prefix[:-1]):
            group, since, branches = self._groups.get(each, (0, -1, _MOST_BRANCHES))
            if branches < _MOST_BRANCHES:
                self._groups[each] = group, since, branches + 1
                return group, since
        return 0, -1

    def _turn(self, now_s: float) -> int:
        """Return the number of the current block; begin it if it is new."""
        number = int(now_s // self.plan.block_s)
        if number != self._number:
            self._number, self._shares = number, self.plan.shares(number)
            self._blocks.begin(number, now_s)
            self.close(now_s)
        return number

    def _add(self, now_s: float, number: int, arm: str, replicas: int, *, stayed: bool) -> None:
        if self._blocks.counts(now_s):
            self._note(number, arm, Sums(chosen=1.0, replicas=float(replicas), stayed=float(stayed)))

    def _note(self, number: int, arm: str, sums: Sums) -> None:
        self._sums[number, arm] = self._sums.get((number, arm), Sums()) + sums

    def observe(self, outcome: Outcome, *, is_late: bool | None = None) -> None:
        """Add a finished request; `is_late` says whether it missed its objective, None without one."""
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
        """Return the current arm of a replica; None if it serves as usual."""
        group = self.plan.group_of(backend)
        return None if self._shares is None or group < 0 else self.plan.arm_of(group, self._number)

    def failed(self, backend: str, seconds: float) -> None:
        """Count a request that a replica failed, `seconds` after it was sent."""
        now_s, block_s = self._statistics.clock(), self.plan.block_s
        # Counted in the current block: the one in which it was sent may be closed.
        self._note(int(now_s // block_s), self._arm(backend, int((now_s - seconds) // block_s)), Sums(failed=1.0))

    def _arm(self, backend: str, number: int) -> str:
        """Return the arm of a replica in a block."""
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
                if at in arms or (number, arm) in noted:  # an arm may have only failures, without times
                    found = arms.get(at) or ArmSums()
                    times = Sums(found.seconds, found.work, found.requests, found.arrived_work, 1.0)
                    sums = times + noted.get((number, arm), Sums())
                    self._statistics.add(BLOCKS, (self.plan.id, str(number), arm, self._process), *sums)

    @property
    def mean_s(self) -> float:
        """Mean seconds of recent requests."""
        return self._blocks.mean_s

    def needed_block_s(self) -> float | None:
        """Return how long a block must be for recent requests; None if it is long enough."""
        return self._blocks.needed_s()


def _times(outcome: Outcome) -> Sums:
    sums = Sums(output_tokens=float(outcome.output_tokens))
    if outcome.ttft_s is None or outcome.tpot_s is None:
        return sums
    later = max(0, outcome.output_tokens - 1)
    return sums._replace(ttft_s=outcome.ttft_s, streams=1.0, decode_s=outcome.tpot_s * later, decoded=float(later))


_MOST_CONVERSATIONS: Final = 100_000
_MOST_BRANCHES: Final = 8
